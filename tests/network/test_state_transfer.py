"""A newcomer takes the state from real donors over real libp2p."""

from __future__ import annotations

from benchmarks.peers import Peers, PeersSetup
from benchmarks.processes import session_pids
from benchmarks.state_transfer import work

CHUNKS = 8  # anchor and momentum of 3.2M parameters


def test_a_newcomer_takes_the_state_from_two_donors_that_make_rounds() -> None:
    setup = PeersSetup(module="benchmarks.state_peer", codec="int8", numel=3_200_000, peers=3, seed=5)
    with Peers(setup) as peers:
        leaders = list(peers.leaders)
        peers.meet()
        assert len(work(peers, 2, rounds=1).rounds) == 1
        (alone,) = work(peers, 1, fetches=1).transfers
        assert alone.right
        assert alone.chunks == (CHUNKS,)
        rounds, (shared,), written = work(peers, 2, rounds=3, fetches=1)
        assert len(rounds) == 3
        assert 1 <= len(written) <= 4
        assert shared.right
        assert sum(shared.chunks) == CHUNKS
    assert [session_pids(leader) for leader in leaders] == [[], [], []]
