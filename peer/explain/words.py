"""Round records in words: the members, the phase that failed and why, what this peer did instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from peer.explain.names import Names
from peer.outer.record import RoundRecord
from peer.printable import printable
from peer.telemetry.figures import human_bytes

Tone = Literal["good", "bad", "quiet", "news"]
PHASES = ("match", "exchange", "commit", "install")
ING = {"match": "matching", "exchange": "the exchange", "commit": "the commit"}
PLANS = {
    "retry": "trains on, nothing is lost; contributes again after a pause of some seconds at most",
    "wait": "trains on, nothing is lost; contributes once a peer is found",
    "catch_up": "trains on and looks for a donor of the heavier lineage",
    None: "trains on, nothing is lost",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Some records that are one event to the user: a round, or all consecutive tries to find a peer.

    Attributes:
        records: at least one, oldest first.
        before: the last record before them that had a group.
        after: the record that follows them, if there is one.
    """

    records: tuple[RoundRecord, ...]
    before: RoundRecord | None = None
    after: RoundRecord | None = None

    @property
    def last(self) -> RoundRecord:
        return self.records[-1]


@dataclass(frozen=True, kw_only=True)
class Told:
    """An entry in words. `tone` is that of the headline."""

    round: int
    tone: Tone
    headline: str
    details: tuple[str, ...]


def entries(records: Sequence[RoundRecord], before: RoundRecord | None = None) -> list[Entry]:
    """One entry per record, but consecutive tries of a round that found no peer make one.

    Args:
        records: oldest first.
        before: the last record before them that had a group, if there is one.
    """
    groups: list[list[RoundRecord]] = []
    for record in records:
        if groups and _lonely(record) and _lonely(groups[-1][-1]) and groups[-1][-1].round == record.round:
            groups[-1].append(record)
        else:
            groups.append([record])
    found = []
    for index, group in enumerate(groups):
        after = next((later[0] for later in groups[index + 1 :] if later[0].status != "banned"), None)
        found.append(Entry(records=tuple(group), before=before, after=after))
        before = last_group(group, before)
    return found


def last_group(records: Sequence[RoundRecord], before: RoundRecord | None = None) -> RoundRecord | None:
    """The last of these that had a group, else `before`."""
    return next((record for record in reversed(records) if record.members), before)


def tell(entry: Entry, names: Names) -> Told:
    """An entry in words."""
    record = entry.last
    if record.status == "committed":
        return _committed(entry, names)
    if record.status == "banned":
        offender = names.full(record.culprit) if record.culprit is not None else "an unknown peer"
        why = (f"because {names.within(record.reason or 'not recorded')}",)
        return Told(round=record.round, tone="bad", headline=f"banned {offender} permanently", details=why)
    if record.status == "caught_up":
        how = f"caught up: {_how_caught_up(record, names)}"
        return Told(round=record.round, tone="news", headline=how, details=())
    return _aborted(entry, names)


def summary(records: Sequence[RoundRecord]) -> str:
    """Counts, the median round, bytes: one line about all these records."""
    committed = [record for record in records if record.status == "committed"]
    lone = sum(bool(record.drawn) and len(record.members) == 1 for record in committed)
    stood = sum(record.stood for record in committed)
    aborted = [record for record in records if record.status == "aborted"]
    alone = sum(record.alone for record in aborted)
    caught_up = sum(record.status == "caught_up" for record in records)
    parts = [
        f"{len(committed)} committed"
        + (f" ({stood} by a persistent group)" if stood else "")
        + (f" ({lone} alone)" if lone else ""),
        f"{len(aborted)} aborted" + (f" ({alone} without other peers)" if alone else ""),
        f"{caught_up} caught up",
    ]
    banned = sum(record.status == "banned" for record in records)
    parts += [f"{banned} banned"] if banned else []
    text = ", ".join(parts)
    totals = [record.seconds["total"] for record in committed if "total" in record.seconds]
    if totals:
        sent = sum(record.bytes_sent for record in committed) / len(committed)
        text += f"; a committed round: {_seconds(median(totals))} (median), {human_bytes(sent)} sent (mean)"
    return text


def _lonely(record: RoundRecord) -> bool:
    return record.status == "aborted" and record.alone


def _committed(entry: Entry, names: Names) -> Told:
    record = entry.last
    if record.drawn:
        return _gossiped(record, names)
    after = f" in {_seconds(record.seconds['total'])}" if "total" in record.seconds else ""
    others = _others(record)
    with_whom = f" with {names.among(others)}" if others else ""
    group = "persistent group" if record.stood else "matched through the DHT"
    if record.regrouped is not None:
        group = f"{group}: {names.within(record.regrouped)}"
    details = [
        _changes(entry, names), *_dropped(record, names), _weights(record, names), _costs(record),
        _audits(record, names),
    ]  # fmt: skip
    return Told(
        round=record.round,
        tone="good",
        headline=f"committed{with_whom}{after}; {group}",
        details=tuple(detail for detail in details if detail),
    )


def _gossiped(record: RoundRecord, names: Names) -> Told:
    """A gossip round, with the members that joined among those that the topology drew."""
    after = f" in {_seconds(record.seconds['total'])}" if "total" in record.seconds else ""
    others, drawn = _others(record), [peer_id for peer_id in record.drawn if peer_id != record.peer_id]
    headline = f"averaged with {names.among(others)}{after}" if others else f"made alone{after}"
    if not drawn:
        headline += "; no partner drawn this time"
    missing = [peer_id for peer_id in drawn if peer_id not in record.members]
    details = [f"drawn with {names.among(drawn)}, without {names.among(missing)}"] if missing else []
    if record.reason is not None:
        details.append(f"because {names.within(record.reason)}; nothing is lost")
    if others:
        details += [*_dropped(record, names), _weights(record, names), _costs(record)]
    return Told(
        round=record.round, tone="quiet" if missing else "good", headline=headline,
        details=tuple(detail for detail in details if detail),
    )  # fmt: skip


