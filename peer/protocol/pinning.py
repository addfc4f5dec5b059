"""What a run takes from the hub: in a manifest from the network, each by its commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from peer.errors import UserError
from peer.protocol.manifest import COMMIT_PATTERN, RunManifest

_RESTART = "ask the organiser to restart the run with a current atoll-bootstrap, which writes {} there"
_SOURCE = "data.sources.{}"


def on_hub(manifest: RunManifest) -> list[tuple[str, str, str]]:
    """(section, name, revision) of everything that a run takes from the hub."""
    model, tokenizer, data = manifest.model, manifest.tokenizer, manifest.data
    named = [
        ("model", model.pretrained, model.revision), ("tokenizer", tokenizer.name, tokenizer.revision),
        *((_SOURCE.format(number), source.name, source.revision) for number, source in enumerate(data.sources)),
    ]  # fmt: skip
    return [(section, name, revision) for section, name, revision in named if name and not Path(name).is_absolute()]


def with_commits(manifest: RunManifest, commits: Mapping[str, str]) -> RunManifest:
    """The manifest with these revisions, by the sections of `on_hub`."""
    sources = tuple(
        source.model_copy(update={"revision": commits.get(_SOURCE.format(number), source.revision)})
        for number, source in enumerate(manifest.data.sources)
    )
    changed = {
        name: getattr(manifest, name).model_copy(update={"revision": commits[name]})
        for name in ("model", "tokenizer") if name in commits
    }  # fmt: skip
    return manifest.model_copy(update={**changed, "data": manifest.data.model_copy(update={"sources": sources})})


def is_commit(revision: str) -> bool:
    """Whether a revision names one state for ever, as a branch or a tag does not."""
    return re.fullmatch(COMMIT_PATTERN, revision) is not None


def check_pinned(manifest: RunManifest, origin: str) -> None:
    """Raise UserError where a manifest from the network leaves open what peers take from the hub."""
    for section, name, revision in on_hub(manifest):
        if not is_commit(revision):
            raise UserError(
                f"{origin} names {section}.revision={revision!r} of {name}, which is no commit: it may change",
                _RESTART.format("the commit"),
            )
    if manifest.model.adapter is not None and manifest.model.base is None:
        raise UserError(f"{origin} does not say which model.base its peers must have", _RESTART.format("its digest"))
    if manifest.tokenizer.kind != "bytes" and manifest.tokenizer.digest is None:
        raise UserError(f"{origin} does not say which tokenizer.digest its peers must have", _RESTART.format("it"))
