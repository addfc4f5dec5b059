"""The processes of one peer with several devices, around a whole assembled trainer whose agent the test plays."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.errors import UserError
from peer.link.messages import Anchor, Snapshot, WantSnapshot
from peer.link.supervisor import create_descriptor
from peer.run.devices import RankProcesses, devices_of
from peer.run.follower import RankWorker
from peer.run.leader import RanksTrainer
from peer.train.arrivals import Arrivals
from peer.train.evaluate import evaluate
from peer.train.orders import RankOrder
from peer.train.ranks import ALONE, Ranks
from tests.link.fakes import LINEAGE
from tests.run.test_assemble import wired
from tests.train.in_ranks import in_ranks


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = create_descriptor()
    yield descriptor
    os.close(descriptor)


def lived(folder: Path, descriptor: int, recipe: str, ranks: Ranks = ALONE) -> dict[str, Any] | None:
    """Steps, a round that the peer is in, steps, progress that is dropped, moments that are loaded, a validation."""
    if ranks.rank:
        RankWorker(ranks, torch.device("cpu")).follow()
        return None
    own = folder / f"peer{ranks.count}"
    own.mkdir()
    peer = wired(own, descriptor, recipe, ranks=ranks)
    losses = [_step(peer, batch) for batch, _ in islice(peer.batches, 3)]
    agent: Any = peer.agent
    agent.inbox.append(WantSnapshot(after=0))
    losses += [_step(peer, batch) for batch, _ in islice(peer.batches, 2)]
    (sent,) = agent.take(Snapshot)
    snapshot = peer.sync.memory.snapshot.tolist()
    peer.sync.memory.anchor += 0.01
    agent.inbox.append(Anchor(round=1, lineage_id=LINEAGE, contributed=sent.sequence))
    losses += [_step(peer, batch) for batch, _ in islice(peer.batches, 3)]
    moments = {name: tensor.clone() for name, tensor in peer.state.tensors().items()}
    peer.state.reset()
    emptied = len(peer.state.tensors())
    peer.state.load(moments)
    validation = evaluate(peer.model, peer.text.validation, 4, 2)
    losses += [_step(peer, batch) for batch, _ in islice(peer.batches, 2)]
    local = torch.empty_like(peer.sync.anchor)
    peer.replica.read(local)
    if isinstance(peer.trainer, RanksTrainer):
        peer.trainer.leader.order(RankOrder.STOP)
    return {
        "losses": losses, "snapshot": snapshot, "round": peer.sync.round, "local": local.tolist(), "emptied": emptied,
        "moments": {name: tensor.flatten().tolist() for name, tensor in moments.items()}, "validation": validation,
    }  # fmt: skip


def _step(peer: Any, batch: Any) -> float:
    result = peer.trainer.step(batch)
    peer.sync.after_step(result)
    return float(result.loss)


@pytest.mark.parametrize(
    ("recipe", "sharded", "near"),
    [
        ("name: diloco", False, True), ("name: diloco", True, True),
        pytest.param("name: diloco", True, False, marks=pytest.mark.long),
        pytest.param("name: fedprox, local: {mu: 2.0}", False, False, marks=pytest.mark.long),
        pytest.param("name: fedprox, local: {mu: 2.0}", True, True, marks=pytest.mark.long),
        pytest.param("name: fedglomo", False, True, marks=pytest.mark.long),
        pytest.param("name: fedglomo", True, False, marks=pytest.mark.long),
    ],
    ids=["ddp", "fsdp", "fsdp, two machines", "a rule that reads the anchor, two machines",
         "fsdp, a rule that reads the anchor", "a second trajectory", "fsdp, a second trajectory, two machines"],
)  # fmt: skip
def test_two_ranks_live_as_one(tmp_path: Path, descriptor: int, recipe: str, sharded: bool, near: bool) -> None:
    alone = lived(tmp_path, descriptor, recipe)
    assert alone is not None
    os.ftruncate(descriptor, 0)
    found, _ = in_ranks(
        2, tmp_path, lambda ranks: lived(tmp_path, descriptor, recipe, ranks), sharded=sharded, near=near
    )
    assert found["round"] == alone["round"] == 1
    for key in ("losses", "snapshot", "local"):
        assert found[key] == pytest.approx(alone[key], abs=2e-5 if key == "losses" else 5e-4), key
    assert found["validation"] == pytest.approx(alone["validation"], abs=1e-4)
    assert found["moments"].keys() == alone["moments"].keys()
    assert len(found["moments"]) > 10
    for name, values in alone["moments"].items():
        assert found["moments"][name] == pytest.approx(values, abs=1e-3), name
    assert found["emptied"] == alone["emptied"] == 0


def test_a_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    """It lives, and does nothing. What a killed process left where the ranks meet does not count."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/arrivals").write_bytes(bytes([9] * 16))
    ended: list[int] = []
    sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
    processes = RankProcesses(["cpu", "cpu"], False, tmp_path, end=ended.append, command=sleeper, hung_s=1.0)
    try:
        arrivals = Arrivals(tmp_path / "ranks/arrivals", 2)
        assert arrivals.counts == [0, 0]
        assert processes.lost() is None  # all are as far: rank 0 may wait for its swarm for as long as it likes
        arrivals.arrive(0)
        lost = processes.lost()
    finally:
        processes.close()
    assert lost is not None
    assert lost.what == "rank 1 on cpu has made no progress for 1 s while the others wait for it"
    assert ended == []
    assert not (tmp_path / "ranks").exists()


def test_ranks_count_where_they_meet(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> int:
        assert ranks.arrivals is not None
        while ranks.rank == 0 and ranks.arrivals.last() != 0:  # until the other waits for this one
            time.sleep(0.01)
        ranks.barrier()
        return ranks.arrivals.counts[ranks.rank]

    assert in_ranks(2, tmp_path, work) == [1, 1]


def test_the_devices_of_a_setting() -> None:
    assert devices_of("cpu:3") == ["cpu", "cpu", "cpu"]
    assert devices_of("cpu") == ["cpu"]
    for wrong, said in (
        ("cpu,cpu", "names a device twice"), ("cpu:0", "must be 1 to 64 devices"), ("cpu:65", "must be 1 to 64"),
        ("cuda:0,cuda:99", "is not available"), ("gpu", "is not a device"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            devices_of(wrong)
