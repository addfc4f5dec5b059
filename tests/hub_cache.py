"""A model in a folder that the hub's client takes for its cache: what a peer has downloaded, without a network."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from peer.data.tokenizer import ByteTokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put(cache: Path, name: str, model: PreTrainedModel) -> Path:
    """The folder of the model `name` at COMMIT, the branch main, with a tokenizer of bytes."""
    repo = cache / f"models--{name.replace('/', '--')}"
    folder = repo / "snapshots" / COMMIT
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return folder
