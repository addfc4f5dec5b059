"""The files of a data set on the hub, as its card names them. Imports `datasets`, which takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from huggingface_hub import hf_hub_url

from peer.data.shards import DataFile
from peer.errors import UserError, did_you_mean
from peer.protocol.manifest import SourceSpec

_HUB = "hf://datasets/"
_ARCHIVES = ("zip://", "tar://", "gzip://", "bz2://", "xz://", "lz4://", "zstd://")


def hub_files(spec: SourceSpec, where: str) -> list[DataFile]:
    """The files of the source's split, sorted, at the commit that the hub names now or the manifest has named.

    Args:
        where: names the source in messages.

    Raises:
        UserError: the hub does not have it or does not answer, or its card names files outside of the data set.
    """
    try:
        with _no_progress_bars():
            # the prefix keeps `datasets` from looking for a folder of that name here
            builder = datasets.load_dataset_builder(f"{_HUB}{spec.name}", spec.subset, revision=spec.revision)
        places = _files_of(builder, str(spec.name), spec.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"cannot load {where}, split {spec.split!r}: {' '.join(str(error).split())}",
            "check the name and the network, or train on your own files with the setting train_files",
        ) from None
    return [_hub_file(str(spec.name), place) for place in places]


def _hub_file(name: str, place: str) -> DataFile:
    revision, _, path = place.removeprefix(f"{_HUB}{name}@").partition("/")
    url = hf_hub_url(name, path, repo_type="dataset", revision=revision)
    return DataFile(name=f"{name}/{path}", place=url, tag=revision, hub=True)


def _files_of(builder: datasets.DatasetBuilder, name: str, split: str) -> list[str]:
    """The files of a split; refuses any that is not in the data set's own repository: its card may name others."""
    found = builder.config.data_files or {}
    if split not in found:
        raise ValueError(f"no such split: {did_you_mean(split, list(found)) or 'it has ' + ', '.join(found)}")
    for files in found.values():
        for file in files:
            *archives, place = str(file).split("::")
            inside = place.startswith(f"{_HUB}{name}@") and ".." not in place.split("/")
            if not inside or not all(archive.startswith(_ARCHIVES) for archive in archives):
                raise ValueError(f"it names the file {str(file)[:128]!r} outside of itself")
            if archives:
                raise ValueError(f"it keeps {str(file)[:128]!r} in an archive, which cannot be streamed")
    return sorted(str(file) for file in found[split])


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep `datasets` from drawing over the console, and leave its setting as it was."""
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
