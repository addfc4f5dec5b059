"""Joins and rosters: what makes one valid, and the group that follows from it. No I/O."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from peer.errors import ProtocolError
from peer.outer.policy.work_allocation import Allotment
from peer.outer.round import Group
from peer.protocol.identity import Identity
from peer.protocol.identity_work import NO_WORK, IdentityWork
from peer.protocol.lineage import Member, Position
from peer.protocol.manifest import RoundSpec, Spec
from peer.protocol.ranges import ClaimRule
from peer.protocol.records import dump_json, open_sealed, parse_json, seal
from peer.protocol.weights import WeightRule
from peer.protocol.wire import JoinMessage, group_id
from peer.swarm.group.allotter import Allotter

log = logging.getLogger(__name__)
JOIN_DOMAIN = "join"
NONCE_BYTES = 8
# Of a join: what may differ among the members of a round.
_OWN = ("tokens", "nonce", "work", "speed", "up", "seen", "ranges")
Joins = list[tuple[str, JoinMessage]]


class RosterMessage(Spec):
    """The leader's roster: every member's sealed join, hex, in roster order."""

    joins: Annotated[tuple[str, ...], Field(min_length=2, max_length=64)]


def lot(drawn: str, peer_id: str) -> bytes:
    """What a peer draws of a run, or of a round."""
    return hashlib.sha256(f"{drawn} {peer_id}".encode()).digest()


def roster_order(run_id: str, peer_ids: Iterable[str]) -> list[str]:
    """These members in their order, which stays from round to round: a reducer feeds back at once what its own shard
    lost. Drawn by lot each round, a shard came back to one reducer after as many rounds as there are members.
    """
    return sorted(peer_ids, key=lambda peer_id: lot(run_id, peer_id))


class RosterAuthority:
    """Makes and checks joins, rosters and groups of one run.

    Args:
        run_id, rounds: the run, its group limits and waiting times.
        seen: in how many rounds of the lineage that this peer is on each peer was.
        work: what the run asks of identities.
        allotter: the fragment that a round is of, and what each member does of it.

    Attributes:
        claims: what members may claim to have trained on.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        rounds: RoundSpec,
        rule: WeightRule,
        seen: Callable[[], Mapping[str, int]] = dict,
        work: IdentityWork = NO_WORK,
        allotter: Allotter | None = None,
    ) -> None:
        self._identity, self.run_id, self.rounds = identity, run_id, rounds
        self._rule, self._seen, self._work, self._allotter = rule, seen, work, allotter
        self.claims = ClaimRule()
        self._fragment = allotter.fragment if allotter is not None else lambda _: 0

    def rounds_of(self, peer_id: str) -> int:
        """In how many rounds of this lineage that peer was."""
        return self._seen().get(peer_id, 0)

    def fresh(self, peer_id: str) -> bool:
        """Whether it was in no round of this lineage, although others were; in private runs it makes no difference."""
        seen = self._seen()
        return bool(seen) and self._rule.probation_rounds > 0 and peer_id not in seen

    def newcomer(self, peer_id: str) -> bool:
        """Whether it is fresh, or in probation although others are not."""
        probation = self._rule.probation_rounds
        return self.fresh(peer_id) or self.rounds_of(peer_id) < probation <= max(self._seen().values(), default=0)

    def surplus(self, waiting: Sequence[str], parent: str) -> set[str]:
        """Of the peers that wait at this leader, the fresh ones that get no seat, drawn by lot: a quarter of a group is
        theirs, but one seat at least, and as many as make a group.
        """
        own_id, largest = self._identity.peer_id, self.rounds.max_group
        fresh = sorted(filter(self.fresh, waiting), key=lambda each: lot(parent, each))
        fresh = [own_id, *fresh] if self.fresh(own_id) else fresh
        known = min(1 + len(waiting) - len(fresh), largest - max(1, largest // 4))
        return set(fresh[self._fresh_seats(known) :])

    def _fresh_seats(self, known: int) -> int:
        return max(1, known // 3, self.rounds.min_group - known)

    def join(
        self, position: Position, tokens: int, group: str | None = None, ranges: str = ""
    ) -> tuple[JoinMessage, bytes]:
        """This peer's join for the next round at `position`, and the same sealed.

        Args:
            group: the persistent group that it continues.
            ranges: of the data that the contribution was trained on.
        """
        fragment = self._fragment(position.round)
        try:
            self.claims.check("this peer", ranges, fragment)
        except ProtocolError as error:  # every other member would refuse the join
            log.error("round %d says nothing of this peer's data: %s", position.round, error)
            ranges = ""
        join = JoinMessage(
            run_id=self.run_id, fragment=fragment, round=position.round,
            parent=position.lineage_id, tokens=tokens, group=group,
            nonce=secrets.token_hex(NONCE_BYTES), work=self._work.nonce, ranges=ranges,
            **(self._allotter.claims(group) if self._allotter is not None else {}),
        )  # fmt: skip
        return join, seal(self._identity, JOIN_DOMAIN, dump_json(join))

    def open_join(self, sealed: bytes, remote: str, position: Position, group: str | None = None) -> JoinMessage:
        """A join that `remote` hands in, for the persistent group `group` or to a leader.

        Raises:
            ProtocolError: it is not its own, or for a group or round that cannot be.
        """
        signer, payload = open_sealed(JOIN_DOMAIN, sealed)
        join = parse_json(JoinMessage, payload)
        if signer != remote or join.run_id != self.run_id:
            raise ProtocolError(f"{remote} handed in a join of {signer} for run {join.run_id[:12]}")
        self._check_work(signer, join)
        self.claims.check(signer, join.ranges, join.fragment)
        if join.group != group:
            raise ProtocolError(f"{remote} handed in a join for another group")
        elsewhere = join.parent == position.lineage_id and join.round != position.round
        if elsewhere or join.fragment != self._fragment(join.round):
            raise ProtocolError(f"{remote} wants fragment {join.fragment} of round {join.round}, which does not exist")
        return join

    def write(
        self, joins: dict[str, tuple[bytes, JoinMessage]], shares: Sequence[int] | None = None
    ) -> tuple[RosterMessage, Group]:
        """The roster of these members (peer id -> sealed join, join), in its order, and its group.

        Args:
            shares: of the members, in that order, where they follow from the round before.
        """
        order = roster_order(self.run_id, joins)
        message = RosterMessage(joins=tuple(joins[peer_id][0].hex() for peer_id in order))
        return message, self._group([(peer_id, joins[peer_id][1]) for peer_id in order], shares)

    def read(self, body: bytes, sealed: bytes, mine: JoinMessage, leader: str) -> Group:
        """The group of a roster that `leader` sent; raises ProtocolError unless every rule holds."""
        roster = parse_json(RosterMessage, body)
        joins: Joins = []
        for text in roster.joins:
            try:
                signer, payload = open_sealed(JOIN_DOMAIN, bytes.fromhex(text))
            except ValueError:
                raise ProtocolError("a join that is not hexadecimal") from None
            joins.append((signer, parse_json(JoinMessage, payload)))
        self._check(joins, mine, leader, sealed.hex() in roster.joins)
        return self._group(joins)

    def _check(self, joins: Joins, mine: JoinMessage, leader: str, holds_mine: bool) -> None:
        peer_ids = [peer_id for peer_id, _ in joins]
        if not holds_mine or leader not in peer_ids:
            raise ProtocolError("it lacks this peer's own join or the leader's")
        if not self.rounds.min_group <= len(joins) <= self.rounds.max_group:
            raise ProtocolError(f"{len(joins)} members; the run allows {self.rounds.max_group}")
        fresh = sum(map(self.fresh, peer_ids))
        if fresh > (seats := self._fresh_seats(len(joins) - fresh)):
            raise ProtocolError(f"{fresh} of {len(joins)} members were in no round; at most {seats} may")
        if peer_ids != roster_order(self.run_id, set(peer_ids)):
            raise ProtocolError("members twice or out of order")
        for peer_id, join in joins:
            self._check_work(peer_id, join)
            self.claims.check(peer_id, join.ranges, join.fragment)
            if join.model_copy(update={name: getattr(mine, name) for name in _OWN}) != mine:
                raise ProtocolError(f"the join of {peer_id} is for another round")

    def _check_work(self, peer_id: str, join: JoinMessage) -> None:
        if not self._work.shown(peer_id, join.work):
            raise ProtocolError(f"{peer_id} has not done the work of {self._work.bits} bits that this run asks for")

    def saw(self, bytes_s: Mapping[str, float]) -> None:
        """How fast the frames of each other member came in a round of a persistent group; 0: too few to say."""
        if self._allotter is not None:
            self._allotter.saw(bytes_s)

    def allot(self, group: Group, round: int) -> Allotment:
        """What each member of a group does of the round that follows `round` rounds, in its present order."""
        if self._allotter is None:
            return Allotment()
        self._allotter.hear(_joins_of(group))
        return self._allotter.of(_joins_of(group), round)

    def slow_line_s(self, group: Group, round: int) -> float:
        """What the exchange of that round may take longer, since a member's line is slow: the same for all members."""
        return self._allotter.slow_line_s(_joins_of(group), round) if self._allotter is not None else 0.0

    def _group(self, joins: Joins, shares: Sequence[int] | None = None) -> Group:
        if shares is None and self._allotter is not None:
            shares = self._allotter.of(joins, joins[0][1].round).shares
        peer_ids = [peer_id for peer_id, _ in joins]
        weights = self._rule.weigh([(peer_id, join.tokens) for peer_id, join in joins], self._seen())
        members = tuple(
            Member(peer_id=peer_id, tokens=weight, share=share, ranges=join.ranges)
            for (peer_id, join), weight, share in zip(joins, weights, shares or [0] * len(joins), strict=True)
        )
        index = peer_ids.index(self._identity.peer_id)
        identifier = group_id([join for _, join in joins], peer_ids)
        return Group(identifier, joins[index][1], members, index, tuple(join for _, join in joins))


def _joins_of(group: Group) -> Joins:
    return list(zip((member.peer_id for member in group.members), group.joins, strict=True))
