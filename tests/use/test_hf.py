"""`SwarmCallback` in a real Trainer, with a swarm that writes down what it is asked; real ones: tests/network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import atoll.hf
from peer.errors import UserError
from tests.train.tiny import tiny_model

LAST = 6  # steps of the run
ROW = list(range(3, 12))


class Recorded:
    """A swarm whose run is finished after LAST steps."""

    def __init__(self, address: str, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, {"address": address, **settings}
        self.tokens: list[int] = []
        self.peers, self.closed = 3, 0

    def __enter__(self) -> Self:
        return self

    @property
    def round(self) -> int:
        if self.closed:
            raise UserError("this Swarm is closed", "")
        return len(self.tokens) // 2

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= LAST

    def after_step(self, tokens: int) -> None:
        self.tokens.append(tokens)

    def close(self) -> None:
        self.closed += 1


class Failing(TrainerCallback):
    """Ends the training with an error, once."""

    failed = False

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not self.failed:
            self.failed = True
            raise ValueError("of the script")


@pytest.mark.parametrize(("counted", "tokens"), [(True, 4 * len(ROW)), (False, 4)])
def test_the_callback_trains_with_the_swarm_until_its_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool, tokens: int
) -> None:
    opened: list[Recorded] = []

    def opening(*args: Any, **settings: Any) -> Recorded:
        opened.append(Recorded(*args, **settings))
        return opened[-1]

    monkeypatch.setattr(atoll.hf, "Swarm", opening)
    callback = atoll.hf.SwarmCallback("address", output_dir=tmp_path / "peer", resume_from_checkpoint="latest")
    rows = [{"input_ids": ROW, "labels": ROW}] * 8
    trainer = Trainer(
        model=tiny_model(), train_dataset=rows, eval_dataset=rows[:2], callbacks=[Failing(), callback],
        args=TrainingArguments(
            output_dir=str(tmp_path / "trainer"), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_steps=50, logging_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            include_num_input_tokens_seen=counted,
        ),
    )  # fmt: skip
    with pytest.raises(ValueError, match="of the script"):
        trainer.train()
    trainer.train()  # closes what the failure left, and opens its own
    trainer.evaluate()  # of a model that has left the swarm
    assert [swarm.closed for swarm in opened] == [1, 1]
    swarm = opened[1]
    assert swarm.settings == {
        "address": "address", "output_dir": tmp_path / "peer", "resume_from_checkpoint": "latest",
    }  # fmt: skip
    assert (swarm.model, type(swarm.optimizer)) == (trainer.model, torch.optim.AdamW)
    assert swarm.tokens == [tokens] * LAST
    assert callback.swarm is None
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [(entry["step"], entry["swarm_round"], entry["swarm_peers"]) for entry in logged] == [
        (2, 1, 3), (4, 2, 3), (6, 3, 3),
    ]  # fmt: skip
