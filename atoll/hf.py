"""`SwarmCallback`: a `transformers.Trainer`, or a trainer of TRL, as a peer of a swarm."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peer.use.swarm import Swarm

__all__ = ["SwarmCallback"]


class SwarmCallback(TrainerCallback):
    """Trains with the swarm at an address: `Trainer(..., callbacks=[SwarmCallback(address)])`.

    The swarm's values are in the model when training begins, and what the run yields when the run is finished, which
    also ends the training. A contribution weighs as many tokens as the trainer counts with
    `include_num_input_tokens_seen=True`, and as many samples without it.

    Args:
        address, output_dir, settings: see `atoll.Swarm`.

    Attributes:
        swarm: while training runs.
    """

    def __init__(
        self, address: str | list[str], *, output_dir: str | os.PathLike[str] = "runs/peer", **settings: Any
    ) -> None:
        self._address, self._output_dir, self._settings = address, output_dir, settings
        self._seen = 0
        self.swarm: Swarm | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.swarm is not None:  # an earlier training ended with an error
            self.swarm.close()
        model: nn.Module = kwargs["model"]
        optimizer: torch.optim.Optimizer = kwargs["optimizer"]
        self.swarm = Swarm(
            self._address, model, getattr(optimizer, "optimizer", optimizer), output_dir=self._output_dir,
            **self._settings,
        ).__enter__()  # fmt: skip
        self._seen = int(state.num_input_tokens_seen)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.swarm is not None
        seen = int(state.num_input_tokens_seen)
        samples = args.train_batch_size * args.gradient_accumulation_steps
        own = (seen - self._seen) // args.world_size  # transformers counts those of all ranks
        self.swarm.after_step(tokens=own if own > 0 else samples)
        self._seen = seen
        if self.swarm.finished:
            control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, float] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if logs is not None and self.swarm is not None:
            seen = {"swarm_round": self.swarm.round, "swarm_peers": self.swarm.peers}
            logs |= seen  # for the callbacks after this one
            state.log_history[-1] |= seen

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.swarm is not None:
            swarm, self.swarm = self.swarm, None
            swarm.close()
