"""Looks at the chains that others claim, beside the rounds: each costs bounded time, bytes and links, and no round."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from peer.errors import AtollError, ProtocolError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.chain import extended, id_of, shared_links, tally_of
from peer.protocol.checkpoints import Checkpoint, choose
from peer.protocol.fork_choice import FINAL_LINKS, ForkRule, ForkVerdict
from peer.protocol.lineage import Certificate, RosterLimits, check_chain, heavier
from peer.protocol.manifest import MAX_ROUNDS
from peer.protocol.records import PeerRecord
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.state.certificate_file import CertificateFile
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.run_control import RunControl

FIRST_STEP = 16  # links to go back where a donor's chain does not follow this peer's; four times as many each time
SLACK_LINKS = 256  # rounds that a donor may have made since its record was written
LINKS_PER_REQUEST = 512
MOST_LINKS = 4096
LEAST_LINK_RATE = 50.0
PAUSE = 9.0  # of the processor's time that a link of a stranger's took: rounds need it, and claims are free
GRACE_ROUNDS = 1000  # that are always believed: clocks differ


class NothingNewError(ProtocolError):
    """A donor has no link to show that this node lacks: what it claimed is of a moment before."""


class NoRoomError(AtollError):
    """This machine's disk has no room for the chain that a donor shows."""


class LinkSource(Protocol):
    """Where certificates come from."""

    async def links(self, donor: str, from_round: int, count: int) -> list[Certificate]:
        """At most `count` certificates of the donor's chain from a round on, as it says; nothing is checked."""


@dataclass(frozen=True, kw_only=True)
class ChainRules:
    """Which chains a run allows, and which of two it prefers.

    Attributes:
        control: says how many rounds the run has, if it ends; None: it does not.
        opened_at: wall-clock seconds since when the run's manifest has been published.
        round_s: no round of the run takes less on average.
        clock: wall-clock seconds.
    """

    limits: RosterLimits
    rule: ForkRule
    checkpoints: NewestCheckpoint
    control: RunControl | None = None
    own_id: str = ""
    opened_at: float = 0.0
    round_s: float = 1.0
    clock: Callable[[], float] = time.time

    @classmethod
    def of(
        cls, plan: RunPlan, checkpoints: NewestCheckpoint, control: RunControl, own_id: str, opened_at: float,
        round_s: float,
    ) -> ChainRules:  # fmt: skip
        """The rules of a run."""
        manifest = plan.manifest
        return cls(
            limits=plan.roster_limits,
            rule=ForkRule.of(manifest.trust), checkpoints=checkpoints, control=control, own_id=own_id,
            opened_at=opened_at, round_s=round_s,
        )  # fmt: skip

    @property
    def total(self) -> int | None:
        """Rounds of the run, if it ends."""
        return self.control.rounds_total if self.control is not None else None

    def most_rounds(self, known: int) -> int:
        """Rounds that a chain can have by now, if `known` ones are there: no more than the run's, and than its time
        allows; a checkpoint counts as known, so that a run may be published again.
        """
        newest = self.checkpoints.newest
        base = max(known, newest.round if newest is not None else 0)
        made = GRACE_ROUNDS + int(max(0.0, self.clock() - self.opened_at) / self.round_s)
        return min(self.total or MAX_ROUNDS, base + made)

    def ends(self, chain: Sequence[Certificate]) -> bool:
        """Whether a chain claims the run's end without proof: a checkpoint of it, or a round that this node was in."""
        if self.total is None or len(chain) < self.total or self.rule.private:
            return False
        newest = self.checkpoints.newest
        confirmed = newest is not None and newest.round >= self.total and newest.on(chain)
        return not confirmed and self.own_id not in tally_of(chain).rounds


