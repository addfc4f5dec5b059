"""The base of an adapter in 4 bits: what is refused, what bitsandbytes is asked for, what it takes."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch

from peer.errors import UserError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import RunManifest
from peer.run.hardware import compute_of
from peer.settings import load_settings
from peer.train import four_bit
from peer.train.compute import Compute
from peer.train.four_bit import check_four_bit, count_values, four_bit_config
from peer.train.memory import Footprint, ModelSize

CPU, CUDA, MILLION = torch.device("cpu"), torch.device("cuda", 0), 1_000_000


def manifest(**model: object) -> RunManifest:
    named = {"pretrained": "o/base", "revision": "0" * 40, **model}
    return RunManifest.model_validate({"name": "a", "model": named, "recipe": {"name": "diloco"}})


ADAPTED = manifest(adapter={"r": 8})


def test_what_cannot_have_a_base_in_4_bits_is_refused_with_the_reason(monkeypatch):
    settings = load_settings({"load_in_4bit": True, "device": "cpu"}, None, {})
    with pytest.raises(UserError, match=r"load_in_4bit=True: it needs a CUDA card, and the device is cpu") as caught:
        compute_of(settings, RunPlan.of(ADAPTED))
    assert caught.value.hint == "leave it off"
    with pytest.raises(UserError, match="this run trains the whole model"):
        compute_of(settings, RunPlan.of(manifest()))
    with pytest.raises(UserError, match="the peer has 2 devices"):
        check_four_bit(ADAPTED.model, CUDA, 2)
    monkeypatch.setattr(four_bit.importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else name)
    with pytest.raises(UserError, match="bitsandbytes is not installed") as caught:
        check_four_bit(ADAPTED.model, CUDA, 1)
    assert "pip install '.[bitsandbytes]'" in caught.value.hint
    monkeypatch.setattr(four_bit.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    check_four_bit(ADAPTED.model, CUDA, 1)
    assert not compute_of(load_settings({"device": "cpu"}, None, {}), RunPlan.of(ADAPTED)).four_bit


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_bitsandbytes_is_asked_for_normal_floats_that_multiply_in_the_peers_precision(precision, dtype):
    config = four_bit_config(precision)
    assert (config.load_in_4bit, config.load_in_8bit) == (True, False)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
    assert config.bnb_4bit_compute_dtype == dtype
    assert config.llm_int8_skip_modules is None  # then the head stays as it is


def test_the_fit_counts_half_a_byte_of_the_base_and_its_embeddings_in_full():
    size = ModelSize(parameters=101 * MILLION, frozen=100 * MILLION, vocab_size=20_000, hidden_size=1000, layers=4)
    whole, small = (Footprint.of(size, 8, CUDA, Compute(four_bit=four_bit)) for four_bit in (False, True))
    of_adapter = 24 * MILLION
    assert whole.training == of_adapter + 400 * MILLION
    assert small.training == of_adapter + 80 * MILLION + int(80 * MILLION * 4.127 / 8)
    assert small.agent == whole.agent == 20 * MILLION


def test_packed_values_are_counted_as_they_were():
    packed = torch.zeros(32, 1, dtype=torch.uint8)
    assert count_values(packed) == 32
    packed.quant_state = type("State", (), {"shape": torch.Size([8, 8])})
    assert count_values(packed) == 64
