"""How much each peer computes, reduces and sends, so that fast and slow ones finish together.

Peers are numbered 0 to R - 1, in the order of the measured speeds and of `Links`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from peer.errors import UserError
from peer.outer.numerics.apportion import largest_remainder
from peer.outer.topology.topologies import Links


@dataclass(frozen=True, kw_only=True)
class WorkShares:
    """What each peer does in a round.

    Attributes:
        steps: inner steps of each peer; they add up to the steps asked for.
        shares: fraction of the vector that each peer reduces; they add up to 1, up to rounding.
    """

    steps: tuple[int, ...]
    shares: tuple[float, ...]


class WorkAllocator(ABC):
    """Measured speeds -> work of each peer.

    Attributes:
        uneven: it gives unequal peers unequal work.
    """

    uneven: ClassVar[bool] = False

    def payload_ratios(self, links: Links) -> tuple[float, ...] | None:  # noqa: ARG002
        """Of each peer's payload to the one that the recipe names; None where all are alike."""
        return None

    def compressor(self, expression: str, links: Links, peer: int) -> str:  # noqa: ARG002
        """The codec of one peer, where the recipe's is `expression`."""
        return expression

    @abstractmethod
    def allocate(
        self, speeds_steps_per_s: Sequence[float], links: Links, total_steps: int, payload_bytes: int
    ) -> WorkShares:
        """Divide `total_steps` inner steps, and the reduction of `payload_bytes`, among the peers.

        Raises:
            UserError: no peers, another number of links than of speeds, or a value out of its range.
        """


@dataclass(frozen=True, kw_only=True)
class EvenSplit(WorkAllocator):
    """Equal steps and shares for all peers; remaining steps go to the first peers."""

    def allocate(
        self, speeds_steps_per_s: Sequence[float], links: Links, total_steps: int, payload_bytes: int
    ) -> WorkShares:
        _check(speeds_steps_per_s, links, total_steps, payload_bytes)
        count = len(speeds_steps_per_s)
        return WorkShares(steps=largest_remainder([1.0] * count, total_steps), shares=(1.0 / count,) * count)


@dataclass(frozen=True, kw_only=True)
class TimeBalanced(WorkAllocator):
    """Shares by bandwidth, then steps by what time is left, so that all peers end at one time (arXiv 2003.04544).

    In a butterfly all-reduce of P bytes, a peer with share s sends 1 - s of its vector to the other reducers and the
    s it reduced to R - 1 peers, and receives as much: P (1 + (R - 2) s) bytes each way, at b bytes per second, the
    slower of its two directions. The shares are those that make the slowest exchange as short as possible, so that
    all peers with a share above 0 exchange in equal time. A peer with v steps per second then makes v (T - exchange)
    steps, or none, with the T for which the steps add up. Both are the root of a piecewise linear function, found
    exactly instead of by bisection. Steps are whole, so ends differ by up to one step of each peer.
    """

    uneven: ClassVar[bool] = True

    def allocate(
        self, speeds_steps_per_s: Sequence[float], links: Links, total_steps: int, payload_bytes: int
    ) -> WorkShares:
        _check(speeds_steps_per_s, links, total_steps, payload_bytes)
        count = len(speeds_steps_per_s)
        rates = [links.both_ways(peer) for peer in range(count)]
        shares = [1.0 / count] * count  # with two peers, bytes do not depend on shares
        if count > 2:
            slopes = [rate / (payload_bytes * (count - 2)) for rate in rates]
            shares = _fill(slopes, [payload_bytes / rate for rate in rates], 1.0)
        exchange = [exchange_s(share, count, rate, payload_bytes) for share, rate in zip(shares, rates, strict=True)]
        quotas = _fill(speeds_steps_per_s, exchange, float(total_steps))
        return WorkShares(steps=largest_remainder(quotas, total_steps), shares=tuple(shares))


