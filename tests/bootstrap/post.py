"""A node that follows a run's chain and signs checkpoints, as a bootstrap does."""

from __future__ import annotations

from types import SimpleNamespace

from bootstrap.follower import ChainFollower
from peer.protocol.fork_choice import ForkRule
from peer.protocol.lineage import RosterLimits
from peer.protocol.records import PeerRecord
from peer.swarm.catchup.chain_scout import ChainRules, ChainScout
from peer.swarm.catchup.donor_requests import DonorRequests
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.state.chain import ChainStore
from tests.swarm.donor import ScriptedDonor
from tests.swarm.runs import RUN


class Post:
    """A follower, and the directory that it reads."""

    def __init__(self, network, folder, genesis, total=None, archive=None):
        self.node, self.now = network.node(), 1000.0
        self.history = ChainStore(folder, genesis)
        self.checkpoints = NewestCheckpoint(folder, RUN, (self.node.peer_id,))
        rules = ChainRules(
            limits=RosterLimits(), rule=ForkRule(), checkpoints=self.checkpoints,
            control=SimpleNamespace(rounds_total=total),
        )
        self.scout = ChainScout(DonorRequests(self.node, RUN), RUN, rules, self.history)
        self.directory = SimpleNamespace(reachable={}, peers={})
        self.follower = ChainFollower(
            self.node, self.directory, self.history, self.scout, self.checkpoints, archive, clock=lambda: self.now
        )

    async def sees(self, *donors):
        """These announce themselves; -> the chain that is followed then."""
        self.directory.reachable = self.directory.peers = dict(donors)
        self.follower._failures.clear()
        for _ in donors:
            await self.follower.look_around()
        self.follower._sign()
        return self.history.chain


async def announced(network, run, identity=None):
    """A donor of a run and its record."""
    donor = await ScriptedDonor(network.node(identity), run).start()
    record = PeerRecord(
        run_id=RUN, nickname="x", state="training", round=run.state.round, lineage_id=run.state.lineage_id,
        lineage_weight=run.history.weight, expires_at=1e10,
    )  # fmt: skip
    return donor.peer_id, record
