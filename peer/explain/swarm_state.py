"""The state of a run as anyone can read it from signed records: its peers, its rounds in words, the newest figures."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from peer.explain.names import Names
from peer.explain.report import PeerReport
from peer.explain.words import PHASES, Entry, Told, entries, tell
from peer.outer.record import RoundRecord
from peer.printable import printable
from peer.protocol.records import PeerRecord
from peer.system.clock import Clock

SILENT_S = 8.0  # without a new record, which come every two seconds
FORGOTTEN_S = 3600.0
MAX_PEERS = 1024
MAX_RECORDS_OF_A_PEER = 48
MAX_EVENTS = 2048
MAX_WORDS = 500
MAX_DETAILS = 12
MAX_MEMBERS = 64
MAX_NEW_EVENTS = 12  # of one peer in one look


@dataclass(frozen=True, kw_only=True)
class PeerView:
    """One peer, by its own claims; `state` is "gone" once it is silent. Losses are in nats per token.

    Attributes:
        reached: how others reach it: "open", "relay" or "no" (it dials them).
        since: unix seconds when it joined, if it says so; `heard` when it was heard last.
        rounds: committed ones that held a contribution of it, as far as this reader knows.
        tokens: that it has trained, in this life of it.
    """

    peer_id: str
    nickname: str
    state: str
    device: str
    reached: str
    round: int
    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    validation: float | None
    utilisation: float | None
    mfu: float | None
    group_size: int
    bytes_sent: int
    bytes_received: int
    seconds_waiting: float
    since: float | None
    heard: float
    rounds: int
    sample: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """A round, or another event of one peer, in the words of `atoll rounds`.

    Attributes:
        key: tells two events apart; the same event again has the same key.
        at: unix seconds; None if it is not known.
        teller: the peer that reports it; of a committed round any of its members; empty: its certificate does.
        members: peer ids; `tokens` their weights together.
        seconds: of phases.
    """

    key: str
    round: int
    at: float | None
    status: str
    tone: str
    headline: str
    details: tuple[str, ...]
    teller: str
    members: tuple[str, ...]
    tokens: int
    lineage_id: str
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The figures of a run at one moment.

    Attributes:
        time: unix seconds.
        tokens: of all peers, committed.
        loss: of training, the median of the peers; `validation` of the newest round that has been validated.
        validated: that round.
    """

    time: float
    round: int
    tokens: int
    peers: int
    tokens_per_s: float
    loss: float | None
    validation: float | None
    validated: int | None
    utilisation: float | None


@dataclass
class _Known:
    """What has come of one peer."""

    record: PeerRecord
    heard: float
    report: PeerReport | None = None
    told: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS_OF_A_PEER))
    rounds: int = 0


