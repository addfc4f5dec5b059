"""What a run takes from the hub: at one commit, into the hub's cache, and never from a folder that bears the name.

Loaders of transformers and datasets look a name up on the local disk first. A manifest is written by others, so that
`Documents/private` in it must not be a folder of this machine: names are resolved here, and loaders get what was found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from peer.errors import UserError
from peer.protocol.manifest import RunManifest
from peer.protocol.pinning import is_commit, on_hub, with_commits

CONFIG_FILES = ("*.json",)
MODEL_FILES = ("*.json", "*.safetensors")
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
NESTED = "*/*"
MAX_INDEX_BYTES = 64 * 2**20
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CANNOT_REACH = (OSError, ValueError, RuntimeError, HfHubHTTPError)


def fetch(name: str, revision: str, files: tuple[str, ...]) -> str:
    """The folder with some files of a model or tokenizer.

    Args:
        name: on the hub; an absolute path is a folder of this machine, which no manifest of another one can name.
        revision: a commit, or a branch where no other peer must have the same.
        files: patterns of the files that are needed.

    Raises:
        OSError, ValueError, RuntimeError: it is not on the hub, or the hub cannot be reached.
    """
    if Path(name).is_absolute():
        return name
    folder = snapshot_download(name, revision=revision, allow_patterns=list(files), ignore_patterns=[NESTED])
    for reference in _references(Path(folder)):
        if not isinstance(reference, str) or not _PLAIN.fullmatch(reference):
            raise ValueError(f"it names the file {str(reference)[:64]!r} outside of itself")
    return folder


def hub_headers() -> dict[str, str]:
    """What the hub asks of those who read its files: the user's token, if there is one."""
    token = get_token()
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def check_download(name: str, revision: str, files: tuple[str, ...], most_bytes: int) -> None:
    """Refuse files that are larger than they can need to be, before any of them is downloaded.

    Where the hub cannot be reached there is nothing to download either.

    Raises:
        UserError: both sizes.
    """
    if Path(name).is_absolute():
        return
    try:
        found = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
    except _CANNOT_REACH:
        return
    taken = [each for each in found if "/" not in each.rfilename and any(fnmatch(each.rfilename, p) for p in files)]
    total = sum(each.size or 0 for each in taken)
    if total > most_bytes:
        raise UserError(
            f"the files of {name} are {total / 2**30:.3g} GiB; its config allows {most_bytes / 2**30:.3g} GiB",
            "name a model whose weights are those of its config, or one that holds them only once",
        )


def pin(manifest: RunManifest) -> RunManifest:
    """The manifest with the commit of each branch that it names, so that all peers take the same files.

    Raises:
        UserError: the hub cannot say which commit that is.
    """
    commits = {
        section: _commit_of(name, revision, "dataset" if section.startswith("data") else "model")
        for section, name, revision in on_hub(manifest) if not is_commit(revision)
    }  # fmt: skip
    return with_commits(manifest, commits)


def _commit_of(name: str, revision: str, kind: Literal["dataset", "model"]) -> str:
    try:
        try:
            commit = HfApi().repo_info(name, revision=revision, repo_type=kind).sha
        except _CANNOT_REACH:
            commit = Path(snapshot_download(name, revision=revision, repo_type=kind, local_files_only=True)).name
    except _CANNOT_REACH:
        commit = None
    if commit is None or not is_commit(commit):
        raise UserError(
            f"the hub does not say which commit revision {revision!r} of {name} is",
            "check the name and the network, or name the commit (40 hex digits) in the manifest",
        )
    return commit


def _references(folder: Path) -> Iterator[Any]:
    """The file names within a downloaded folder that loaders would open as paths."""
    for path in folder.glob("*.json"):
        if path.name != "tokenizer_config.json" and not path.name.endswith(".index.json"):
            continue
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"its {path.name[:64]} is larger than {MAX_INDEX_BYTES} bytes")
        try:
            document = json.loads(path.read_bytes())
        except RecursionError:
            raise ValueError(f"its {path.name[:64]} is nested too deep") from None
        if not isinstance(document, dict):
            raise ValueError(f"its {path.name[:64]} is no mapping")
        if path.name.endswith(".index.json"):
            weights = document.get("weight_map")
            yield from weights.values() if isinstance(weights, dict) else [weights]
        else:
            yield from (value for key, value in document.items() if key.endswith("_file") and value is not None)
