"""How good a trained model is on text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from peer.data.encode import DocumentEncoder
from peer.data.packing import PackedTokens, check_enough, pack_documents
from peer.data.resident import first_held_out, read_documents
from peer.data.sources import list_sources
from peer.errors import UserError
from peer.protocol.manifest import DataSpec
from peer.train.batch import IGNORED, Batch
from peer.train.evaluate import evaluate
from peer.use.trained import Trained


@dataclass(frozen=True, kw_only=True)
class Measured:
    """On some text. `loss` in nats a token, `bits_per_byte` of its UTF-8: comparable between tokenizers."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    text: str


def measure(trained: Trained, files: Sequence[str], sequences: int, sequence_length: int | None = None) -> Measured:
    """The loss on all of some files, or on the run's validation text.

    Args:
        files: files, folders and globs; none: the documents that the run holds out.
        sequences: at most, spread evenly.
        sequence_length: of a window, in tokens; None: the run's.

    Raises:
        UserError: no text, or a model without a run and no files.
    """
    if trained.manifest is None and not files:
        raise UserError("this folder holds a model and no run: there is no validation text", "give --files")
    spec = trained.manifest.data if trained.manifest is not None else DataSpec()
    length = sequence_length or spec.sequence_length
    name, windows = (_all_of if files else _held_out)(trained, spec, tuple(files), length)
    check_enough("evaluation", windows, 1)
    loss = evaluate(trained.model, windows, sequences, 8)
    count = min(sequences, len(windows))
    chosen = torch.stack([windows.window(i * len(windows) // count) for i in range(count)])
    batch = Batch.of(chosen, windows.document_end)
    text = "".join(
        trained.tokenizer.decode(labels_t[labels_t != IGNORED].numpy().astype(np.int32)) for labels_t in batch.labels_bt
    )
    tokens = batch.tokens
    return Measured(
        loss=loss, perplexity=math.exp(min(loss, 700.0)), tokens=tokens, text=name,
        bits_per_byte=loss * tokens / math.log(2) / max(1, len(text.encode("utf-8", "replace"))),
    )  # fmt: skip


def _all_of(trained: Trained, spec: DataSpec, files: tuple[str, ...], length: int) -> tuple[str, PackedTokens]:
    (source,) = list_sources(spec, files)
    end = trained.tokenizer.eos_id if spec.document_mask else None
    packed = pack_documents(read_documents(source), DocumentEncoder(trained.tokenizer.encoder(), spec.train_on), length)
    return source.name, PackedTokens(packed.tokens, length, end)


def _held_out(trained: Trained, spec: DataSpec, files: tuple[str, ...], length: int) -> tuple[str, PackedTokens]:  # noqa: ARG001
    sources = list_sources(spec, ())
    total = sum(source.weight for source in sources)
    pieces, encoder = [], DocumentEncoder(trained.tokenizer.encoder(), spec.train_on)
    for source in sources:  # as `peer.data.corpus` takes them
        wanted = max(length + 1, round(spec.validation_tokens * source.weight / total))
        documents = first_held_out(
            source, spec.validation_fraction, wanted, lambda text: len(encoder.tokens_of([text])[0])
        )
        pieces.append(pack_documents(documents, encoder, length).tokens[: wanted + 1])
    end = trained.tokenizer.eos_id if spec.document_mask else None
    packed = PackedTokens(np.concatenate(pieces), length, end)
    return "the run's validation text", packed
