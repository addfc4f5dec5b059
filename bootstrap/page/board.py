"""What the page shows: the state of the run, its chain and its history, as documents."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from bootstrap.page.run_card import RunCard
from peer.explain.history import MAX_NAMES, History
from peer.explain.names import Names
from peer.explain.swarm_state import CurvePoint, PeerView, RoundEvent, SwarmState
from peer.explain.words import Entry, tell
from peer.outer.record import RoundRecord
from peer.protocol.lineage import Certificate
from peer.swarm.net.node import Node
from peer.swarm.state.chain import ChainStore
from peer.system.clock import Clock

log = logging.getLogger(__name__)
POINT_PERIOD_S = 5.0
NEW_LINKS = 256  # of the chain, in one look
MAX_LIVE_LINKS = 8  # new ones in one look; more are older than it
MAX_NAMED = 1024
SHOWN_EVENTS = 60
PACE_S = 900.0  # over which the pace of the run is measured
MAX_SHOWN_PEERS = 1024
NOT_SHOWN = {"heard", "step", "seconds_waiting", "sample", "group_size", "bytes_received", "validation", "mfu"}


@dataclass(frozen=True)
class Update:
    """The changes since the previous version, as they are sent to pages."""

    version: int
    document: dict[str, Any]


class Board:
    """Takes a look whenever the state is new, keeps history, and hands out documents.

    Args:
        card: what does not change.
        state: kept new by a `SwarmReader`.
        chain: as this node follows it; None where a run has none (gossip).
        clock: unix seconds.

    Attributes:
        version: grows with each look.
        updated: notified then.
        events_seen: how many of each status.
    """

    def __init__(
        self, card: RunCard, node: Node, state: SwarmState, chain: ChainStore | None, history: History,
        clock: Clock = time.time,
    ) -> None:  # fmt: skip
        self.card, self.history, self._node, self._state, self._chain = card, history, node, state, chain
        self._clock, self._written_at, self._kept = clock, 0.0, dict[str, int]()
        self._names, self._views = history.names(), list[PeerView]()
        self._linked, self._live = (0, ""), False  # the newest link that was written; whether none was missing then
        self._pace: deque[CurvePoint] = deque()
        self._peers: dict[str, dict[str, Any]] = {}
        self._point = state.point()
        self.version, self.updated = int(1000 * clock()), asyncio.Condition()  # above that of an earlier process
        self.newest = Update(self.version, {})
        self._last_id = next((row["id"] for row in history.events(1)), 0)
        self.events_seen = Counter(history.counts())

    async def look(self) -> None:
        """Read the newest state, write history when it is due, and notify waiting streams."""
        if len(self._names) > MAX_NAMES:
            self._names = dict(list(self._names.items())[-MAX_NAMES // 2 :])
        self._views = self._state.peers
        self._names |= {view.peer_id: view.nickname for view in self._views}
        self._point = self._place_on_chain(self._state.point())
        if self._pace and self._point.time < self._pace[-1].time:  # the clock was set back
            self._pace = deque()
        self._pace.append(self._point)
        while self._pace[0].time < self._point.time - PACE_S:
            self._pace.popleft()
        events: list[dict[str, Any]] = []
        if not self._written_at <= self._point.time < self._written_at + POINT_PERIOD_S:
            self._written_at = self._point.time
            events = await self._write()
        await self._publish(events)

    async def _write(self) -> list[dict[str, Any]]:
        """Keep the figures and the new rounds; -> the newest of these."""
        events = [event for event in self._state.events if self._kept.get(event.key) != len(event.details)]
        names = {view.peer_id: view.nickname for view in self._views}
        known = {event.key for event in self._state.events}
        try:
            written = await asyncio.to_thread(self._write_in_thread, self._point, events, names)
        except OSError as error:
            log.warning("the history is not written: %s", error)
            return []
        self._kept = {k: n for k, n in self._kept.items() if k in known} | {e.key: len(e.details) for e in events}
        self.events_seen.update(event["status"] for event in written if event["id"] > self._last_id)
        self._last_id = max([self._last_id, *(event["id"] for event in written)])
        return written[:SHOWN_EVENTS]

    def _write_in_thread(
        self, point: CurvePoint, events: list[RoundEvent], names: dict[str, str]
    ) -> list[dict[str, Any]]:
        links = list(self._new_links())
        self.history.add(point, [*links, *events], names)
        if links:
            self._linked = links[-1].round, links[-1].lineage_id
        return self.history.named([event.key for event in (*links, *events)][-MAX_NAMED:])

    def _new_links(self) -> Iterator[RoundEvent]:
        """Rounds of the chain that the history lacks, oldest first: it is complete even if no peer reported one."""
        if self._chain is None:
            return
        start, length, names = self._first_unwritten(self._chain), len(self._chain.chain), Names(self._names)
        stop = min(length, start + NEW_LINKS)
        live, self._live = self._live and stop - start < MAX_LIVE_LINKS, stop == length
        for place in range(start, stop):
            yield self._event_of(self._chain.chain[place], names, self._clock() if live else None)

    def _first_unwritten(self, chain: ChainStore) -> int:
        """The place of the first link that is not in the history; the last ones again where the chain is another."""
        if chain.leads_through(*self._linked):
            return self._linked[0]
        written = self.history.certified(MAX_NAMED)
        found = next((round for round, lineage_id in written if chain.leads_through(round, lineage_id)), None)
        if found is not None or not written:
            return found or 0
        return max(0, min(written[0][0], len(chain.chain)) - NEW_LINKS)

    def _event_of(self, certificate: Certificate, names: Names, at: float | None) -> RoundEvent:
        """A round as its certificate describes it."""
        link = certificate.link
        record = RoundRecord(
            status="committed", round=link.round + 1, lineage_id=link.id, stood=True,
            members=tuple(member.peer_id for member in link.roster),
            weights=tuple(member.tokens for member in link.roster),
        )  # fmt: skip
        told = tell(Entry(records=(record,)), names)
        headline = told.headline.partition(";")[0]  # a certificate does not tell how the group was found
        return RoundEvent(
            key=f"{record.round}/{link.id}", round=record.round, at=at, status="committed", tone="good",
            headline=headline, details=told.details[:1], teller="", members=record.members,
            tokens=link.weight, lineage_id=link.id, seconds={},
        )  # fmt: skip

    def _place_on_chain(self, point: CurvePoint) -> CurvePoint:
        """With the rounds and tokens that are certified, instead of those that peers claim."""
        if self._chain is None or not len(self._chain.chain):
            return point
        return replace(
            point, round=len(self._chain.chain), tokens=self._chain.weight // self.card.plan.recipe.num_fragments
        )

    async def _publish(self, events: list[dict[str, Any]]) -> None:
        peers = {view.peer_id: self._row(view) for view in self._views[:MAX_SHOWN_PEERS]}
        diffs = (_changes(self._peers.get(peer_id, {}), row) for peer_id, row in peers.items())
        changed = [diff for diff in diffs if len(diff) > 1]
        left = [peer_id for peer_id in self._peers if peer_id not in peers]
        self._peers = peers
        document = {
            "now": self.now(), "peers": changed, "left": left, "rounds": [self._with_names(event) for event in events],
            "samples": self.samples(),
        }  # fmt: skip
        async with self.updated:
            self.version += 1
            self.newest = Update(self.version, {"version": self.version, **document})
            self.updated.notify_all()

    async def newer_than(self, version: int, timeout_s: float) -> bool:
        """Wait for another version; False if there is none in time."""
        try:
            async with asyncio.timeout(timeout_s), self.updated:
                await self.updated.wait_for(lambda: self.version > version)
        except TimeoutError:
            return False
        return True

    # -- documents -------------------------------------------------------------------------------------------------

    def now(self) -> dict[str, Any]:
        """The figures of this moment, with pace, the time that is left, lineage and traffic."""
        point = self._point
        traffic = [view for view in self._views if view.state != "gone"]
        return {
            **asdict(point), **self._progress(),
            "states": self._states(), "lineage_id": self._tip(),
            "bytes_sent": sum(view.bytes_sent for view in traffic),
            "bytes_received": sum(view.bytes_received for view in traffic),
            "served": {name: [one.sent, one.received] for name, one in sorted(self._node.traffic.items())},
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """All that a page needs to begin with, but for the curves."""
        rounds = [self._with_names(event) for event in self.history.events(SHOWN_EVENTS)]
        return {
            "version": self.version, "run": self.card.document, "now": self.now(), "peers": list(self._peers.values()),
            "rounds": rounds, "samples": self.samples(),
        }  # fmt: skip

    def rounds(self, limit: int, before: int | None, status: str | None) -> list[dict[str, Any]]:
        """Rounds and other events, those that were heard of last first."""
        return [self._with_names(event) for event in self.history.events(limit, before, status)]

    def peers(self) -> list[dict[str, Any]]:
        return list(self._peers.values())

    def credit(self, limit: int) -> list[dict[str, Any]]:
        """Who has contributed most in certified rounds, whether it is there now or not."""
        if self._chain is None:
            return []
        fragments, names = self.card.plan.recipe.num_fragments, self.history.names()
        return [
            {"peer_id": peer_id, "nickname": names.get(peer_id, peer_id[-8:]), "tokens": tokens // fragments,
             "rounds": self._chain.seen[peer_id]}
            for peer_id, tokens in self._chain.tokens.most_common(limit)
        ]  # fmt: skip

    def samples(self) -> list[dict[str, Any]]:
        """Texts that models of the run have written, of a few peers."""
        told = {view.sample: view for view in self._views if view.sample and view.state != "gone"}
        return [{"peer": view.nickname, "round": view.round, "text": text} for text, view in list(told.items())[:3]]

    def _with_names(self, event: dict[str, Any]) -> dict[str, Any]:
        names = Names({p: self._names[p] for p in (*event["members"], event["teller"]) if p in self._names})
        lineage = ""
        if event["status"] == "committed" and self._chain is not None and event["round"] <= len(self._chain.chain):
            on_chain = self._chain.leads_through(event["round"], event["lineage_id"])
            lineage = "certified" if on_chain else "other"
        return {
            **event, "members": [names.of(peer_id) for peer_id in event["members"]],
            "teller": names.of(event["teller"]) if event["teller"] else "",
            "lineage": lineage,
        }  # fmt: skip

    def _row(self, view: PeerView) -> dict[str, Any]:
        row = asdict(view)
        if self._chain is not None:
            row |= {"rounds": self._chain.seen[view.peer_id], "contributed": self._chain.tokens[view.peer_id]}
        return {**row, "heard": round(view.heard), "tokens_per_s": round(view.tokens_per_s, 1)}

    def _states(self) -> dict[str, int]:
        states = [view.state for view in self._views]
        return {state: states.count(state) for state in ("training", "joining", "paused", "finished", "gone")}

    def _tip(self) -> str:
        return "" if self._chain is None else self._chain.lineage_id(len(self._chain.chain))

    def _progress(self) -> dict[str, Any]:
        """How much of the run is done, at what pace, and how long the rest takes at that pace."""
        first, last = self._pace[0] if self._pace else self._point, self._point
        seconds, control = max(1e-9, last.time - first.time), self.card.control
        goals = ((control.rounds_total, last.round, first.round), (control.tokens_total, last.tokens, first.tokens))
        done, left = None, None
        for goal, now, before in goals:
            if goal:
                done = max(done or 0.0, min(1.0, now / goal))
                if now > before:
                    rest = max(0, goal - now) * seconds / (now - before)
                    left = rest if left is None else min(left, rest)
        pace = (last.tokens - first.tokens) / seconds
        return {
            "done": done, "eta_s": left, "committed_tokens_per_s": pace if pace > 0 else 0.0,
            "goal": {"rounds": control.rounds_total, "tokens": control.tokens_total},
        }  # fmt: skip


def _changes(before: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The id of a peer, and what a page shows of it that is not as before."""
    shown = {name: value for name, value in row.items() if name not in NOT_SHOWN}
    new = {name: value for name, value in shown.items() if name not in before or before[name] != value}
    return {**new, "peer_id": row["peer_id"]}
