"""Scores on tasks of lm-eval beside training: a process of low priority evaluates a copy of what the run yields."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.data.tokenizer import load_tokenizer
from peer.errors import UserError
from peer.genesis import build_initial_model
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import RunManifest
from peer.run.assemble import Peer
from peer.run.devices import how_it_ended
from peer.run.tasks import Scores, score
from peer.system.death_signal import die_with_parent
from peer.system.private_files import make_files_private
from peer.system.resources import usable_cores
from peer.telemetry.process_log import StderrLog
from peer.train.device import pick_device
from peer.train.four_bit import count_values
from peer.train.memory import check_memory

log = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "peer.run.task_scores")
LOG_FILE = "tasks.log"  # in the output folder
LOWEST_PRIORITY, FIRST_TO_END = 19, "1000"  # the kernel ends this process before another where memory runs out
HARNESS_BYTES = 2**30  # of lm-eval, and of what a task computes
CPU = torch.device("cpu")
Tell = Callable[[int, int, Scores], None]


class TaskScores:
    """Every so many rounds the scores of what the run yields, computed in a child of the trainer.

    Whatever becomes of the child, training continues. A round whose turn comes while it works is left out.

    Args:
        tell: called with round, step and scores of a copy, once they are there.
    """

    def __init__(self, peer: Peer, tell: Tell) -> None:
        self._peer, self._tell = peer, tell
        self._child: subprocess.Popen[bytes] | None = None
        self._answer = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - a child's, and not a block's
        self._last = peer.sync.round
        self._scored = (0, 0)  # round and step of the copy

    def after_step(self) -> None:
        """Take the scores that have come, and ask for those of a round that is due."""
        self._collect()
        sync, every = self._peer.sync, self._peer.settings.eval_tasks_every_rounds
        if sync.round // every == self._last // every:
            return
        self._last = sync.round
        if self._child is not None:
            log.warning("no scores of round %d: those of round %d are not there yet", sync.round, self._scored[0])
            return
        try:
            self._child = self._start()
        except (UserError, OSError) as error:
            log.warning("no scores of round %d: %s", sync.round, error.what if isinstance(error, UserError) else error)
        self._scored = (sync.round, sync.step)

    def close(self) -> None:
        """End the child."""
        self._collect()
        if self._child is not None:
            log.warning("no scores of round %d: this peer leaves before they are there", self._scored[0])
            self._child.kill()
            self._child.wait()
        self._answer.close()

    def _collect(self) -> None:
        if self._child is None or (code := self._child.poll()) is None:
            return
        self._child = None
        self._answer.seek(0)
        try:
            answer = json.loads(self._answer.read())
        except ValueError:
            what = f"their process {how_it_ended(code)}; see {self._peer.settings.output_dir / LOG_FILE}"
            answer = {"problem": what}
        if "problem" in answer:
            log.warning("no scores of round %d: %s", self._scored[0], answer["problem"])
        else:
            self._tell(*self._scored, answer["scores"])

    def _start(self) -> subprocess.Popen[bytes]:
        peer, settings = self._peer, self._peer.settings
        parameters = sum(map(count_values, peer.model.parameters()))
        check_memory(parameters, 4 * (parameters + peer.mapped.numel) + HARNESS_BYTES, CPU)
        device = pick_device(settings.eval_tasks_device)
        vector = in_memory(peer.sync.result)
        asked = {
            "manifest": peer.manifest.model_dump(mode="json"), "output_dir": str(settings.output_dir),
            "vector": vector, "tasks": settings.eval_tasks, "limit": settings.eval_tasks_limit,
            "folder": None if settings.eval_task_folder is None else str(settings.eval_task_folder),
            "device": str(device), "threads": 1 if peer.model.device == CPU else usable_cores(),
        }  # fmt: skip
        self._answer.seek(0)
        self._answer.truncate()
        with tempfile.TemporaryFile(buffering=0) as question, (settings.output_dir / LOG_FILE).open("ab") as errors:
            question.write(json.dumps(asked).encode())
            question.seek(0)
            try:
                return subprocess.Popen(
                    [*COMMAND, "--parent", str(os.getpid())], stdin=question, stdout=self._answer, stderr=errors,
                    pass_fds=[vector], start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(vector)


def in_memory(vector: Tensor) -> int:
    """The descriptor of anonymous memory with a copy of an fp32 vector."""
    descriptor = os.memfd_create("atoll-scored")
    os.ftruncate(descriptor, 4 * vector.numel())
    torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.float32).copy_(vector)
    return descriptor


def main() -> None:
    """Process entry: a question on standard input, `scores` or a `problem` on standard output."""
    parser = argparse.ArgumentParser(prog="python -m peer.run.task_scores", description="started by `atoll join`")
    parser.add_argument("--parent", type=int, required=True)
    die_with_parent(parser.parse_args().parent)
    os.nice(LOWEST_PRIORITY)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(FIRST_TO_END)
    make_files_private()
    logging.basicConfig(level=logging.INFO, handlers=[StderrLog(rotates=True)])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # tasks print
            answer: dict[str, Any] = {"scores": _scores(json.load(sys.stdin))}
    except UserError as error:
        answer = {"problem": error.what}
    print(json.dumps(answer), flush=True)


def _scores(asked: dict[str, Any]) -> Scores:
    torch.set_num_threads(asked["threads"])
    manifest = RunManifest.model_validate(asked["manifest"])
    tokenizer = load_tokenizer(manifest.tokenizer, Path(asked["output_dir"]))
    model = build_initial_model(manifest, tokenizer)
    vector = torch.frombuffer(mmap.mmap(asked["vector"], 0), dtype=torch.float32)
    FlatLayout.of(model, RunPlan.of(manifest).recipe.cut).copy_from_flat(vector, model)
    model.to(torch.device(asked["device"]))  # type: ignore[arg-type]
    folder = None if asked["folder"] is None else Path(asked["folder"])
    return score(model, tokenizer, asked["tasks"], folder, asked["limit"])


if __name__ == "__main__":
    main()
