"""The end of a simulation: exchanges under way are merged, and unsent progress is exchanged once more."""

from __future__ import annotations

from collections.abc import Sequence

from peer.sim.engine.swarm import SimSwarm
from peer.sim.learner.replica import SimReplica
from peer.sim.round.rounds import ExchangeCost, SimRound


def close(swarm: SimSwarm, unfinished: Sequence[SimRound], cost: ExchangeCost) -> None:
    """Bring a swarm whose goal is reached to rest, so that the anchor holds all that was learned.

    Args:
        swarm: nothing of it is being sent any more.
    """
    present = [replica for replica in swarm.replicas if replica.present]
    for replica in present:
        swarm.count_time(replica)
        for _, round, contribution in swarm.stays[replica.index].pending:
            if round.outcome is not None:
                swarm.sync.merge(replica, round.outcome, contribution, round.fragment)
    for round in unfinished:
        for member, contribution in round.contributions.items():
            swarm.sync.give_back(swarm.replicas[member], contribution, round.fragment)
    if swarm.recipe.payload == "delta" and present:
        _last_rounds(swarm, present, cost)


def _last_rounds(swarm: SimSwarm, present: Sequence[SimReplica], cost: ExchangeCost) -> None:
    """Put the progress that has not been sent into the anchor that is evaluated."""
    sides = sorted({replica.side for replica in present})
    lasts_s = dict.fromkeys(sides, 0.0)  # groups exchange at the same time, fragments one after another
    for side in sides:
        own = [replica for replica in present if replica.side == side]
        for fragment in range(len(swarm.sync.fragments)):
            if all(replica.unsent_tokens[fragment] == 0 for replica in own):
                continue
            number = 1 + swarm.tally.committed
            lasts_s[side] += max(
                _exchange(swarm, [swarm.replicas[member] for member in group], fragment, number, cost)
                for group in swarm.recipe.topology.groups(number, [r.index for r in own], 0, None)
            )
    swarm.clock.wait(max(lasts_s.values()))


def _exchange(swarm: SimSwarm, members: Sequence[SimReplica], fragment: int, number: int, cost: ExchangeCost) -> float:
    """Returns its seconds."""
    round = SimRound(fragment, number, set(), members=tuple(replica.index for replica in members))
    rate = swarm.learning_rate(members[0])
    round.contributions = {
        r.index: swarm.sync.contribute(r, fragment, number, rate, overlapped=False) for r in members
    }
    sent = [round.contributions[member] for member in round.members]
    swarm.tally.count_dropped(swarm.sync.commit(members, sent, fragment, number, rate).dropped)
    swarm.tally.committed += 1
    update_bytes = swarm.sync.wire_bytes(fragment)
    swarm.count_sent(cost.traffic(round, update_bytes))
    return cost.seconds(round, update_bytes)
