"""Eight real peers share out 200 shards, while six of them are killed and as many join: what the chain says of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from peer.data.blocks import ResidentBlocks
from peer.data.packing import PackedTokens
from peer.data.seeded import SeededShards
from peer.data.shared import SharedSources, SharedWindows
from peer.protocol.data_spec import PARTS_PER_SHARD, SharedData
from peer.protocol.ranges import ClaimRule
from tests.network.harness import TestSwarm
from tests.network.members import Member
from tests.network.processes import run

SHARDS, WINDOWS, LENGTH, BATCH, STEPS = 200, 64, 8, 4, 5  # a shard lasts some rounds: leases are known by then
SHARED = f"shared: {{digest: '{'a' * 64}', shards: [{SHARDS}], shard_tokens: {WINDOWS * LENGTH}}}"
CUT = SharedData(digest="a" * 64, shards=(SHARDS,), shard_tokens=WINDOWS * LENGTH)
MOST_PARTS = ClaimRule.of(CUT, STEPS * BATCH * LENGTH).most_parts
KILLS = 6


@dataclass
class SharingMember(Member):
    """A member that reads windows, and trains on nothing of them."""

    source: SharedWindows | None = None
    rows: list[int] = field(default_factory=list)

    def begin(self) -> None:
        packed = PackedTokens(np.arange(SHARDS * WINDOWS * LENGTH + 1, dtype=np.uint32), LENGTH)
        blocks, seeded = ResidentBlocks(packed, SHARDS, [3, 0]), SeededShards(3, self.peer_id, SHARDS)
        self.source = SharedWindows(blocks, 1.0, 0, seeded, leased=True)
        self.waits = True  # or its shards, of some milliseconds, would outrun the rounds
        assert self.sync is not None
        self.sync.share(SharedSources({0: self.source}, 1), MOST_PARTS)

    def step(self) -> None:
        assert self.source is not None
        self.rows += [int(row[0]) // LENGTH for row in self.source.take(BATCH)]
        super().step()


def coverage_of(address: str) -> dict[str, Any]:
    code, output = run("peer.cli", ["data", "coverage", address, "--json"])
    assert code == 0, output
    return cast("dict[str, Any]", json.loads(output[output.index("{") :]))


def start(make_swarm: Callable[..., TestSwarm], names: Sequence[str]) -> tuple[TestSwarm, list[SharingMember]]:
    swarm = make_swarm(steps=STEPS, wait=3.0)
    swarm.manifest_text = swarm.manifest_text.replace("data: {sequence", f"data: {{{SHARED}, sequence")
    swarm.kind = SharingMember
    swarm.bootstrap()
    return swarm, join(swarm, *names)


def join(swarm: TestSwarm, *names: str) -> list[SharingMember]:
    members = cast("list[SharingMember]", swarm.add(*names))
    for member in members:
        member.begin()
    return members


def trained(members: Sequence[SharingMember]) -> int:
    return sum(len(member.rows) for member in members)


def test_two_peers_read_different_shards_and_the_chain_says_which(make_swarm: Callable[..., TestSwarm]) -> None:
    swarm, (one, two) = start(make_swarm, ["one", "two"])
    swarm.drive(lambda: min(one.round, two.round) >= 4, timeout_s=50.0)
    assert not set(one.rows) & set(two.rows)
    assert one.source is not None
    assert one.source.unleased == 0
    found = coverage_of(swarm.bootstraps[-1].address)
    (epoch,) = found["sources"][0]["epochs"]
    assert epoch["parts_once"] >= 4 * 2 * STEPS * BATCH * PARTS_PER_SHARD // WINDOWS * 3 // 5  # of four rounds
    assert epoch["parts_twice_or_more"] == 0
    assert set(found["peers"]) == {one.peer_id, two.peer_id}


@pytest.mark.long
@pytest.mark.timeout(580)
def test_no_kill_loses_a_shard_and_what_is_read_twice_is_listed(
    make_swarm: Callable[..., TestSwarm]
) -> None:
    rng = random.Random(5)
    swarm, members = start(make_swarm, [f"peer{number}" for number in range(8)])
    alive, victims = list(members), []
    for number in range(KILLS):
        goal = trained(members) + SHARDS * WINDOWS // (KILLS + 4)
        swarm.drive(lambda goal=goal: trained(members) >= goal, timeout_s=120.0)
        victim = alive.pop(rng.randrange(len(alive)))
        victim.kill()
        victims.append(victim.peer_id)
        newcomer = join(swarm, f"late{number}")[0]
        members.append(newcomer)
        alive.append(newcomer)
    swarm.drive(lambda: trained(members) >= 1.2 * SHARDS * WINDOWS, timeout_s=300.0)
    for _ in range(20):
        found = coverage_of(swarm.bootstraps[-1].address)
        epochs = found["sources"][0]["epochs"]
        if epochs[0]["parts_never"] == 0:
            break
        goal = trained(members) + 200
        swarm.drive(lambda goal=goal: trained(members) >= goal, timeout_s=120.0)
    print(json.dumps(found), victims, [member.source.unleased for member in members if member.source])
    assert epochs[0]["parts_never"] == 0
    assert epochs[0]["parts_once"] >= (SHARDS - KILLS) * PARTS_PER_SHARD
    assert epochs[0]["readings_again"] <= KILLS * PARTS_PER_SHARD
    again = found["sources"][0]["again"]["0"]
    assert sum(end - first for first, end in again) == epochs[0]["parts_twice_or_more"]
    assert sum(peer["refused"] for peer in found["peers"].values()) <= 2 * PARTS_PER_SHARD * len(members)
