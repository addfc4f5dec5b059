"""Real processes, real DHT, real sockets: full groups, kills, late joiners, splits that heal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from peer.outer.compress.int8 import BlockInt8
from peer.outer.optim.optimizers import Nesterov
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import ReduceFormat
from tests.network.harness import TestSwarm
from tests.network.members import TOKENS_PER_STEP, Member
from tests.outer.reference import reduced

pytestmark = pytest.mark.timeout(300)
MakeSwarm = Callable[..., TestSwarm]


def all_at(members: list[Member], round: int) -> bool:
    return all(member.round >= round for member in members)


def full_rounds(member: Member, members: int) -> list[int]:
    """The newest rounds without a gap that had everybody in them."""
    full: list[int] = []
    for record in reversed(member.committed):
        if len(record.members) != members:
            break
        full.append(record.round)
    return full


def in_full_rounds(member: Member, members: int) -> bool:
    """The member's last round had everybody in it."""
    return bool(member.committed) and len(member.committed[-1].members) == members


def test_a_round_counts_what_came_before_this_peer_began_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=5, hidden=64)
    swarm.bootstrap()
    fast, slow = swarm.add("fast", "slow")
    slow.pace = 6  # the other's contribution is there long before its own
    swarm.drive(lambda: all(len(full_rounds(member, 2)) >= 6 for member in (fast, slow)), 120.0)
    sent = {record.round: record.bytes_sent for record in fast.committed}
    shared = [record for record in slow.committed[-5:] if record.round in sent]
    assert len(shared) >= 4
    for record in shared:
        assert record.bytes_received == pytest.approx(sent[record.round], rel=0.05)
        assert record.bytes_received == pytest.approx(record.bytes_sent, rel=0.05)


def test_a_peer_whose_parameters_are_not_finite_costs_the_others_no_round(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=5)
    swarm.bootstrap()
    members = swarm.add("a", "b", "spoilt")
    spoilt = members[2]
    swarm.drive(lambda: all(in_full_rounds(member, 3) for member in members), 120.0)
    assert spoilt.replica is not None
    for value in (float("nan"), float("inf"), 1e30):
        before = [len(member.records) for member in members]
        spoilt.replica.flat[7] = value
        swarm.drive(lambda: all(len(m.records) >= n + 3 for m, n in zip(members, before, strict=True)), 60.0)  # noqa: B023
        for member, count in zip(members, before, strict=True):
            later = [(record.status, len(record.members)) for record in member.records[count:]]
            assert later == [("committed", 3)] * len(later), "nobody aborted, and nobody was left out"
        assert bool(spoilt.replica.flat.isfinite().all())
    assert len(swarm.drive_together(members)) == 1
    assert all(bool(member.sync.memory.anchor.isfinite().all()) for member in members if member.sync is not None)


def test_three_peers_commit_full_rounds_and_arrive_at_the_computed_anchor(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=5)
    genesis = swarm.bootstrap().genesis()
    members = swarm.add("a", "b", "c")
    swarm.drive(lambda: all(len(full_rounds(member, 3)) >= 40 for member in members), 120.0)
    for member in members:
        last = [record.round for record in member.committed[-40:]]
        assert last == list(range(last[0], last[0] + 40))
    assert len(swarm.drive_together(members)) == 1
    stopped = [member.stop() for member in members]
    # They stop one after the other: who stops later may have made another round, but never another state of one.
    assert len({(one.round, one.state_digest) for one in stopped}) == len({one.round for one in stopped})
    assert members[0].sync is not None
    moved = float((members[0].sync.memory.anchor - genesis[: members[0].sync.memory.anchor.numel()]).mean())
    assert moved > 0.004  # every member pushes every parameter up, by 1 to 3 thousandths a step


def test_the_first_round_equals_the_reference_bit_for_bit(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=4)
    genesis = swarm.bootstrap().genesis()
    members = swarm.add("a", "b")
    numel = genesis.numel() // 2
    snapshots: dict[str, torch.Tensor] = {}

    def first_snapshots_then_rounds() -> bool:
        for member in members:
            assert member.sync is not None
            if member.round == 0:
                snapshots[member.peer_id] = member.sync.memory.snapshot.clone()
        return all(len(member.committed) >= 2 for member in members)

    swarm.drive(first_snapshots_then_rounds)
    record, following = members[0].committed[:2]
    wire = ReduceFormat(numel, BlockInt8())
    state = OuterState(genesis[:numel].clone(), [torch.zeros(numel)], Nesterov(lr=0.7, momentum=0.6), wire)
    update = reduced(state, [snapshots[peer_id] for peer_id in record.members], record.weights)
    assert record.update_digest == update.digest()
    state.apply(update, 1, record.lineage_id)
    assert (following.round, following.state_digest) == (2, state.digest())
    assert set(record.weights) <= {4 * TOKENS_PER_STEP}


