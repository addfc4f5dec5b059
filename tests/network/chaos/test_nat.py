"""Peers that accept no connection, across network namespaces with real address translation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.chaos.namespaces import Internet
from tests.network.chaos.relay import Link
from tests.network.chaos.wide import WideSwarm

pytestmark = pytest.mark.timeout(300)  # on busy cores each process takes its time to start


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as net:
        yield net


def test_peers_find_each_other_at_addresses_that_libp2p_does_not_hand_on(tmp_path: Path) -> None:
    """Neither public nor private, as those of test networks: libp2p finds no route to such a peer by its id."""
    with Internet("198.18") as internet:
        for name in ("bootstrap", "alpha", "bravo"):
            internet.host(name)
        swarm = WideSwarm(tmp_path, internet)
        try:
            swarm.bootstrap()
            swarm.add("alpha", "bravo")
            swarm.drive(lambda: all(len(member.committed) >= 2 for member in swarm.members))
        finally:
            swarm.close()


def test_a_peer_behind_nat_takes_part(internet: Internet, tmp_path: Path) -> None:
    for name in ("bootstrap", "alpha", "bravo"):
        internet.host(name)
    internet.behind("home", Link(), nat=True)
    swarm = WideSwarm(tmp_path, internet)
    try:
        swarm.bootstrap()
        swarm.add("alpha", "bravo")
        swarm.drive(lambda: all(len(member.committed) >= 2 for member in swarm.members))
        (home,) = swarm.add("home")  # catches up, then contributes
        assert [member.client for member in swarm.members] == [False, False, True]
        assert home.round > 0

        def together() -> bool:
            return sum(len(record.members) == 3 for record in home.committed) >= 3

        swarm.drive(together)
        rounds = [record for record in home.committed if len(record.members) == 3]
        assert all(record.weights[record.members.index(home.peer_id)] > 0 for record in rounds)
        assert len({record.state_digest for member in swarm.members for record in member.committed
                    if record.round == rounds[0].round}) == 1  # fmt: skip
    finally:
        swarm.close()
