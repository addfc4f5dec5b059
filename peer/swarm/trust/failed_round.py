"""A round that failed, or was long: what its members lacked, by what they say, and which of them are in dispute.

A member that gives a round up tells the others what it lacks, and of which members. No single word counts. A member
that lacks an earlier stage is not to blame for a later one: without a contribution a shard cannot be reduced; nor is a
member that was delayed itself, or could not begin; and one that gave up because another did is to blame for nothing
that it sent no longer. What remains are *disputes*: pairs of which one member stalls or lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace

from peer.protocol.word import Stage
from peer.swarm.round.giving_up import Lack
from peer.swarm.round.lateness import Waited
from peer.swarm.trust.debts import Loss, Peers

EXCUSES: dict[Stage, tuple[Stage, ...]] = {
    "contribution": ("roster", "join"), "reduced": ("roster", "join", "contribution"),
    "vote": ("roster", "join", "contribution", "reduced"),
}  # of a member that lacks those itself  # fmt: skip

MOST_IN_TURN = 0.6
"""Of the members. A member that fails with all n in turn then owes 7 + 14 * 0.6 n times what one failure costs, so that
all n together cost less than an eighth of the time."""
ENDED: tuple[Stage, ...] = ("reduced", "vote")
"""Of a round that others have made: a member that lacks them joins no other round, since deadlines may be longer than
windows."""
BEGUN = ("word", "stream", *EXCUSES)  # what members lack that may have begun


@dataclass
class FailedRound:
    """One round that failed, or was long.

    Attributes:
        wasted_s: by it, as this peer has lost them.
        settled: all that comes has come.
        committed: it did not fail, so that no network was cut, and members may differ on whether it was long at all.
    """

    number: int
    members: frozenset[str]
    wasted_s: float = 0.0
    lacks: dict[str, Lack | None] = field(default_factory=dict)
    settled: bool = False
    committed: bool = False
    _words: dict[str, Lack | None] = field(default_factory=dict, init=False)

    def long(self, late: str, stage: Stage, words: Mapping[str, Waited]) -> None:
        """It was committed, but a member was late at this stage.

        A word counts only on that member, and on those that delayed it: for a word on any other its sender would pay
        nothing.

        Args:
            words: of each member, this peer among them, for what it waited.
        """
        self.settled = self.committed = True
        for one, waited in words.items():
            self.hear(one, Lack(stage, frozenset({late} & dict(waited.late)[stage].keys())))
        if late in words and (delayed_by := words[late].delayed_by):
            self.hear(late, Lack("join", delayed_by))

    def hear(self, member: str, lack: Lack | None) -> None:
        """What a member says that it lacks; what it says of itself, or of a stranger, is nothing."""
        if lack is not None:
            others = self.members - {member}
            lack = replace(lack, names=lack.names & others, delayed_by=lack.delayed_by & others)
        self.lacks[member] = lack if lack is not None and lack.names else None

    def loss(self, *, alone: bool = False) -> Loss:
        """What it cost; see `Loss`."""
        return Loss(self.number, self.wasted_s, alone, self.committed)

    def in_turn_s(self, elsewhere_s: float) -> float:
        """How much of what a member has cost elsewhere counts here: as much as failures like this one, with most of the
        members, would have cost. More would be owed for the least failure after a few long ones.
        """
        return min(elsewhere_s, MOST_IN_TURN * len(self.members) * self.wasted_s)

    def is_most(self, disputes: Collection[Peers]) -> bool:
        """Whether so many disputes of one member are with more than two thirds of the others."""
        return 3 * len(disputes) > 2 * (len(self.members) - 1)

    def disputes(self, *, hasty: bool = False) -> set[Peers]:
        """All pairs of which one member stalls or lies; `hasty`: also with those that may still explain themselves."""
        self._words, withheld, pairs = self._heard(), self._withheld(), set[Peers]()
        for accuser in self.lacks:
            lack = self._word(accuser)
            for peer_id in lack.names if lack is not None else ():
                if instead := self._instead(accuser, peer_id, withheld):
                    pairs |= instead
                elif (blamed := self._blamed(accuser, peer_id, hasty=hasty)) not in (None, accuser):
                    pairs.add(frozenset({accuser, str(blamed)}))
        return pairs

    def _word(self, member: str) -> Lack | None:
        """What a member accuses others of."""
        return self._words.get(member)

    def _heard(self) -> dict[str, Lack | None]:
        """What each accuses others of. To wait for a join accuses no member, and excuses none by itself; but where most
        others had all joins, one that waited as another ended the round for it has heard that one's word.
        """
        begun = sum(lack is not None and lack.stage in BEGUN for lack in self.lacks.values())
        most, withheld = 2 * begun >= len(self.members) - 1, self._withheld()

        def accuses(lack: Lack | None) -> Lack | None:
            if lack is None or lack.stage != "waiting":
                return lack
            ended = most and len(lack.delayed_by) == 1 and not lack.names & withheld
            return Lack("word", lack.delayed_by) if ended else None

        return {member: accuses(lack) for member, lack in self.lacks.items()}

    def _withheld(self) -> frozenset[str]:
        """The members for whose join most wait: more than one liar can say."""
        waiting = Counter(name for lack in self.lacks.values() if lack is not None and lack.stage == "waiting"
                          for name in lack.names)  # fmt: skip
        return frozenset(name for name, count in waiting.items() if count >= 2 and 2 * count >= len(self.members) - 1)

    def _instead(self, accuser: str, peer_id: str, withheld: Set[str]) -> set[Peers]:
        """The disputes in the place of one with a member that could not begin, or was delayed.

        The accuser says that it had all joins: so it is in dispute with the member for which most wait. Each pair has
        the accuser or the member that excuses itself in it, so that no word of a third parts those two from others.
        """
        lack, theirs = self.lacks[accuser], self.lacks.get(peer_id)
        if lack is None or lack.stage not in EXCUSES or theirs is None or self._excused(lack, theirs):
            return set()
        if theirs.stage == "waiting":
            return {frozenset({accuser, name}) for name in theirs.names & withheld - {accuser}}
        return {frozenset({peer_id, name}) for name in theirs.delayed_by}

    def _blamed(self, accuser: str, peer_id: str, *, hasty: bool) -> str | None:
        """Which member one that lacks something of `peer_id` is in dispute with: mostly that one, or none."""
        lack, theirs = self._word(accuser), self._word(peer_id)
        assert lack is not None
        if lack.stage == "roster":  # which came before all that its leader may have given up for
            return peer_id
        if lack.stage == "word" or (theirs is not None and theirs.stage == "word"):
            return self._first(accuser, peer_id, hasty=hasty)
        if theirs is not None and self._excused(lack, theirs):
            return None
        return peer_id if hasty or self.settled or theirs is not None or lack.stage not in EXCUSES else None

    def _excused(self, lack: Lack, theirs: Lack) -> bool:
        """Whether a member that is said to have sent nothing at a stage lacked what it needs for that."""
        if theirs.round != lack.round:  # the one that is ahead has made the other's round
            return lack.stage == "join" and theirs.stage in ENDED and theirs.round < lack.round
        return theirs.stage in EXCUSES.get(lack.stage, ())

    def _first(self, accuser: str, peer_id: str, *, hasty: bool) -> str | None:
        """The one to blame where members gave up one after the other: each shows the word of the one that it heard of.

        Those that heard a word from a member do not blame it for passing that word on: it may have been told to that
        member alone. Nor do they blame one that waited, and ended the round for such a word.
        """
        passed, here = {peer_id}, peer_id
        if self._unexplained(accuser, peer_id):
            return peer_id
        while (cause := self._cause(here)) is not None:
            here = cause
            if here in passed:
                return peer_id if passed == {accuser, peer_id} else None  # the two name each other; or see `circled`
            passed.add(here)
        if (lack := self._word(here)) is None:
            waits = self.lacks.get(here)  # then it ended no round of its own accord
            withheld = waits.names & self._withheld() - {accuser} if waits is not None else ()
            return min(withheld, default=here if hasty or self.settled else None)
        if peer_id in lack.names:
            return peer_id if passed == {accuser, peer_id} else None
        silent = sorted(each for each in lack.names if self.lacks.get(each) is None)
        return silent[0] if silent and self.settled else None

    def _unexplained(self, accuser: str, peer_id: str) -> bool:
        """Whether no word of another explains what the accuser lacks of this member: the accuser was the first to say
        one, or had waited until its deadline, before which a member that gives up for a word says so; or this member,
        or most others, had made the round, and so had all that it sends in it.
        """
        lack, theirs, others = self._word(accuser), self.lacks.get(peer_id), self.members - {accuser, peer_id}
        if lack is None or theirs is None or lack.stage == "word":
            return False
        if lack.waited and theirs.stage == "word":
            return True
        if theirs.round != lack.round and (lack.stage != "join" or theirs.round > lack.round):
            return True
        made = sum(other is not None and other.round > lack.round for other in map(self.lacks.get, others))
        return accuser in self._causes(peer_id) or (lack.stage in ENDED and made >= 2 and 2 * made > len(others))

    def _cause(self, member: str) -> str | None:
        """The member whose word this one shows as its reason."""
        lack = self.lacks.get(member)
        if lack is not None and lack.stage == "waiting" and lack.shown:
            return min(lack.delayed_by, default=None)
        lack = self._word(member)
        return min(lack.names) if lack is not None and lack.stage == "word" else None

    def _causes(self, member: str) -> set[str]:
        """The members whose words, one after the other, this one shows as its reason."""
        found, here = set[str](), member
        while (lack := self.lacks.get(here)) is not None and lack.shown and (cause := self._cause(here)) is not None:
            if cause in found:
                break
            found.add(cause)
            here = cause
        return found

    def circled(self) -> tuple[set[Peers], set[Peers]]:
        """The members that explain in a circle of three or more why they gave up. One of them lies: no member can have
        given up because of another that did so later. The one that most members name was the first that all heard, but
        where one of the circle still waited for joins, another may have had the others hear one first: then that counts
        only in a circle of all members. Two that name each other are in dispute anyway, and make no circle.

        Returns:
            It and the member that it names, in dispute; and the pairs of a circle where most name no single one, but
            none where all of a round are in one circle: all would leave all.
        """
        self._words = self._heard()
        names = {one: {min(lack.names)} if lack.stage == "word" else lack.names
                 for one in self.lacks if (lack := self._word(one)) is not None}  # fmt: skip
        causes = {one: {name for name in names[one] if self._explains(name, one)} for one in names}
        causes = {one: {name for name in own if one not in causes.get(name, ())} for one, own in causes.items()}
        after = {one: _reached(one, causes) for one in causes}
        pairs, unclear = set[Peers](), set[Peers]()
        for circle in {frozenset(other for other in after[one] if one in after.get(other, ())) for one in after}:
            named = Counter(name for own in names.values() for name in own & circle)
            first = [one for one in circle if named[one] == max(named.values())]
            waited = any(lack is not None and lack.stage == "waiting" for lack in map(self.lacks.get, circle))
            if len(circle) >= 3 and len(first) == 1 and (not waited or len(circle) == len(self.members)):
                pairs |= {frozenset({first[0], cause}) for cause in causes[first[0]] & circle}
            elif 3 <= len(circle) < len(self.members):
                unclear |= {frozenset({one, cause}) for one in circle for cause in causes[one] & circle}
        return pairs, unclear

    def _explains(self, peer_id: str, accuser: str) -> bool:
        """Whether what this member lacks is the reason why the accuser lacks something of it."""
        lack, theirs = self._word(accuser), self._word(peer_id)
        assert lack is not None
        if theirs is None or lack.stage == "roster":
            return False
        by_word = "word" in (lack.stage, theirs.stage) and not self._unexplained(accuser, peer_id)
        return by_word or self._excused(lack, theirs)


def _reached(start: str, edges: Mapping[str, Set[str]]) -> set[str]:
    """All that follows in so many steps, at least one."""
    found, ahead = set[str](), [start]
    while ahead:
        new = edges.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found
