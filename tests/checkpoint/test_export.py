from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from peer.checkpoint import export
from peer.checkpoint.export import export_model, write_folder
from peer.checkpoint.inventory import CheckpointError
from peer.data.tokenizer import ByteTokenizer


def tiny_model() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "llama", vocab_size=264, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def test_an_export_loads_with_transformers_and_gives_the_same_logits(tmp_path):
    model = tiny_model().train()
    path = export_model(model, ByteTokenizer(), tmp_path / "out" / "model")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("def train():", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert ids[0].tolist() == ByteTokenizer().encode("def train():").tolist()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model.train(False)(input_ids=ids).logits)
    assert list(path.glob("*.safetensors"))
    assert not list(path.glob("*.bin"))


def test_a_replaced_export_keeps_its_link_and_leaves_nothing_behind_even_when_interrupted(tmp_path, monkeypatch):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "disk" / "model" / "first").touch()
    link = tmp_path / "export"
    link.symlink_to(tmp_path / "disk" / "model")
    write_folder(link, lambda folder: (folder / "second").touch(), replace=True)
    assert link.is_symlink()
    assert [file.name for file in link.iterdir()] == ["second"]

    def interrupted(path):
        if path == tmp_path / "disk":
            raise KeyboardInterrupt

    monkeypatch.setattr(export, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_folder(link, lambda folder: (folder / "third").touch(), replace=True)
    assert [file.name for file in link.iterdir()] == ["third"]
    rename = Path.rename

    def refused(path, to):
        if ".tmp-" in path.name:
            raise OSError("no space")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match="no space"):
        write_folder(link, lambda folder: (folder / "fourth").touch(), replace=True)
    assert [file.name for file in link.iterdir()] == ["third"]
    assert [file.name for file in (tmp_path / "disk").iterdir()] == ["model"]


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path):
    (tmp_path / "empty").mkdir()
    export_model(tiny_model(), ByteTokenizer(), tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    for taken in ("empty", "file"):
        with pytest.raises(CheckpointError, match=f"{taken} exists already"):
            export_model(tiny_model(), ByteTokenizer(), tmp_path / taken)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_export_leaves_nothing(tmp_path):
    class FullDisk:
        def save(self, path: Path) -> None:
            raise OSError(28, "No space left on device", str(path))

    with pytest.raises(CheckpointError, match=r"cannot export to .*No space left"):
        export_model(tiny_model(), FullDisk(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
