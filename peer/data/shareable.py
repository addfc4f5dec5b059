"""The text of a run that peers can lease, measured when the run opens."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from peer.data.cut_files import can_be_cut, read_stretch, units_of
from peer.data.encode import DocumentEncoder
from peer.data.packing import pack_documents
from peer.data.problems import FileProblem, SourceBusy
from peer.data.resident import read_documents, split_documents
from peer.data.shards import DataFile, Shard, open_file, text_or_reason
from peer.data.shared import shard_count
from peer.data.sources import TextSource, list_sources
from peer.data.tokenizer import Tokenizer
from peer.errors import UserError
from peer.hub import hub_headers
from peer.protocol import hashing
from peer.protocol.data_spec import MAX_SHARDS, SharedData
from peer.protocol.manifest import DataSpec, RunManifest

log = logging.getLogger(__name__)
AWAY = ("hub", "web")
SAMPLE_CHARS = 1 << 20  # that are tokenised
SAMPLED_FILES = 16  # of a source, whose sizes are asked for
COPIED_BYTES = 1 << 30  # of a file that peers copy as a whole, to check its digest


class SharedText:
    """The digest of a text: of the documents that are held in memory, and of the names of files that are streamed."""

    def __init__(self) -> None:
        self._hasher = hashing.Hasher()

    def add(self, number: int, documents: Sequence[str]) -> None:
        """The training documents of one source."""
        self._hasher.update(number.to_bytes(8, "big") + len(documents).to_bytes(8, "big"))
        for text in documents:
            data = text.encode("utf-8", "surrogatepass")
            self._hasher.update(len(data).to_bytes(8, "big") + data)

    def add_files(self, number: int, shards: Sequence[Shard]) -> None:
        """The files of one source, by what tells their content, wherever they lie."""
        names = [[(file.name, file.tag, file.sha256) for file in shard] for shard in shards]
        self.add(number, [json.dumps(names)])

    @property
    def digest(self) -> str:
        """64 hex digits."""
        return self._hasher.digest().hex()


def least_shard_tokens(manifest: RunManifest, nominal_tokens: int) -> int:
    """A shard is a step at least, and a quarter of a contribution: what a peer holds is a handful of them."""
    return max(manifest.tokens_per_step, nominal_tokens // 4)


@dataclass(frozen=True)
class SourceCut:
    """Of one source: how many shards, and about how many tokens each."""

    shards: int = 0
    shard_tokens: int = 1


def shared_data(manifest: RunManifest, tokenizer: Tokenizer, nominal_tokens: int) -> SharedData | None:
    """What the manifest says of it; None if there is none, or a source cannot be reached now.

    Raises:
        UserError: a source of this machine that does not exist.
    """
    spec, text, cuts = manifest.data, SharedText(), list[SourceCut]()
    least, encoder = least_shard_tokens(manifest, nominal_tokens), DocumentEncoder(tokenizer.encoder(), spec.train_on)
    for number, source in enumerate(spec.sources):
        try:
            (found,) = list_sources(spec.model_copy(update={"sources": (source,)}), (), private_urls=True)
        except UserError as error:
            if source.kind not in AWAY:
                raise
            log.warning("no data is leased, but shared out by the seeded rule: %s", error)
            return None
        if found.resident:
            documents, _ = split_documents(read_documents(found), spec.validation_fraction)
            text.add(number, documents)
            cuts.append(_cut(spec, _tokens(documents, encoder), least, 1))
            continue
        text.add_files(number, found.shards)
        try:
            cuts.append(_cut_of_files(found, spec, encoder, least))
        except (FileProblem, SourceBusy, OSError) as problem:
            log.warning("%s is not leased, but shared out by the seeded rule: %s", found.name, problem)
            cuts.append(SourceCut())
    cuts = cuts if sum(cut.shards for cut in cuts) <= MAX_SHARDS else [SourceCut()]
    if not any(cut.shards for cut in cuts):
        return None
    least_tokens = min(cut.shard_tokens for cut in cuts if cut.shards)  # more parts fit a contribution where it is less
    return SharedData(
        digest=text.digest, shards=tuple(cut.shards for cut in cuts), shard_tokens=max(1, least_tokens)
    )


def _cut(spec: DataSpec, tokens: int, least: int, files: int) -> SourceCut:
    shards = shard_count(tokens // spec.sequence_length, spec.sequence_length, spec.shard_sequences, least)
    shards = min(max(1, round(shards / files)), MAX_SHARDS // files) * files
    return SourceCut(shards, tokens // shards) if shards else SourceCut()


def _cut_of_files(source: TextSource, spec: DataSpec, encoder: DocumentEncoder, least: int) -> SourceCut:
    """As many shards of each file, by the sizes of some of them and the first text of one."""
    files = [shard[0].model_copy(update={"sha256": None}) for shard in source.shards]
    if not all(len(shard) == 1 and can_be_cut(shard[0].name) for shard in source.shards):
        raise FileProblem("its files can only be read from their beginning; parquet and plain jsonl can be leased")
    sizes = [_size_of(file) for file in files[:: -(-len(files) // SAMPLED_FILES)]]
    if any(shard[0].sha256 is not None for shard in source.shards) and max(sizes) > COPIED_BYTES:
        raise FileProblem(f"a file of {max(sizes):,} bytes; to check the digests of files, at most {COPIED_BYTES:,}")
    tokens = _tokens_of_file(files[0], source.column, encoder) * sum(sizes) / max(1, sizes[0]) / len(sizes)
    windows = 64 * spec.sequence_length  # the one that a shard ends in is not used
    return _cut(spec, int(tokens * len(files)), max(least, windows), len(files))


def _size_of(file: DataFile) -> int:
    with open_file(file, hub_headers() if file.hub else {}) as raw:
        return raw.seek(0, io.SEEK_END)


def _tokens_of_file(file: DataFile, column: str, encoder: DocumentEncoder) -> float:
    """An estimate from its first rows."""
    with open_file(file, hub_headers() if file.hub else {}) as raw:
        units, sample, chars, after = units_of(raw, file.name), list[str](), 0, 1
        raw.seek(0)
        for value, offset in read_stretch(raw, file.name, column, (0, 1)):
            sample.append(text_or_reason(value)[0])
            chars, after = chars + len(sample[-1]), offset
            if chars >= SAMPLE_CHARS:
                break
    return len(pack_documents(filter(None, sample), encoder, 1).tokens) * units / after


def _tokens(documents: Sequence[str], encoder: DocumentEncoder) -> int:
    """An estimate from the first documents."""
    sample: list[str] = []
    chars = 0
    for document in documents:
        if chars >= SAMPLE_CHARS:
            break
        sample.append(document)
        chars += len(document)
    return len(pack_documents(sample, encoder, 1).tokens) * sum(map(len, documents)) // max(1, chars)
