"""What `atoll rounds` says of a real swarm: records written by production agents, one of which is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from peer.cli import main
from peer.explain.journal import JournalReader
from peer.link.messages import Figures
from peer.outer.record import RoundRecord
from peer.protocol.reports import TrainerFigures, ValidationPoint
from peer.swarm.observe.reader import SwarmReader, visit_run
from tests.network.harness import TestSwarm
from tests.network.members import Member

pytestmark = pytest.mark.timeout(300)


def atoll(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["rounds", *argv])
    assert caught.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def kept(member: Member) -> list[RoundRecord]:
    found = JournalReader(member.folder).poll()
    assert found.problems == []
    return found.records


def seen_from_outside(address: str, folder: Path, until: Callable[[SwarmReader], bool]) -> SwarmReader:
    """What a node that only watches has read once the condition holds."""

    async def watch() -> SwarmReader:
        changed = asyncio.Event()
        async with visit_run(address, folder / "watcher.key") as visit:
            visit.reader.changed = changed.set
            async with asyncio.timeout(60.0):
                while not until(visit.reader):
                    await changed.wait()
                    changed.clear()
            return visit.reader

    return asyncio.run(watch())


def test_a_swarm_with_a_death_and_a_latecomer(
    make_swarm: Callable[..., TestSwarm], capsys: pytest.CaptureFixture[str]
) -> None:
    swarm = make_swarm(steps=5)
    swarm.bootstrap()
    alpha, bravo, charlie = swarm.add("alpha", "bravo", "charlie")
    swarm.drive(lambda: all(any(one.stood and len(one.members) == 3 for one in m.committed) for m in swarm.members))
    charlie.kill()
    survivors = [alpha, bravo]
    ends = {m.name: len(m.records) for m in survivors}
    swarm.drive(lambda: all(any(len(one.members) == 2 for one in m.committed[-1:]) for m in survivors))
    assert all(len(m.records) > ends[m.name] for m in survivors)
    (delta,) = swarm.add("delta")
    swarm.drive(lambda: len(delta.committed) > 0)
    watched_from_outside(alpha, bravo, delta)  # now, for a report holds the last rounds only
    swarm.drive(lambda: alpha.records[-1].nicknames.get(delta.peer_id) == "delta")
    for member in swarm.members:
        records = kept(member)
        assert [one for one in records if one in member.records] == member.records
        assert all(one.peer_id == member.peer_id and one.ended_at is not None for one in records)
    assert kept(delta)[0].status == "caught_up"

    told = atoll(capsys, str(alpha.folder), "--last", "0")
    assert told.splitlines()[0] == f"{alpha.folder}: alpha {alpha.peer_id[-6:]}"
    assert "; persistent group\n" in told
    assert "no longer there: charlie\n" in told
    assert "new: delta\n" in told
    assert "weights in tokens: " in told
    assert "caught up: " in atoll(capsys, str(delta.folder), "--last", "0")
    documents = json.loads(atoll(capsys, str(alpha.folder), "--last", "0", "--json"))
    assert [RoundRecord.model_validate(document) for document in documents] == kept(alpha)


def watched_from_outside(alpha: Member, bravo: Member, delta: Member) -> None:
    """What a node that takes no part reads of them."""
    figures = TrainerFigures(device="abacus", utilisation=0.5, validation=ValidationPoint(round=3, tokens=9, loss=2.5))
    for member in (alpha, bravo):
        member.agent.send(Figures(figures=figures))

    def told(reader: SwarmReader) -> bool:
        """Whether every peer has told the reader what the assertions below look for."""
        both = sum(one.device == "abacus" for one in reader.state.peers) == 2
        return both and any(one.status == "caught_up" and one.teller == delta.peer_id for one in reader.state.events)

    # the agents go on publishing while nothing drives their trainers
    reader = seen_from_outside(alpha.maddrs[0], alpha.folder, told)
    states = {view.nickname: (view.state, view.reached, view.validation) for view in reader.state.peers}
    assert states["alpha"] == ("training", "open", 2.5)
    assert {"alpha", "bravo", "delta"} <= states.keys()
    keys = {(event.round, event.lineage_id) for event in reader.state.events if event.status == "committed"}
    assert (alpha.committed[-1].round, alpha.committed[-1].lineage_id) in keys
    assert reader.state.point().validation == 2.5
