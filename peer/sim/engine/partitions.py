"""A network that falls into sides which cannot reach each other, and heals."""

from __future__ import annotations

from peer.sim.engine.exchanges import Exchanges
from peer.sim.engine.lineages import Lineages
from peer.sim.engine.stepping import Stepping
from peer.sim.engine.swarm import SimSwarm, clones, heaviest_side
from peer.sim.world.scenario import NetworkSplit


class Partitions:
    """Partitions in virtual time."""

    def __init__(self, swarm: SimSwarm, exchanges: Exchanges, stepping: Stepping, lineages: Lineages) -> None:
        self._swarm, self._exchanges, self._stepping, self._lineages = swarm, exchanges, stepping, lineages

    def split(self, partition: NetworkSplit) -> None:
        """Each side is on its own from now."""
        swarm = self._swarm
        for replica, side in zip(swarm.replicas, partition.side_of(len(swarm.replicas)), strict=True):
            replica.side = side
        self._restart_rounds()
        self._lineages.split()

    def heal(self) -> None:
        """Reconnect all peers, which continue from the side that made the most steps."""
        swarm = self._swarm
        if len({replica.side for replica in swarm.replicas}) == 1:
            return
        swarm.tally.heals += 1
        side = heaviest_side(swarm.replicas)
        winners = sorted((r for r in swarm.replicas if r.side == side), key=lambda r: (not r.present, r.index))
        losers = [replica for replica in swarm.replicas if replica.side != side]
        self._lineages.heal(winners[0], losers)
        for replica in swarm.replicas:
            replica.side = 0
        if clones(swarm.recipe):
            for replica in losers:
                swarm.stays[replica.index].pending = list(swarm.stays[winners[0].index].pending)
        self._restart_rounds()

    def _restart_rounds(self) -> None:
        """No exchange survives a change of reachability; the next round carries its work."""
        swarm, rounds = self._swarm, self._exchanges.gathering.unfinished()
        swarm.tally.aborted += len(rounds)
        self._exchanges.give_up(rounds)
        present = [replica for replica in swarm.replicas if replica.present]
        for stay in swarm.stays:
            stay.due = []
        rounds_made = swarm.rounds_made(present)
        for replica in present:
            swarm.stand_at(replica, rounds_made)
        for stay in swarm.stays:
            stay.pending = [entry for entry in stay.pending if entry[1].outcome is not None]
        for replica, stay in zip(swarm.replicas, swarm.stays, strict=True):
            if stay.blocked is not None and replica.present:
                self._stepping.go_on(replica)
