"""The part `model.adapter` of a manifest."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from peer.protocol.spec import Spec

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,64}$")]


class AdapterSpec(Spec):
    """Small matrices that are trained in place of a pretrained model's own, which stay as they are.

    Beside each of the chosen linear layers stand A [r, in] and B [out, r]; it gives W x + (alpha / r) B A x (Hu et al.
    2021, arXiv 2106.09685). `target_modules` are endings of the layers' names, such as `q_proj`; none: all linear
    layers but the head.
    """

    kind: Literal["lora"] = "lora"
    r: int = Field(default=16, ge=1, le=1024)
    alpha: int = Field(default=32, ge=1, le=65536)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: Annotated[tuple[ModuleName, ...], Field(max_length=64)] = ()
