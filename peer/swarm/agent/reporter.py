"""Publishes this peer's report in the DHT, for those who watch the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

from peer.explain.report import MAX_ROUNDS, PeerReport, pack_report
from peer.outer.record import RoundRecord
from peer.protocol.reports import REPORT_TTL_S, TrainerFigures, reports_key
from peer.swarm.net.directory import write_record
from peer.swarm.net.node import Node
from peer.system.clock import Clock

log = logging.getLogger(__name__)
_MILLION = 10**6


class Reporter:
    """Collects what a report tells, and publishes it: soon after a round has ended, else every few seconds.

    Args:
        clock: wall-clock seconds.

    Attributes:
        figures: the newest of the trainer.
    """

    def __init__(self, node: Node, run_id: str, clock: Clock = time.time) -> None:
        self._node, self._run_id, self._clock = node, run_id, clock
        self._since, self.figures = clock(), TrainerFigures()
        self._rounds: deque[RoundRecord] = deque(maxlen=MAX_ROUNDS)
        self._changed = asyncio.Event()

    def add(self, record: RoundRecord) -> None:
        """A round has ended."""
        self._rounds.append(record)
        self._changed.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        timing = self._node.timing
        while True:
            self._changed.clear()
            report = PeerReport(since=self._since, figures=self.figures, rounds=tuple(self._rounds))
            now = self._clock()
            if (blob := pack_report(self._node.identity, self._run_id, int(now * _MILLION), report)) is not None:
                await write_record(self._node, reports_key(self._run_id), blob, now + REPORT_TTL_S)
            await asyncio.sleep(timing.report_pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timing.report_period_s - timing.report_pause_s)
