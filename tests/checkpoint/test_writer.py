from __future__ import annotations

import threading

import pytest
import torch

from peer.checkpoint import writer as room
from peer.checkpoint.inventory import CheckpointError
from peer.checkpoint.store import find_checkpoint, list_checkpoints, read_checkpoint
from peer.checkpoint.writer import CheckpointWriter


def test_what_is_written_is_what_was_submitted_whatever_training_does_next(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = room.write_checkpoint

    def gated(*args: object) -> object:
        assert may_write.wait(10)
        return write(*args)

    monkeypatch.setattr(room, "write_checkpoint", gated)
    writer = CheckpointWriter(tmp_path, keep=2)
    weight, state = torch.ones(4), {"step": 1, "data": {"position": 8}}
    writer.submit(1, {"model": {"weight": weight}}, state)
    weight.zero_()
    state["data"]["position"] = 9
    assert list_checkpoints(tmp_path) == [], "submit does not wait for the disk"
    may_write.set()
    assert writer.wait() == tmp_path / "checkpoint-1"
    tensors, saved = read_checkpoint(tmp_path / "checkpoint-1")
    assert tensors["model"]["weight"].tolist() == [1.0] * 4
    assert saved == {"step": 1, "data": {"position": 8}}
    writer.close()


def test_close_finishes_what_was_submitted_and_prunes(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (1, 2, 3):
        writer.submit(step, {"model": {"weight": torch.full((2,), step)}}, {})
    writer.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2"]
    assert find_checkpoint(tmp_path).name == "checkpoint-3"


def test_a_failure_reaches_the_next_call_and_writing_goes_on(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.submit(1, {"Bad Stem": {}}, {})
    with pytest.raises(CheckpointError, match="file stem 'Bad Stem'"):
        writer.submit(2, {}, {})
    writer.submit(3, {}, {})
    assert writer.wait() == tmp_path / "checkpoint-3"
    assert writer.wait() is None
    writer.submit(4, {"Bad Stem": {}}, {})
    with pytest.raises(CheckpointError):
        writer.close()


def test_what_another_process_adds_is_not_removed_while_it_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = room.write_checkpoint

    def gated(*args: object) -> object:
        assert may_write.wait(10)
        return write(*args)

    monkeypatch.setattr(room, "write_checkpoint", gated)
    (tmp_path / "outer-7.part").mkdir()  # of an earlier life
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (1, 2):
        part = writer.part(step)
        assert not (tmp_path / "outer-7.part").exists()
        (part / "chain.jsonl").write_text(f"{step}")
        if step == 2:
            may_write.set()
        writer.submit(step, {}, {}, part)
    writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2"}
    assert [(tmp_path / f"checkpoint-{step}" / "chain.jsonl").read_text() for step in (1, 2)] == ["1", "2"]


def test_a_folder_that_nobody_submitted_is_removed_by_the_next(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.part(1)
    assert writer.part(2).is_dir()
    assert not (tmp_path / "outer-1.part").exists()
    writer.close()
    assert list(tmp_path.iterdir()) == []
