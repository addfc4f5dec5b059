"""Failed rounds as the books of some members hear of them; the clock and the chain are played."""

from __future__ import annotations

import itertools

from peer.swarm.round.giving_up import Lack
from peer.swarm.round.lateness import Waited
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.trust.stalls import StallBook

LOST_S = 5.0
HONEST, LIAR = ("a", "b", "c"), "x"
FOUR = (*HONEST, LIAR)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Chain:
    """`rounds`: of each peer; 20 of the others. Probation ends with 10."""

    def __init__(self, **rounds):
        self.rounds = rounds

    def rounds_of(self, peer_id):
        return self.rounds.get(peer_id, 20)

    def fresh(self, peer_id):
        return self.rounds_of(peer_id) == 0

    def newcomer(self, peer_id):
        return self.rounds_of(peer_id) < 10


def _waited(text, lost_s):
    stage, *names = text.split()
    late = dict.fromkeys(names, lost_s)
    if stage == "by":
        return Waited(delayed_by=frozenset(names))
    return Waited(late, {}, frozenset(names)) if stage == "contribution" else Waited(shards=late)


class Books:
    """The books of some members of a group; rounds fail, and each hears what all others say."""

    def __init__(self, *owners, members=FOUR, **rounds):
        self.clock, self.members = Clock(), members
        self.books = {owner: StallBook(owner, Chain(**rounds), STANDARD, self.clock) for owner in owners or members}
        self._number = itertools.count()

    def fail(self, lost_s=LOST_S, **words):
        """A round fails: `words` are the stage and the members that a member lacks, as `a="contribution b c"`; behind
        `by` those that had delayed it; behind `shows` the round, and that it shows the word for which it gave up;
        after `waited` it had waited until its deadline.
        """
        group, self.clock.now = str(next(self._number)), self.clock.now + lost_s
        for book in self.books.values():
            for member, text in words.items():
                waited, text = text.startswith("waited "), text.removeprefix("waited ")
                text, shows, number = text.partition(" shows ")
                lacking, _, delayed_by = text.partition(" by ")
                stage, *names = lacking.split()
                lack = Lack(
                    stage, frozenset(names), frozenset(delayed_by.split()), int(number or -1), bool(shows), waited
                )
                book.told(group, self.members, member, lack, lost_s)
            self.clock.now += STANDARD.stall_words_s
            book.settle(group)

    def long(self, lost_s=LOST_S, after_s=0.0, **words):
        """A round is committed that was long: `words` as in `fail`, or whose contribution came late, as `a="by x"`.

        Only those that waited for a member lose time by it.
        """
        self.clock.now += lost_s + after_s
        said = {member: _waited(text, lost_s) for member, text in words.items()}
        for owner, book in self.books.items():
            book.committed(self.members)
            book.waited(self.members, said.get(owner, Waited()), {who: said[who] for who in said if who != owner})

    def refused(self, owner="a"):
        return {peer_id for peer_id in self.members if self.books[owner].refuses(peer_id)}

    def commit(self, members=FOUR):
        for book in self.books.values():
            book.committed(members)

    def until_seated(self, peer_id, owner="a"):
        began = self.clock.now
        while self.books[owner].refuses(peer_id):
            self.clock.now += 1.0
        return self.clock.now - began
