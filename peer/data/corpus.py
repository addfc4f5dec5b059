"""The text of one peer: what it trains on, source by source, and what it validates on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peer.data.batches import Resident, WindowSource
from peer.data.encode import TextEncoder
from peer.data.packing import PackedTokens, check_enough, pack_documents
from peer.data.resident import read_documents, split_documents
from peer.data.segments import SEGMENT_BYTES, SegmentCache, SegmentRule, encoder_id_of
from peer.data.sources import TextSource, list_sources
from peer.data.streamed import Reading, StreamedSource
from peer.data.tokenizer import Tokenizer
from peer.data.worker import Beginning
from peer.data.workers import Workers
from peer.protocol import hashing
from peer.protocol.manifest import DataSpec

CACHE_BYTES = 4 << 30
WAIT_S = 0.1


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How this machine reads.

    Attributes:
        train_files: the peer's own, in place of the run's sources.
        cache: folder of tokenised segments.
        workers: processes that read and tokenise.
        segment_bytes: of text in a segment.
        hub_headers: sent to the hub, and to no other server.
        private_urls: the run's files may lie on this machine's network.
    """

    train_files: tuple[str, ...] = ()
    cache: Path
    cache_bytes: int = CACHE_BYTES
    workers: int = 1
    segment_bytes: int = SEGMENT_BYTES
    hub_headers: Mapping[str, str]
    private_urls: bool = False


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sources of windows, in the order of the manifest.

    Attributes:
        digest: of what the order of the data depends on, 64 hex digits.
        tokens_digest: the same of the tokens.
    """

    sources: Sequence[WindowSource]
    validation: PackedTokens
    digest: str
    tokens_digest: str
    workers: Workers | None = None

    def close(self) -> None:
        """End the processes that read."""
        if self.workers is not None:
            self.workers.close()


def open_corpus(
    spec: DataSpec, tokenizer: Tokenizer, options: ReadingOptions, least_windows: int,
    stopping: Callable[[], bool] = lambda: False,
) -> Corpus:
    """The text of this peer; small local sources are read here, the others while they are trained on.

    Args:
        least_windows: one batch.
        stopping: whether to give up waiting for the first text.

    Raises:
        UserError: a source that does not exist or cannot be reached, or too little text.
    """
    sources = list_sources(spec, options.train_files, private_urls=options.private_urls)
    encoder = tokenizer.encoder()
    workers = None
    if not all(source.resident for source in sources):
        beginning = Beginning(encoder=dict(encoder.document), hub_headers=dict(options.hub_headers))
        options.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        workers = Workers(beginning, options.workers, options.cache)
    try:
        return _Opening(spec, tokenizer, encoder, options, workers, stopping).open(sources, least_windows)
    except BaseException:
        if workers is not None:
            workers.close()
        raise


class _Opening:
    def __init__(
        self, spec: DataSpec, tokenizer: Tokenizer, encoder: TextEncoder, options: ReadingOptions,
        workers: Workers | None, stopping: Callable[[], bool],
    ) -> None:
        self._spec, self._tokenizer, self._stopping, self._workers = spec, tokenizer, stopping, workers
        self._encoder_id = encoder_id_of(encoder)
        self._segment_bytes = options.segment_bytes
        self._reading = None
        if workers is not None:
            cache = SegmentCache(options.cache, options.cache_bytes)
            self._reading = Reading(workers, cache, self._encoder_id, spec.sequence_length)
        self._text = hashing.Hasher()

    def open(self, sources: Sequence[TextSource], least_windows: int) -> Corpus:
        total = sum(source.weight for source in sources)
        trained: list[WindowSource] = []
        held_out: list[np.ndarray] = []
        for number, source in enumerate(sources):
            wanted = max(self._spec.sequence_length + 1, round(self._spec.validation_tokens * source.weight / total))
            windows, tokens = (self._resident if source.resident else self._streamed)(number, source, wanted)
            trained.append(windows)
            held_out += tokens
        length = self._spec.sequence_length
        end = self._tokenizer.eos_id if self._spec.document_mask else None
        packed = np.concatenate(held_out) if held_out else np.empty(0, dtype=np.int32)
        validation = PackedTokens(packed, length, end)
        if len(trained) == 1 and isinstance(alone := trained[0], Resident):
            check_enough("training", alone.windows, least_windows)
        check_enough("validation", validation, 1)
        text = self._text.digest().hex()
        return Corpus(
            sources=trained, validation=validation, digest=text,
            tokens_digest=hashing.digest(f"{text} {self._encoder_id}".encode()).hex(), workers=self._workers,
        )  # fmt: skip

    def _resident(self, number: int, source: TextSource, wanted: int) -> tuple[WindowSource, list[Any]]:  # noqa: ARG002
        train, validation = split_documents(read_documents(source), self._spec.validation_fraction)
        for text in train:
            data = text.encode("utf-8", "surrogatepass")
            self._text.update(len(data).to_bytes(8, "big") + data)
        length = self._spec.sequence_length
        windows = Resident(pack_documents(train, self._tokenizer, length), source.weight)
        return windows, [pack_documents(validation, self._tokenizer, length).tokens[: wanted + 1]]

    def _streamed(self, number: int, source: TextSource, wanted: int) -> tuple[WindowSource, list[Any]]:
        assert self._reading is not None
        files = [[file.model_dump() for file in shard] for shard in source.shards]
        rule = SegmentRule(
            column=source.column, fraction=self._spec.validation_fraction, limit_bytes=self._segment_bytes
        )
        self._text.update(json.dumps([files, rule.model_dump()], sort_keys=True).encode())
        streamed = StreamedSource(self._reading, source.name, number, source.shards, rule, source.weight)
        return streamed, [tokens[: wanted + 1] for tokens in streamed.held_out(wanted, self._wait)]

    def _wait(self) -> bool:
        time.sleep(WAIT_S)
        return self._stopping()