@dataclass(frozen=True, kw_only=True)
class AdaptiveTopK(EvenSplit):
    """Even work, but slow uplinks send sparser payloads, so that all links finish together (arXiv 2410.12707).

    Attributes:
        base_ratio: mean fraction of the values that is sent.
        minimum: least fraction that any link sends.
    """

    base_ratio: float
    minimum: float = 0.0

    def __post_init__(self) -> None:
        _check_ratio(self.base_ratio, self.minimum)

    def payload_ratios(self, links: Links) -> tuple[float, ...]:
        return tuple(ratio / self.base_ratio for ratio in self.ratios(links))

    def compressor(self, expression: str, links: Links, peer: int) -> str:
        values = expression.partition("+")[2]
        return f"top{max(1, round(4096 * self.ratios(links)[peer]))}/4096+{values}"

    def ratios(self, links: Links) -> tuple[float, ...]:
        """The fraction of its values that each peer sends; see `ratios`."""
        return ratios(links, self.base_ratio, self.minimum)


def ratios(links: Links, base_ratio: float, minimum: float = 0.0) -> tuple[float, ...]:
    """r_i = clamp(c up_i, minimum, 1), with the c for which the mean of r is `base_ratio` (arXiv 2410.12707).

    The time to send, r_i P / up_i, is then equal on all links that are not clamped. Equal links get `base_ratio`.

    Raises:
        UserError: no links, or not 0 <= minimum <= base_ratio <= 1 with base_ratio above 0.
    """
    _check_ratio(base_ratio, minimum)
    if not links.size:
        raise UserError("0 links: must be at least 1", "measure the peers' uplinks first")
    low, high = 0.0, 1.0 / min(links.up)
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        mean = math.fsum(_clamp(middle * rate, minimum) for rate in links.up) / links.size
        low, high = (middle, high) if mean < base_ratio else (low, middle)
    return tuple(_clamp(high * rate, minimum) for rate in links.up)


def exchange_s(share: float, num_peers: int, bytes_per_s: float, payload_bytes: int) -> float:
    """Seconds of one butterfly all-reduce for a peer that reduces `share`: P (1 + (R - 2) s) / b; 0 alone."""
    return payload_bytes * (1.0 + (num_peers - 2) * share) / bytes_per_s if num_peers > 1 else 0.0


def _fill(slopes: Sequence[float], offsets: Sequence[float], total: float) -> list[float]:
    """max(0, slope_i (T - offset_i)) for each i, with the T for which they add up to `total`."""
    order = sorted(range(len(slopes)), key=lambda at: offsets[at])
    level, slope, weighted = math.inf, 0.0, 0.0
    for at in order:
        if offsets[at] >= level:
            break
        slope += slopes[at]
        weighted += slopes[at] * offsets[at]
        level = (total + weighted) / slope
    filled = [max(0.0, slopes[at] * (level - offsets[at])) for at in range(len(slopes))]
    scale = total / math.fsum(filled)
    return [value * scale for value in filled]


def _clamp(ratio: float, minimum: float) -> float:
    return min(1.0, max(minimum, ratio))


def _check_ratio(base_ratio: float, minimum: float) -> None:
    if not 0.0 < base_ratio <= 1.0:
        raise UserError(f"base_ratio={base_ratio}: must be in (0, 1]", "0.01 sends one value in a hundred")
    if not 0.0 <= minimum <= base_ratio:
        raise UserError(f"minimum={minimum}: must be in [0, base_ratio={base_ratio}]", "0 clamps nothing")


def _check(speeds: Sequence[float], links: Links, total_steps: int, payload_bytes: int) -> None:
    if not speeds or links.size != len(speeds):
        raise UserError(f"{len(speeds)} speeds and {links.size} links: must be as many, above 0", "measure each peer")
    for peer, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed > 0.0):
            raise UserError(f"peer {peer} makes {speed} steps/s: must be finite and above 0", "leave it out")
    if total_steps < 1:
        raise UserError(f"total_steps={total_steps}: must be at least 1", "published: 500 per peer")
    if payload_bytes < 1:
        raise UserError(f"payload_bytes={payload_bytes}: must be at least 1", "4 bytes a parameter in fp32")
