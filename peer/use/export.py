"""A trained model as a folder for transformers, and on the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import HfApi

from peer.checkpoint.export import export_model
from peer.errors import UserError
from peer.run.card import write_card
from peer.train.adapter import has_adapter, merge_adapter, what_to_save
from peer.use.trained import Trained

_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(trained: Trained, path: Path, dtype: str, *, merged: bool = False) -> Path:
    """Write weights, config, tokenizer and card, all or nothing.

    Args:
        merged: an adapter with the model that it stands on, as one model.

    Raises:
        UserError: `merged`, and there is no adapter.
        CheckpointError: the folder is not empty, or the disk failed.
    """
    if merged:
        if not has_adapter(trained.model):
            raise UserError("--merged: this model has no adapter", "leave it out: the export is a whole model")
        merge_adapter(trained.model)
    model = trained.model.to(_TORCH[dtype])  # type: ignore[arg-type]

    def card(folder: Path) -> None:
        if trained.manifest is not None and trained.after is not None:
            write_card(folder, trained.manifest, {
                "round": f"{trained.after.round:,}", "lineage": f"`{trained.after.lineage_id}`", "weights": dtype,
            }, adapter=has_adapter(model), address=trained.after.address)  # fmt: skip

    return export_model(what_to_save(model), trained.tokenizer, path, card)


def upload(path: Path, name: str) -> str:
    """Put an exported folder on the hub; -> its address.

    Raises:
        UserError: no token, no such place, no network.
    """
    api = HfApi()
    try:
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=path, commit_message="Export of an Atoll run")
        return str(address)
    except Exception as error:  # the hub's client lets those of its HTTP library through
        reason = " ".join(str(error).split())[:300]
        hint = f"the model is in {path}; check the name, log in to the hub, and then: hf upload {name} {path}"
        raise UserError(f"{name} could not be uploaded: {reason}", hint) from None
