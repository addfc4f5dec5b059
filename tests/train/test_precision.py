from __future__ import annotations

import math

import pytest
import torch

from peer.errors import UserError
from peer.protocol.manifest import InnerSpec
from peer.train import precision
from peer.train.compute import Compute
from peer.train.optim import build_optimizer
from peer.train.precision import GROWTH_STEPS, LossScale, allow_tf32, autocast
from peer.train.step import Trainer
from tests.train.tiny import random_batches, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
INNER = InnerSpec()


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without bf16 computes the same, only slowly, which is why `autocast` refuses it."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)


def losses(dtype: str, steps: int = 30) -> list[float]:
    model, batch = tiny_model(), random_batches(1)[0]
    optimizer = build_optimizer(model, INNER)
    trainer = Trainer(model, optimizer, INNER, lambda: 1e-2, compute=Compute(precision=dtype))
    found = [trainer.step(batch) for _ in range(steps)]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(result.skipped for result in found)
    return [result.loss for result in found]


def test_both_small_precisions_learn_as_fp32_does():
    whole = losses("fp32")
    for dtype in ("bf16", "fp16"):
        found = losses(dtype)
        assert found != whole, dtype
        assert found[-1] == pytest.approx(whole[-1], rel=0.1), dtype


def test_matrix_products_are_of_the_precision():
    one = torch.ones(1, 1)
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with autocast(CPU, dtype)():
            assert torch.mm(one, one).dtype == expected


def test_bf16_is_refused_where_the_hardware_has_none(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(UserError, match=r"bf16=True: cpu \(.*\) cannot compute in bf16") as told:
        autocast(CPU, "bf16")
    assert "--fp16" in told.value.hint
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GTX 1080")
    with pytest.raises(UserError, match=r"cuda:0 \(GTX 1080\) cannot compute in bf16"):
        autocast(CUDA, "bf16")


def test_an_overflow_of_fp16_is_made_again_with_a_smaller_scale():
    """The gradient of a loss times 2^16 may be too large for fp16: no step is lost over it."""
    model, batch = tiny_model(), random_batches(1)[0]
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 1e-2, compute=Compute(precision="fp16"))
    scale = trainer._scale
    assert scale is not None
    weight = next(model.parameters())
    weight.register_hook(lambda grad: grad * math.inf if scale.value > 2.0**12 else grad)
    result = trainer.step(batch)
    assert not result.skipped
    assert scale.value == 2.0**12
    assert math.isfinite(result.grad_norm)


def test_what_no_scale_can_mend_is_a_skipped_step():
    model, batch = tiny_model(), random_batches(1)[0]
    trainer = Trainer(model, build_optimizer(model, INNER), INNER, lambda: 1e-2, compute=Compute(precision="fp16"))
    next(model.parameters()).register_hook(lambda grad: grad * math.nan)
    assert trainer.step(batch).skipped
    assert trainer.skipped_steps == 1


def test_the_scale_grows_after_many_good_steps():
    scale = LossScale(4.0)
    for _ in range(GROWTH_STEPS - 1):
        scale.grow()
    assert scale.value == 4.0
    assert scale.shrink()
    for _ in range(GROWTH_STEPS):
        scale.grow()
    assert scale.value == 4.0, "an overflow begins the count again"
    assert scale.shrink()
    assert scale.shrink()
    assert not scale.shrink()
    assert scale.value == 1.0


def test_tf32_is_set_for_both_libraries():
    for wanted in (True, False):
        allow_tf32(wanted)
        assert torch.backends.cuda.matmul.allow_tf32 is wanted
        assert torch.backends.cudnn.allow_tf32 is wanted


def test_a_device_without_its_own_test_is_asked_by_its_kind(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, _: major <= 13)
    assert not precision._has_bf16(torch.device("mps"))
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, _: major <= 14)
    assert precision._has_bf16(torch.device("mps"))
