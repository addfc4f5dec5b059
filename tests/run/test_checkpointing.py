from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch

from peer.checkpoint import store
from peer.checkpoint.inventory import CheckpointError
from peer.checkpoint.store import list_checkpoints, read_checkpoint
from peer.checkpoint.writer import CheckpointWriter
from peer.link.messages import Save, Saved
from peer.link.supervisor import AgentGoneError
from peer.run import checkpointing as saving_module
from peer.run.checkpointing import Saving

LINEAGE = "ab" * 32


class Agent:
    """Hears what it is asked for; `answer` does it."""

    def __init__(self) -> None:
        self.starts = 1
        self.gone = False
        self.asked: list[Path] = []

    def send(self, message: Save) -> None:
        if self.gone:
            raise AgentGoneError("agent ended")
        self.asked.append(Path(message.path))

    def answer(self, round: int = 3, problem: str | None = None) -> Saved:
        if problem is None:
            (self.asked[-1] / "outer.safetensors").write_bytes(b"outer")
        return Saved(path=str(self.asked[-1]), round=round, lineage_id=LINEAGE, problem=problem)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def saving(tmp_path, agent) -> Saving:
    inner = {"inner": {"parameters": torch.ones(3)}}
    return Saving(agent, CheckpointWriter(tmp_path, keep=9), lambda saved: (inner, {"lineage_id": saved.lineage_id}))


def written(root: Path) -> list[str]:
    return sorted(path.name for path in list_checkpoints(root))


def test_a_checkpoint_has_the_parts_of_both(tmp_path, agent, saving):
    saving.ask(7)
    assert saving.waiting
    saving.ask(8)
    assert len(agent.asked) == 1, "one at a time"
    saving.answered(agent.answer(), 9, 3)
    assert not saving.waiting
    saving.close()
    assert written(tmp_path) == ["checkpoint-9"]
    assert (tmp_path / "checkpoint-9" / "outer.safetensors").read_bytes() == b"outer"
    assert list(tmp_path.glob("outer-*")) == []


def test_on_a_slow_disk_no_step_waits_for_a_checkpoint(tmp_path, agent, saving, monkeypatch, caplog):
    """The disk is not done with one when the next is due, and the one after."""
    disk = threading.Event()

    def slow(*arguments):
        disk.wait(20.0)
        return store.write_checkpoint(*arguments)

    monkeypatch.setattr("peer.checkpoint.writer.write_checkpoint", slow)
    saving.ask_in_passing(10)
    began = time.monotonic()
    saving.answered(agent.answer(), 10, 3)
    with caplog.at_level(logging.INFO):
        for step in (20, 30):
            saving.ask_in_passing(step)
    assert time.monotonic() - began < 5.0, "the disk takes 20 s"
    assert len(agent.asked) == 1
    assert caplog.messages[-1] == "no checkpoint at step 30: the one before is still being written"
    disk.set()
    saving.close()
    assert written(tmp_path) == ["checkpoint-10"]
    saving.ask_in_passing(40)
    assert len(agent.asked) == 2


def test_an_agent_that_dies_meanwhile_takes_one_checkpoint_with_it_not_all(tmp_path, agent, saving, caplog):
    saving.ask(10)
    agent.starts += 1
    assert not saving.waiting
    saving.ask(20)
    assert "asking its successor" in caplog.text
    saving.answered(Saved(path=str(agent.asked[0]), round=3, lineage_id=LINEAGE, problem=None), 20, 3)
    assert saving.waiting, "that was the dead one's answer"
    saving.answered(agent.answer(), 20, 3)
    saving.close()
    assert written(tmp_path) == ["checkpoint-20"]


def test_an_agent_that_is_gone_is_asked_again_at_the_next_step(tmp_path, agent, saving, caplog):
    agent.gone = True
    saving.ask(10)
    assert "no checkpoint at step 10: agent ended" in caplog.text
    agent.gone = False
    saving.ask(11)
    saving.answered(agent.answer(), 11, 3)
    saving.close()
    assert written(tmp_path) == ["checkpoint-11"]


