"""Documents of sources that are small and on this machine, in memory, and their split."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from peer.data.chat import Conversation
from peer.data.shards import Problems, is_held_out, shard_rows, text_or_reason
from peer.data.sources import TextSource, list_sources
from peer.errors import UserError
from peer.hub import hub_headers
from peer.protocol.manifest import DataSpec

log = logging.getLogger(__name__)
MAX_NAMED = 8


def documents_of(source: TextSource, problems: Problems, left_out: Counter[str]) -> Iterator[str]:
    """The documents of a source one after the other; counts the skipped ones."""
    for shard in source.shards:
        for value, _ in shard_rows(shard, source.column, 0, hub_headers() if shard[0].hub else {}, problems):
            text, reason = text_or_reason(value)
            if reason is None:
                yield text
            else:
                left_out[reason] += 1


def read_documents(source: TextSource, most_bytes: int | None = None) -> list[str]:
    """All documents, or the first ones of so many bytes; the log counts the skipped ones.

    Raises:
        UserError: there is none.
    """
    problems = Problems()
    left_out: Counter[str] = Counter()
    documents = []
    read = 0
    for text in documents_of(source, problems, left_out):
        documents.append(text)
        read += len(text)
        if most_bytes is not None and read >= most_bytes:
            break
    report(source.name, problems.lines, left_out)
    if not documents:
        raise UserError(f"the data set is empty: {source.name}", source.hint)
    return documents


def first_held_out(source: TextSource, fraction: float, enough: int, size: Callable[[str], int]) -> list[str]:
    """The first documents for validation of a source, as `split_documents` gives them, until their sizes are enough.

    Raises:
        UserError: there is none.
    """
    documents, found, total = [], [], 0
    for text in documents_of(source, Problems(), Counter()):
        documents.append(text)
        if is_held_out(text, fraction):
            found.append(text)
            total += size(text)
        if total >= enough:
            return found
    if not documents:
        raise UserError(f"the data set is empty: {source.name}", source.hint)
    return split_documents(documents, fraction)[1]


def texts_for(spec: DataSpec, train_files: tuple[str, ...], *, validation: bool) -> Iterator[str]:
    """The text of the training documents of all sources, or of those for validation, one after the other.

    Raises:
        UserError: a source that does not exist, or no document in all of them.
    """
    seen = False
    for source in list_sources(spec, train_files):
        if source.resident:
            seen = True
            yield from map(_text_of, split_documents(read_documents(source), spec.validation_fraction)[validation])
            continue
        problems, left_out = Problems(), Counter[str]()
        for text in documents_of(source, problems, left_out):
            seen = True
            if is_held_out(text, spec.validation_fraction) == validation:
                yield _text_of(text)
        report(source.name, problems.lines, left_out)
    if not seen:
        raise UserError(f"the data set is empty: {source.name}", source.hint)


def report(name: str, problems: Sequence[str], left_out: Counter[str]) -> None:
    """Warn of what could not be read, and of how much."""
    for problem in problems[:MAX_NAMED]:
        log.warning("left out: %s", problem)
    if len(problems) > MAX_NAMED:
        log.warning("left out: %d more files of %s", len(problems) - MAX_NAMED, name)
    if left_out:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        log.warning("rows left out of %s: %s", name, counts)


def split_documents(documents: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """(train, validation), the same on every machine: by a hash of each document's content.

    Both sides get at least one document, if there are two that differ. A lone document is cut by position instead: its
    last `fraction` of characters validates.

    Raises:
        UserError: a lone document too short to cut.
    """
    if len(set(documents)) == 1:
        return _cut(documents[0], fraction)
    validation = {text for text in documents if is_held_out(text, fraction)}
    if not validation:
        validation = {min(documents, key=_rank)}
    elif len(validation) == len(set(documents)):
        validation.remove(max(documents, key=_rank))
    return [text for text in documents if text not in validation], [text for text in documents if text in validation]


def _text_of(document: str) -> str:
    return document.text if isinstance(document, Conversation) else document


def _rank(text: str) -> tuple[bytes, str]:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest(), text


def _cut(text: str, fraction: float) -> tuple[list[str], list[str]]:
    if len(text) < 2 or isinstance(text, Conversation):
        what = "conversation" if isinstance(text, Conversation) else f"document of {len(text)} characters"
        raise UserError(
            f"the data set is one {what}; a validation split needs two, or a longer text",
            "add text, or more documents",
        )
    cut = min(max(int(len(text) * (1.0 - fraction)), 1), len(text) - 1)
    return [text[:cut]], [text[cut:]]
