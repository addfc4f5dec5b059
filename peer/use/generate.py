"""Text from a trained model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

from peer.errors import UserError
from peer.use.trained import Trained


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. A temperature of 0 takes the likeliest."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, good, limit in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
        ):
            if not good:
                raise UserError(f"--{flag.replace('_', '-')} {getattr(self, flag)}", f"it must be {limit}")


def generate(
    trained: Trained, prompt: str, sampling: Sampling, say: Callable[[str], None] = lambda _: None
) -> str:
    """The text that follows a prompt, until the model ends it, its window is full, or there are enough tokens.

    The same weights, prompt and seed give the same text on one device; no other random state is touched. A prompt that
    is longer than the window is cut at its beginning.

    Args:
        say: gets the text piece by piece, as it comes.
    """
    tokenizer = trained.tokenizer
    ids = tokenizer.encode(prompt) if prompt else np.array([tokenizer.eos_id], dtype=np.int32)
    return continue_ids(trained, ids, sampling, say)


def window_of(trained: Trained) -> int:
    """How many tokens the model takes at once."""
    return getattr(trained.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def continue_ids(
    trained: Trained, ids: np.ndarray, sampling: Sampling, say: Callable[[str], None], ends: Collection[int] = (),
) -> str:  # fmt: skip
    """The same for a prompt of ids, int32 [n].

    Args:
        ends: ids that end the text, beside the tokenizer's.
    """
    model, tokenizer, context = trained.model, trained.tokenizer, window_of(trained)
    new = min(sampling.max_new_tokens, max(context // 2, context - len(ids)))
    inputs = torch.from_numpy(ids[-(context - new) :].astype(np.int64))[None].to(model.device)
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    unknown = list(range(tokenizer.vocab_size, model.config.get_text_config().vocab_size))
    pieces = _Pieces(trained, say)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(sampling.seed)
        model.generate(  # type: ignore[operator]
            inputs, attention_mask=torch.ones_like(inputs), streamer=pieces, max_new_tokens=new,
            eos_token_id=sorted({tokenizer.eos_id, *ends}), pad_token_id=tokenizer.eos_id,
            suppress_tokens=unknown or None,
            **(drawn if sampling.temperature > 0.0 else {"do_sample": False}),
        )  # fmt: skip
    return pieces.text


class _Pieces(BaseStreamer):
    """Tokens -> text that is whole: a character may need several of them."""

    def __init__(self, trained: Trained, say: Callable[[str], None]) -> None:
        self.text = ""
        self._tokenizer, self._say = trained.tokenizer, say
        self._ids: list[int] | None = None  # None: the prompt comes first

    def put(self, value: Any) -> None:
        """Called with the prompt, and then with each token."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = self._tokenizer.decode(np.array(self._ids, dtype=np.int32))
        if not text.endswith("\ufffd"):
            self._tell(text)

    def end(self) -> None:
        """There are no more."""
        self._tell(self._tokenizer.decode(np.array(self._ids or [], dtype=np.int32)))

    def _tell(self, text: str) -> None:
        if len(text) > len(self.text):
            self._say(text[len(self.text) :])
            self.text = text
