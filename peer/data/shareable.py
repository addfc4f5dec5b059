"""The text of a run that peers can lease, measured when the run opens."""

from __future__ import annotations

from collections.abc import Sequence

from peer.data.encode import DocumentEncoder
from peer.data.packing import pack_documents
from peer.data.resident import read_documents, split_documents
from peer.data.shared import shard_count
from peer.data.sources import list_sources
from peer.data.tokenizer import Tokenizer
from peer.protocol import hashing
from peer.protocol.data_spec import HELD_IN_MEMORY, SharedData
from peer.protocol.manifest import RunManifest

SAMPLE_CHARS = 1 << 20  # that are tokenised


class SharedText:
    """The digest of the text that is held in memory."""

    def __init__(self) -> None:
        self._hasher = hashing.Hasher()

    def add(self, number: int, documents: Sequence[str]) -> None:
        """The training documents of one source."""
        self._hasher.update(number.to_bytes(8, "big") + len(documents).to_bytes(8, "big"))
        for text in documents:
            data = text.encode("utf-8", "surrogatepass")
            self._hasher.update(len(data).to_bytes(8, "big") + data)

    @property
    def digest(self) -> str:
        """64 hex digits."""
        return self._hasher.digest().hex()


def least_shard_tokens(manifest: RunManifest, nominal_tokens: int) -> int:
    """A shard is a step at least, and a quarter of a contribution: what a peer holds is a handful of them."""
    return max(manifest.tokens_per_step, nominal_tokens // 4)


def shared_data(manifest: RunManifest, tokenizer: Tokenizer, nominal_tokens: int) -> SharedData | None:
    """What the manifest says of it; None if there is none.

    Raises:
        UserError: a source that does not exist.
    """
    spec, text, shards = manifest.data, SharedText(), []
    least_tokens = []  # of a shard of each source: more parts fit a contribution where they are small
    for number, source in enumerate(spec.sources):
        if source.kind not in HELD_IN_MEMORY:
            shards.append(0)
            continue
        (found,) = list_sources(spec.model_copy(update={"sources": (source,)}), ())
        if not found.resident:  # too large: peers stream it
            shards.append(0)
            continue
        documents, _ = split_documents(read_documents(found), spec.validation_fraction)
        text.add(number, documents)
        tokens = _tokens(documents, DocumentEncoder(tokenizer.encoder(), spec.train_on))
        least = least_shard_tokens(manifest, nominal_tokens)
        shards.append(shard_count(tokens // spec.sequence_length, spec.sequence_length, spec.shard_sequences, least))
        least_tokens.append(tokens // shards[-1])
    if not sum(shards):
        return None
    return SharedData(
        digest=text.digest, shards=tuple(shards), shard_tokens=max(1, min(least_tokens))
    )


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
