"""Who stalls, and gets no seat for a while.

Who is in dispute with whom is said in `failed_round`. A member in dispute with more than two thirds of the others
stalls, and all refuse it. Of a pair that nothing else explains, each refuses the other; a third member refuses the one
with which it is in dispute as well, and the rest leave out the one with fewer committed rounds, on a tie both. Disputes
are remembered, so that no member picks its victims one by one; but not those of a cut network, which no single member
explains and whose far side is silent: after further cuts all members would be in dispute with most. A member that
stalls by this rule itself refuses no other that does: the network has cut them off together, and they make rounds of
their own.

The first failure has no consequence: it may be a bad line, or a machine that slept. For how long a peer is refused
after a second one is said in `debts`.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from types import MappingProxyType
from typing import Protocol

from peer.swarm.round.giving_up import Lack
from peer.swarm.round.lateness import Waited
from peer.swarm.runtime.expiring import BoundedMap, ExpiringSet
from peer.swarm.runtime.timing import Timing
from peer.swarm.trust.debts import FACTOR, MAX_REMEMBERED, Debts, Loss, Peers
from peer.swarm.trust.failed_round import FailedRound
from peer.system.clock import Clock

log = logging.getLogger(__name__)
FEWEST = 3  # of two members, each could be the one that lies
GROUPS_KEPT = 16
STRANGERS = ""  # all of them: a new key costs nothing
MISSED_IN_A_ROW = 3  # rounds: those that make them are of use to others


class Standing(Protocol):
    """What the chain says of peers; `RosterAuthority` implements it."""

    def rounds_of(self, peer_id: str) -> int:
        """In how many committed rounds it was."""

    def fresh(self, peer_id: str) -> bool:
        """Whether it was in none, although others were."""

    def newcomer(self, peer_id: str) -> bool:
        """Whether it is in probation, although others are not."""


class StallBook:
    """Recent failures, and the peers that are refused for them.

    Args:
        own_id: this peer.
        standing: of peers, by the chain.
        timing, clock: every duration of this peer, and its clock.
    """

    def __init__(self, own_id: str, standing: Standing, timing: Timing, clock: Clock) -> None:
        self._own_id, self._standing, self._timing, self._clock = own_id, standing, timing, clock
        self._failures: BoundedMap[str, FailedRound] = BoundedMap(GROUPS_KEPT)
        self._debts = Debts(clock, timing.longest_refusal_s)
        self._disputes: ExpiringSet[Peers] = ExpiringSet(clock, timing.dispute_s)
        self._held: ExpiringSet[str] = ExpiringSet(clock, timing.stall_words_s + timing.late_roster_s)
        self._refused: ExpiringSet[str] = ExpiringSet(clock)
        self._shunned: ExpiringSet[str] = ExpiringSet(clock)
        self._news: set[str] = set()
        self._told: ExpiringSet[Peers] = ExpiringSet(clock, timing.dispute_s)
        self._fresh_wait = self._fresh_shunned = self._fresh_allowed = 0.0
        self._missed = 0
        self._numbers = itertools.count()

    # -- who is refused ----------------------------------------------------------------------------------------------

    def refuses(self, peer_id: str) -> bool:
        """Whether it gets no seat now."""
        if self._standing.fresh(peer_id) and max(self._fresh_wait, self._fresh_shunned) > self._clock():
            return True
        return peer_id in self._refused or peer_id in self._held

    def guilt(self, peer_id: str) -> tuple[bool, float]:
        """The larger, the more speaks against it: whether most refuse it, and for how long this peer does."""
        return self.shuns(peer_id), self._refused.left_s(peer_id)

    def shuns(self, peer_id: str) -> bool:
        """Whether a leader that gives it a seat must know better: most members refuse it, and for long."""
        return peer_id in self._shunned or (self._fresh_shunned > self._clock() and self._standing.fresh(peer_id))

    def seated(self, leader: str, peer_id: str) -> None:
        """A leader has given a seat to a peer that most refuse. It may not have been there; once told, it knows."""
        if self.shuns(peer_id):
            pair = frozenset({leader, STRANGERS if self._standing.fresh(peer_id) else peer_id})
            if pair in self._told:
                self.cost(leader, self._timing.least_waste_s)
            self._told.add(pair)

    def take_news(self) -> set[str]:
        """The peers that are refused since this was last asked."""
        news, self._news = self._news, set()
        return news

    def committed(self, members: Collection[str]) -> None:
        """This peer made a round with these."""
        self._missed = 0
        self._made_round(members)

    def missed(self, members: Collection[str]) -> None:
        """These made a round without this peer, as the chain shows. After a few in a row this peer refuses none of
        them: it would stay alone with what it alone has seen, or has seen before it was away.
        """
        self._missed += 1
        self._made_round(members)
        for peer_id in members if self._missed >= MISSED_IN_A_ROW else ():
            self._refused.pop(peer_id, None)
            self._news.discard(peer_id)

    def _made_round(self, members: Collection[str]) -> None:
        """What fails next is no longer in a row, and a leader that gives one of them a seat need not know better."""
        self._fresh_shunned = min(self._fresh_shunned, self._fresh_allowed)
        self._debts.made_round(members)
        for peer_id in members:
            self._shunned.pop(peer_id, None)

    def cost(self, peer_id: str, seconds: float, *, again: bool = False) -> None:
        """This peer saw itself that a peer cost so much time.

        Args:
            again: it is not the first time.
        """
        own, loss = frozenset({peer_id}), Loss(next(self._numbers), seconds)
        self._refuse({peer_id}, self._charge(own, loss, again=again))

    # -- failures ----------------------------------------------------------------------------------------------------

    def told(self, group: str, members: Iterable[str], member: str, lack: Lack | None, wasted_s: float) -> bool:
        """A member of a group, perhaps this peer, gives a round up. -> whether it is the first: `settle` it later.

        Args:
            group: its id; a group ends when a round of it fails.
            lack: what the member says that it lacks; None: it does not explain itself.
            wasted_s: that this peer has lost by it.
        """
        first = group not in self._failures
        failure = self._failures.setdefault(group, FailedRound(next(self._numbers), frozenset(members)))
        if failure.settled or member in failure.lacks or member not in failure.members:
            return first
        failure.wasted_s = max(failure.wasted_s, wasted_s, self._timing.least_waste_s)
        failure.hear(member, lack)
        self._held.pop(member, None)
        if failure.members <= failure.lacks.keys():
            self.settle(group)
        else:
            self._hold(failure)
        return first

    def _hold(self, failure: FailedRound) -> None:
        """Until all that comes has come, no seat for those that may stall."""
        now, hasty = _ByMember(failure.disputes()), _ByMember(failure.disputes(hasty=True))
        earlier = self._earlier(failure)
        for peer_id in failure.members if len(failure.members) >= FEWEST else ():
            unexplained = peer_id not in failure.lacks and hasty.of(peer_id)
            if unexplained or (now.of(peer_id) and failure.is_most(now.of(peer_id) | earlier.of(peer_id))):
                self._held.add(peer_id)

    def settle(self, group: str) -> None:
        """A while has passed: a member that has not explained itself has no excuse."""
        failure = self._failures.get(group)
        if failure is None or failure.settled:
            return
        failure.settled = True
        for peer_id in failure.members:
            self._held.pop(peer_id, None)
        self._judge(failure)

    def explained(self, group: str, member: str, lack: Lack) -> None:
        """A member whose word did not come to this peer has given it to others. If it does not stall by that word, as
        most see, it is this peer's line that is cut: a group that has it is no reason to decline.
        """
        failure = self._failures.get(group)
        if failure is None or not failure.settled or failure.lacks.get(member) is not None:
            return
        failure.hear(member, lack)
        if not failure.is_most(_ByMember(failure.disputes() | failure.circled()[0]).of(member)):
            self._shunned.pop(member, None)

    def waited(self, members: Iterable[str], waited: Waited, words: Mapping[str, Waited]) -> None:
        """A round is committed, of these members. One that was late has cost its seconds, and that a group forms again
        once it is refused.

        Args:
            waited: what made it long for this peer, if it was.
            words: the same of the others, as they say.
        """
        group, said = frozenset(members), {**words, self._own_id: waited}
        for peer_id in sorted(group) if len(group) >= FEWEST else ():
            seconds = {stage: late[peer_id] for stage, late in waited.late if peer_id in late}
            if seconds:  # late at both stages: that is one failure
                lost_s = sum(seconds.values()) + self._timing.least_waste_s
                failure = FailedRound(next(self._numbers), group, lost_s)
                failure.long(peer_id, max(seconds, key=seconds.__getitem__), said)
                self._judge(failure)

    def rejoined(
        self, members: Iterable[str], late: Mapping[str, float], shards: Mapping[str, Collection[str]]
    ) -> None:
        """Members were late with their joins of a round, and name the one whose shard had come late to them alone.

        Args:
            late: seconds.
            shards: of each member, whose; as it said with its vote in the round before. A word that names several is of
                no account: it would part them all from that one at the price of one.
        """
        group = frozenset(members)
        late = {peer_id: seconds for peer_id, seconds in late.items() if len(shards.get(peer_id, ())) == 1}
        for peer_id, seconds in late.items() if len(group) >= FEWEST else ():
            failure = FailedRound(next(self._numbers), group, seconds, settled=True, committed=True)
            failure.hear(peer_id, Lack("reduced", frozenset(shards[peer_id])))
            self._judge(failure)

    def _judge(self, failure: FailedRound) -> None:
        circled, unclear = failure.circled()
        disputes = failure.disputes() | circled
        guilty = self._guilty(failure, disputes | unclear)
        if self._own_id not in guilty:
            self._convict(guilty, failure)
        elif len(guilty) > 1:
            log.info("%s keep their seats: this peer was cut off with them", ", ".join(guilty.keys() - {self._own_id}))
        silent = {peer_id for peer_id in failure.members - {self._own_id} if failure.lacks.get(peer_id) is None}
        together = bool(frozenset.intersection(*disputes, failure.members)) or failure.committed
        cut = not together and not any(map(silent.isdisjoint, disputes))
        pairs = {pair for pair in disputes if pair.isdisjoint(guilty)}
        self._part(pairs, failure, cut=cut)
        self._remember({pair for pair in unclear if pair.isdisjoint(guilty)})
        alone = self._least(frozenset().union(*unclear)) | (silent & frozenset().union(*pairs) if cut else set())
        for peer_id in sorted(alone - guilty.keys()):
            own = frozenset({peer_id})
            refused_s = self._charge(own, failure.loss(alone=True), again=False)
            self._refuse(own - {self._own_id}, refused_s)

    def _guilty(self, failure: FailedRound, disputes: Set[Peers]) -> dict[str, bool]:
        """The members in dispute with most; of each, whether only earlier disputes make them most."""
        now, earlier, guilty = _ByMember(disputes), self._earlier(failure), dict[str, bool]()
        for peer_id in sorted(failure.members, key=lambda each: (-len(now.of(each)), each)):
            these = now.of(peer_id)
            if len(failure.members) >= FEWEST and these and failure.is_most(these | earlier.of(peer_id)):
                guilty[peer_id] = not failure.is_most(these)
                for each in (now, earlier):
                    each.explain(peer_id)
        for pair in [pair for pair in self._disputes if not pair.isdisjoint(guilty)] if guilty else ():
            del self._disputes[pair]
        return guilty

    def _earlier(self, failure: FailedRound) -> _ByMember:
        return _ByMember(pair for pair in self._disputes if pair <= failure.members)

    # -- consequences ------------------------------------------------------------------------------------------------

    def _convict(self, guilty: Mapping[str, bool], failure: FailedRound) -> None:
        loss, owing = failure.loss(), {peer_id: frozenset({peer_id}) for peer_id in guilty}
        elsewhere_s = self._debts.elsewhere_s(owing.values())
        for peer_id, own in owing.items():
            log.warning("%s stalled or delayed a round: %.1f s were lost, as most saw", peer_id, loss.seconds)
            refused_s = self._charge(own, loss, failure.in_turn_s(elsewhere_s[own]), again=guilty[peer_id])
            self._refuse(own, refused_s)
            if refused_s > 0.0 and not failure.committed:
                self._shunned.add(peer_id, refused_s / 2)  # others have lost less, and refuse it for less
                if self._standing.newcomer(peer_id):
                    # until a round is made: a leader that holds each group a little would end all with a stranger
                    now = self._clock()
                    self._fresh_allowed = (now + self._fresh_wait) / 2
                    self._fresh_shunned = max(self._fresh_allowed, now + self._timing.fresh_pause_s)

    def _part(self, pairs: Set[Peers], failure: FailedRound, *, cut: bool) -> None:
        """The two members of each pair say of each other that a round failed there, and nothing else explains it.

        Args:
            cut: the network may be cut.
        """
        opponents = {peer_id for pair in pairs if self._own_id in pair for peer_id in pair - {self._own_id}}
        elsewhere_s = self._debts.elsewhere_s(pairs) if not cut else {}
        quarrels = Counter(peer_id for pair in pairs for peer_id in pair)
        loss = failure.loss(alone=cut)
        for pair in sorted(pairs, key=sorted):
            how = "was long" if failure.committed else "failed"
            log.warning("a round %s between %s: %.1f s were lost", how, " and ".join(sorted(pair)), loss.seconds)
            losers = self._losers(pair, opponents, quarrels)
            again = not failure.committed and any(map(self._standing.newcomer, losers - {self._own_id}))
            elsewhere = failure.in_turn_s(elsewhere_s.get(pair, 0.0))
            self._refuse(losers - {self._own_id}, self._charge(pair, loss, elsewhere, again=again))
        self._remember(pairs if not cut else ())

    def _remember(self, pairs: Iterable[Peers]) -> None:
        for pair in pairs:
            if len(self._disputes) < MAX_REMEMBERED:
                self._disputes.add(pair, max(self._timing.dispute_s, self._debts.left_s(pair)))

    def _losers(self, pair: Peers, opponents: Set[str], quarrels: Mapping[str, int]) -> Peers:
        """Which of a pair this peer leaves out, perhaps itself.

        Args:
            opponents: with whom it is in dispute just now.
            quarrels: in how many pairs each is.
        """
        if self._own_id in pair or not pair.isdisjoint(opponents):  # of what this peer saw it refuses no other
            return pair & {*opponents, self._own_id}
        return self._least(pair, quarrels)

    def _least(self, peers: Peers, quarrels: Mapping[str, int] = MappingProxyType({})) -> Peers:
        """Those of them that the chain knows least; of those, the ones in most pairs, if that differs."""
        keys = {each: (self._standing.rounds_of(each), -quarrels.get(each, 0)) for each in peers}
        return frozenset(each for each, key in keys.items() if key == min(keys.values()))

    def _charge(self, peers: Peers, loss: Loss, elsewhere_s: float = 0.0, *, again: bool) -> float:
        """Add to a debt. -> seconds of refusal. A peer in probation has no first time: identities are free."""
        if any(map(self._standing.newcomer, peers)):
            share = min(1.0, loss.seconds / self._timing.soft_exchange_s)  # of a deadline
            pause_s = share * max(self._timing.fresh_pause_s, FACTOR * loss.seconds)
            self._fresh_wait = max(self._fresh_wait, self._clock() + pause_s)
            again = again or (len(peers) == 1 and not loss.committed)
        return self._debts.charge(peers, loss, elsewhere_s, again=again)

    def _refuse(self, peers: Collection[str], seconds: float) -> None:
        for peer_id in peers if seconds > 0.0 else ():
            log.warning("%s gets no seat from this peer for %.0f s", peer_id, seconds)
            self._refused.add(peer_id, max(seconds, self._refused.left_s(peer_id)))
            self._news.add(peer_id)


class _ByMember:
    """Disputes by member: a failure of 64 members has thousands, and is judged with each word of a member."""

    def __init__(self, pairs: Iterable[Peers]) -> None:
        self._of: dict[str, set[Peers]] = {}
        for pair in pairs:
            for peer_id in pair:
                self._of.setdefault(peer_id, set()).add(pair)

    def of(self, peer_id: str) -> Set[Peers]:
        """Those of this member."""
        return self._of.get(peer_id, frozenset())

    def explain(self, peer_id: str) -> None:
        """They are this member's fault: forget them."""
        for pair in self._of.pop(peer_id, ()):
            for other in pair - {peer_id}:
                self._of[other].discard(pair)