def test_two_bits_with_feedback_on_both_legs_keep_replicas_equal_and_survive_a_kill(make_swarm: MakeSwarm) -> None:
    """The default recipe: residuals on both legs, an average of anchors in the outer state, a group that shrinks."""
    swarm = make_swarm(steps=5, recipe="name: lagoon")
    genesis = swarm.bootstrap().genesis()
    members = swarm.add("a", "b", "c")
    swarm.drive(lambda: all_at(members, 8) and in_full_rounds(members[0], 3), 120.0)
    members[2].kill()
    survivors = members[:2]
    rounds = survivors[0].round
    assert len(swarm.drive_together(survivors, lambda: all_at(survivors, rounds + 8), 120.0)) == 1
    swarm.drive(lambda: survivors[0].at_rest)
    audits = [
        note for member in survivors for record in member.records for note in record.audits
        if members[2].peer_id not in note  # it may have been killed before it could show something
    ]  # fmt: skip
    # of 16 rounds, in each of which both audit with a probability of a third or more
    assert any(note.endswith("recomputed, and right") for note in audits), audits
    assert not any(wrong in note for note in audits for wrong in (": false", "residual", "paths")), audits
    sync = survivors[0].sync
    assert sync is not None
    numel = sync.anchor.numel()
    lagging = sync.memory.buffers[-1] / (1.0 - 0.75**sync.round)
    assert torch.equal(sync.result, lagging)
    start = genesis[:numel]
    assert 0.0 < float((sync.result - start).mean()) < float((sync.anchor - start).mean())  # all push upwards


def test_kill_9_in_the_middle_of_an_exchange_loses_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(hidden=512, steps=3)  # 1.5M parameters: the exchange is long enough to be hit
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    survivors, victim = members[:2], members[2]
    swarm.drive(lambda: all_at(members, 2))
    killed_at: list[int] = []

    def kill_when_the_next_group_stands() -> bool:
        if victim.log_text().count("group of 3") >= 3 and not killed_at:
            victim.kill()
            killed_at.append(max(member.round for member in members))
        return bool(killed_at)

    swarm.drive(kill_when_the_next_group_stands, pace_s=0.001)
    began = time.monotonic()
    swarm.drive(lambda: all(member.round >= killed_at[0] + 3 for member in survivors), 60.0)
    assert time.monotonic() - began < 45.0
    assert len(swarm.drive_together(survivors)) == 1
    assert [len(record.members) for record in survivors[0].committed[-2:]] == [2, 2]


def test_a_late_joiner_takes_the_state_from_a_peer_and_joins_the_group(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=5)
    swarm.bootstrap()
    first = swarm.add("a", "b")
    swarm.drive(lambda: all_at(first, 3))
    swarm.bootstraps[0].kill()  # any member's address will do; the manifest lives on in the DHT
    published = first[0].start
    assert first[0].swarm is not None
    address = first[0].maddrs[0]
    (late,) = swarm.add("late", address=address)
    assert published.initial_peers != (address,)
    assert late.round >= 3
    everybody = [*first, late]
    swarm.drive(lambda: bool(late.committed) and late.committed[-1].round >= late.committed[0].round + 1)
    assert len(late.committed[-1].members) == 3
    assert len(swarm.drive_together(everybody)) == 1


def test_a_member_that_was_stopped_replays_what_it_missed(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=5, wait=2.0)
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    sleeper, others = members[2], members[:2]
    swarm.drive(lambda: all_at(members, 1))
    assert sleeper.agent.pid is not None
    sleeper.frozen = True
    os.kill(sleeper.agent.pid, signal.SIGSTOP)
    at = max(member.round for member in members)
    swarm.drive(lambda: all_at(others, at + 3), 90.0)
    for member in others:
        member.pace = 10  # on an idle machine they make more rounds a second than one replays
    os.kill(sleeper.agent.pid, signal.SIGCONT)
    sleeper.frozen = False
    assert len(swarm.drive_together(members, lambda: sleeper.round >= at + 4)) == 1
    how = [record.reason for record in sleeper.records if record.status == "caught_up"]
    assert how
    assert "replayed" in str(how[0])


def test_a_crashed_agent_is_restarted_and_catches_up(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=5)
    swarm.bootstrap()
    members = swarm.add("a", "b", "c")
    swarm.drive(lambda: all_at(members, 1))
    victim = members[1]
    assert victim.agent.pid is not None
    assert victim.sync is not None
    steps = victim.sync.step
    os.kill(victim.agent.pid, signal.SIGKILL)
    at = max(member.round for member in members)
    swarm.drive(lambda: victim.agent.starts == 2 and all_at(members, at + 3), 90.0)
    assert len(swarm.drive_together(members, lambda: all(in_full_rounds(m, 3) for m in members), 90.0)) == 1
    assert victim.sync.step > steps


