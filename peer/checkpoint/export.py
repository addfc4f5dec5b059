"""A folder that any transformers program loads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError

from peer.checkpoint.files import flush, remove_tree, unify_modes
from peer.checkpoint.inventory import CheckpointError


class SavesWeights(Protocol):
    """A model of transformers, or an adapter."""

    def save_pretrained(self, folder: Path, /) -> None:
        """Write weights (safetensors) and config."""


class SavesItself(Protocol):
    """What an export needs of a tokenizer."""

    def save(self, path: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(path)` loads."""


def export_model(
    model: SavesWeights, tokenizer: SavesItself, path: Path, card: Callable[[Path], None] | None = None,
    replace: bool = False,
) -> Path:  # fmt: skip
    """Write model (safetensors), tokenizer and what `card` adds to `path`, all of it or nothing.

    Raises:
        CheckpointError: the folder exists and is not empty, or the disk failed.
    """
    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save(folder)
        if card is not None:
            card(folder)

    return write_folder(path, write, replace)


def write_folder(path: Path, write: Callable[[Path], None], replace: bool = False) -> Path:
    """Make the folder `path` with what `write` puts into the folder that it gets: all of it or nothing.

    Args:
        replace: remove what that folder held before, once the new one is written.

    Raises:
        CheckpointError: the folder exists and is not empty, or the disk failed.
    """
    if not replace and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} exists already", "choose another folder for the export, or remove this one")
    place = path.resolve()  # of a link, what it leads to
    aside, before = (place.with_name(f"{place.name}.{word}-{os.getpid()}") for word in ("tmp", "old"))
    remove_tree(aside)
    try:
        aside.mkdir(parents=True)
        write(aside)
        unify_modes(aside)
        for file in (*aside.iterdir(), aside):
            flush(file)
        if replace and place.exists():
            place.rename(before)
        aside.rename(place)
        flush(place.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot export to {path}: {error}", "check the disk and the permissions") from error
    finally:
        if before.exists() and not place.exists():
            before.rename(place)
        remove_tree(before)
        remove_tree(aside)
    return path
