"""A scenario: what the computers of a simulated swarm and the network between them are like.

It is YAML: classes of peers, times at which the network is cut in parts, and a seed; `Scenario.draw` makes peers of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from peer.errors import UserError, did_you_mean
from peer.outer.numerics.apportion import largest_remainder
from peer.protocol.manifest import Name, Spec
from peer.protocol.problems import explain_validation
from peer.protocol.yaml_text import parse_yaml, read_limited

MAX_SCENARIO_BYTES = 64 * 1024
MAX_PEERS = 100_000
HORIZON_S = 7 * 86400.0
SHARES_TOLERANCE = 0.01     # 0.33 + 0.33 + 0.33 passes for 1
BYTES_PER_MBIT = 1e6 / 8

Attack = Literal[
    "none", "sign-flip", "scale", "nan", "little", "copy", "inner-product", "noise", "zero", "constant"
]
SCALED_ATTACKS = ("scale", "little", "inner-product", "noise", "constant")
Presence = tuple[tuple[float, float], ...]


def _rule(holds: Callable[[float, float], bool], message: str) -> AfterValidator:
    def check(pair: tuple[float, float]) -> tuple[float, float]:
        if not holds(*pair):
            raise ValueError(message)
        return pair

    return AfterValidator(check)


NUMBER_IS_RANGE = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else (value, value))
NULL_IS_ZERO = BeforeValidator(lambda value: 0.0 if value is None else value)
NOT_NEGATIVE = _rule(lambda low, _: low >= 0, "must be at least 0")

Range = Annotated[tuple[float, float], NUMBER_IS_RANGE, _rule(lambda low, high: low <= high, "must be [least, most]")]
Speed = Annotated[Range, _rule(lambda low, _: low > 0, "must be above 0")]
Latency = Annotated[Range, NOT_NEGATIVE]
Loss = Annotated[Range, NOT_NEGATIVE, _rule(lambda _, high: high < 1, "must be below 1: it is a probability")]
Mbps = Annotated[
    Range, NULL_IS_ZERO, NOT_NEGATIVE,
    _rule(lambda low, high: low > 0 or high == 0, "0 and null mean unlimited, so a range cannot begin with them"),
]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class PeerClass(Spec):
    """Peers that are alike: `count` of them, or `share` of the peers that no `count` takes.

    `speed`, `up_mbps`, `down_mbps`, `latency_ms` and `loss` are a number, or a range [least, most] from which
    each peer draws its own, uniformly.
    """

    share: Share | None = None
    count: int | None = Field(default=None, ge=1, le=MAX_PEERS)
    speed: Speed = (1.0, 1.0)
    jitter: float = Field(default=0.0, ge=0.0, le=3.0)
    up_mbps: Mbps = (0.0, 0.0)
    down_mbps: Mbps = (0.0, 0.0)
    latency_ms: Latency = (0.0, 0.0)
    loss: Loss = (0.0, 0.0)
    lifetime_s: float | None = Field(default=None, ge=1.0)
    away_s: float | None = Field(default=None, ge=1.0)
    join_s: float = Field(default=0.0, ge=0.0)
    leave_s: float | None = Field(default=None, gt=0.0)
    attack: Attack = "none"
    attack_scale: float | None = Field(default=None, ge=-1e30, le=1e30)

    @model_validator(mode="after")
    def _consistent(self) -> PeerClass:
        if (self.share is None) == (self.count is None):
            raise ValueError("give exactly one of 'share' and 'count'")
        if self.leave_s is not None and self.leave_s <= self.join_s:
            raise ValueError(f"leave_s={self.leave_s}: must be above join_s={self.join_s}")
        if self.away_s is not None and self.lifetime_s is None:
            raise ValueError("'away_s' goes with 'lifetime_s', and only with it")
        if self.attack_scale is not None and self.attack not in SCALED_ATTACKS:
            raise ValueError(f"'attack_scale' goes with the attacks {', '.join(SCALED_ATTACKS)}, and only with them")
        return self


class NetworkSplit(Spec):
    """From `start_s` to `end_s` only peers on the same side reach each other; `sides` are shares of all peers."""

    start_s: float = Field(ge=0.0)
    end_s: float
    sides: tuple[Share, ...] = Field(min_length=2, max_length=64)

    @model_validator(mode="after")
    def _consistent(self) -> NetworkSplit:
        if self.end_s <= self.start_s:
            raise ValueError(f"end_s={self.end_s}: must be above start_s={self.start_s}")
        _check_shares(self.sides, "sides")
        return self

    def side_of(self, num_peers: int) -> tuple[int, ...]:
        """The side of each peer; sides are runs of neighbours, so that each has peers of all classes."""
        counts = _divided(num_peers, self.sides)
        return tuple(side for side, count in enumerate(counts) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class PeerProfile:
    """One simulated computer.

    Attributes:
        speed: 2.0 makes an inner step in half of the base time.
        jitter: sigma of the lognormal factor on the time of each step; 0 for none.
        up_bytes_s: what it sends at most, to all others together; inf for unlimited.
        down_bytes_s: the same for what it receives.
        latency_s: one way to the backbone; the round trip between i and j takes 2 (l_i + l_j).
        loss: probability that a packet is lost between it and the backbone.
        presence: (joins, leaves) in seconds, in order and apart; the last may leave at inf.
        attack: what it does to its contributions, see `peer.sim.round.attacks`.
        attack_scale: None for the attack's own default.
    """

    speed: float = 1.0
    jitter: float = 0.0
    up_bytes_s: float = math.inf
    down_bytes_s: float = math.inf
    latency_s: float = 0.0
    loss: float = 0.0
    presence: Presence = ((0.0, math.inf),)
    attack: Attack = "none"
    attack_scale: float | None = None


class Scenario(Spec):
    """The swarm of one simulation."""

    name: Name
    description: str = Field(default="", max_length=400)
    seed: int = Field(default=0, ge=0, lt=2**31)
    peers: tuple[PeerClass, ...] = Field(min_length=1, max_length=64)
    partitions: tuple[NetworkSplit, ...] = Field(default=(), max_length=64)

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        shares = [kind.share for kind in self.peers if kind.share is not None]
        if shares:
            _check_shares(shares, "the shares of the peers that no 'count' takes")
        for earlier, later in pairwise(self.partitions):
            if later.start_s < earlier.end_s:
                raise ValueError(f"partitions overlap or are not in order: start_s={later.start_s} is below the "
                                 f"end_s={earlier.end_s} of the one before")
        return self

    def draw(self, num_peers: int, seed: int | None = None, horizon_s: float = HORIZON_S) -> tuple[PeerProfile, ...]:
        """The peers, classes interleaved; equal arguments give equal peers on every machine.

        Args:
            seed: of the ranges and lifetimes; None for the scenario's own.
            horizon_s: a peer that is away then does not return; a longer horizon changes nothing before it.

        Raises:
            UserError: a number of peers that the classes cannot make up.
        """
        kinds = interleaved(self.counts(num_peers))
        root = self.seed if seed is None else seed
        # A text is hashed with SHA-512: neighbouring seeds and peers have unrelated streams.
        streams = (random.Random(f"{root}/{index}") for index in range(num_peers))
        return tuple(_profile(self.peers[kind], rng, horizon_s) for kind, rng in zip(kinds, streams, strict=True))

    def counts(self, num_peers: int) -> tuple[int, ...]:
        """How many of `num_peers` are of each class: `count` first, the shares divide the rest; raises as `draw`."""
        if not 1 <= num_peers <= MAX_PEERS:
            raise UserError(f"{num_peers} peers: must be between 1 and {MAX_PEERS}", "choose another number of peers")
        fixed = sum(kind.count or 0 for kind in self.peers)
        shares = [kind.share or 0.0 for kind in self.peers]
        if fixed > num_peers:
            raise UserError(f"{num_peers} peers: scenario {self.name} needs at least {fixed}", f"simulate {fixed}")
        if fixed < num_peers and not any(shares):
            hint = f"simulate {fixed}, or give one of its classes 'share: 1' in place of 'count'"
            raise UserError(f"{num_peers} peers: scenario {self.name} describes exactly {fixed}", hint)
        rest = _divided(num_peers - fixed, shares) if any(shares) else (0,) * len(shares)
        return tuple((kind.count or 0) + extra for kind, extra in zip(self.peers, rest, strict=True))


def _divided(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    exact = [Fraction(str(share)) for share in shares]      # 0.29 * 100 is 28.999... in floats
    return largest_remainder(exact, total)


def interleaved(counts: Sequence[int]) -> tuple[int, ...]:
    """The class of each peer, every class spread evenly: (4, 2) -> (0, 1, 0, 0, 1, 0)."""
    slots = [((2 * index + 1) / (2 * count), kind) for kind, count in enumerate(counts) for index in range(count)]
    return tuple(kind for _, kind in sorted(slots))


def shipped_scenarios() -> tuple[str, ...]:
    """The names that `load_scenario` knows without a path."""
    folder = resources.files("peer.sim") / "scenarios"
    return tuple(sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".yaml")))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A shipped scenario by its bare name, or the file at a path (whatever has a '/' or ends in .yaml or .yml).

    Raises:
        UserError: no such scenario, an unreadable file, or one that `parse_scenario` refuses.
    """
    text = str(name_or_path)
    if "/" not in text and not text.endswith((".yaml", ".yml")):
        if text not in (known := shipped_scenarios()):
            hint = f"the shipped ones are {', '.join(known)}; give your own as a path, such as ./mine.yaml"
            raise UserError(f"no scenario is named {text!r}: {did_you_mean(text, known)}", hint)
        return parse_scenario((resources.files("peer.sim") / "scenarios" / f"{text}.yaml").read_bytes(), text)
    hint = f"the shipped ones go by name: {', '.join(shipped_scenarios())}"
    return parse_scenario(read_limited(text, MAX_SCENARIO_BYTES, "scenario", hint), text)


