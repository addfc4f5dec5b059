"""How good the model is: validation loss and a sample of text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from peer.errors import UserError
from peer.train.batch import Batch
from peer.train.loss import LanguageLoss

TEMPERATURE = 0.8
_DEFAULT_CONTEXT = 1024  # for architectures without a limit on positions


class ValidationWindows(Protocol):
    """Validation data: equally long token windows, int64 [T + 1] each; `document_end`: see `Batch.of`."""

    @property
    def document_end(self) -> int | None: ...

    def __len__(self) -> int: ...

    def window(self, index: int) -> torch.Tensor:
        """One window."""


class TextCodec(Protocol):
    """What a sample needs of a tokenizer; ids are int32 [n]."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str) -> npt.NDArray[np.int32]: ...

    def decode(self, ids: npt.NDArray[np.int32]) -> str: ...


def evaluate(model: PreTrainedModel, validation: ValidationWindows, max_sequences: int, batch_sequences: int) -> float:
    """Mean nats per learned token over windows spread evenly over the validation data, the same ones each time.

    Args:
        model: left in the mode it was in.
        max_sequences: how many windows at most.
        batch_sequences: windows per forward pass.

    Raises:
        UserError: no validation window, or a limit below 1.
    """
    count = min(max_sequences, len(validation))
    if count < 1 or batch_sequences < 1:
        raise UserError(
            f"nothing to evaluate: {len(validation)} validation sequences, at most {max_sequences} wanted, "
            f"{batch_sequences} at a time",
            "each must be at least 1",
        )
    windows_nt = torch.stack([validation.window(i * len(validation) // count) for i in range(count)])
    loss, total, tokens = LanguageLoss(model, router_loss=0.0), 0.0, 0
    with _inference(model):
        for batch_bt in torch.split(windows_nt, batch_sequences):
            batch = Batch.of(batch_bt, validation.document_end).to(model.device)
            total += loss.mean(batch) * batch.tokens
            tokens += batch.tokens
    return total / max(1, tokens)


def sample_text(model: PreTrainedModel, tokenizer: TextCodec, prompt: str, max_new_tokens: int, seed: int) -> str:
    """The prompt and its continuation, sampled at temperature 0.8 until eos or `max_new_tokens`.

    The same seed and weights give the same text on one device; no other random state is touched.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt_ids = tokenizer.encode(prompt) if prompt else np.array([tokenizer.eos_id], dtype=np.int32)
    ids_bt = torch.from_numpy(prompt_ids.astype(np.int64)).unsqueeze(0)
    context = _context_tokens(model)
    with _inference(model):
        for _ in range(max_new_tokens):
            inputs_bt = ids_bt[:, -context:].to(model.device)
            logits_v = model(input_ids=inputs_bt, use_cache=False).logits[0, -1, : tokenizer.vocab_size]
            # Drawn on the CPU: the generators of devices differ.
            chances_v = torch.softmax(logits_v.float().cpu() / TEMPERATURE, dim=-1)
            token = torch.multinomial(chances_v, 1, generator=generator)
            if int(token) == tokenizer.eos_id:
                break
            ids_bt = torch.cat([ids_bt, token.unsqueeze(0)], dim=1)
    return tokenizer.decode(ids_bt[0].numpy().astype(np.int32))


def _context_tokens(model: Any) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else _DEFAULT_CONTEXT


@contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    """No gradients, no dropout; the model's mode is as before afterwards."""
    was_training = model.training
    model.train(False)
    try:
        # Compiled, these shapes would make the graph of the steps dynamic.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
