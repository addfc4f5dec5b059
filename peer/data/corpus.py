"""The text of one peer: what it trains on, source by source, and what it validates on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peer.data.batches import Resident, WindowSource
from peer.data.blocks import ResidentBlocks, TextBlocks
from peer.data.encode import DocumentEncoder, TextEncoder
from peer.data.packing import PackedTokens, check_enough, pack_documents
from peer.data.resident import first_held_out, read_documents, report, split_documents
from peer.data.seeded import SeededSegments, SeededShards
from peer.data.segments import SEGMENT_BYTES, SegmentCache, SegmentRule, encoder_id_of
from peer.data.shareable import SharedText
from peer.data.shared import SharedSources, SharedWindows, shard_count
from peer.data.sources import TextSource, list_sources
from peer.data.streamed import PATIENCE_S, Reading, StreamedSource
from peer.data.stretches import StreamBlocks
from peer.data.tokenizer import Tokenizer
from peer.data.worker import Beginning
from peer.data.workers import Workers
from peer.errors import UserError
from peer.protocol import hashing
from peer.protocol.data_spec import SharedData
from peer.protocol.manifest import DataSpec
from peer.system.clock import awake_clock

log = logging.getLogger(__name__)

CACHE_BYTES = 4 << 30
WAIT_S = 0.1
_OWN_VALIDATION = "the run's text for validation cannot be read, so this peer validates on its own files: %s"


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How this peer shares the run's data out with others: its identity, the run's seed, and the least of a shard."""

    peer_id: str
    run_seed: int
    least_tokens: int


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How this machine reads.

    Attributes:
        train_files: the peer's own, in place of the run's sources.
        validates: on the run's sources, whatever it trains on.
        cache: folder of tokenised segments.
        workers: processes that read and tokenise.
        segment_bytes: of text in a segment.
        hub_headers: sent to the hub, and to no other server.
        private_urls: the run's files may lie on this machine's network.
        sharing: None: all is read, in an order of this peer's own.
    """

    train_files: tuple[str, ...] = ()
    validates: bool = True
    cache: Path
    cache_bytes: int = CACHE_BYTES
    workers: int = 1
    segment_bytes: int = SEGMENT_BYTES
    hub_headers: Mapping[str, str]
    private_urls: bool = False
    sharing: Sharing | None = None


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sources of windows, in the order of the manifest.

    Attributes:
        digest: of what the order of the data depends on, 64 hex digits.
        tokens_digest: the same of the tokens.
    """

    sources: Sequence[WindowSource | SharedWindows]
    validation: PackedTokens
    digest: str
    tokens_digest: str
    workers: Workers | None = None

    @property
    def shared(self) -> SharedSources:
        """Those of them that peers share out."""
        shared = {number: one for number, one in enumerate(self.sources) if isinstance(one, SharedWindows)}
        streams = (one.seeded for one in self.sources if isinstance(one, StreamedSource) and one.seeded is not None)
        return SharedSources(shared, len(self.sources), streams)

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
    validating = _of_the_run(spec, options) if options.train_files and options.validates else ()
    encoder = tokenizer.encoder()
    workers = None
    if not all(source.resident for source in (*sources, *validating)):
        beginning = Beginning(encoder=dict(encoder.document), hub_headers=dict(options.hub_headers))
        options.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        workers = Workers(beginning, options.workers, options.cache)
    try:
        return _Opening(spec, tokenizer, encoder, options, workers, stopping).open(sources, validating, least_windows)
    except BaseException:
        if workers is not None:
            workers.close()
        raise


def _of_the_run(spec: DataSpec, options: ReadingOptions) -> Sequence[TextSource]:
    """The sources that all peers validate on; none if they cannot be reached: the peer then trains without them."""
    try:
        return list_sources(spec, (), private_urls=options.private_urls)
    except UserError as error:
        log.warning(_OWN_VALIDATION, error)
        return ()


