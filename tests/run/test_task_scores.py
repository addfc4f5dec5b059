"""A child that scores tasks beside training: what it is given, what it finds, and what becomes of training."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer.link.messages import Anchor
from peer.link.supervisor import create_descriptor
from peer.outer.state.flat_layout import FlatLayout
from peer.run import task_scores
from peer.run.task_scores import LOG_FILE, TaskScores
from peer.run.tasks import Scores
from tests.link.fakes import LINEAGE
from tests.network.forked import ForkedProcess
from tests.network.processes import until
from tests.run.test_assemble import wired

WORDS = b"the quick brown fox"


class Forked(ForkedProcess):
    """What starts the child in place of `subprocess.Popen`: its imports are done."""

    def __init__(self, command: list[str], *, stdin: Any, stdout: Any, stderr: Any, pass_fds: list[int], **_: Any):
        assert command[:3] == [sys.executable, "-m", "peer.run.task_scores"]
        assert len(pass_fds) == 1
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
                    os.dup2(source.fileno(), target)
                sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", closefd=False) for n in range(3))
                sys.argv = command[2:]
                task_scores.main()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(3)


def likelihood(model: Any, limit: int) -> float:
    """A task: how likely a model finds so many bytes of a text, in nats."""
    ids = torch.tensor([[byte + 3 for byte in WORDS[: limit + 1]]])
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits
    return -float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]))


def harness(before: Callable[[], None]) -> dict[str, Any]:
    """What stands for the modules of lm-eval, and really evaluates one task."""
    def evaluate(*, model: Any, tasks: list[str], limit: int, **_: Any) -> Any:
        before()
        print("tasks print")
        if tasks != ["bytes"]:
            raise ValueError("no such task")
        return {"results": {"bytes": {"nats,none": likelihood(model["pretrained"], limit)}}}

    whole: Any = SimpleNamespace(simple_evaluate=evaluate, __spec__=SimpleNamespace())
    manager = SimpleNamespace(TaskManager=lambda **_: None)
    return {"lm_eval": whole, "lm_eval.tasks": manager, "lm_eval.models.huggingface": SimpleNamespace(HFLM=dict)}


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = create_descriptor()
    yield descriptor
    os.close(descriptor)


class Scored:
    """A peer whose agent the test plays, and its scores."""

    def __init__(self, folder: Path, descriptor: int, *tasks: str) -> None:
        plain = wired(folder, descriptor, "name: diloco")
        self.settings = plain.settings.model_copy(update={
            "eval_tasks": tasks, "eval_tasks_every_rounds": 2, "eval_tasks_limit": 7,
        })  # fmt: skip
        self.peer = replace(plain, settings=self.settings)
        self.told: list[tuple[int, int, Scores]] = []
        self.scores = TaskScores(self.peer, lambda *found: self.told.append(found))

    def step(self) -> None:
        batch, _ = next(iter(self.peer.batches))
        self.peer.sync.after_step(self.peer.trainer.step(batch))
        self.scores.after_step()

    def take_anchor(self, round: int) -> float:
        """The swarm's model of this round comes; -> what the task gives for that."""
        agent: Any = self.peer.agent
        anchor = self.peer.sync.memory.anchor
        anchor += 0.3 * torch.randn(len(anchor), generator=torch.Generator().manual_seed(round))
        agent.inbox.append(Anchor(round=round, lineage_id=LINEAGE, contributed=None))
        self.step()
        local, model = torch.empty_like(self.peer.sync.anchor), self.peer.model
        self.peer.replica.read(local)
        layout = FlatLayout.of(model)
        layout.copy_from_flat(self.peer.sync.result, model)
        found = likelihood(model.train(False), 7)
        layout.copy_from_flat(local, model.train())
        return found

    def wait(self) -> None:
        """Steps until the child has ended and was heard."""
        def ended() -> bool:
            self.step()
            return self.scores._child is None

        until(ended, 60.0, lambda: (self.settings.output_dir / LOG_FILE).read_text())


def test_a_copy_of_the_swarms_model_is_scored_while_the_peer_trains(
    tmp_path: Path, descriptor: int, monkeypatch, caplog
) -> None:
    gate, child_waits = os.pipe()
    reached, child_is_there = os.pipe()
    for name, module in harness(lambda: os.write(child_is_there, b"x") and os.read(gate, 1) and None).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(task_scores, "subprocess", SimpleNamespace(Popen=Forked))
    scored = Scored(tmp_path, descriptor, "bytes")
    scored.take_anchor(1)
    assert scored.scores._child is None  # every second round
    expected = scored.take_anchor(2)
    child = scored.scores._child
    assert child is not None
    step = scored.peer.sync.step
    scored.take_anchor(3)
    scored.take_anchor(4)  # the child works still
    assert "no scores of round 4: those of round 2 are not there yet" in caplog.text
    assert os.read(reached, 1) == b"x"
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == 19
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"
    os.write(child_waits, b"x")
    scored.wait()
    assert scored.told == [(2, step, {"bytes": {"nats": expected}})]
    assert scored.peer.sync.step > step + 2
    expected = scored.take_anchor(7)  # two rounds at once count as well
    os.write(child_waits, b"x")
    scored.wait()
    assert scored.told[1][0] == 7
    assert scored.told[1][2]["bytes"]["nats"] == expected
    assert abs(scored.told[0][2]["bytes"]["nats"] - expected) > 0.01
    scored.take_anchor(8)
    scored.scores.close()
    assert "no scores of round 8: this peer leaves before they are there" in caplog.text
    assert not [name for name in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "atoll-scored" in name]


def test_whatever_becomes_of_the_child_training_continues(
    tmp_path: Path, descriptor: int, monkeypatch, caplog
) -> None:
    for name, module in harness(lambda: None).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(task_scores, "subprocess", SimpleNamespace(Popen=Forked))
    scored = Scored(tmp_path, descriptor, "colours")
    scored.take_anchor(2)
    scored.wait()
    assert "no scores of round 2: tasks colours: ValueError: no such task" in caplog.text
    for name, module in harness(lambda: os.kill(os.getpid(), signal.SIGKILL)).items():
        monkeypatch.setitem(sys.modules, name, module)
    scored.take_anchor(4)
    scored.wait()
    assert f"no scores of round 4: their process was killed by SIGKILL; see {tmp_path / LOG_FILE}" in caplog.text
    monkeypatch.setattr("peer.train.device.resources.available_memory", lambda: 2**20)
    scored.take_anchor(6)
    assert "no scores of round 6: a model of 0.0M parameters needs 1.00 GiB; 0.00 GiB free on cpu" in caplog.text
    assert scored.told == []
    scored.scores.close()
