"""What a trainer tells of itself to those who watch, and that it costs little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from peer.link.supervisor import AgentGoneError
from peer.protocol.reports import MAX_SAMPLE_CHARS
from peer.run import figures
from peer.run.figures import SAMPLE_PERIOD_S, TrainerReport
from peer.system.resources import usable_cores


class Trainer:
    """A peer whose model writes a text in so many seconds."""

    def __init__(self, monkeypatch, seconds=0.0, text="def f"):
        self.now, self.sent, self.samples, self.gone = 100.0, [], 0, False
        self._seconds, self._text = seconds, text
        monkeypatch.setattr(figures, "sample_text", self._write)
        peer = SimpleNamespace(
            model=SimpleNamespace(device=torch.device("cpu")), text=SimpleNamespace(tokenizer=None),
            manifest=SimpleNamespace(seed=1), agent=SimpleNamespace(send=self._send),
        )  # fmt: skip
        self.report = TrainerReport(peer, lambda: self.now)

    def _send(self, message):
        if self.gone:
            raise AgentGoneError("gone")
        self.sent.append(message.figures)

    def _write(self, *_):
        self.samples += 1
        self.now += self._seconds
        return self._text


@pytest.fixture
def trainer(monkeypatch):
    return Trainer(monkeypatch)


def test_utilisation_is_the_share_of_time_in_steps_since_the_last_word(trainer):
    trainer.now += 10.0
    trainer.report.trained(8.0, None)
    trainer.now += 10.0
    trainer.report.trained(13.0, 0.4)
    assert [(one.utilisation, one.mfu) for one in trainer.sent] == [(0.8, None), (0.5, 0.4)]
    assert trainer.sent[0].device.endswith(f"{usable_cores()} cores")


def test_a_validation_is_told_unless_it_is_no_number(trainer):
    trainer.report.validated(3, 5000, 2.5)
    trainer.report.validated(4, 6000, float("nan"))
    assert [(one.validation.round, one.validation.tokens, one.validation.loss) for one in trainer.sent] == [
        (3, 5000, 2.5)
    ]


def test_samples_take_half_a_percent_of_the_time_at_most(monkeypatch):
    quick, slow = Trainer(monkeypatch, 0.1), None
    for _ in range(3):
        quick.report.sample()
    quick.now += SAMPLE_PERIOD_S
    quick.report.sample()
    assert quick.samples == 2
    slow = Trainer(monkeypatch, 6.0)
    for _ in range(1200):
        slow.report.sample()
        slow.now += 1.0
    assert slow.samples == 1
    slow.now += 6.0
    slow.report.sample()
    assert slow.samples == 2


def test_a_sample_is_one_short_line(monkeypatch):
    trainer = Trainer(monkeypatch, text="def f():\n\x1b[31m" + "x" * 1000)
    trainer.report.sample()
    assert trainer.sent[-1].sample.startswith("def f(): ?[31mxxx")
    assert len(trainer.sent[-1].sample) == MAX_SAMPLE_CHARS


def test_an_agent_that_is_gone_is_told_by_the_next_word(trainer):
    trainer.gone = True
    trainer.report.validated(3, 5000, 2.5)
    trainer.gone = False
    trainer.now += 1.0
    trainer.report.trained(1.0, None)
    assert trainer.sent[0].validation.round == 3
