from __future__ import annotations

import logging
from functools import partialmethod

import pytest
import torch
from torch import nn

from peer.data.packing import PackedTokens
from peer.errors import UserError
from peer.protocol.manifest import InnerSpec, ModelSpec
from peer.train.compute import Compute, is_compiled, prepare
from peer.train.evaluate import evaluate
from peer.train.model import build_model
from peer.train.optim import build_optimizer
from peer.train.step import StepResult, Trainer
from tests.train.architectures import tiny_config
from tests.train.tiny import random_batches, tiny_model

INNER = InnerSpec()


def trained(compute: Compute, steps: int = 4, model=None) -> tuple[list[StepResult], Trainer]:
    model = model or tiny_model()
    prepare(model, compute)
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 1e-2, compute=compute)
    return [trainer.step(batch) for batch in random_batches(steps)], trainer


def test_recomputing_layers_changes_no_number():
    plain, _ = trained(Compute())
    again, trainer = trained(Compute(checkpointing=True))
    assert [result.loss for result in again] == [result.loss for result in plain]
    assert trainer.model.is_gradient_checkpointing


def test_recomputing_keeps_less_until_the_backward_pass():
    kept = {}
    for checkpointing in (False, True):
        model = tiny_model()
        prepare(model, Compute(checkpointing=checkpointing))
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.nbytes), t)[1], lambda t: t):
            model(input_ids=random_batches(1, 4, 32)[0], use_cache=False).logits.sum()
        kept[checkpointing] = sum(sizes)
    assert kept[True] < 0.6 * kept[False]


def test_a_model_that_cannot_recompute_says_so():
    model = tiny_model()
    type(model).supports_gradient_checkpointing, before = False, type(model).supports_gradient_checkpointing
    try:
        with pytest.raises(UserError, match="gradient_checkpointing=True: llama cannot recompute its layers"):
            prepare(model, Compute(checkpointing=True))
    finally:
        type(model).supports_gradient_checkpointing = before


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_compiled_model_makes_the_same_steps():
    plain, _ = trained(Compute())
    compiled, trainer = trained(Compute(compiled=True))
    assert is_compiled(trainer.model), "it did not fall back"
    assert [result.loss for result in compiled] == pytest.approx([result.loss for result in plain], abs=1e-4)
    assert "model.embed_tokens.weight" in dict(trainer.model.named_parameters()), "the names are those of the model"


def test_the_graph_of_the_steps_keeps_its_shapes_beside_validation_and_samples(monkeypatch):
    """Two other shapes that reach a compiled model would leave one slower graph for all."""
    sizes: list[list[object]] = []

    def traced(graph, inputs):
        sizes.append([size for tensor in inputs if isinstance(tensor, torch.Tensor) for size in tensor.shape])
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=traced))
    _, trainer = trained(Compute(compiled=True), steps=1)
    graphs = len(sizes)
    for rows in (3, 5):
        evaluate(trainer.model, PackedTokens(random_batches(1, 1, 100)[0][0].numpy(), 8), 10, rows)
    for batch in random_batches(2):
        trainer.step(batch)
    assert is_compiled(trainer.model)
    assert len(sizes) == graphs > 0
    assert all(type(size) is int for graph in sizes for size in graph)


@pytest.mark.long
def test_a_failed_compilation_is_one_line_and_training_goes_on(caplog):
    def broken(*_args, **_options):
        raise RuntimeError("no compiler\nfor this machine")

    model = tiny_model()
    plain, _ = trained(Compute())
    prepare(model, Compute(compiled=True))
    model.base_model._compiled_call_impl = broken
    with caplog.at_level(logging.WARNING):
        results, trainer = trained(Compute(), model=model)
    assert [result.loss for result in results] == [result.loss for result in plain]
    assert caplog.messages == ["torch.compile failed, training without it: RuntimeError: no compiler for this machine"]
    assert not is_compiled(trainer.model)


def test_attention_is_chosen_among_what_the_architecture_has():
    model = tiny_model()
    eager, _ = trained(Compute(attention="eager"), model=model)
    assert model.config._attn_implementation == "eager"
    assert [r.loss for r in eager] == pytest.approx([r.loss for r in trained(Compute())[0]], abs=1e-4)


def test_an_attention_that_is_not_there_is_refused_and_nothing_is_fetched():
    with pytest.raises(UserError, match="attn_implementation='flash_attention_2': llama cannot compute it") as told:
        prepare(tiny_model(), Compute(attention="flash_attention_2"))
    assert told.value.hint == "use auto, or one of sdpa, eager"
    config = tiny_config("mamba")
    model = build_model(ModelSpec(architecture="mamba", config=config), 259, 3)
    before = model.config._attn_implementation
    with pytest.raises(UserError, match="attn_implementation='flash_attention_2': mamba cannot"):
        prepare(model, Compute(attention="flash_attention_2"))
    assert model.config._attn_implementation == before