def _aborted(entry: Entry, names: Names) -> Told:
    record = entry.last
    others = _others(record)
    if record.alone:
        headline = "no peer to average with"
    elif record.behind:
        headline = f"aborted in {_phase(record)}: this peer was behind"
    else:
        headline = f"aborted in {_phase(record)}"
    headline += f", with {names.among(others)}" if others else ""
    if len(entry.records) > 1:
        headline += f": {len(entry.records)} tries"
    elif "total" in record.seconds:
        headline += f", after {_seconds(record.seconds['total'])}"
    reason = names.within(record.reason or "not recorded")
    culprit = f" (culprit: {names.full(record.culprit)})" if record.culprit is not None else ""
    details = [f"reason: {reason}{culprit}"]
    if record.regrouped is not None:
        details.append(f"before that the persistent group ended: {names.within(record.regrouped)}")
    if not record.alone:
        details += [_weights(record, names), _costs(record)]
    details.append(_audits(record, names))
    details.append(f"instead: {_instead(entry, names)}")
    tone: Tone = "quiet" if record.alone else "bad"
    return Told(round=record.round, tone=tone, headline=headline, details=tuple(text for text in details if text))


def _phase(record: RoundRecord) -> str:
    return ING.get(record.phase or "", printable(record.phase or "an unknown phase"))


def _instead(entry: Entry, names: Names) -> str:
    """What the peer did after an abort, according to the next record, else what it plans to do."""
    record, after = entry.last, entry.after
    if after is None:
        return PLANS[record.instead]
    later = _later(record, after)
    if after.status == "caught_up":
        return f"caught up to round {after.round}{later}: {_how_caught_up(after, names)}"
    waited = "trained on, waited for others" if record.alone else "trained on"
    if after.status == "aborted":
        tried = "found no peer to average with" if after.alone else f"aborted in {_phase(after)}"
        return f"{waited}; tried again in round {after.round}, which {tried}{later}"
    lost = [peer_id for peer_id in _others(record) if peer_id not in after.members]
    regrouped = f", regrouped without {names.among(lost)}" if lost else ""
    return f"{waited}; contributed again in round {after.round}, committed{later}{regrouped}"


def _how_caught_up(record: RoundRecord, names: Names) -> str:
    if record.replayed is not None:
        donor = names.of(record.donor) if record.donor is not None else "a donor that left"
        return f"replayed {record.replayed} {'round' if record.replayed == 1 else 'rounds'} from {donor}"
    return names.within(record.reason or "not recorded how")


def _changes(entry: Entry, names: Names) -> str:
    """Which members joined and left since the previous group."""
    record, before = entry.last, entry.before
    if before is None or record.stood:
        return ""
    came = [peer_id for peer_id in record.members if peer_id not in before.members]
    left = [peer_id for peer_id in before.members if peer_id not in record.members]
    parts = [f"new: {names.among(came)}"] if came else []
    parts += [f"no longer there: {names.among(left)}"] if left else []
    return "; ".join(parts)


def _dropped(record: RoundRecord, names: Names) -> list[str]:
    """The members that the recording peer left out of its shard."""
    return [
        f"left out: {names.full(drop.peer_id)}, in {drop.slices} of {drop.of} slices that this peer averaged: "
        f"{names.within(drop.reason)}"
        for drop in record.dropped
    ]


def _weights(record: RoundRecord, names: Names) -> str:
    if not record.weights:
        return ""
    pairs = zip(record.members, record.weights, strict=False)
    shares = ", ".join(f"{_own(names, record, peer_id)} {tokens:,}" for peer_id, tokens in pairs)
    return f"weights in tokens: {shares}" + (f"; cosine {record.cosine:.2f}" if record.cosine is not None else "")


def _audits(record: RoundRecord, names: Names) -> str:
    return f"audited: {'; '.join(names.within(audit) for audit in record.audits)}" if record.audits else ""


def _own(names: Names, record: RoundRecord, peer_id: str) -> str:
    return names.of(peer_id) + (" (this peer)" if peer_id == record.peer_id else "")


def _costs(record: RoundRecord) -> str:
    seconds = dict(record.seconds)
    rest = seconds.get("total", 0.0) - sum(seconds.get(phase, 0.0) for phase in PHASES)
    if record.phase is not None and record.phase not in seconds and "total" in seconds:
        seconds[record.phase] = max(0.0, rest)  # the phase that failed has no mark of its own
    phases = [f"{phase} {_seconds(seconds[phase])}" for phase in PHASES if phase in seconds]
    traffic = f"sent {human_bytes(record.bytes_sent)}, received {human_bytes(record.bytes_received)}"
    return "; ".join([", ".join(phases), traffic] if phases else [traffic])


def _others(record: RoundRecord) -> list[str]:
    return [peer_id for peer_id in record.members if peer_id != record.peer_id]


def _later(record: RoundRecord, after: RoundRecord) -> str:
    if record.ended_at is None or after.ended_at is None:
        return ""
    return f" {_seconds(max(0.0, after.ended_at - record.ended_at))} later"


def _seconds(seconds: float) -> str:
    """`0.11 s`, `12.3 s`, `2 min 5 s`, `3 h 20 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds >= 0.0995 else f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