def parse_scenario(text: str | bytes, origin: str) -> Scenario:
    """YAML text -> Scenario.

    Raises:
        UserError: not YAML, an unknown key (names the nearest known one), or a value out of its range.
    """
    try:
        document = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"scenario {origin} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"scenario {origin} must be a mapping of keys to values, not {type(document).__name__}")
    # Items by themselves: `explain_validation` finds the nearest known key in sections, not in lists of them.
    problems = [*_problems(document, "peers", PeerClass), *_problems(document, "partitions", NetworkSplit)]
    if problems:
        raise UserError(f"scenario {origin} is not valid", "\n".join(problems))
    try:
        return Scenario.model_validate(document)
    except ValidationError as error:
        raise UserError(f"scenario {origin} is not valid", explain_validation(error, Scenario)) from None


def _problems(document: dict[Any, Any], key: str, schema: type[BaseModel]) -> Iterator[str]:
    items = document.get(key)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        try:
            schema.model_validate(item)
        except ValidationError as error:
            yield from (f"{key}.{index}: {line}" for line in explain_validation(error, schema).splitlines())


def _check_shares(shares: Sequence[float], what: str) -> None:
    total = math.fsum(shares)
    if abs(total - 1.0) > SHARES_TOLERANCE + 1e-9:
        raise ValueError(f"{what} add up to {total:.4g}: must be 1")


def _profile(kind: PeerClass, rng: random.Random, horizon_s: float) -> PeerProfile:
    return PeerProfile(
        speed=rng.uniform(*kind.speed),
        jitter=kind.jitter,
        up_bytes_s=rng.uniform(*kind.up_mbps) * BYTES_PER_MBIT or math.inf,
        down_bytes_s=rng.uniform(*kind.down_mbps) * BYTES_PER_MBIT or math.inf,
        latency_s=rng.uniform(*kind.latency_ms) / 1000,
        loss=rng.uniform(*kind.loss),
        presence=tuple(_presence(kind, rng, horizon_s)),
        attack=kind.attack,
        attack_scale=kind.attack_scale,
    )


def _presence(kind: PeerClass, rng: random.Random, horizon_s: float) -> Iterator[tuple[float, float]]:
    end_s = math.inf if kind.leave_s is None else kind.leave_s
    now_s = kind.join_s
    if kind.lifetime_s is None:
        yield now_s, end_s
        return
    while now_s < min(end_s, horizon_s):
        left_s = now_s + rng.expovariate(1 / kind.lifetime_s)
        yield now_s, min(left_s, end_s)
        now_s = math.inf if kind.away_s is None else left_s + rng.expovariate(1 / kind.away_s)
