"""What a trainer tells its agent for those who watch the run: device, utilisation, validation, a sample."""

from __future__ import annotations

import contextlib
import math
import time

from peer.link.messages import Figures
from peer.link.supervisor import AgentGoneError
from peer.printable import printable
from peer.protocol.reports import MAX_DEVICE_CHARS, MAX_SAMPLE_CHARS, TrainerFigures, ValidationPoint
from peer.run.assemble import Peer
from peer.system.clock import Clock
from peer.train.device import device_name
from peer.train.evaluate import sample_text

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 48
SAMPLE_SHARE = 1 / 200  # of the time, at most
SAMPLE_PERIOD_S = 60.0


class TrainerReport:
    """The newest figures of one trainer; after a crash the next agent receives them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, peer: Peer, clock: Clock = time.monotonic) -> None:
        self._peer, self._clock = peer, clock
        self._figures = TrainerFigures(device=printable(device_name(peer.model.device))[:MAX_DEVICE_CHARS])
        self._at, self._trained, self._sample_at = clock(), 0.0, float("-inf")

    @property
    def utilisation(self) -> float | None:
        """Share of the time that goes into steps, as it was last told."""
        return self._figures.utilisation

    def trained(self, seconds: float, mfu: float | None) -> None:
        """So many seconds were spent in steps since the start, and the steps used this share of the device."""
        now = self._clock()
        share = (seconds - self._trained) / max(1e-9, now - self._at)
        self._at, self._trained = now, seconds
        self._tell(utilisation=min(1.0, max(0.0, share)), mfu=None if mfu is None else min(1.0, max(0.0, mfu)))

    def validated(self, round: int, tokens: int, loss: float) -> None:
        """The anchor of that round, at so many tokens of all peers, has this loss."""
        if math.isfinite(loss) and 0.0 <= loss < 1e6:
            self._tell(validation=ValidationPoint(round=round, tokens=tokens, loss=loss))

    def sample(self) -> None:
        """Let the model, as its parameters are now, write a short text; rarely, where that takes long."""
        began, peer = self._clock(), self._peer
        if began < self._sample_at:
            return
        text = sample_text(peer.model, peer.text.tokenizer, SAMPLE_PROMPT, SAMPLE_TOKENS, peer.manifest.seed)
        ended = self._clock()
        self._sample_at = ended + max(SAMPLE_PERIOD_S, (ended - began) / SAMPLE_SHARE)
        self._tell(sample=printable(text, MAX_SAMPLE_CHARS - 3))

    def _tell(self, **changes: object) -> None:
        self._figures = self._figures.model_copy(update=changes)
        with contextlib.suppress(AgentGoneError):  # the next step starts another one
            self._peer.agent.send(Figures(figures=self._figures))
