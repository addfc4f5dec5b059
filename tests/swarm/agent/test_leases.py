"""Which of the leases in other peers' records a peer respects."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from peer.link.messages import DataUse, Leased
from peer.protocol.coverage import Coverage
from peer.protocol.ranges import MAX_LEASED
from peer.protocol.records import PeerRecord
from peer.swarm.agent.lease_book import LeaseBook
from peer.swarm.agent.leases import MOST_BEHIND, DataLeases

SHARDS = 14
assert SHARDS < MAX_LEASED


@dataclass
class Chain:
    """Of as many rounds as told."""

    chain: range
    seen: Counter[str]
    coverage: Coverage = field(default_factory=lambda: Coverage((SHARDS,)))


@dataclass
class Records:
    peers: dict[str, PeerRecord]
    announced: int = 0

    def announce_soon(self) -> None:
        self.announced += 1


@dataclass
class Trainer:
    told: list[Leased] = field(default_factory=list)

    def tell(self, message: Leased) -> None:
        self.told.append(message)


def record(leases: str, round: int = 50) -> PeerRecord:
    return PeerRecord(
        run_id="a" * 64, nickname="n", state="training", round=round, lineage_id="b" * 64, lineage_weight=1,
        leases=leases, expires_at=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "seen", "left"),
    [
        ({"member": record("0:0-10")}, {"member": 3}, SHARDS - 10),
        ({"stranger": record("0:0-10")}, {}, SHARDS - 1),
        ({"behind": record("0:0-10", round=50 - MOST_BEHIND - 1)}, {"behind": 3}, SHARDS),
        ({"late": record("0:0-10", round=50 - MOST_BEHIND)}, {"late": 3}, SHARDS - 10),
        ({"beyond": record(f"0:0-{SHARDS + 1}")}, {"beyond": 3}, SHARDS),
    ],
    ids=["a member", "a stranger holds one", "one that fell behind holds none", "a late one", "no such shard"],
)
def test_what_is_left_beside_the_leases_of_another(records: dict[str, Any], seen: dict[str, int], left: int) -> None:
    directory, trainer = Records(records), Trainer()
    history: Any = Chain(range(50), Counter(seen))
    leases = DataLeases([LeaseBook("run", "own", 60.0)], history, directory, trainer, clock=lambda: 0.0)  # type: ignore[arg-type]
    leases.hear(DataUse(wanted=(MAX_LEASED,)))
    taken = {piece.shard for answer in trainer.told for piece in answer.taken if piece.epoch == 0}
    assert len(taken) == left
    assert directory.announced
