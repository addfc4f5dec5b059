"""The training loop that one writes by hand, against which others are measured."""

from __future__ import annotations

from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from peer.data.batches import Batches
from peer.protocol.manifest import InnerSpec


def plain_adamw(model: nn.Module, inner: InnerSpec, fused: bool | None = None) -> torch.optim.AdamW:
    """PyTorch's AdamW with a run's numbers."""
    return torch.optim.AdamW(
        model.parameters(), lr=inner.learning_rate, betas=inner.betas, eps=inner.eps, weight_decay=inner.weight_decay,
        fused=fused,
    )


def bare_loop(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batches: Batches, inner: InnerSpec, steps: int
) -> None:
    """Forward, backward, clip, step: so many steps."""
    for batch, _ in islice(batches, steps):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), inner.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
