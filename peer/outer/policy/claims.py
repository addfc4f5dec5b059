"""What peers say of their speed and their lines in signed joins, and what the others saw of it.

All members of a group hold the same joins, in the same order: all arrive at the same figures, to the same bits. What
was measured decides: the tokens of one round's contributions, and the time that each member's frames took. A claim
counts where nothing was measured yet, and then within a factor of two of what is usual.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Final

from peer.outer.topology.topologies import Links

FACTOR: Final = 2.0  # allowed error of a claim that was never measured
SLOWEST: Final = 8.0  # times slower than the usual line is one that a round waits for
UNLIMITED_BYTES_S: Final = 1e15
LEVELS: Final = string.digits + string.ascii_letters + "-_"
UNSEEN: Final = "."
_PER_OCTAVE, _HALF_OCTAVE = 2, 2.0**0.5


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Of one member.

    Attributes:
        tokens: of its contribution; members train all the time, so the tokens of one round measure speed.
        speed: tokens/s, as it says; 0: unknown.
        up: bytes/s that its line sends, as it says; 0: unknown.
        seen: bytes/s, as each other member says that saw its frames.
    """

    tokens: int
    speed: float = 0.0
    up: float = 0.0
    seen: tuple[float, ...] = ()


def round_s_of(claims: Sequence[Claim]) -> float:
    """Seconds that the round took: the median of what the members say that they trained in it, and how fast."""
    known = [claim.tokens / claim.speed for claim in claims if claim.speed > 0.0]
    return median_low(known) if known else 1.0


def speeds_of(claims: Sequence[Claim]) -> list[float]:
    """Tokens/s of each member: its tokens over the time of the round."""
    round_s = round_s_of(claims)
    return [claim.tokens / round_s for claim in claims]


def lines_of(claims: Sequence[Claim]) -> Links:
    """Bytes/s of each member's line, both ways: the median of what the others saw and of its own word.

    So no single one of three words moves it beyond what the others say. Of two reports about a member that says nothing
    the higher counts: a false one can give it more of the work, up to the bound of an allotment, but take none from it.
    Where nothing was seen, it is the member's word, within FACTOR of the median line.
    """
    seen = [_middle(claim) if claim.seen else 0.0 for claim in claims]
    usual = _usual([rate for rate in seen if rate > 0.0] or [claim.up for claim in claims])
    rates = tuple(
        rate or min(max(claim.up or usual, usual / FACTOR), usual * FACTOR)
        for rate, claim in zip(seen, claims, strict=True)
    )
    return Links(up=rates, down=rates)


def behind_s_a_byte(claims: Sequence[Claim]) -> float:
    """Seconds that a byte takes longer on the slowest line than on the usual one, at most SLOWEST times as long.

    Where nothing was seen, the member's own word counts in full: all that it can gain is the others' patience.
    """
    known = [_middle(claim) if claim.seen else claim.up for claim in claims]
    usual = _usual(known)
    slowest = min((rate for rate in known if rate > 0.0), default=usual)
    return 1.0 / max(slowest, usual / SLOWEST) - 1.0 / usual


def _usual(rates: Sequence[float]) -> float:
    known = [rate for rate in rates if rate > 0.0]
    return median_low(known) if known else UNLIMITED_BYTES_S


def _middle(claim: Claim) -> float:
    return median_low([*claim.seen, claim.up]) if claim.up > 0.0 else median_high(claim.seen)


def level_of(bytes_s: float) -> str:
    """One character for a rate, to the nearest half octave; UNSEEN for 0."""
    if bytes_s <= 0.0:
        return UNSEEN
    return LEVELS[min(max(0, round(_PER_OCTAVE * math.log2(bytes_s))), len(LEVELS) - 1)]


def rate_of(level: str) -> float:
    """The rate that a character stands for; 0 for UNSEEN. Exact: the same on every machine."""
    if level == UNSEEN:
        return 0.0
    octaves, half = divmod(LEVELS.index(level), _PER_OCTAVE)
    return float(1 << octaves) * (_HALF_OCTAVE if half else 1.0)
