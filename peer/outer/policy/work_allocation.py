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
from peer.outer.compress.base import Codec
from peer.outer.compress.topk import TopK
from peer.outer.numerics.apportion import largest_remainder
from peer.outer.policy.claims import Claim, behind_s_a_byte, lines_of, round_s_of, speeds_of
from peer.outer.state.wire_format import WireFormat
from peer.outer.topology.topologies import Links

NO_REST = 1e-9  # of a total: what rounding leaves
NO_TIME = 0.01  # of a round: a line that sends a payload in less is as good as any
SLOW_LINE_SHARE = 0.25  # of a round: what an exchange may take longer for the slowest line


@dataclass(frozen=True, kw_only=True)
class WorkShares:
    """What each peer does in a round.

    Attributes:
        steps: inner steps of each peer; they add up to the steps asked for.
        shares: fraction of the vector that each peer reduces; they add up to 1, up to rounding.
    """

    steps: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Allotment:
    """What each member of a group does of its next round, in roster order; empty where all do the same.

    Attributes:
        steps: inner steps from the merge of a round to the next contribution.
        shares: cells of the vector that it reduces; or, of a top-k codec, values that it sends of each block.
    """

    steps: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()


class WorkAllocator(ABC):
    """Measured speeds -> work of each peer.

    Attributes:
        uneven: it gives unequal peers unequal work.
        reads_claims: what members say of each other decides what each does of a round.
    """

    uneven: ClassVar[bool] = False
    reads_claims: ClassVar[bool] = False

    def most_steps(self, steps: int) -> int:
        """The most of any peer, where the schedule has so many for each."""
        return steps

    def payload_ratios(self, links: Links) -> tuple[float, ...] | None:  # noqa: ARG002
        """Of each peer's payload to the one that the recipe names; None where all are alike."""
        return None

    def codec_of(self, peer: int, links: Links, codec: Codec) -> Codec:  # noqa: ARG002
        """What a peer writes its contributions with."""
        return codec

    def usual(self, codec: Codec) -> Codec:
        """The codec of a member whose line is like all others."""
        return codec

    def allot(self, claims: Sequence[Claim], wire: WireFormat, steps: int, tokens_per_step: int) -> Allotment:  # noqa: ARG002
        """The work of the members of a group, by what all of them hold of each other.

        Args:
            wire: how the round is written.
            steps: that the schedule has for it.
        """
        return Allotment()

    def slow_line_s(self, claims: Sequence[Claim], wire: WireFormat) -> float:  # noqa: ARG002
        """What the exchange of these members may take longer than usual, since a line among them is slow."""
        return 0.0

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
    exactly instead of by bisection. Steps are whole: the rest goes where it ends first, so that the others do not
    wait for one step more of a slow peer.

    Attributes:
        most: times the steps and the share that an even split would have, at most, for any peer. With 2, whatever a
            peer says takes no more than half of either from the others together, if these are two or more.
    """

    uneven: ClassVar[bool] = True
    reads_claims: ClassVar[bool] = True
    most: float = 2.0

    def __post_init__(self) -> None:
        if not self.most >= 1.0:
            raise UserError(f"most={self.most}: must be at least 1", "1 gives all peers as many steps")

    def most_steps(self, steps: int) -> int:
        return math.ceil(self.most * steps)

    def allocate(
        self, speeds_steps_per_s: Sequence[float], links: Links, total_steps: int, payload_bytes: int
    ) -> WorkShares:
        _check(speeds_steps_per_s, links, total_steps, payload_bytes)
        count = len(speeds_steps_per_s)
        rates = [links.both_ways(peer) for peer in range(count)]
        shares = [1.0 / count] * count  # with two peers, bytes do not depend on shares
        if count > 2:
            slopes = [rate / (payload_bytes * (count - 2)) for rate in rates]
            shares = _fill_within(slopes, [payload_bytes / rate for rate in rates], 1.0, self.most / count)
        exchange = [exchange_s(share, count, rate, payload_bytes) for share, rate in zip(shares, rates, strict=True)]
        most = math.ceil(self.most * total_steps / count)
        quotas = _fill_within(speeds_steps_per_s, exchange, float(total_steps), float(most))
        steps = _whole(quotas, exchange, speeds_steps_per_s, total_steps, most)
        return WorkShares(steps=steps, shares=tuple(shares))

    def allot(self, claims: Sequence[Claim], wire: WireFormat, steps: int, tokens_per_step: int) -> Allotment:
        speeds = [speed / tokens_per_step for speed in speeds_of(claims)]
        payload_bytes = sum(wire.contributed_bytes(1, 0))
        enough = payload_bytes / (NO_TIME * round_s_of(claims))
        rates = tuple(min(rate, enough) for rate in lines_of(claims).up)
        work = self.allocate(speeds, Links(up=rates, down=rates), steps * len(claims), payload_bytes)
        cells = largest_remainder(work.shares, -(-wire.numel // wire.cell))
        return Allotment(steps=tuple(max(1, own) for own in work.steps), shares=cells)

    def slow_line_s(self, claims: Sequence[Claim], wire: WireFormat) -> float:
        """A short payload goes both ways in turn: nothing is reduced before all of it has come."""
        longer_s = 2.0 * sum(wire.contributed_bytes(1, 0)) * behind_s_a_byte(claims)
        return min(longer_s, SLOW_LINE_SHARE * round_s_of(claims))


@dataclass(frozen=True, kw_only=True)
class AdaptiveTopK(EvenSplit):
    """Even work, but slow uplinks send sparser payloads, so that all links finish together (arXiv 2410.12707).

    Attributes:
        base_ratio: mean fraction of the values that is sent.
        minimum: least fraction that any link sends.
    """

    reads_claims: ClassVar[bool] = True
    base_ratio: float
    minimum: float = 0.0

    def __post_init__(self) -> None:
        _check_ratio(self.base_ratio, self.minimum)

    def payload_ratios(self, links: Links) -> tuple[float, ...]:
        return tuple(ratio / self.base_ratio for ratio in self.ratios(links))

    def kept(self, links: Links, codec: TopK) -> tuple[int, ...]:
        """Values that each peer sends of a block."""
        return tuple(max(1, round(codec.block * ratio)) for ratio in self.ratios(links))

    def codec_of(self, peer: int, links: Links, codec: Codec) -> Codec:
        assert isinstance(codec, TopK), f"{codec.name} is no top-k"
        return codec.keeping(self.kept(links, codec)[peer])

    def usual(self, codec: Codec) -> Codec:
        assert isinstance(codec, TopK), f"{codec.name} is no top-k"
        return codec.keeping(max(1, round(codec.block * self.base_ratio)))

    def allot(self, claims: Sequence[Claim], wire: WireFormat, steps: int, tokens_per_step: int) -> Allotment:  # noqa: ARG002
        assert isinstance(wire.codec, TopK), f"{wire.codec.name} is no top-k"
        return Allotment(shares=self.kept(lines_of(claims), wire.codec))

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
    least = min(offsets)  # so that no huge offset cancels the total
    offsets = [offset - least for offset in offsets]
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
    return [min(total, value * scale) for value in filled]


def _fill_within(slopes: Sequence[float], offsets: Sequence[float], total: float, most: float) -> list[float]:
    """`_fill`, but none above `most`; the others share the rest."""
    filled = dict(enumerate(_fill(slopes, offsets, total)))
    full: list[int] = []
    while over := [at for at, value in filled.items() if value > most and at not in full]:
        full += over
        rest = [at for at in filled if at not in full]
        if not rest:
            break
        left = total - most * len(full)
        if left <= NO_REST * total:  # rounding alone
            filled |= dict.fromkeys(rest, 0.0)
            break
        again = _fill([slopes[at] for at in rest], [offsets[at] for at in rest], left)
        filled |= dict(zip(rest, again, strict=True))
    return [most if at in full else filled[at] for at in range(len(slopes))]


def _whole(
    quotas: Sequence[float], offsets: Sequence[float], speeds: Sequence[float], total: int, most: int
) -> tuple[int, ...]:
    """Quotas rounded down, and the rest one by one to the peer that would end first with it."""
    steps = [math.floor(quota + 1e-6) for quota in quotas]
    for _ in range(total - sum(steps)):
        able = (at for at in range(len(steps)) if steps[at] < most)
        steps[min(able, key=lambda at: round(offsets[at] + (steps[at] + 1) / speeds[at], 9))] += 1
    return tuple(steps)


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
