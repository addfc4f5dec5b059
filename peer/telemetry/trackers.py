"""Metrics for wandb, trackio or TensorBoard: each in a thread of its own, which training never waits for.

A tracker that is not installed, fails or hangs is left out from then on, with one line in the log.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import netrc
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

log = logging.getLogger(__name__)
MAX_WAITING = 512  # metrics that a slow tracker has not taken
CLOSE_S = 10.0
MAX_ERROR_CHARS = 200
Values = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunLabels:
    """What a tracker calls this peer: `group` is the run's id, so that all its peers are shown together."""

    project: str
    name: str
    group: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """One service, from its own thread."""

    def log(self, values: Values, step: int) -> None:
        """Keep these."""

    def close(self) -> None:
        """Nothing follows."""


class Wandb:
    """https://docs.wandb.ai; without a login it is left out, as it would ask for one on the terminal."""

    def __init__(self, labels: RunLabels) -> None:
        wandb = importlib.import_module("wandb")
        if not _has_wandb_login(os.environ):
            raise PermissionError("no login: run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline")
        self._run = wandb.init(
            project=labels.project, name=labels.name, group=labels.group, dir=str(labels.folder),
            config=dict(labels.config), settings={"silent": True},  # it would write into the live table
        )  # fmt: skip

    def log(self, values: Values, step: int) -> None:
        """Several events of one step are one row there."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send the rest."""
        self._run.finish()


def _has_wandb_login(environ: Mapping[str, str]) -> bool:
    """Whether wandb starts without asking: by its variables, or by the netrc file in which `wandb login` keeps the key.

    Args:
        environ: WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, WANDB_MODE, WANDB_BASE_URL and NETRC count.
    """
    if environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return host in netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False


class Trackio:
    """https://huggingface.co/docs/trackio"""

    def __init__(self, labels: RunLabels) -> None:
        self._trackio = importlib.import_module("trackio")
        given = {"project": labels.project, "name": labels.name, "group": labels.group, "config": dict(labels.config)}
        known = inspect.signature(self._trackio.init).parameters  # the first versions had no groups
        self._trackio.init(**{key: value for key, value in given.items() if key in known})

    def log(self, values: Values, step: int) -> None:
        """As it is."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Send the rest."""
        self._trackio.finish()


class TensorBoard:
    """https://www.tensorflow.org/tensorboard; files below `tensorboard` in the output folder."""

    def __init__(self, labels: RunLabels) -> None:
        folder = labels.folder / "tensorboard" / f"{labels.group[:12]}-{labels.name}"
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(self, values: Values, step: int) -> None:
        """One scalar each."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


TRACKERS: dict[str, Callable[[RunLabels], Tracker]] = {"wandb": Wandb, "trackio": Trackio, "tensorboard": TensorBoard}


class _TrackerThread:
    """One tracker and its thread.

    Attributes:
        alive: it is still told.
    """

    def __init__(self, name: str, labels: RunLabels) -> None:
        self.name, self._labels, self.alive = name, labels, True
        self._waiting: queue.Queue[tuple[Values, int] | None] = queue.Queue(MAX_WAITING)
        self.thread = threading.Thread(target=self._run, name=f"report to {name}", daemon=True)
        self.thread.start()

    def put(self, item: tuple[Values, int] | None) -> None:
        """Without waiting; a tracker that takes nothing for so long is left out."""
        try:
            if self.alive:
                self._waiting.put_nowait(item)
        except queue.Full:
            self._leave_out(f"it has not taken the last {MAX_WAITING} metrics")

    def _run(self) -> None:
        try:
            tracker = TRACKERS[self.name](self._labels)
            while (item := self._waiting.get()) is not None and self.alive:
                tracker.log(*item)
            tracker.close()
        except ImportError:
            self._leave_out(f"it is not installed: pip install '.[{self.name}]' in a clone")
        except BaseException as error:  # some trackers raise SystemExit or their own base class
            self._leave_out(f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS].replace("\n", " "))

    def _leave_out(self, why: str) -> None:
        if self.alive:
            self.alive = False
            log.warning("no more metrics for %s, training continues: %s", self.name, why)


class Trackers:
    """All trackers of one peer.

    Args:
        names: keys of TRACKERS.
    """

    def __init__(self, names: tuple[str, ...], labels: RunLabels) -> None:
        self._workers = [_TrackerThread(name, labels) for name in dict.fromkeys(names)]
        self._step = 0

    def take(self, event: str, fields: Mapping[str, Any]) -> None:
        """One event of the metrics; what trackers can draw of it is handed to their threads."""
        self._step = max(self._step, int(fields.get("step") or 0))
        values = _drawn(event, fields)
        for worker in self._workers if values else ():
            worker.put((values, self._step))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Give the trackers some seconds for what they have not sent."""
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.put(None)
        for worker in self._workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
            if worker.thread.is_alive() and worker.alive:
                worker.alive = False
                log.warning("%s has not taken the last metrics within %g s", worker.name, timeout_s)


def _drawn(event: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Names as the Trainer of Hugging Face has them: `train/loss`, `eval/loss`; of rounds `swarm/...`."""
    if event == "round":
        if fields["status"] != "committed":
            return {}
        sizes = {key: fields[key] for key in ("round", "bytes_sent", "bytes_received")}
        return _numbers("swarm", {**sizes, "peers": len(fields["members"]), "seconds": fields["seconds"].get("total")})
    prefix = {"step": "train", "validation": "eval", "tasks": "eval"}.get(event)
    return {} if prefix is None else _numbers(prefix, {key: value for key, value in fields.items() if key != "step"})


def _numbers(prefix: str, fields: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{prefix}/{key}": float(value)
        for key, value in fields.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
