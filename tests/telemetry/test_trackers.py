"""What trackers are told, and that none of them stops or delays anything."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from peer.settings import load_settings
from peer.telemetry import trackers
from peer.telemetry.metrics import MetricsFile, read_metrics
from peer.telemetry.trackers import MAX_WAITING, TRACKERS, RunLabels, Trackers

ROUND = {"status": "committed", "round": 3, "members": ("a", "b"), "seconds": {"total": 1.5}, "bytes_sent": 7,
         "bytes_received": 8}  # fmt: skip


@pytest.fixture
def labels(tmp_path):
    return RunLabels(project="atoll", name="mine", group="ab" * 32, folder=tmp_path, config={"seed": 3})


class Fake:
    """A tracker that keeps what it is told, or does as a test wants."""

    def __init__(self, act=lambda: None):
        self.told, self.closed, self._act = [], False, act

    def log(self, values, step):
        self._act()
        self.told.append((dict(values), step))

    def close(self):
        self.closed = True


def with_fake(monkeypatch, fake, name="wandb"):
    monkeypatch.setitem(TRACKERS, name, lambda _: fake)
    return fake


def lines(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_steps_validations_and_committed_rounds_are_told_with_the_step(monkeypatch, labels, tmp_path):
    fake = with_fake(monkeypatch, Fake())
    told = Trackers(("wandb",), labels)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", follow=told.take)
    metrics.write("start", peer_id="x")
    metrics.write("step", step=10, loss=2.5, mfu=None, grad_norm=float("nan"))
    metrics.write("validation", step=10, round=2, loss=2.25)
    metrics.write("round", **ROUND)
    metrics.write("round", **{**ROUND, "status": "aborted"})
    told.close()
    assert fake.told == [
        ({"train/loss": 2.5}, 10),
        ({"eval/round": 2.0, "eval/loss": 2.25}, 10),
        ({"swarm/round": 3.0, "swarm/bytes_sent": 7.0, "swarm/bytes_received": 8.0, "swarm/peers": 2.0,
          "swarm/seconds": 1.5}, 10),
    ]  # fmt: skip
    assert fake.closed
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5


@pytest.mark.parametrize("error", [RuntimeError("no network\nat all"), SystemExit(1), OSError("full")])
def test_a_tracker_that_fails_is_left_out_with_one_line(monkeypatch, labels, caplog, error):
    def fail():
        raise error

    broken, sound = with_fake(monkeypatch, Fake(fail)), with_fake(monkeypatch, Fake(), "trackio")
    told = Trackers(("wandb", "trackio"), labels)
    for step in range(5):
        told.take("step", {"step": step, "loss": 1.0})
    told.close()
    assert (len(broken.told), len(sound.told)) == (0, 5)
    (line,) = lines(caplog)
    assert line.startswith(f"no more metrics for wandb, training continues: {type(error).__name__}: ")
    assert "\n" not in line


def test_a_tracker_that_is_not_installed_is_told_with_the_remedy(monkeypatch, labels, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    told = Trackers(("wandb",), labels)
    told.close()
    (line,) = lines(caplog)
    remedy = "pip install '.[wandb]' in a clone"
    assert line == f"no more metrics for wandb, training continues: it is not installed: {remedy}"


def test_a_tracker_that_hangs_delays_nothing(monkeypatch, labels, caplog):
    release = threading.Event()
    hanging = with_fake(monkeypatch, Fake(release.wait))
    told = Trackers(("wandb",), labels)
    began = time.monotonic()
    for step in range(MAX_WAITING + 3):
        told.take("step", {"step": step, "loss": 1.0})
    told.close(timeout_s=0.0)
    assert time.monotonic() - began < 5.0
    assert lines(caplog) == [
        f"no more metrics for wandb, training continues: it has not taken the last {MAX_WAITING} metrics"
    ]
    release.set()
    told._workers[0].thread.join(10.0)
    assert len(hanging.told) <= 1


def test_a_tracker_that_hangs_at_the_end_is_given_some_seconds(monkeypatch, labels, caplog):
    release = threading.Event()
    with_fake(monkeypatch, Fake(release.wait))
    told = Trackers(("wandb",), labels)
    told.take("step", {"step": 1, "loss": 1.0})
    told.close(timeout_s=0.05)
    assert lines(caplog) == ["wandb has not taken the last metrics within 0.05 s"]
    release.set()


def module(monkeypatch, name, **members):
    made = ModuleType(name)
    made.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, made)


def wandb_environment(monkeypatch, tmp_path, **given):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **given}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "machine", "begins"),
    [
        ({}, None, False),
        ({"WANDB_MODE": "online"}, "api.other.example", False),
        ({"WANDB_API_KEY": "k" * 40}, None, True),
        ({"WANDB_MODE": "offline"}, None, True),
        ({}, "api.wandb.ai", True),
        ({"WANDB_BASE_URL": "https://wandb.example:8080"}, "wandb.example", True),
    ],
)
def test_wandb_begins_only_where_it_has_a_login(monkeypatch, labels, tmp_path, caplog, given, machine, begins):
    """It would ask on the terminal, over the live table, and wait there."""
    begun, fake = [], Fake()
    module(monkeypatch, "wandb", init=lambda **_: begun.append(1) or SimpleNamespace(log=fake.log, finish=fake.close))
    wandb_environment(monkeypatch, tmp_path, **given)
    if machine is not None:
        (tmp_path / ".netrc").write_text(f"machine {machine}\n  login user\n  password {'k' * 40}\n")
        (tmp_path / ".netrc").chmod(0o600)
    told = Trackers(("wandb",), labels)
    told.close()
    assert bool(begun) == begins
    said = "no more metrics for wandb, training continues: PermissionError: no login: run `wandb login`, or set "
    assert lines(caplog) == ([] if begins else [said + "WANDB_API_KEY, or WANDB_MODE=offline"])


def test_wandb_and_trackio_hear_project_name_and_group(monkeypatch, labels, tmp_path):
    wandb_environment(monkeypatch, tmp_path, WANDB_MODE="offline")
    begun, fake = [], Fake()
    run = SimpleNamespace(log=lambda values, step: fake.log(values, step), finish=fake.close)
    module(monkeypatch, "wandb", init=lambda **given: begun.append(given) or run)

    def init(project, name=None, config=None):
        begun.append({"project": project, "name": name, "config": config})

    module(monkeypatch, "trackio", init=init, log=lambda values, step: fake.log(values, step), finish=fake.close)
    for kind in (trackers.Wandb, trackers.Trackio):
        tracker = kind(labels)
        tracker.log({"train/loss": 1.0}, 4)
        tracker.close()
    shared = {"project": "atoll", "name": "mine", "config": {"seed": 3}}
    assert begun == [{**shared, "group": "ab" * 32, "dir": str(tmp_path), "settings": {"silent": True}}, shared]
    assert fake.told == [({"train/loss": 1.0}, 4)] * 2
    assert fake.closed


def test_tensorboard_writes_below_the_output_folder(monkeypatch, labels, tmp_path):
    folders, scalars = [], []
    writer = SimpleNamespace(add_scalar=lambda *given: scalars.append(given), close=lambda: scalars.append("closed"))
    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda folder: folders.append(folder) or writer)
    tracker = trackers.TensorBoard(labels)
    tracker.log({"train/loss": 1.0, "eval/loss": 2.0}, 4)
    tracker.close()
    assert folders == [str(tmp_path / "tensorboard" / "abababababab-mine")]
    assert scalars == [("train/loss", 1.0, 4), ("eval/loss", 2.0, 4), "closed"]


def test_the_settings_have_the_names_of_hugging_face():
    settings = load_settings({"report_to": "wandb,tensorboard", "run_name": "mine", "project": "p"}, None, {})
    assert (settings.report_to, settings.run_name, settings.project) == (("wandb", "tensorboard"), "mine", "p")
    assert load_settings({}, None, {}).report_to == ()
