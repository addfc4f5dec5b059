from __future__ import annotations

import errno
import logging
import os
import random
import resource
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from peer.checkpoint import files, store
from peer.checkpoint.inventory import CheckpointError
from peer.checkpoint.store import find_checkpoint, list_checkpoints, read_checkpoint, write_checkpoint
from peer.errors import UserError

TENSORS = {
    "model": {"weight": torch.arange(64, dtype=torch.float32), "half": torch.ones(3, 2, dtype=torch.bfloat16)},
    "optimizer": {"weight.step": torch.tensor(7.0), "empty": torch.empty(0)},
}
STATE = {"step": 5, "loss": 1.25, "data": {"seed": 1, "epoch": 0, "position": 3}}


def write(root: Path, step: int, **options: object) -> Path:
    return write_checkpoint(root, step, TENSORS, {**STATE, "step": step}, **options)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def assert_same(tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    assert {stem: set(named) for stem, named in tensors.items()} == {stem: set(n) for stem, n in TENSORS.items()}
    for stem, named in TENSORS.items():
        for name, tensor in named.items():
            assert tensors[stem][name].dtype == tensor.dtype
            assert torch.equal(tensors[stem][name], tensor)


def test_what_is_written_is_read(tmp_path):
    extra = tmp_path / "anchor.bin"
    extra.write_bytes(b"anchor")
    path = write(tmp_path / "run", 5, extra_files=[extra])
    assert names(tmp_path / "run") == ["checkpoint-5"]
    assert names(path) == ["anchor.bin", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    tensors, state = read_checkpoint(find_checkpoint(tmp_path / "run"))
    assert_same(tensors)
    assert state == STATE
    assert (path / "anchor.bin").read_bytes() == b"anchor"
    assert not extra.exists(), "moved in"


def test_tied_strided_and_sliced_tensors_come_back_equal(tmp_path):
    flat = torch.arange(12.0)
    named = {"tied": flat, "again": flat, "slice": flat[3:7], "turned": flat.view(3, 4).t()}
    tensors, _ = read_checkpoint(write_checkpoint(tmp_path, 0, {"model": named}, {}))
    assert all(torch.equal(tensors["model"][name], tensor) for name, tensor in named.items())


@pytest.mark.parametrize("victim", ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json", "x"])
def test_truncation_at_any_offset_is_found(tmp_path, victim):
    (tmp_path / "x").write_bytes(b"extra file")
    path = write(tmp_path, 5, extra_files=[tmp_path / "x"])
    content = (path / victim).read_bytes()
    for length in sorted({*range(0, len(content), max(1, len(content) // 25)), len(content) - 1}):
        (path / victim).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=victim):
            read_checkpoint(path)
    (path / victim).unlink()
    with pytest.raises(CheckpointError, match=f"{victim} cannot be read: No such file"):
        read_checkpoint(path)


def test_every_flipped_bit_is_found(tmp_path):
    path = write(tmp_path, 5)
    rng = random.Random(1)
    for victim in names(path):
        content = (path / victim).read_bytes()
        for _ in range(60):
            position, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
            flipped = bytearray(content)
            flipped[position] ^= bit
            (path / victim).write_bytes(flipped)
            with pytest.raises(CheckpointError, match=victim):
                read_checkpoint(path)
        (path / victim).write_bytes(content)
    assert_same(read_checkpoint(path)[0])


def test_a_tensor_that_loads_wrong_is_named(tmp_path, monkeypatch):
    path, load = write(tmp_path, 5), store.load_file

    def load_with_a_flaw(file: Path) -> dict[str, torch.Tensor]:
        tensors = load(file)
        if "weight" in tensors:
            tensors["weight"][3] += 1
        return tensors

    monkeypatch.setattr(store, "load_file", load_with_a_flaw)
    with pytest.raises(CheckpointError, match="model: tensor 'weight' has another SHA-256"):
        read_checkpoint(path)


def test_the_newest_valid_one_is_found_and_the_corrupt_ones_are_named(tmp_path, caplog):
    for step in (9, 10, 100):
        write(tmp_path, step)
    (tmp_path / "checkpoint-100" / "state.json").write_text("{}")
    (tmp_path / "checkpoint-10" / "manifest.json").unlink()
    (tmp_path / "checkpoint-last").mkdir()
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    assert "checkpoint-100 is not valid: state.json has 2 bytes instead of" in caplog.text
    assert "checkpoint-10 is not valid: manifest.json cannot be read" in caplog.text
    assert find_checkpoint(tmp_path / "checkpoint-9") == tmp_path / "checkpoint-9"
    for named in ("checkpoint-100", "checkpoint-10"):
        with pytest.raises(CheckpointError, match=f"{named} is not valid"):
            find_checkpoint(tmp_path / named)


def test_nothing_valid_is_a_users_problem(tmp_path):
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=f"no valid checkpoint in {root}"):
            find_checkpoint(root)
    write(tmp_path, 5)
    (tmp_path / "checkpoint-5" / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(tmp_path)
    assert "state.json cannot be read" in caught.value.hint


def test_the_oldest_are_pruned(tmp_path):
    for step in (8, 9, 10, 11):
        write(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-11", "checkpoint-10"]
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-11"]


def test_a_checkpoint_just_written_is_never_the_one_pruned(tmp_path):
    for step in (200, 300):
        write(tmp_path, step, keep=2)
    write(tmp_path, 150, keep=2)
    assert names(tmp_path) == ["checkpoint-150", "checkpoint-300"]


def test_the_newest_is_that_of_the_highest_round_and_not_of_the_highest_step(tmp_path):
    """A peer that starts fresh begins at step 0; the swarm's rounds go on."""
    for step, round in ((500, 9), (10, 12), (400, 12), (20, 14)):
        write_checkpoint(tmp_path, step, {}, {"round": round, "run_id": "a"}, keep=9)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-20", "checkpoint-400", "checkpoint-10", "checkpoint-500",
    ]  # fmt: skip
    assert find_checkpoint(tmp_path).name == "checkpoint-20"


def test_an_older_lineage_does_not_hold_the_places_of_a_newer_one(tmp_path):
    for step in (500, 600, 700):
        write_checkpoint(tmp_path, step, {}, {"round": step})
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, {}, {"round": step})
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]


def test_runs_do_not_touch_or_find_each_others(tmp_path):
    for run in ("a", "b"):
        for step in (10, 20, 30):
            write_checkpoint(tmp_path / run, step, {}, {"round": step + (run == "b"), "run_id": run}, keep=2)
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["checkpoint-20", "checkpoint-30"]
    assert [path.parent.name for path in list_checkpoints(tmp_path)] == ["b", "a", "b", "a"]
    assert find_checkpoint(tmp_path, "a") == tmp_path / "a" / "checkpoint-30"
    with pytest.raises(CheckpointError, match="no valid checkpoint of run c in"):
        find_checkpoint(tmp_path, "c")


def test_the_same_step_is_replaced(tmp_path):
    write(tmp_path, 5)
    path = write_checkpoint(tmp_path, 5, {}, {"second": True})
    assert read_checkpoint(path) == ({}, {"second": True})
    assert names(tmp_path) == ["checkpoint-5"]


def test_killed_while_replacing_leaves_the_old_one_to_be_found(tmp_path):
    (tmp_path / "checkpoint-5.tmp-1").mkdir()
    write(tmp_path, 4)
    write(tmp_path, 5).rename(tmp_path / "checkpoint-5.old")
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-5.old"
    write(tmp_path, 5)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def fail_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    """Every file and folder is flushed once, so failing flushes fail the write at each of its stages."""
    calls = 0
    flush = files.flush

    def failing(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        flush(path)

    monkeypatch.setattr(files, "flush", failing)
    monkeypatch.setattr(store, "flush", failing)


@pytest.mark.parametrize("call", range(1, 7))
def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(tmp_path, monkeypatch, call):
    write(tmp_path / "run", 4)
    extra = tmp_path / "extra"
    extra.write_bytes(b"kept")
    with monkeypatch.context() as patch:
        fail_at(patch, call, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*checkpoint-5: .*No space left"):
            write(tmp_path / "run", 5, extra_files=[extra])
    assert names(tmp_path / "run") == ["checkpoint-4"]
    assert_same(read_checkpoint(find_checkpoint(tmp_path / "run"))[0])
    assert extra.read_bytes() == b"kept"
    write(tmp_path / "run", 5, extra_files=[extra])
    assert names(tmp_path / "run") == ["checkpoint-4", "checkpoint-5"]


def test_a_file_the_system_refuses_to_grow_is_no_crash(tmp_path):
    write(tmp_path, 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot write checkpoint"):
            write_checkpoint(tmp_path, 5, {"model": {"weight": torch.zeros(2**18)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["checkpoint-4"]


def test_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage(9, 9, 2**20))
    with pytest.raises(CheckpointError, match=r"needs 5\.0 MiB; 1\.0 MiB free in"):
        write_checkpoint(tmp_path, 5, {"model": {"weight": torch.zeros(2**20)}}, {})
    assert names(tmp_path) == []
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage(0, 0, 0))  # a file system that tells no size
    write(tmp_path, 5)
    assert names(tmp_path) == ["checkpoint-5"]


@pytest.mark.parametrize("call", range(1, 7))
def test_killed_at_any_file_the_previous_one_is_found_and_the_rest_cleaned_up(tmp_path, monkeypatch, call):
    extra = tmp_path / "extra"
    extra.write_bytes(b"kept")
    run = tmp_path / "run"
    write(run, 4)
    with monkeypatch.context() as patch:
        fail_at(patch, call, Killed())
        patch.setattr(store, "remove_tree", lambda _: None)  # a killed process tidies nothing
        with pytest.raises(Killed):
            write(run, 5, extra_files=[extra])
    assert names(run) == ["checkpoint-4", f"checkpoint-5.tmp-{os.getpid()}"]
    assert find_checkpoint(run) == run / "checkpoint-4"
    assert extra.exists()
    write(run, 6, extra_files=[extra])
    assert names(run) == ["checkpoint-4", "checkpoint-6"]


def test_a_state_that_is_no_json_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, 5, {}, {"tensor": torch.zeros(1)})
    assert names(tmp_path) == []


@pytest.mark.parametrize("stem", ["", "../up", "a/b", "A", ".hidden", "a.b", "x" * 65])
def test_bad_stems_are_refused(tmp_path, stem):
    with pytest.raises(CheckpointError, match="file stem"):
        write_checkpoint(tmp_path, 5, {stem: {}}, {})


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "model.safetensors", ".hidden", "a b"])
def test_bad_extra_names_are_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="extra file"):
        write(tmp_path / "run", 5, extra_files=[tmp_path / name])


def test_bad_numbers_and_missing_extras_are_refused(tmp_path):
    for step, keep in ((-1, 1), (0, 0)):
        with pytest.raises(CheckpointError, match=f"step={step}, keep={keep}"):
            write(tmp_path, step, keep=keep)
    with pytest.raises(CheckpointError, match="No such file"):
        write(tmp_path, 5, extra_files=[tmp_path / "absent"])
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        write(tmp_path / "file", 5)