class SwarmState:
    """Takes what peers publish, and keeps what is known of the run, within bounds.

    Args:
        fragments: of the run's recipe: each of its tokens is committed once for each.
        clock: unix seconds.

    Attributes:
        trusted: whose claims count in figures of the whole run and whose rounds are shown; None while all do.
    """

    def __init__(self, fragments: int = 1, clock: Clock = time.time) -> None:
        self._fragments, self._clock = fragments, clock
        self._peers: dict[str, _Known] = {}
        self._events: OrderedDict[str, RoundEvent] = OrderedDict()
        self.trusted: Callable[[str], bool] | None = None

    def take(self, records: Mapping[str, PeerRecord], reports: Mapping[str, PeerReport]) -> None:
        """The records and reports that are in the directory now."""
        now = self._clock()
        for peer_id, record in records.items():
            peer = self._peers.setdefault(peer_id, _Known(record, now))
            if record.serial > peer.record.serial:
                peer.record, peer.heard = record, now
        for peer_id, report in reports.items():
            if (known := self._peers.get(peer_id)) is not None:
                known.report = report
        self._forget(now)
        names = self.names()
        for peer_id in reports.keys() & self._peers.keys():
            if self._counts(peer_id):
                self._tell(self._peers[peer_id], reports[peer_id], names, now)

    def names(self) -> Names:
        """The names of all peers that are known."""
        return Names({peer_id: peer.record.nickname for peer_id, peer in self._peers.items()})

    @property
    def peers(self) -> list[PeerView]:
        """All that were heard of in the last hour, in the order of their names."""
        now = self._clock()
        views = [self._view(peer_id, peer, now) for peer_id, peer in self._peers.items()]
        return sorted(views, key=lambda view: (view.nickname, view.peer_id))

    @property
    def events(self) -> list[RoundEvent]:
        """Rounds and other events, those that were heard of last at the end."""
        return list(self._events.values())

    def point(self) -> CurvePoint:
        """The figures of this moment; the run's place is the one that most of its peers claim."""
        there = ("joining", "training", "paused")
        views = [view for view in self.peers if view.state in there and self._counts(view.peer_id)]
        training = [view for view in views if view.state == "training"]
        round, tokens = self._place([*views] or [view for view in self.peers if self._counts(view.peer_id)])
        losses = [view.loss for view in training if view.loss is not None]
        busy = [view.utilisation for view in training if view.utilisation is not None]
        validated, validation = self._validation(views)
        return CurvePoint(
            time=self._clock(), round=round, tokens=tokens, peers=len(training),
            tokens_per_s=sum(view.tokens_per_s for view in training), loss=median(losses) if losses else None,
            validation=validation, validated=validated, utilisation=sum(busy) / len(busy) if busy else None,
        )  # fmt: skip

    def _counts(self, peer_id: str) -> bool:
        return self.trusted is None or self.trusted(peer_id)

    def _place(self, views: Iterable[PeerView]) -> tuple[int, int]:
        claims = Counter((r.round, r.lineage_weight) for r in (self._peers[view.peer_id].record for view in views))
        if not claims:
            return 0, 0
        (round, weight), _ = max(claims.items(), key=lambda claim: (claim[1], claim[0]))
        return round, weight // self._fragments

    def _validation(self, views: Iterable[PeerView]) -> tuple[int | None, float | None]:
        """Of the newest round that at least half as many peers as any other have validated."""
        losses: dict[int, list[float]] = {}
        for view in views:
            report = self._peers[view.peer_id].report
            if report is not None and report.figures.validation is not None:
                losses.setdefault(report.figures.validation.round, []).append(report.figures.validation.loss)
        if not losses:
            return None, None
        most = max(map(len, losses.values()))
        round = max(round for round, found in losses.items() if 2 * len(found) >= most)
        return round, median(losses[round])

    def _forget(self, now: float) -> None:
        old = [peer_id for peer_id, peer in self._peers.items() if peer.heard < now - FORGOTTEN_S]
        crowd = sorted(self._peers, key=lambda p: (not self._counts(p), -self._peers[p].heard))[MAX_PEERS:]
        for peer_id in {*old, *crowd}:
            del self._peers[peer_id]

    def _view(self, peer_id: str, peer: _Known, now: float) -> PeerView:
        record, report = peer.record, peer.report
        figures = report.figures if report is not None else None
        gone = now - peer.heard > SILENT_S and record.state != "finished"
        return PeerView(
            peer_id=peer_id, nickname=printable(record.nickname), state="gone" if gone else record.state,
            device=printable(figures.device) if figures else "",
            reached="open" if not record.client else "relay" if record.relayed else "no",
            round=record.round, step=record.step, tokens=record.tokens,
            tokens_per_s=0.0 if gone else record.tokens_per_s, loss=record.loss,
            validation=figures.validation.loss if figures and figures.validation else None,
            utilisation=figures.utilisation if figures else None, mfu=figures.mfu if figures else None,
            group_size=record.group_size, bytes_sent=record.bytes_sent, bytes_received=record.bytes_received,
            seconds_waiting=record.seconds_waiting, since=report.since if report else None, heard=peer.heard,
            rounds=peer.rounds, sample=printable(figures.sample) if figures else "",
        )  # fmt: skip

    def _tell(self, peer: _Known, report: PeerReport, names: Names, now: float) -> None:
        """Add the rounds of a report that are new; what follows an event completes its words."""
        newest = peer.told[-1].ended_at or 0.0 if peer.told else 0.0
        fresh = [record for record in report.rounds if newest < (record.ended_at or 0.0) <= now + SILENT_S]
        for record in fresh[-MAX_NEW_EVENTS:]:
            peer.told.append(record)
            peer.rounds += record.status == "committed" and record.peer_id in record.members
        if not fresh:
            return
        for entry in entries(list(peer.told))[-MAX_NEW_EVENTS - 1 :]:
            record = entry.last
            committed = record.status == "committed" and not record.drawn
            key = event_key(entry.records[0])
            if committed and (key in self._events or record.peer_id not in record.members):
                continue  # another member has reported it
            told = tell(_for_all(entry) if committed else entry, names)
            self._events[key] = _event(entry, told, now)
        while len(self._events) > MAX_EVENTS:
            self._events.popitem(last=False)


def event_key(record: RoundRecord) -> str:
    """The same for all members of a committed round."""
    if record.status == "committed" and not record.drawn:
        return f"{record.round}/{record.lineage_id}"
    return f"{record.round}/{record.status}/{record.peer_id}/{record.ended_at:.3f}"


def _for_all(entry: Entry) -> Entry:
    """A committed round as no single member sees it."""
    return replace(entry, records=tuple(record.model_copy(update={"peer_id": None}) for record in entry.records))


def _event(entry: Entry, told: Told, now: float) -> RoundEvent:
    record = entry.last
    return RoundEvent(
        key=event_key(entry.records[0]), round=told.round, at=min(record.ended_at or now, now), status=record.status,
        tone=told.tone, headline=told.headline[:MAX_WORDS],
        details=tuple(line[:MAX_WORDS] for line in told.details[:MAX_DETAILS]),
        teller=record.peer_id or "", members=record.members[:MAX_MEMBERS], tokens=sum(record.weights),
        lineage_id=record.lineage_id,
        seconds={phase: s for phase, s in record.seconds.items() if phase in (*PHASES, "total") and 0 <= s < 1e6},
    )  # fmt: skip
