"""What `atoll join` exports at the end, as another program loads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from peer.checkpoint.export import export_model
from peer.data.tokenizer import load_tokenizer
from peer.genesis import build_initial_model
from peer.protocol.manifest import RunManifest
from peer.run.card import CARD
from peer.run.final_report import EXPORT_S, export, export_at_once
from tests.train.architectures import tiny_config

ADDRESS = "/dns4/run.example.org/tcp/31337/p2p/12D3KooWKmmM9Y5H6oezr6EDRhBYuxX24zB2Ryv6XrVcmTra4uad"
PROMPT = "def h\u00e9llo():"


@pytest.mark.parametrize("architecture", ["llama", "mistral", "mixtral", "phi3", "olmo2", "qwen2", "qwen3_moe", "gpt2"])
def test_an_exported_byte_model_goes_on_with_a_prompt(tmp_path, architecture):
    spec = {"architecture": architecture, "config": tiny_config(architecture)}
    manifest = RunManifest.model_validate({"name": "a", "model": spec})
    ours = load_tokenizer(manifest.tokenizer)
    path = export_model(build_initial_model(manifest, ours), ours, tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == ours.encode(PROMPT).tolist()
    assert model.generation_config.eos_token_id == ours.eos_id == tokenizer.eos_token_id
    out = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokenizer.decode(out[0], skip_special_tokens=True).startswith(PROMPT)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 3


def peer_of(folder: Path, name: str = "a", numel: int = 10) -> Any:
    spec = {"architecture": "llama", "config": tiny_config("llama")}
    manifest = RunManifest.model_validate({"name": name, "model": spec})
    tokenizer = load_tokenizer(manifest.tokenizer)
    return SimpleNamespace(
        settings=SimpleNamespace(output_dir=folder), manifest=manifest, model=build_initial_model(manifest, tokenizer),
        text=SimpleNamespace(tokenizer=tokenizer), mapped=SimpleNamespace(numel=numel),
        sync=SimpleNamespace(round=3, result=torch.zeros(1), swarm_tokens=9, memory=SimpleNamespace(head=None),
                             finished=False, agent=SimpleNamespace(address=ADDRESS)),
        replica=SimpleNamespace(write=lambda _: None),
    )  # fmt: skip


HOOKS: Any = SimpleNamespace(validation=[], records=[])


def test_a_later_export_of_a_run_replaces_the_earlier_and_touches_no_other(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine").touch()
    peer, other = peer_of(tmp_path), peer_of(tmp_path, "b")
    assert export(peer, HOOKS) == tmp_path / "export-2"
    assert export(other, HOOKS) == tmp_path / "export-3"
    peer.sync.round = 4
    assert export_at_once(peer, HOOKS) == tmp_path / "export-2"
    assert "| round | 4 |" in (tmp_path / "export-2" / CARD).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "export-2", "export-3"]
    assert (tmp_path / "export" / "mine").exists()


@pytest.mark.parametrize(("changes", "address", "told"), [
    ({}, ADDRESS, True), ({}, ADDRESS.replace("dns4/run.example.org", "ip4/192.168.0.7"), False), ({}, "", False),
    ({"mode": "private"}, ADDRESS, False), ({"invited": True}, ADDRESS, False),
])  # fmt: skip
def test_the_card_of_a_run_that_has_not_ended_says_how_to_join_it(tmp_path, changes, address, told):
    peer = peer_of(tmp_path)
    peer.manifest = RunManifest.model_validate({**peer.manifest.model_dump(), "trust": changes})
    peer.sync.agent.address = address
    card = (export(peer, HOOKS) / CARD).read_text()
    assert (f"| train with us | `atoll join {address} --run a` |" in card) == told
    assert ("atoll join" in card) == told
    peer.sync.finished = True
    assert "atoll join" not in (export(peer, HOOKS) / CARD).read_text()


def test_a_second_ctrl_c_skips_the_export_and_a_large_one_is_not_tried(tmp_path, caplog):
    peer = peer_of(tmp_path)

    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    peer.text.tokenizer = SimpleNamespace(save=interrupt)
    assert export_at_once(peer, HOOKS) is None
    assert "was not exported: interrupted" in caplog.text
    caplog.set_level("INFO")
    assert export_at_once(peer_of(tmp_path, numel=int(EXPORT_S * 100e6)), HOOKS) is None
    assert f"`atoll export {tmp_path}` reads the last checkpoint" in caplog.text
    assert list(tmp_path.iterdir()) == []