def test_two_lineages_heal_to_the_heavier_one(make_swarm: MakeSwarm) -> None:
    """A split that lasts from the start: two bootstraps of one run that do not know each other, then one that does."""
    swarm = make_swarm(steps=5)
    left = swarm.bootstrap("bootstrap")
    heavy = swarm.add("a", "b")
    right = swarm.bootstrap("island")
    assert right.run_id == left.run_id
    light = swarm.add("c", "d")
    swarm.drive(lambda: all_at(heavy, 6) and all_at(light, 2), 90.0)
    light_before = {member.lineage_id for member in light}
    for member in light:
        member.pace = 20  # so that it stays the lighter side
    swarm.drive(lambda: all_at(heavy, max(member.round for member in light) + 10), 90.0)
    assert light_before.isdisjoint({member.lineage_id for member in heavy})
    port = right.port
    right.close()
    swarm.bootstrap("island", initial_peers=[left.address], port=port)
    met = max(member.round for member in heavy)
    everybody = heavy + light
    swarm.drive(lambda: all("took the snapshot" in member.log_text() for member in light), 120.0)
    for member in light:
        member.pace = 1
    assert len(swarm.drive_together(everybody, lambda: all(in_full_rounds(m, 4) for m in everybody), 120.0)) == 1
    assert min(member.round for member in everybody) > met
    for member in light:
        assert any("unsent progress is kept" in str(record.reason) for record in member.records)
    assert not any("snapshot" in str(record.reason) for member in heavy for record in member.records)


def test_members_go_on_without_the_bootstrap_and_find_it_again(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=5)
    bootstrap = swarm.bootstrap()
    members = swarm.add("a", "b")
    swarm.drive(lambda: all_at(members, 1))
    port, address = bootstrap.port, bootstrap.address
    swarm.drive(lambda: all(member.swarm is not None and member.swarm.addresses for member in members))
    bootstrap.kill()
    at = max(member.round for member in members)
    swarm.drive(lambda: all_at(members, at + 3))
    stayed, crashed = members
    assert crashed.agent.pid is not None
    os.kill(crashed.agent.pid, signal.SIGKILL)  # its next agent finds the swarm through the other member
    before = len(crashed.log_text())
    at = max(member.round for member in members)
    swarm.drive(lambda: crashed.agent.starts == 2 and all_at(members, at + 3), 90.0)
    # they look every five seconds: one that is away for less is missed by nobody
    lost = f"lost {address}"
    swarm.drive(lambda: lost in stayed.log_text() and lost in crashed.log_text()[before:])
    again = swarm.bootstrap(port=port)
    assert again.address == address
    swarm.drive(lambda: all(f"reached {address} again" in member.log_text() for member in members), 60.0)
    (late,) = swarm.add("late")
    assert late.round >= 4


@pytest.mark.long
def test_a_peer_alone_trains_on_and_joins_others_when_they_appear(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(steps=3)
    swarm.bootstrap()
    (alone,) = swarm.add("alone")
    swarm.drive(lambda: any(record.alone for record in alone.records), 60.0)
    assert alone.round == 0
    assert alone.sync is not None
    assert alone.sync.step > 3
    (friend,) = swarm.add("friend")
    swarm.drive(lambda: all_at([alone, friend], 2), 60.0)
    assert len(swarm.drive_together([alone, friend])) == 1
    assert alone.committed[0].weights[0] == alone.committed[0].weights[1]  # capped at the nominal tokens


@pytest.mark.long
def test_killing_the_trainer_leaves_nothing_alive(make_swarm: MakeSwarm) -> None:
    """The agent and its libp2p daemon die with the process that started them, however that one dies."""
    swarm = make_swarm()
    bootstrap = swarm.bootstrap()
    script = (
        "import sys, time; from pathlib import Path\n"
        "from peer.link.supervisor import AgentProcess; from peer.link.messages import Start, Published\n"
        "folder = Path(sys.argv[1]); folder.mkdir(); agent = AgentProcess(folder / 'agent.log'); agent.start()\n"
        "agent.send(Start(initial_peers=(sys.argv[2],), host_maddrs=('/ip4/127.0.0.1/tcp/0',), nickname='x',\n"
        "    identity_path=str(folder / 'identity.key'), directory=str(folder)))\n"
        "agent.expect(Published, 60); print(agent.pid, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(swarm.folder / "owner"), bootstrap.address]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert owner.stdout is not None
    agent = int(owner.stdout.readline())
    family = [agent, *_children(agent)]
    assert len(family) == 2
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 5.0
    while any(map(_alive, family)):
        assert time.monotonic() < deadline, [pid for pid in family if _alive(pid)]


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
