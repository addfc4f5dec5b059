"""A model cut before its head, so that logits can be made of some tokens at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

log = logging.getLogger(__name__)
PROBE_TOKENS = 8
TOLERANCE = 1e-4  # of the largest logit; rounding moves less


class SplitHead:
    """Runs the base of a model once, and then the rest of it on parts of what the base gave.

    The rest is the model's own forward pass with its base replaced: what an architecture does to its logits (scales,
    caps, biases) is done to those of each part.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._base_name = model, model.base_model_prefix
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._parent, self._head_name = _owner(model, head)
        self._base = model.get_submodule(self._base_name)
        self._output: Any = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> SplitHead | None:
        """None for an architecture that cannot be cut this way: both ways must give the same logits."""
        was_training = model.training
        model.train(False)
        try:
            # Compiled, these shapes would make the graph of the steps dynamic.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                return cls._tried(model)
        except Exception as error:  # each architecture has a forward pass of its own, and may expect anything
            log.debug("the head cannot be applied to parts", exc_info=error)
        finally:
            model.train(was_training)
        log.info("this architecture makes the logits of all tokens at once: smaller micro-batches need less memory")
        return None

    @classmethod
    def _tried(cls, model: PreTrainedModel) -> SplitHead | None:
        head = cls(model)
        vocab_size = model.config.get_text_config().vocab_size
        ids_bt = (torch.arange(2 * PROBE_TOKENS, device=model.device) % vocab_size).view(2, PROBE_TOKENS)
        whole = model(input_ids=ids_bt, use_cache=False).logits
        hidden_btd, _ = head.hidden(lambda: model(input_ids=ids_bt, use_cache=False))
        half = PROBE_TOKENS // 2
        parts = torch.cat([head.logits(hidden_btd[:, :half]), head.logits(hidden_btd[:, half:])], dim=1)
        same = parts.shape == whole.shape and (parts - whole).abs().max() <= TOLERANCE * whole.abs().max()
        assert bool(same)
        return head

    def hidden(self, forward: Callable[[], Any]) -> tuple[Tensor, Any]:
        """-> (what the base gives of each token [B, T, D], the model's output without logits of use)."""
        recording, no_head = _Recording(self._base), _NoHead(self._parent.get_submodule(self._head_name))
        with _swapped(self._model, self._base_name, recording), _swapped(self._parent, self._head_name, no_head):
            output = forward()
        self._output = recording.output
        hidden_btd: Tensor = self._output[0]
        return hidden_btd, output

    def logits(self, hidden_btd: Tensor) -> Tensor:
        """Of these tokens, [B, t, V]."""
        with _swapped(self._model, self._base_name, _Given(_with_hidden(self._output, hidden_btd), self._base)):
            logits_btv: Tensor = self._model(input_ids=None, use_cache=False).logits
        return logits_btv


class _Stand(nn.Module):
    """In the place of a module, which still answers for everything else."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["base"] = base  # not registered: it is no part of this

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)


class _Recording(_Stand):
    output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["output"] = self.__dict__["base"](*args, **kwargs)
        return self.__dict__["output"]


class _Given(_Stand):
    def __init__(self, output: Any, base: nn.Module) -> None:
        super().__init__(base)
        self.__dict__["output"] = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.__dict__["output"]


class _NoHead(_Stand):
    def forward(self, hidden_btd: Tensor) -> Tensor:
        return hidden_btd[..., :1]


def _with_hidden(output: Any, hidden_btd: Tensor) -> Any:
    if isinstance(output, tuple):
        return (hidden_btd, *output[1:])
    return type(output)(**{**output, "last_hidden_state": hidden_btd})


def _owner(model: nn.Module, head: nn.Module | None) -> tuple[nn.Module, str]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is head:
                return parent, name
    raise LookupError("the model has no head")


@contextmanager
def _swapped(parent: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    """`parent.name` is another module meanwhile."""
    before = parent._modules[name]
    parent._modules[name] = module
    try:
        yield
    finally:
        parent._modules[name] = before
