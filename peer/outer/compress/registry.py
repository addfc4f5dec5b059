"""Codecs by the name that a manifest gives them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from peer.errors import UserError, did_you_mean
from peer.outer.compress.base import Compressor
from peer.outer.compress.identity import Fp32
from peer.outer.compress.int8 import BlockInt8

COMPRESSORS: Final[Mapping[str, Compressor]] = MappingProxyType({"fp32": Fp32(), "int8": BlockInt8()})


def compressor(name: str) -> Compressor:
    """The codec called `name`.

    Raises:
        UserError: no such codec; names the nearest.
    """
    if name not in COMPRESSORS:
        raise UserError(f"unknown compressor {name!r}", did_you_mean(name, COMPRESSORS))
    return COMPRESSORS[name]
