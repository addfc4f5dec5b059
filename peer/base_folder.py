"""A folder of the organiser's with a trained model, as the base of a run: `model.pretrained: FOLDER`, or `--from`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peer.errors import UserError
from peer.protocol.manifest import MAX_MANIFEST_BYTES, ORGANISER, ModelSpec, RunManifest, parse_manifest, read_manifest
from peer.protocol.yaml_text import parse_yaml, read_limited

CONFIG_FILE, ADAPTER_FILE, TOKENIZER_FILE = "config.json", "adapter_config.json", "tokenizer.json"
_BYTES = 259  # entries of a vocabulary of bytes


def read_organisers(path: Path, base: Path | None = None) -> RunManifest:
    """The manifest in the organiser's file.

    Args:
        base: a folder with a trained model, in place of the file's `model`; its tokenizer too, where the file names
            none.

    Raises:
        UserError: what `read_manifest` refuses, or a folder that no run can begin with.
    """
    if base is None:
        manifest = read_manifest(path, ORGANISER)
    else:
        text = read_limited(path, MAX_MANIFEST_BYTES, "manifest", "give the path of a YAML file")
        try:
            document = parse_yaml(text) or {}
        except ValueError as error:
            raise UserError(f"manifest {path} cannot be read: {error}") from None
        if isinstance(document, dict):
            document |= _taken_from(base.absolute(), document)
        manifest = parse_manifest(json.dumps(document), f"{path} from {base}", ORGANISER)
    if (folder := folder_of(manifest.model)) is not None:
        _check(folder, manifest.model)
    return manifest


def folder_of(spec: ModelSpec) -> Path | None:
    """The folder of this machine that a model begins with."""
    return Path(spec.pretrained) if spec.pretrained is not None and Path(spec.pretrained).is_absolute() else None


def _taken_from(base: Path, document: dict[str, Any]) -> dict[str, Any]:
    said = document.get("model")
    adapter = said.get("adapter") if isinstance(said, dict) else None
    taken: dict[str, Any] = {"model": {"pretrained": str(base), **({"adapter": adapter} if adapter else {})}}
    if "tokenizer" not in document and (base / TOKENIZER_FILE).is_file() and not holds_bytes(base):
        taken["tokenizer"] = {"kind": "folder", "name": str(base)}
    return taken


def holds_bytes(folder: Path) -> bool:
    """Whether an export has the tokenizer of bytes, for which a manifest needs no files, and nothing added to it."""
    if (folder / "chat_template.jinja").exists():
        return False
    try:
        document = json.loads((folder / TOKENIZER_FILE).read_bytes())
        added = [token["id"] for token in document["added_tokens"]]
        model = document["model"]
        return len(model["vocab"]) == _BYTES and not model.get("merges") and max(added, default=0) < _BYTES
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _check(folder: Path, spec: ModelSpec) -> None:
    if (folder / ADAPTER_FILE).is_file():
        raise UserError(
            f"{folder} holds an adapter, and not the model that it stands on",
            f"make one model of them: atoll export {folder} --merged --to DIR",
        )
    if not (folder / CONFIG_FILE).is_file() or not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model.pretrained={folder}: holds no model: {CONFIG_FILE} and weights in safetensors are needed",
            "give a folder that `atoll export` or `save_pretrained` has written",
        )
    if spec.adapter is not None:
        raise UserError(
            f"an adapter stands on a model that every peer loads; {folder} is on this machine alone",
            "put it on the hub (atoll export FOLDER --push-to-hub NAME) and name it there, or train the whole model: "
            "without model.adapter it goes out through the swarm",
        )
