"""Whole peers on machines that refuse things: full disks, odd file systems."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from peer.checkpoint.store import list_checkpoints, read_checkpoint
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.processes import JoinedPeer, until
from tests.shims import FULL_DISK, NO_FOLDER_FSYNC, preload

ROUNDS = 4


def manifest(total: str = "") -> str:
    return MANIFEST.format(hidden=16, recipe=DILOCO, steps=10, wait=5.0, total=total)


@pytest.fixture
def bootstrap(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BootstrapProcess]:
    with closing(BootstrapProcess(tmp_path / "bootstrap", request.param)) as node:
        yield node


def full_disk(folder: Path) -> tuple[Path, dict[str, str]]:
    """The disk is full while this file is there."""
    flag = folder / "full"
    return flag, {**preload(folder, FULL_DISK), "FULL_BELOW": str(folder / "tight"), "FULL_WHILE": str(flag)}


@pytest.mark.parametrize("bootstrap", [manifest()], indirect=True)
def test_a_full_disk_stops_nothing_and_checkpoints_come_back_with_the_space(
    tmp_path: Path, bootstrap: BootstrapProcess
) -> None:
    full, env = full_disk(tmp_path)
    flags = ("--save-steps", "10", "--save-total-limit", "2")
    with (
        closing(JoinedPeer(tmp_path / "other", bootstrap.address, "--save-steps", "0")) as other,
        closing(JoinedPeer(tmp_path / "tight", bootstrap.address, *flags, env=env)) as tight,
    ):
        def checkpoints() -> list[int]:
            found = (tight.folder / "checkpoints").glob("*/checkpoint-*")  # not within: the peer removes some meanwhile
            return sorted(int(path.name.split("-")[1]) for path in found if path.name.count("-") == 1)

        tight.wait_for(lambda: len(tight.committed) > 0 and bool(checkpoints()))
        full.touch()
        before, kept = other.round, checkpoints()
        other.wait_for(lambda: other.round >= before + 4)
        shared = [event for event in other.committed if event["round"] > before + 1]
        assert all(len(event["members"]) == 2 for event in shared), "the peer without space took part"
        assert tight.process.poll() is None, tight.log_text()
        assert set(kept) <= {*checkpoints(), *kept}
        assert checkpoints(), "the earlier ones are untouched"
        full.unlink()
        tight.wait_for(lambda: max(checkpoints()) > max(kept))
        tight.wait_for(lambda: any("is written again" in line for line in tight.said("info")))
        tight.process.send_signal(signal.SIGTERM)
        assert tight.process.wait(30.0) == 0, tight.log_text()
        last = json.loads((tight.folder / "status.json").read_text())
        assert last["peers"]
        assert max(checkpoints()) >= tight.step, "the last one is that of the last step"
        told = [line for line in (*tight.said("warning"), *tight.said("error")) if "No space left" in line]
        assert len(told) == 1, told
        assert "Traceback" not in tight.log_text()


SPOIL = """
import importlib.util, os, sys


class Spoiler:
    def find_spec(self, name, path, target=None):
        if name != "peer.train.step":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), spoil(module.Trainer))
        return spec


def spoil(trainer):
    step = trainer.step

    def spoilt(self, batch):
        if os.path.exists(os.environ["SPOILT_BY"]):
            os.remove(os.environ["SPOILT_BY"])
            next(self.model.parameters()).data.fill_(float("nan"))
        return step(self, batch)

    trainer.step = spoilt


if "peer.cli" in sys.orig_argv:
    sys.meta_path.insert(0, Spoiler())
