"""What was run of each published recipe with real peers, beside the simulator: `atoll recipes`, docs/recipes.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one test shows of several recipes. All agents continue through a kill and with a late join.

    Attributes:
        beside: how near real peers come to the simulator's parameters.
        what: the peers, and what they end with.
        where: the tests.
    """

    recipes: tuple[str, ...]
    beside: str
    what: str
    where: tuple[str, ...]


_AGENTS = "three agents and trainers; equal digests"
_GOSSIP = ("tests/network/test_gossip.py", "tests/swarm/gossip/test_round_loop.py")
EVIDENCE: Final = (
    Shown(
        recipes=("ddp", "gpa", "dropcompute"), beside="bit for bit", what=f"{_AGENTS}; also as whole peers",
        where=("tests/network/test_shared_steps.py", "tests/network/test_every_step.py"),
    ),
    Shown(
        recipes=("demo", "distro"), beside="bit for bit", what=f"{_AGENTS}; no gradient clipped; also as whole peers",
        where=("tests/network/test_shared_steps.py", "tests/network/test_every_step.py"),
    ),
    Shown(
        recipes=("dct-threshold", "sparse-block", "fusionllm-adatopk"), beside="within 2e-6",
        what=f"{_AGENTS}; fusionllm-adatopk on unequal lines", where=("tests/network/test_shared_steps.py",),
    ),
    Shown(
        recipes=(
            "fedavg", "fedadagrad", "fedadam", "fedyogi", "fedprox", "easgd", "papa", "fedglomo", "diloco",
            "opendiloco", "intellect1", "eager-diloco", "heloco", "sparseloco", "covenant", "pier", "edit",
            "palsgd", "paba", "snoo", "restarted-diloco", "lagoon", "muloco", "des-loc",
        ),
        beside="within 2e-6", what=f"{_AGENTS}, AdamW inside; paba of unequal speeds, edit gathered",
        where=("tests/network/test_local_rules.py",),
    ),
    Shown(
        recipes=("streaming-diloco",), beside="bit for bit",
        what="three agents; equal digests; its rounds in memory are the simulator's",
        where=("tests/network/test_streaming.py", "tests/sim/test_production_overlap.py"),
    ),
    Shown(
        recipes=("selsync",), beside="bit for bit",
        what="three agents that call for rounds; equal digests; its rounds in memory are the simulator's",
        where=("tests/network/test_called_rounds.py", "tests/sim/test_production.py"),
    ),
    Shown(
        recipes=("async-diloco", "dybw"), beside="within 1e-5", what="agents of unequal speeds; equal digests",
        where=("tests/network/test_quorum.py", "tests/network/test_backup.py"),
    ),
    Shown(
        recipes=("noloco", "saps"), beside="bit for bit",
        what="agents that come together; their rounds in memory are the simulator's",
        where=_GOSSIP,
    ),
    Shown(
        recipes=("sparta",), beside="bit for bit",
        what="three agents and trainers, AdamW inside; its rounds in memory are the simulator's",
        where=_GOSSIP,
    ),
    Shown(
        recipes=("a2cid2",), beside="within 1e-6",
        what="agents on a ring and on a torus that come together; its rounds in memory are the simulator's",
        where=_GOSSIP,
    ),
)  # fmt: skip
BESIDE: Final[Mapping[str, str]] = MappingProxyType({name: one.beside for one in EVIDENCE for name in one.recipes})
