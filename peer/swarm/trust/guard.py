"""How a peer reacts to Byzantine peers: audits, evidence, permanent bans, temporary refusals. It delays no round."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from peer.outer.recipe.recipe import Recipe
from peer.outer.round import RoundAborted
from peer.protocol.evidence import Evidence, TwoWords
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.round.giving_up import Lack, StalledError
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.persistent_group import PersistentGroup
from peer.swarm.round.signatures import GroupsDifferError, ReducedShards, ReductionProof
from peer.swarm.runtime.round_priority import RoundPriority
from peer.swarm.state.store import StateStore
from peer.swarm.trust.audit_server import AuditServer
from peer.swarm.trust.auditor import Audit, Auditor, Conviction
from peer.swarm.trust.ban_list import BanList
from peer.swarm.trust.evidence_gossip import EvidenceGossip
from peer.swarm.trust.judge import Judge
from peer.swarm.trust.long_rounds import LongRounds
from peer.swarm.trust.recompute import Recomputer
from peer.swarm.trust.stalls import StallBook, Standing
from peer.swarm.trust.strikes import StrikeCounter
from peer.swarm.trust.verdict import NoEvidenceError

log = logging.getLogger(__name__)
MAX_NOTES = 8


class GuardHost(Protocol):
    """The peer that is guarded; `LineageRounds` implements it."""

    def on_ban(self, culprit: str, reason: str) -> None:
        """A peer is banned."""

    def live_peers(self) -> Iterable[str]:
        """The peers that the directory shows, without one that was silent a moment ago."""


def guard_of(
    node: Node, directory: Directory, rosters: RosterAuthority, recipe: Recipe, store: StateStore, host: GuardHost
) -> Guard:
    """The guard of a peer in its run; from now on banned peers are neither served nor listened to."""
    judge = Judge(rosters.run_id, Recomputer(store.state.fragments, recipe, lambda: store.history.chain))
    folder, priority = store.history.folder / "bans", store.snapshot_cache.priority
    guard = Guard(node, judge, folder, host, rosters, priority)
    guard.fewest = rosters.rounds.min_group
    guard.uninvited = lambda peer_id: directory.gate.void(peer_id) if directory.gate is not None else ""
    node.refuses = directory.banned = guard.banned
    node.strange = guard.strange
    return guard


class Guard:
    """Ties the parts together; one for each peer and run.

    Args:
        standing: of peers, by the chain.
        rng: secret, so that no other peer can predict its draws.

    Attributes:
        uninvited: why the invitation of a peer is void; empty: it is not.
        fewest: peers of which the run makes a round.
    """

    def __init__(
        self,
        node: Node,
        judge: Judge,
        folder: Path,
        host: GuardHost,
        standing: Standing,
        priority: RoundPriority | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._node, self._judge, self._host = node, judge, host
        self._standing = standing
        self.bans, self.strikes = BanList(folder), StrikeCounter(node.timing, node.clock)
        self.stalls = StallBook(node.peer_id, standing, node.timing, node.clock)
        self._audit_server = AuditServer(node, judge.run_id, priority or RoundPriority(node.timing, node.clock))
        self._auditor = Auditor(node, judge, rng or random.SystemRandom())
        self._evidence_gossip = EvidenceGossip(node, judge, self.bans, self.strikes, self.strange, self._on_offer)
        self._telling: asyncio.Task[None] | None = None
        self._members: tuple[str, ...] = ()
        self._long_rounds = LongRounds(node, self.stalls)
        self._auditing: asyncio.Task[None] | None = None
        self._banning = asyncio.Lock()
        self._notes: list[str] = []
        self.uninvited: Callable[[str], str] = lambda _: ""
        self.fewest = 2

    async def start(self) -> None:
        await self._audit_server.start()
        await self._evidence_gossip.start()

    def banned(self, peer_id: str) -> bool:
        """Whether this peer is neither served nor listened to: by evidence, or since its invitation is void."""
        noted = peer_id in self.bans and (self.bans.convicts(peer_id) or self.strange(peer_id))
        return noted or bool(self.uninvited(peer_id))

    def refuses(self, peer_id: str) -> bool:
        """Whether it gets no seat: it is banned, or broke the protocol or stalled recently."""
        if self.banned(peer_id) or self.strikes.refuses(peer_id):
            return True
        if not self.stalls.refuses(peer_id):
            return False
        return self._standing.fresh(peer_id) or peer_id not in self._spared()

    def _spared(self) -> set[str]:
        """The refused peers that still get a seat: as many as a round lacks, the least guilty first. Without them this
        peer would only wait for the refusals to pass. None that no round has seen: anybody can make hundreds, which
        would take the seats of those that others have, and the processor's time.
        """
        live = {peer_id for peer_id in self._host.live_peers() if not self._standing.fresh(peer_id)}
        refused = {peer_id for peer_id in live if self.stalls.refuses(peer_id)}
        others = len(live) - len(refused)
        return set(sorted(refused, key=self.stalls.guilt)[: max(0, self.fewest - 1 - others)])

    def objection(self, members: Iterable[str], where: str = "") -> StalledError | None:
        """Why this peer is in no round with these: one is banned, or stalls, as most members have seen."""
        for peer_id in sorted(members):
            if self.banned(peer_id):
                why = self.uninvited(peer_id) or "is banned"
            elif self.stalls.shuns(peer_id) and peer_id not in self._spared():
                why = "stalls"
            else:
                continue
            abort = RoundAborted("match", f"{peer_id} {why}{where}", peer_id)
            return StalledError(abort, Lack("stream", frozenset({peer_id})))
        return None

    def second_thought(self, members: Iterable[str]) -> RoundAborted | None:
        """Why a persistent group forms again: a member of it is refused since this was last asked."""
        late = sorted(self.stalls.take_news().intersection(members))
        return RoundAborted("match", f"{late[0]} is always late", late[0]) if late else None

    def notes(self) -> tuple[str, ...]:
        """What has been audited since this was last asked, in words."""
        notes, self._notes = tuple(self._notes), []
        return notes

    # -- during a round ----------------------------------------------------------------------------------------------

    def joined(self, persistent: PersistentGroup, round: int, buffers: RoundBuffers) -> None:
        """All have joined a round of a persistent group."""
        self._audit_server.joined(persistent.identifier, round, buffers.joins)

    def begins(self, buffers: RoundBuffers) -> bool:
        """An exchange begins: free what earlier ones left, except for small amounts.

        Returns:
            whether to keep what this peer receives: only if an auditor may ask for it.
        """
        self._audit_server.begins()
        self._members = tuple(peer_id for peer_id in buffers.order if peer_id != self._node.peer_id)
        self.meet(self._members)
        return self._judge.recomputer.can_audit(buffers.sitting.result(), buffers.me)

    def meet(self, peer_ids: Iterable[str]) -> None:
        """Offer these peers the evidence behind this peer's bans, unless it has done so."""
        culprits = sorted(self.bans, key=self._standing.rounds_of, reverse=True)
        if culprits and (self._telling is None or self._telling.done()):
            self._telling = self._node.spawn(self._evidence_gossip.tell(list(peer_ids), culprits))

    def reduced(self, kept: ReductionProof) -> None:
        """This peer has reduced its shard."""
        self._audit_server.reduced(kept)

    def heard(self, heard: ReducedShards) -> None:
        """The others' shards have arrived, signed."""
        self._audit_server.heard(heard)

    def gave_up(self, persistent: PersistentGroup, member: str, lack: Lack | None, lost_s: float) -> None:
        """A member, perhaps this peer, gives up and says what it lacks."""
        group = persistent.identifier
        if self.stalls.told(group, persistent.members, member, lack, lost_s):
            asyncio.get_running_loop().call_later(self._node.timing.stall_words_s, self._settle, persistent)

    def _settle(self, persistent: PersistentGroup) -> None:
        """Once the others had time for their words after this peer has left the round: what a member says early must
        not close the book to what the others see at the deadline, or to a member that still waits for its roster.
        """
        loop, timing = asyncio.get_running_loop(), self._node.timing
        words_s = timing.stall_words_s + (timing.late_roster_s if persistent.leader else 0.0)
        if (left_s := persistent.left_at + words_s - loop.time()) > 0.0:
            loop.call_later(min(left_s, words_s), self._settle, persistent)
        else:
            self.stalls.settle(persistent.identifier)

    def explained(self, group: str, member: str, lack: Lack) -> None:
        """A member that said nothing to this peer as a round failed has told others what it lacked."""
        self.stalls.explained(group, member, lack)

    def equivocated(self, finding: TwoWords) -> None:
        """A member has given two reasons to two members as it ended a round."""
        evidence = Evidence(finding=finding)
        found = Conviction(self._judge.judge(evidence), evidence)
        self._node.spawn(self._ban(found, "this peer has heard both"))

    def cost(self, peer_id: str, seconds: float) -> None:
        """This peer has lost so much time through that one."""
        self.stalls.cost(peer_id, seconds)

    def saw(self, error: RoundAborted) -> None:
        """This peer saw a member break the protocol."""
        if error.culprit is not None:
            self.strikes.saw(error.culprit, error.reason)

    def malformed(self, buffers: RoundBuffers, error: RoundAborted) -> None:
        """A member's payload is malformed; if it sent another one to others, that can be proved."""
        self.saw(error)
        if buffers.heard is not None:
            for peer_id in buffers.inboxes:
                if peer_id != error.culprit:
                    self._disagreed(buffers.heard, peer_id)

    def odd_vote(self, buffers: RoundBuffers, peer_id: str, forged: bool) -> None:
        """A member signed another link than this peer, or none that it could have signed."""
        if buffers.heard is None:
            return
        if forged:
            self.strikes.saw(peer_id, "signed its vote wrongly")
        else:
            self._disagreed(buffers.heard, peer_id)

    async def explain(
        self, persistent: PersistentGroup | None, buffers: RoundBuffers, differ: GroupsDifferError
    ) -> RoundAborted:
        """Why this round fails, with the name of the member that equivocated, if that can be proved."""
        culprit = None
        if persistent is not None and persistent.position is not None:
            culprit = await self.equivocator(
                differ.remote, persistent.identifier, persistent.position.round, buffers.joins
            )
        if culprit is None:
            return RoundAborted("exchange", differ.reason, differ.remote)  # the two are in dispute
        return RoundAborted("exchange", f"{differ.reason}: {culprit} signed two conflicting joins", culprit)

    # -- after it ----------------------------------------------------------------------------------------------------

    def committed(self, buffers: RoundBuffers) -> None:
        """The round is committed: audit it, perhaps."""
        self.stalls.committed(buffers.order)
        self._long_rounds.committed(buffers)
        if (heard := buffers.heard) is None:
            return
        drawn = self._auditor.draw(heard)
        if drawn is not None and (self._auditing is None or self._auditing.done()):
            self._auditing = self._node.spawn(self._audit(heard, *drawn))

    def missed(self, signers: Iterable[str]) -> None:
        """These have committed a round that this peer was not in."""
        self.stalls.missed(frozenset(signers))

    def _disagreed(self, heard: ReducedShards, remote: str) -> None:
        """A member signed another link than this peer: find out whether a reducer sent two results."""
        self._node.spawn(self._compare(heard, remote))

    async def equivocator(self, remote: str, group: str, round: int, joins: dict[str, bytes]) -> str | None:
        """The member that equivocated in its joins for this round, if that can be proved; it is banned."""
        try:
            found = await self._auditor.equivocation(remote, group, round, joins)
        except NoEvidenceError as error:
            self.strikes.saw(remote, f"said that it has other joins: {error}")
            return None
        if found is None:
            self.strikes.unanswered(remote)
            return None
        await self._ban(found, f"this peer and {remote} compared their joins")
        return found.verdict.culprit

    async def _compare(self, heard: ReducedShards, remote: str) -> None:
        found = await self._auditor.compare(heard, remote)
        if found is not None:
            await self._ban(found, f"this peer and {remote} compared the results that they received")

    async def _audit(self, heard: ReducedShards, reducer: str, index: int) -> None:
        await self.take(await self._auditor.audit(heard, reducer, index))

    async def take(self, audit: Audit) -> None:
        """Draw the consequences of an audit."""
        what = f"slice {audit.slice_index} of {audit.reducer}'s shard in round {audit.round}"
        words = "recomputed, and right" if audit.outcome == "right" else audit.outcome
        self._notes = [*self._notes, f"{what}: {words}{f' ({audit.detail})' if audit.detail else ''}"][-MAX_NOTES:]
        log.info("audit of %s: %s %s", what, words, audit.detail)
        if audit.outcome == "right":
            self.strikes.answered(audit.reducer)
        elif audit.found is not None:
            await self._ban(audit.found, "this peer audited it")
        elif audit.outcome == "not shown":
            self.strikes.unanswered(audit.reducer)

    # -- bans --------------------------------------------------------------------------------------------------------

    def strange(self, peer_id: str) -> bool:
        """Whether it was in no round."""
        return self._standing.rounds_of(peer_id) == 0 and peer_id not in self._members

    def _on_offer(self, found: Conviction, remote: str) -> None:
        if self.strange(found.verdict.culprit):  # anybody can convict keys that it has made up for that
            self.bans.note(found.verdict)
            log.info("%s offered evidence against %s, which was in no round", remote, found.verdict.culprit)
            return
        self._node.spawn(self._ban(found, f"{remote} offered the evidence, and it is valid"))

    async def _ban(self, found: Conviction, how: str) -> None:
        verdict = found.verdict
        async with self._banning:
            if self.bans.convicts(verdict.culprit) or verdict.culprit == self._node.peer_id:
                return
            try:
                await asyncio.to_thread(self.bans.add, verdict, found.evidence, found.payloads)
            except OSError as error:
                log.error("the ban of %s holds until this peer restarts: %s", verdict.culprit, error)
        log.error("%s is banned: it %s; %s", verdict.culprit, verdict.offence, how)
        self._host.on_ban(verdict.culprit, f"it {verdict.offence}; {how}")
        audience = dict.fromkeys([*self._members, *self._host.live_peers()])
        self._node.spawn(self._evidence_gossip.tell(list(audience), [verdict.culprit]))