class _Opening:
    def __init__(
        self, spec: DataSpec, tokenizer: Tokenizer, encoder: TextEncoder, options: ReadingOptions,
        workers: Workers | None, stopping: Callable[[], bool],
    ) -> None:
        self._spec, self._tokenizer, self._stopping, self._workers = spec, tokenizer, stopping, workers
        self._encoder_id = encoder_id_of(encoder)
        self._documents = DocumentEncoder(encoder, spec.train_on)
        self._segment_bytes = options.segment_bytes
        self._reading = None
        if workers is not None:
            cache = SegmentCache(options.cache, options.cache_bytes)
            self._reading = Reading(workers, cache, self._encoder_id, spec.sequence_length)
        self._text, self._order = SharedText(), hashing.Hasher()
        self._sharing, self._own_files = options.sharing, bool(options.train_files)

    def open(
        self, sources: Sequence[TextSource], validating: Sequence[TextSource], least_windows: int
    ) -> Corpus:
        """Read small sources whole, and the documents for validation.

        Args:
            sources: trained on; their held-out documents validate if there are no others.
            validating: the run's sources, of a peer that trains on its own files.
        """
        trained: list[WindowSource] = []
        held_out: list[np.ndarray] = []
        for number, (source, wanted) in enumerate(self._shares(sources)):
            windows, tokens = (self._resident if source.resident else self._streamed)(number, source, wanted)
            trained.append(windows)
            held_out += tokens
        if validating:
            held_out = self._held_out_of_the_run(validating) or held_out
        length = self._spec.sequence_length
        end = self._tokenizer.eos_id if self._spec.document_mask else None
        packed = np.concatenate(held_out) if held_out else np.empty(0, dtype=np.int32)
        validation = PackedTokens(packed, length, end)
        if len(trained) == 1 and isinstance(alone := trained[0], Resident):
            check_enough("training", alone.windows, least_windows)
        check_enough("validation", validation, 1)
        text = hashing.digest(f"{self._text.digest} {self._order.digest().hex()}".encode()).hex()
        return Corpus(
            sources=self._shared_out(trained), validation=validation, digest=text,
            tokens_digest=hashing.digest(f"{text} {self._encoder_id}".encode()).hex(), workers=self._workers,
        )  # fmt: skip

    def _shares(self, sources: Sequence[TextSource]) -> Iterator[tuple[TextSource, int]]:
        """Each source with the tokens that validate."""
        total = sum(source.weight for source in sources)
        for source in sources:
            share = round(self._spec.validation_tokens * source.weight / total)
            yield source, max(self._spec.sequence_length + 1, share)

    def _held_out_of_the_run(self, sources: Sequence[TextSource]) -> list[np.ndarray]:
        given_up = awake_clock() + PATIENCE_S
        held_out: list[np.ndarray] = []
        for number, (source, wanted) in enumerate(self._shares(sources)):
            if source.resident:
                rule = self._spec.validation_fraction
                documents = first_held_out(source, rule, wanted, lambda text: len(self._packed([text])))
                held_out.append(self._packed(documents)[: wanted + 1])
            else:
                streamed, _ = self._stream(number, source)
                found = streamed.held_out(wanted, lambda: self._wait() or awake_clock() > given_up)
                held_out += [tokens[: wanted + 1] for tokens in found]
        if not any(map(len, held_out)):
            log.warning(_OWN_VALIDATION, f"no source answered within {PATIENCE_S:.0f} s")
            return []
        return held_out

    def _packed(self, documents: Sequence[str]) -> np.ndarray:
        return pack_documents(documents, self._documents, self._spec.sequence_length).tokens

    def _resident(self, number: int, source: TextSource, wanted: int) -> tuple[WindowSource, list[Any]]:
        train, validation = split_documents(read_documents(source), self._spec.validation_fraction)
        self._text.add(number, train)
        windows = Resident(pack_documents(train, self._documents, self._spec.sequence_length), source.weight)
        held_out = self._packed(validation)[: wanted + 1]
        report(source.name, [], self._documents.left_out)
        self._documents.left_out.clear()
        return windows, [held_out]

    def _shared_out(self, sources: Sequence[WindowSource]) -> list[WindowSource | SharedWindows]:
        """The sources as peers share them out, where they do: leased if this is the text of the manifest."""
        sharing, spec = self._sharing, self._spec
        shared = spec.shared if self._fits(spec.shared, sources) else None
        if sharing is None or spec.assignment == "free" or (self._own_files and shared is None):
            return list(sources)
        if spec.shared is not None and shared is None:
            log.warning("this machine's text is not the organiser's: it takes part without leases")
        return [self._shared_source(number, source, shared, sharing) for number, source in enumerate(sources)]

    def _shared_source(
        self, number: int, source: WindowSource, cut: SharedData | None, sharing: Sharing
    ) -> WindowSource | SharedWindows:
        shards = cut.shards[number] if cut is not None else 0
        leased, start = shards > 0, sum(cut.shards[:number]) if cut is not None else 0
        blocks: TextBlocks | None = None
        if isinstance(source, Resident):
            length, windows = self._spec.sequence_length, source.windows
            shards = shards or shard_count(len(windows), length, self._spec.shard_sequences, sharing.least_tokens)
            blocks = ResidentBlocks(windows, shards, [sharing.run_seed, start])
        elif isinstance(source, StreamedSource) and cut is not None and leased:
            blocks = StreamBlocks(source, shards, cut)
        elif isinstance(source, StreamedSource):
            source.seeded = SeededSegments(sharing.run_seed, sharing.peer_id, number)
        if blocks is None:
            return source
        seeded = SeededShards(sharing.run_seed, sharing.peer_id, shards)
        return SharedWindows(blocks, source.weight, start, seeded, leased=leased)

    def _fits(self, shared: SharedData | None, sources: Sequence[WindowSource]) -> bool:
        """Whether this is the text that the organiser has cut, and each shard has a window, or its place in a file."""
        return shared is not None and shared.digest == self._text.digest and all(
            0 < shards <= len(source.windows) if isinstance(source, Resident) else shards % source.num_files == 0
            for source, shards in zip(sources, shared.shards, strict=True)
            if isinstance(source, Resident | StreamedSource)
        )  # fmt: skip

    def _streamed(self, number: int, source: TextSource, wanted: int) -> tuple[WindowSource, list[Any]]:
        streamed, described = self._stream(number, source)
        self._order.update(described)
        self._text.add_files(number, source.shards)
        return streamed, [tokens[: wanted + 1] for tokens in streamed.held_out(wanted, self._wait)]

    def _stream(self, number: int, source: TextSource) -> tuple[StreamedSource, bytes]:
        """The source, and what the order of its data depends on."""
        assert self._reading is not None
        files = [[file.model_dump() for file in shard] for shard in source.shards]
        rule = SegmentRule(
            column=source.column, train_on=self._spec.train_on, fraction=self._spec.validation_fraction,
            limit_bytes=self._segment_bytes,
        )  # fmt: skip
        streamed = StreamedSource(self._reading, source.name, number, source.shards, rule, source.weight)
        return streamed, json.dumps([files, rule.model_dump()], sort_keys=True).encode()

    def _wait(self) -> bool:
        time.sleep(WAIT_S)
        return self._stopping()