class ChainScout:
    """Fetches and judges the chains of others.

    Args:
        run_id, rules: the run, and which chains it allows and prefers.

    Attributes:
        busy: whether there are rounds that need the processor.
    """

    def __init__(self, source: LinkSource, run_id: str, rules: ChainRules, history: ChainStore) -> None:
        self._source, self._run_id, self._history = source, run_id, history
        self.rules, self._rule, self._checkpoints = rules, rules.rule, rules.checkpoints
        self._weighed: tuple[int, dict[str, int]] | None = None
        self.busy: Callable[[], bool] = lambda: True

    def claims(self, records: Mapping[str, PeerRecord], avoided: Collection[str], lost: bool = False) -> list[str]:
        """Peers that say they are on another chain, or further on this one: those with a say here first.

        A record that stands on this node's own chain claims nothing, unless this node has lost the state of its tip.
        """
        history, weights = self._history, self._weights()
        tip = history.lineage_id(len(history.chain))
        wanted = self._wanted()
        elsewhere = [
            peer_id
            for peer_id, record in records.items()
            if peer_id not in avoided
            and record.state != "joining"
            and record.round > 0
            and (lost or not history.leads_through(record.round, record.lineage_id))
            and (lost or weights.get(peer_id) or wanted is not None or self._heavier(record, tip))
        ]
        return sorted(
            elsewhere, key=lambda peer_id: (-weights.get(peer_id, 0), -records[peer_id].lineage_weight, peer_id)
        )

    def start(self) -> Checkpoint | None:
        """What a node without any link must reach before it takes part: the run was there already."""
        chain = self._history.chain
        return None if chain else self._checkpoints.binding(chain)

    def has_say(self, peer_id: str) -> bool:
        """Whether a peer counts in what follows this node's tip."""
        return peer_id in self._weights()

    def followed(self, signed: Set[str]) -> bool:
        """Whether others at this node's tip would follow a round that these have signed, and they themselves missed."""
        return self._rule.followed(self._history.chain, signed)

    def _weights(self) -> dict[str, int]:
        """Who has a say about what follows this node's tip."""
        chain = self._history.chain
        if self._weighed is None or self._weighed[0] != len(chain):
            self._weighed = len(chain), self._rule.established(chain)
        return self._weighed[1]

    def _heavier(self, record: PeerRecord, tip: str) -> bool:
        return heavier(record.lineage_weight, record.lineage_id, self._history.weight, tip)

    def _wanted(self) -> Checkpoint | None:
        """The newest checkpoint, where this node's chain does not lead through it."""
        binding = self._checkpoints.binding(self._history.chain)
        return binding if binding is not None and not binding.on(self._history.chain) else None

    async def look(self, donor: str, claimed_round: int, *, behind: bool = False) -> Sequence[Certificate]:
        """The donor's chain from genesis, checked; of its links those that it shares with this node's are not fetched.

        A node with a chain of its own looks at no more than `MOST_LINKS` of another branch: they show who signs it. A
        newcomer keeps what it reads in a file.

        Args:
            behind: the donor's chain may leave this node's before the newest checkpoint.

        Raises:
            NoRoomError: the disk is full.
            NothingNewError: it has no link after the round that this node leaves no more.
            ProtocolError: it does not verify, does not lead through the newest checkpoint, or leaves this node's chain
                further back than any verdict could follow.
            StreamClosedError: the donor went away, or sends slower than `LEAST_LINK_RATE`.
        """
        own = self._history.chain
        possible = self.rules.most_rounds(len(own))
        if claimed_round > possible:
            raise ProtocolError(f"{donor} claims round {claimed_round}; the run can have made {possible} by now")
        start, links = await self._meet(donor, own, self._floor(own, behind))
        shared, more = start + shared_links(own[start:], links), len(links) == LINKS_PER_REQUEST
        links = links[shared - start :]
        parent = id_of(own, shared - 1) if shared else self._history.genesis
        chain: Sequence[Certificate] = own[:shared]
        seen, file = tally_of(chain).rounds, None if own else self._history.claimed()
        most = min(possible, shared + MOST_LINKS) if own else possible
        pause = PAUSE if own and self.busy() and not self.has_say(donor) else 0.0
        while links:
            await check_links(links, self._run_id, parent, len(chain), self.rules.limits, seen, pause)
            parent = links[-1].link.id
            chain = extended(chain, links) if file is None else _written(file, links, donor)
            if not own and self._misses_checkpoint(chain):
                raise ProtocolError(f"the chain of {donor} does not lead through the newest checkpoint")
            left = min(most, max(claimed_round, shared) + SLACK_LINKS) - len(chain)
            if left <= 0 or not more or (not own and self._history.chain):  # another chain was taken meanwhile
                break
            links = await self._source.links(donor, len(chain), min(left, LINKS_PER_REQUEST))
            more = len(links) == LINKS_PER_REQUEST
        return chain

    def _misses_checkpoint(self, chain: Sequence[Certificate]) -> bool:
        newest = self._checkpoints.newest
        return newest is not None and newest.on(chain) is False

    async def _meet(self, donor: str, own: Sequence[Certificate], floor: int) -> tuple[int, list[Certificate]]:
        """The first links of the donor that follow this node's chain, and from which round on they do."""
        start, step = len(own), FIRST_STEP
        while True:
            parent = id_of(own, start - 1) if start else self._history.genesis
            links = await self._source.links(donor, start, LINKS_PER_REQUEST)
            if links and links[0].link.parent == parent:
                return start, links
            if start <= floor:
                if not links:
                    error = NothingNewError if own else ProtocolError
                    raise error(f"the chain of {donor} does not reach round {floor + 1}")
                raise ProtocolError(f"the chain of {donor} leaves this one before round {floor + 1}")
            start, step = max(floor, start - step), 4 * step

    def _floor(self, own: Sequence[Certificate], behind: bool) -> int:
        newest = self._checkpoints.newest
        checkpointed = newest.round if newest is not None and newest.on(own) and not behind else 0
        return max(checkpointed, 0 if self._rule.private else len(own) - FINAL_LINKS)

    def carried(self, chain: Sequence[Certificate], judged: int = 0) -> Sequence[Certificate]:
        """What of a verified chain from genesis `judge` shall see: a tail that few of those who were there have signed
        is left away. All of it, if the rest were nothing new: `judge` tells what then.

        Args:
            judged: so many of its links have been judged before.
        """
        own = self._history.chain
        shared, binding = shared_links(own, chain), self._checkpoints.binding(own)
        known = max(shared, judged)
        if binding is not None and binding.on(chain):
            known = max(known, binding.round)
        held = self._rule.carried(chain, known, forked=known == shared < len(own))
        return chain[:held] if judged or held > shared else chain

    def judge(self, chain: Sequence[Certificate]) -> ForkVerdict:
        """Whether this node follows a chain that `look` has returned, as its own stands now."""
        own = self._history.chain
        shared = shared_links(own, chain)
        lived = bool(own) and shared == len(own)  # this node was there until now
        if self.rules.ends(chain) and not lived:
            return ForkVerdict.KEEP
        return choose(self._rule, self._checkpoints.binding(own), own[:shared], own[shared:], chain[shared:])

    def resumed(
        self, chain: Sequence[Certificate], shown: Sequence[Certificate], records: Mapping[str, PeerRecord]
    ) -> bool:
        """Whether most of those that made this node's chain have left its end, and are on this longer one now.

        Args:
            chain: what `carried` leaves of the one that is `shown`, whose last links members may announce.
        """
        own = self._history.chain
        shared = shared_links(own, chain)
        there = {
            peer_id
            for peer_id, record in records.items()
            if len(own) < record.round <= len(shown) and id_of(shown, record.round - 1) == record.lineage_id
        }
        return self._rule.resumed(own[:shared], own[shared:], chain[shared:], there)


def _written(file: CertificateFile, links: Sequence[Certificate], donor: str) -> Sequence[Certificate]:
    try:
        return file.extended(links)
    except OSError as error:
        where = f"{file.path.parent}: {error.strerror}"
        raise NoRoomError(f"no room for the chain of {donor} in {where}; free some space") from None


async def check_links(
    links: Sequence[Certificate], run_id: str, parent: str, first_round: int, limits: RosterLimits, seen: Counter[str],
    pause: float = 0.0,
) -> None:  # fmt: skip
    """`check_chain`, link by link: rounds continue in between.

    Args:
        pause: after each link, in times of the processor that it took.
    """
    for offset, certificate in enumerate(links):
        began = time.thread_time()
        check_chain([certificate], run_id, parent, first_round + offset, limits, seen)
        parent = certificate.link.id
        await asyncio.sleep(pause * (time.thread_time() - began))
