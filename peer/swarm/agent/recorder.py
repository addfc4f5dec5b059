"""Keeps every round record on disk, before the trainer hears of it: a record outlives both processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from peer.explain.journal import RoundJournal
from peer.link.channel import TrainerLink
from peer.link.messages import RoundEnded, ToTrainer
from peer.outer.record import RoundRecord
from peer.protocol.records import PeerRecord
from peer.system.clock import Clock


class Nicknames(Protocol):
    """Where the records of live peers are; a `Directory`."""

    @property
    def peers(self) -> Mapping[str, PeerRecord]: ...


class Recorder:
    """Adds to each record its time, its owner and the members' nicknames, writes it, and forwards it.

    Args:
        clock: unix seconds.

    Attributes:
        on_record: called with each complete record.
    """

    def __init__(
        self,
        journal: RoundJournal,
        peer_id: str,
        nickname: str,
        directory: Nicknames,
        trainer: TrainerLink,
        clock: Clock = time.time,
    ) -> None:
        self._journal, self._peer_id, self._nickname = journal, peer_id, nickname
        self._directory, self._trainer, self._clock = directory, trainer, clock
        self._before: dict[str, str] = {}
        self.on_record: Callable[[RoundRecord], None] = lambda _: None

    def tell(self, message: ToTrainer) -> None:
        """See `TrainerLink.tell`; records are completed and kept first."""
        if isinstance(message, RoundEnded):
            message = RoundEnded(record=self._complete(message.record))
            self._journal.append(message.record)
            self.on_record(message.record)
        self._trainer.tell(message)

    def _complete(self, record: RoundRecord) -> RoundRecord:
        live = {peer_id: peer.nickname for peer_id, peer in self._directory.peers.items()}
        # a peer that has just died may be out of the directory already, and its name is needed most
        known = {**self._before, **live, self._peer_id: self._nickname}
        named = (self._peer_id, *record.members, record.culprit, record.donor)
        nicknames = {peer_id: known[peer_id] for peer_id in named if peer_id in known}
        if record.members:
            self._before = nicknames
        return record.model_copy(
            update={"ended_at": self._clock(), "peer_id": self._peer_id, "nicknames": nicknames}
        )
