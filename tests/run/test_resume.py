"""Which checkpoint is resumed is said, and so is what of it does not hold any more."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from peer.errors import UserError
from peer.link.second_trajectory import SecondTrajectory
from peer.protocol.manifest import RunManifest, parse_manifest
from peer.run.resume import Resumed, checkpoint_folder, read_resumed
from peer.settings import LATEST, PeerSettings
from tests.network.bootstraps import DILOCO, MANIFEST
from tests.run.saved import NUMEL, ORIGIN, save


@pytest.fixture
def manifest() -> RunManifest:
    return parse_manifest(MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total="").encode(), "test")


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def resume(folder: Path, manifest: RunManifest, wanted: str | None) -> Resumed | None:
    return read_resumed(PeerSettings(output_dir=folder, resume_from_checkpoint=wanted), manifest, NUMEL, 0)


def test_nothing_to_resume_is_said(tmp_path, manifest, caplog):
    save(checkpoint_folder(tmp_path, "f" * 64), "f" * 64, 5, 5)
    assert resume(tmp_path, manifest, LATEST) is None
    assert "no checkpoint of this run in" in caplog.text
    caplog.clear()
    assert resume(tmp_path, manifest, None) is None
    assert caplog.text == ""


def test_the_highest_round_is_resumed_and_said_and_so_is_what_was_written_later(tmp_path, manifest, caplog):
    own = checkpoint_folder(tmp_path, manifest.run_id)
    save(own, manifest.run_id, 500, 3)
    best = save(own, manifest.run_id, 40, 7)
    resumed = resume(tmp_path, manifest, LATEST)
    assert resumed is not None
    assert resumed.folder == best
    assert [record.getMessage() for record in caplog.records] == [f"resuming from {best}: step 40, round 7"]
    caplog.clear()
    late = save(own, manifest.run_id, 45, 2)
    again = resume(tmp_path, manifest, LATEST)
    assert again is not None
    assert again.folder == best
    assert f"{late} (step 45, round 2) was written after it" in caplog.text
    assert resume(tmp_path, manifest, str(tmp_path / "checkpoints")) is not None


def test_a_fresh_start_beside_checkpoints_says_so(tmp_path, manifest, caplog):
    best = save(checkpoint_folder(tmp_path, manifest.run_id), manifest.run_id, 40, 7)
    assert resume(tmp_path, manifest, None) is None
    assert f"starting fresh beside 1 checkpoints of this run, newest {best} (step 40, round 7)" in caplog.text


def test_a_checkpoint_of_another_run_is_refused(tmp_path, manifest):
    other = save(tmp_path, "f" * 64, 5, 5)
    with pytest.raises(UserError, match="belongs to run ffffffffffffffff"):
        resume(tmp_path, manifest, str(other))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, None), ({"batch_sequences": 8}, "batch size"), ({"text": "cc", "tokenizer": "dd"}, "text"),
        ({"tokenizer": "dd"}, "tokenizer"), ({"text": "cc", "tokenizer": "dd", "data_seed": 2}, "text and data seed"),
    ],
)  # fmt: skip
def test_what_differs_begins_again(caplog, changes, names):
    resumed = Resumed(Path(), {}, {"origin": ORIGIN})
    assert resumed.continues({**ORIGIN, **changes}) is (names is None)
    told = [record.getMessage() for record in caplog.records]
    expected = f"the checkpoint was made with another {names}: the order of the data begins again"
    assert told == ([] if names is None else [expected])


def test_a_peer_that_calls_for_rounds_resumes_its_votes(tmp_path, manifest):
    votes = {"votes": 7, "smoothed_norm": 1.25, "calls": True}
    folder = save(checkpoint_folder(tmp_path, manifest.run_id), manifest.run_id, 40, 7, progress=votes)
    resumed = resume(tmp_path, manifest, str(folder))
    assert resumed is not None
    assert votes.items() <= resumed.state["progress"].items()


def test_a_second_trajectory_is_resumed_and_missed(tmp_path, manifest):
    own = checkpoint_folder(tmp_path, manifest.run_id)
    settings = PeerSettings(output_dir=tmp_path, resume_from_checkpoint=LATEST)
    save(own, manifest.run_id, 40, 7)
    with pytest.raises(UserError, match="second must hold anchor, parameters"):
        read_resumed(settings, manifest, NUMEL, 0, SecondTrajectory.NAMES)
    second = {"anchor": torch.ones(NUMEL), "parameters": torch.zeros(NUMEL)}
    save(own, manifest.run_id, 50, 8, second=second)
    resumed = read_resumed(settings, manifest, NUMEL, 0, SecondTrajectory.NAMES)
    assert resumed is not None
    assert all(torch.equal(resumed.tensors["second"][name], value) for name, value in second.items())
