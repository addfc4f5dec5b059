"""The folder of one demo: fresh each time, locked while it runs, with the manifest of its run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import yaml

from peer.errors import UserError
from peer.protocol.manifest import parse_manifest
from peer.protocol.yaml_text import parse_yaml
from peer.system.file_lock import lock_folder
from peer.system.preflight import check_output_dir

LOCK_NAME = "demo.lock"
MANIFEST_NAME = "quickstart.yaml"


def manifest_text(rounds: int, seed: int | None) -> str:
    """The quickstart manifest as YAML, ending after `rounds`, with another seed if one is given."""
    document = parse_yaml(files("peer.demo").joinpath(MANIFEST_NAME).read_bytes())
    document.setdefault("rounds", {})["total"] = rounds
    if seed is not None:
        document["seed"] = seed
    text: str = yaml.safe_dump(document, sort_keys=False)
    parse_manifest(text, "of the demo")
    return text


@contextlib.contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """An empty folder at `path`, locked while the context lasts. An earlier demo's is moved to `path`-1, `path`-2, ...

    Raises:
        UserError: it holds something that no demo wrote, cannot be written to, or a demo is running in it.
    """
    if os.path.isdir(path) and any(path.iterdir()):  # false, too, for a name that no system takes
        _move_away(path)
    check_output_dir(path)
    with lock_folder(path, "output_dir", LOCK_NAME):
        yield path


def _move_away(path: Path) -> None:
    if not (path / LOCK_NAME).is_file():
        raise UserError(
            f"output_dir={path}: holds files that are not of an earlier demo", "Choose another --output-dir."
        )
    with lock_folder(path, "output_dir", LOCK_NAME):
        number = 1
        while os.path.lexists(path.with_name(f"{path.name}-{number}")):
            number += 1
        path.rename(path.with_name(f"{path.name}-{number}"))