"""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("bootstrap", [manifest()], indirect=True)
def test_parameters_that_become_nan_cost_one_peer_its_progress_and_nothing_else(
    tmp_path: Path, bootstrap: BootstrapProcess
) -> None:
    """As of a broken processor: the weights of one peer of four are NaN at once."""
    (tmp_path / "sitecustomize.py").write_text(SPOIL)
    flag = tmp_path / "spoil"
    env = {"PYTHONPATH": str(tmp_path), "SPOILT_BY": str(flag)}
    with ExitStack() as stack:
        others = [stack.enter_context(closing(JoinedPeer(tmp_path / f"other{index}", bootstrap.address)))
                  for index in range(3)]
        flags = ("--save-steps", "5")
        spoilt = stack.enter_context(closing(JoinedPeer(tmp_path / "spoilt", bootstrap.address, *flags, env=env)))
        spoilt.wait_for(lambda: any(len(event["members"]) == 4 for event in spoilt.committed), 150.0)
        flag.touch()
        spoilt.wait_for(lambda: not flag.exists())
        before = max(other.round for other in others)
        spoilt.wait_for(lambda: min(peer.round for peer in (*others, spoilt)) >= before + 5, 100.0)
        own_id = spoilt.events("start")[-1]["peer_id"]
        for other in others:
            since = [event for event in other.events("round") if event["round"] > before]
            assert {event["status"] for event in since} == {"committed"}, "each within its deadline"
            assert all(own_id in event["members"] for event in since if event["round"] > before + 1), "it is back"
        spoilt.process.send_signal(signal.SIGTERM)
        assert spoilt.process.wait(30.0) == 0, spoilt.log_text()
        assert [line.split(":")[0] for line in spoilt.said("warning")] == [
            "step skipped", "loss or parameters are not finite (NaN or infinity)",
        ]  # fmt: skip
        kept = list_checkpoints(spoilt.folder / "checkpoints")
        assert len(kept) == 3
        for path in kept:
            tensors, _ = read_checkpoint(path)
            assert all(bool(tensor.isfinite().all()) for named in tensors.values() for tensor in named.values())


@pytest.mark.long
@pytest.mark.parametrize("bootstrap", [manifest(f", total: {ROUNDS}")], indirect=True)
def test_how_a_run_ends_is_said_and_what_is_missing_is_in_the_exit_code(
    tmp_path: Path, bootstrap: BootstrapProcess
) -> None:
    full, no_space = full_disk(tmp_path)
    odd_folder = tmp_path / "odd-shim"
    odd_folder.mkdir()
    no_fsync = preload(odd_folder, NO_FOLDER_FSYNC, "REASON=EINVAL")
    with ExitStack() as stack:
        def join(name: str, *flags: str, env: dict[str, str] | None = None) -> JoinedPeer:
            return stack.enter_context(closing(JoinedPeer(tmp_path / name, bootstrap.address, *flags, env=env)))

        brief = join("brief", "--max-rounds", "1")
        brief.wait_for(lambda: brief.step > 0)  # the other two need each other for the last rounds, and not this one
        odd, tight = join("odd", "--save-steps", "5", env=no_fsync), join("tight", env=no_space)
        tight.wait_for(lambda: tight.step > 0)
        full.touch()
        until(lambda: all(peer.process.poll() is not None for peer in (odd, brief, tight)), 100.0, odd.log_text)
        assert odd.process.returncode == 0, odd.log_text()
        assert f"left at round {ROUNDS} (the run is complete)" in odd.said("info")[-1]
        assert odd.said("warning") + odd.said("error") == []
        assert list((odd.folder / "checkpoints").rglob("checkpoint-*"))
        modes = {path.name: path.stat().st_mode & 0o777 for path in odd.folder.rglob("*.safetensors")}
        assert set(modes) >= {"model.safetensors", "inner.safetensors", "outer.safetensors"}
        assert set(modes.values()) == {0o600}

        assert brief.process.returncode == 0, brief.log_text()
        assert "made its 1 rounds (max_rounds); the run continues without it" in brief.said("info")[-1]

        assert tight.process.returncode == 1, tight.log_text()
        assert tight.said("error")[-1].startswith("not written: the last checkpoint, the exported model")
        assert "Traceback" not in "".join(peer.log_text() for peer in (odd, brief, tight))