@pytest.mark.parametrize(
    ("round", "problem", "said"),
    [(3, "cannot write: no space", "no space"), (2, None, "outer state is of round 2, the parameters of round 3")],
)
def test_what_the_agent_could_not_do_is_said(tmp_path, agent, saving, caplog, round, problem, said):
    saving.ask(10)
    saving.answered(agent.answer(round, problem), 10, 3)
    assert said in caplog.text
    assert not saving.waiting
    saving.close()
    assert written(tmp_path) == []


def test_a_disk_that_takes_no_folder_does_not_end_the_training(agent, saving, caplog, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", _full)
        saving.ask(10)
    assert "no checkpoint at step 10: [Errno 28] No space left on device" in caplog.text
    saving.ask(11)
    agent.asked[-1].rmdir()
    saving.answered(Saved(path=str(agent.asked[-1]), round=3, lineage_id=LINEAGE, problem=None), 11, 3)
    assert "no checkpoint at step 11: [Errno 2]" in caplog.text
    saving.close()


def test_the_same_step_is_written_once_and_again_if_that_failed(tmp_path, agent, saving, caplog, monkeypatch):
    saving.ask(10)
    saving.answered(agent.answer(), 10, 3)
    saving.ask(10)
    assert len(agent.asked) == 1
    with monkeypatch.context() as patched:
        patched.setattr(store, "_check_space", _full)
        saving.ask(12)
        saving.answered(agent.answer(), 12, 3)
        saving.ask(12)
    assert "cannot write checkpoint" in caplog.text
    saving.answered(agent.answer(), 12, 3)
    saving.close()
    assert written(tmp_path) == ["checkpoint-10", "checkpoint-12"]
    _, state = read_checkpoint(tmp_path / "checkpoint-12")
    assert state == {"lineage_id": LINEAGE}


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


class Clock:
    """Goes on while it is polled."""

    def __init__(self) -> None:
        self.now = 100.0

    def poll(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(saving_module.time, "monotonic", lambda: clock.now)
    return clock


def test_the_last_one_has_the_time_that_a_large_state_needs(tmp_path, agent, saving, clock, caplog):
    """An agent that writes 1 GB in 6 s, with the clock of the test."""

    def poll(seconds):
        clock.poll(seconds)
        if clock.now > 106.0 and saving.waiting:
            saving.answered(agent.answer(), 7, 3)

    with caplog.at_level("INFO"):
        saving.last(7, 10**9, poll)
    saving.close()
    assert written(tmp_path) == ["checkpoint-7"]
    assert caplog.text.count("writing the last checkpoint, of 1.0 GB") == 1


@pytest.mark.parametrize(("num_bytes", "patience_s"), [(10**6, 1.5), (10**9, 11.5)])
def test_the_last_one_is_not_waited_for_without_end(saving, clock, caplog, num_bytes, patience_s):
    saving.last(7, num_bytes, clock.poll)
    assert clock.now == pytest.approx(100.0 + patience_s, abs=0.2)
    assert f"no checkpoint at step 7: the agent has not written its part for {patience_s} s" in caplog.text


def test_an_agent_that_goes_at_the_end_ends_no_trainer(saving, caplog):
    def poll(_):
        raise AgentGoneError("it fell over")

    saving.last(7, 10**6, poll)
    assert "no checkpoint at step 7: it fell over" in caplog.text
    assert not saving.waiting
    saving.close()


def test_what_is_not_worth_keeping_is_not_written_and_prunes_nothing(tmp_path, agent, caplog):
    finite = [True]

    def inner(_: Saved):
        if not finite[0]:
            raise CheckpointError("parameters is not finite")
        return {"inner": {"parameters": torch.ones(3)}}, {}

    saving = Saving(agent, CheckpointWriter(tmp_path, keep=1), inner)
    for step in (7, 8, 9):
        saving.ask(step)
        saving.answered(agent.answer(), step, 3)
        finite[0] = False
    saving.close()
    assert written(tmp_path) == ["checkpoint-7"]
    assert not saving.complete
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "once"
