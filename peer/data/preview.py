"""What a peer would read of a manifest's sources, from a sample of each."""

from __future__ import annotations

import os
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from peer.data.batches import Batches, Resident
from peer.data.encode import ID_MASK, INNER, DocumentEncoder
from peer.data.formats import read_rows
from peer.data.packing import PackedTokens
from peer.data.problems import FileProblem, SourceBusy
from peer.data.shards import is_held_out, named, open_file, text_or_reason
from peer.data.sources import TextSource, list_sources
from peer.data.tokenizer import Tokenizer, load_tokenizer
from peer.data.web import WebFile
from peer.errors import UserError
from peer.hub import hub_headers
from peer.printable import printable
from peer.protocol.manifest import RunManifest

MAX_SHOWN_CHARS = 600
BOUNDARY = " | "


@dataclass
class SourcePreview:
    """One source.

    Attributes:
        files: of the source.
        documents, held_out: of the sample, for training and for validation.
        left_out: why -> how many rows.
        problems: files that cannot be read, or not to their end.
        text_bytes, tokens, seconds: of the sample, read and tokenised.
        share: of the bytes of all files that were read; None if their sizes are not known.
        sequence: a packed sequence as text.
    """

    name: str
    weight: float
    files: int
    documents: int = 0
    held_out: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    text_bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    share: float | None = None
    sequence: str = ""

    @property
    def tokens_in_all(self) -> int | None:
        """An estimate: the files are taken to be alike."""
        return None if not self.share else round(self.tokens / min(1.0, self.share))

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {**asdict(self), "left_out": dict(self.left_out), "tokens_in_all": self.tokens_in_all}

    def in_words(self) -> str:
        """Some lines for a terminal."""
        total = self.documents + self.held_out
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items()) or "nothing"
        rate = self.tokens / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.name}: {self.files:,} file{'s' if self.files != 1 else ''}, weight {self.weight:g}",
            f"  documents   {total:,} read, {self.held_out:,} of them for validation",
            f"  left out    {left_out}",
            f"  tokens      {self.tokens:,} of {self.text_bytes / 1e6:.1f} MB of text, {rate:,.0f} a second here",
            f"  in all      {self._in_all()}",
            *(f"  problem     {problem}" for problem in self.problems),
        ]
        shown = textwrap.wrap(self.sequence, 100) or ["no whole sequence in the sample"]
        return "\n".join([*lines, "  a sequence  " + "\n              ".join(shown)])

    def _in_all(self) -> str:
        if self.tokens_in_all is None:
            return "not known: the servers do not say how large their files are"
        if self.share is not None and self.share >= 1.0:
            return f"{self.tokens_in_all:,} tokens"
        return f"about {self.tokens_in_all:,} tokens, estimated from {self.share:.2%} of the bytes"


def preview(
    manifest: RunManifest, train_files: tuple[str, ...], megabytes: float, *, private_urls: bool = False
) -> list[SourcePreview]:
    """A preview of each source.

    Args:
        megabytes: of text to read of each.

    Raises:
        UserError: a source that does not exist or cannot be reached, or no text at all.
    """
    if not megabytes > 0.0:
        raise UserError(f"--megabytes {megabytes:g}: must be above 0", "4 are read in seconds")
    tokenizer = load_tokenizer(manifest.tokenizer)
    found = [
        _SourceSample(source, manifest, tokenizer, int(megabytes * 1e6)).take()
        for source in list_sources(manifest.data, train_files, private_urls=private_urls)
    ]
    if not any(one.documents + one.held_out for one in found):
        what = "; ".join(problem for one in found for problem in one.problems[:3]) or "every row is left out"
        raise UserError(f"the data set is empty: {what}", "see `atoll data preview --help` for what is read")
    return found


class _SourceSample:
    def __init__(self, source: TextSource, manifest: RunManifest, tokenizer: Tokenizer, most_bytes: int) -> None:
        self._source, self._manifest, self._tokenizer, self._most_bytes = source, manifest, tokenizer, most_bytes
        self._encoder = DocumentEncoder(tokenizer.encoder(), manifest.data.train_on)
        self._read = self._size = 0
        files = sum(map(len, source.shards))
        self._found = SourcePreview(name=printable(source.name), weight=source.weight, files=files)
        self._pieces: list[np.ndarray] = []

    def take(self) -> SourcePreview:
        found, began = self._found, time.perf_counter()
        for value in self._values():
            text, reason = text_or_reason(value)
            if reason is not None:
                found.left_out[reason] += 1
                continue
            held_out = is_held_out(text, self._manifest.data.validation_fraction)
            found.documents, found.held_out = found.documents + (not held_out), found.held_out + held_out
            found.text_bytes += len(text.encode("utf-8", "replace"))
            (tokens,) = self._encoder.tokens_of([text])
            found.tokens += len(tokens)
            if not held_out:
                self._pieces.append(tokens)
            if found.text_bytes >= self._most_bytes:
                found.share = self._read / self._size if self._size else None
                break
        else:
            found.share = 1.0
        found.seconds = time.perf_counter() - began
        found.left_out += self._encoder.left_out
        found.sequence = self._sequence()
        return found

    def _values(self) -> Iterator[Any]:
        """Values of the files in their order; counts the bytes that were read, of all there are."""
        files = [file for shard in self._source.shards for file in shard]
        sizes = [Path(file.place).stat().st_size for file in files if "://" not in file.place]
        self._size = sum(sizes)
        for number, file in enumerate(files):
            headers = hub_headers() if file.hub else {}
            before = self._read
            try:
                with open_file(file.model_copy(update={"sha256": None}), headers) as raw:
                    size = _size_of(raw)
                    if not sizes:  # the others are taken to be as large as the first
                        self._size = size * len(files)
                        sizes = [size]
                    for value, _ in read_rows(raw, file.name, self._source.column, 0):
                        self._read = before + min(size, raw.tell())
                        yield value
                    self._read = before + size
            except (FileProblem, SourceBusy, OSError) as error:
                self._found.problems.append(printable(named(file, str(error))))
                if number >= 8 and not self._found.documents:
                    return

    def _sequence(self) -> str:
        length = self._manifest.data.sequence_length
        packed = PackedTokens(np.concatenate(self._pieces) if self._pieces else np.empty(0, dtype=np.int32), length)
        if not len(packed):
            return ""
        ((batch, _),) = islice(Batches([Resident(packed)], 1, self._manifest.seed), 1)
        tokens, end = batch[0].numpy().astype(np.int32), self._tokenizer.eos_id
        ends = np.flatnonzero((tokens & (ID_MASK | INNER)) == end)
        parts = [self._tokenizer.decode(part[part != end]) for part in np.split(tokens & ID_MASK, ends)]
        return printable(BOUNDARY.join(parts), MAX_SHOWN_CHARS)


def _size_of(raw: Any) -> int:
    inner = getattr(raw, "raw", raw)
    if isinstance(inner, WebFile):
        return inner.size or 0
    return os.fstat(raw.fileno()).st_size
