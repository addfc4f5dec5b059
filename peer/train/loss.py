"""The loss of a causal language model and its gradient, without the logits of all tokens at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from peer.train.batch import IGNORED, Batch
from peer.train.head import SplitHead
from peer.train.sharding import is_sharded

log = logging.getLogger(__name__)
# fp32 logits at a time. A GPU needs many rows to be busy: each part reads the head and adds to its gradient.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 2**26, 2**29
Context = Callable[[], AbstractContextManager[object]]


def chunk_bytes(device: torch.device) -> int:
    """How many bytes of fp32 logits are made at a time."""
    return CPU_CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES


class LanguageLoss:
    """Next-token cross entropy of one model, in nats, computed in fp32.

    Where the logits of a micro-batch would take more than `logit_bytes`, the head is applied to some tokens at a time,
    and their part of the backward pass is made at once: no [B, T, V] exists. Smaller ones take the model's own path.

    Args:
        precision: makes the context of each forward pass.
        router_loss: weight of the auxiliary loss that balances a mixture of experts; None: the model's own.
        logit_bytes: of fp32 logits at a time; None: what suits the device.
    """

    def __init__(
        self, model: PreTrainedModel, precision: Context = nullcontext, router_loss: float | None = None,
        logit_bytes: int | None = None,
    ) -> None:
        self.model, self._precision = model, precision
        text = model.config.get_text_config()
        self._vocab_size = int(getattr(text, "vocab_size", 1))
        self._router_weight = router_weight(model, router_loss)
        self._chunk_bytes = logit_bytes or chunk_bytes(model.device)
        self._head: SplitHead | None = None
        self._head_known = False

    def backward(self, batch: Batch, tokens: int, scale: float = 1.0) -> Tensor:
        """Add the gradient of this part of a step to the parameters'.

        Args:
            batch: on the model's device.
            tokens: of the whole step, over which the mean is taken.
            scale: of the gradient.

        Returns:
            This part's share of the mean loss, without the router's: a scalar on the device.
        """
        tokens = max(1, tokens)
        head = self._head_for(batch)
        if head is not None:
            return self._backward_in_chunks(head, batch, tokens, scale)
        with self._precision():
            output = self._forward(batch)
            loss = _summed(output.logits, batch.labels_bt) / tokens
        total = loss
        if self._router_weight:
            total = loss + self._router_weight * (batch.tokens / tokens) * output.aux_loss
        (total if scale == 1.0 else total * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def mean(self, batch: Batch) -> float:
        """Mean nats per token of a batch on the model's device; no gradient."""
        head = self._head_for(batch)
        if head is None:
            with self._precision():
                total = _summed(self._forward(batch).logits, batch.labels_bt)
        else:
            with self._precision():
                hidden_btd, _ = head.hidden(lambda: self._forward(batch))
            parts = self._parts(hidden_btd, batch.labels_bt)
            total = torch.stack([self._of_part(head, *part) for part in parts]).sum()
        return (total / max(1, batch.tokens)).item()

    def _forward(self, batch: Batch) -> Any:
        more: dict[str, Any] = {"output_router_logits": True} if self._router_weight else {}
        if batch.positions_bt is not None:
            more["position_ids"] = batch.positions_bt
        return self.model(input_ids=batch.inputs_bt, use_cache=False, **more)

    def _head_for(self, batch: Batch) -> SplitHead | None:
        """The head where the logits of this batch are too large to be made at once, if the model can be cut."""
        if 4 * batch.labels_bt.numel() * self._vocab_size <= self._chunk_bytes or is_sharded(self.model):
            return None  # a part of a sharded model cannot be run by itself
        if not self._head_known:
            self._head, self._head_known = SplitHead.of(self.model), True
        return self._head

    def _backward_in_chunks(self, head: SplitHead, batch: Batch, tokens: int, scale: float) -> Tensor:
        with self._precision():
            hidden_btd, output = head.hidden(lambda: self._forward(batch))
        gradient_btd = torch.empty_like(hidden_btd)
        total, begin = torch.zeros((), device=hidden_btd.device), 0
        for part_btd, labels_bt in self._parts(hidden_btd.detach(), batch.labels_bt):
            part_btd.requires_grad_()
            loss = self._of_part(head, part_btd, labels_bt) / tokens
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            assert part_btd.grad is not None
            gradient_btd[:, begin : begin + part_btd.shape[1]] = part_btd.grad
            begin += part_btd.shape[1]
            total += loss.detach()
        roots = {hidden_btd: gradient_btd}
        if self._router_weight:
            share = self._router_weight * scale * batch.tokens / tokens
            roots[output.aux_loss] = torch.full_like(output.aux_loss, share)
        roots = {root: gradient for root, gradient in roots.items() if root.requires_grad}  # others are frozen
        if roots:
            torch.autograd.backward(list(roots), list(roots.values()))
        return total

    def _of_part(self, head: SplitHead, hidden_btd: Tensor, labels_bt: Tensor) -> Tensor:
        with self._precision():
            return _summed(head.logits(hidden_btd), labels_bt)

    def _parts(self, hidden_btd: Tensor, labels_bt: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self._chunk_bytes // (4 * self._vocab_size * len(labels_bt))
        return zip(torch.split(hidden_btd, max(1, rows), 1), torch.split(labels_bt, max(1, rows), 1), strict=True)


def _summed(logits_btv: Tensor, labels_bt: Tensor) -> Tensor:
    """Nats of all tokens together, in fp32."""
    return F.cross_entropy(
        logits_btv.flatten(0, 1).float(), labels_bt.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def router_weight(model: PreTrainedModel, wanted: float | None) -> float:
    """Of the auxiliary loss of a model's router: as wanted, else the model's own; 0 where it has none."""
    text = model.config.get_text_config()
    own = getattr(text, "router_aux_loss_coef", None)
    if own is None or not hasattr(text, "output_router_logits"):
        return 0.0
    weight = float(own if wanted is None else wanted)
    if weight and not _balances(model):
        log.info("the router of this architecture has no auxiliary loss: trained without")
        return 0.0
    return weight


@torch.no_grad()
def _balances(model: PreTrainedModel) -> bool:
    """Whether the auxiliary loss can be had: some architectures have its weight alone, or fail to compute it."""
    ids_bt = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    was_training = model.training
    model.train(False)
    try:
        output = model(input_ids=ids_bt, use_cache=False, output_router_logits=True)
    except Exception as error:  # each architecture has code of its own
        log.debug("no auxiliary loss", exc_info=error)
        return False
    finally:
        model.train(was_training)
    return isinstance(getattr(output, "aux_loss", None), Tensor)
