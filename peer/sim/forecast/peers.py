"""The peers of a plan as a person types them: how many, their lines, their cards, their price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, ValidationError

from peer.errors import UserError
from peer.protocol.manifest import Spec
from peer.protocol.problems import explain_validation
from peer.sim.world.scenario import BYTES_PER_MBIT, PeerProfile

MAX_PEERS = 256
EXAMPLE = "write it as 8:up=100,down=500,latency=20,price=0.4,gpu=RTX 4090"
Number = Annotated[float, Field(strict=False)]


class PeerKind(Spec):
    """`count` peers that are alike: Mbit/s up and down, one-way ms to the backbone, price an hour, and the card."""

    count: Annotated[int, Field(strict=False, ge=1, le=MAX_PEERS)]
    up: Annotated[Number, Field(gt=0)] = 100.0
    down: Annotated[Number, Field(gt=0)] = 100.0
    latency: Annotated[Number, Field(ge=0)] = 20.0
    price: Annotated[Number, Field(ge=0)] | None = None
    gpu: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedPeers:
    """All peers of a plan.

    Attributes:
        step_s: of the fastest; the profiles' speeds are shares of it.
        price: an hour, of all; None where not all have one.
    """

    profiles: tuple[PeerProfile, ...]
    step_s: float
    price: float | None


def parse_peers(texts: Sequence[str]) -> list[PeerKind]:
    """Raises UserError with the text, and with an example."""
    kinds = []
    for text in texts:
        count, _, rest = text.partition(":")
        items = [item.partition("=") for item in rest.split(",") if item.strip()]
        if not all(equals for _, equals, _ in items):
            raise UserError(f"--peers {text}: cannot be read", EXAMPLE)
        try:
            kinds.append(PeerKind.model_validate({"count": count, **{k.strip(): v.strip() for k, _, v in items}}))
        except ValidationError as error:
            raise UserError(f"--peers {text}: {explain_validation(error, PeerKind)}", EXAMPLE) from None
    total = sum(kind.count for kind in kinds)
    if not 2 <= total <= MAX_PEERS:
        raise UserError(f"--peers: {total} in all, must be from 2 to {MAX_PEERS}", EXAMPLE)
    return kinds


def planned_peers(kinds: Sequence[PeerKind], steps_s: Sequence[float]) -> PlannedPeers:
    """Peers of these kinds, each kind with its own seconds of a step."""
    fastest = min(steps_s)
    profiles = tuple(
        PeerProfile(
            speed=fastest / step_s, up_bytes_s=kind.up * BYTES_PER_MBIT, down_bytes_s=kind.down * BYTES_PER_MBIT,
            latency_s=kind.latency / 1000,
        )
        for kind, step_s in zip(kinds, steps_s, strict=True)
        for _ in range(kind.count)
    )  # fmt: skip
    prices = [kind.price * kind.count for kind in kinds if kind.price is not None]
    return PlannedPeers(
        profiles=profiles, step_s=fastest, price=sum(prices) if len(prices) == len(kinds) else None
    )
