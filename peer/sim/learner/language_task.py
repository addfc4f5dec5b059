"""What a simulation learns from a manifest: its model on its text."""

from __future__ import annotations

import torch

from peer.data.encode import DocumentEncoder
from peer.data.packing import PackedTokens, check_enough, pack_documents
from peer.data.resident import read_documents, split_documents
from peer.data.sources import RESIDENT_BYTES, list_sources
from peer.data.tokenizer import load_tokenizer
from peer.genesis import build_initial_model
from peer.protocol.manifest import RunManifest
from peer.sim.learner.task import CPU, LanguageTask

VALIDATION_BYTES = 64 * 1024


def load_windows(
    manifest: RunManifest, train_files: tuple[str, ...], validation_tokens: int = VALIDATION_BYTES
) -> tuple[PackedTokens, PackedTokens]:
    """Training and validation windows of a manifest's text, or of files that replace it.

    Args:
        train_files: files, folders or globs; the manifest's own source without any.
        validation_tokens: of the validation text at most, the first ones: evaluating must not outweigh training.

    Raises:
        UserError: no such files, or too little text.
    """
    tokenizer, length = load_tokenizer(manifest.tokenizer), manifest.data.sequence_length
    sources = list_sources(manifest.data, train_files)
    documents = [text for source in sources for text in read_documents(source, RESIDENT_BYTES // len(sources))]
    train, validation = split_documents(documents, manifest.data.validation_fraction)
    encoder = DocumentEncoder(tokenizer.encoder(), manifest.data.train_on)
    windows, held_out = (pack_documents(texts, encoder, length) for texts in (train, validation))
    check_enough("training", windows, manifest.inner.batch_sequences)
    check_enough("validation", held_out, 1)
    windows.document_end = end = tokenizer.eos_id if manifest.data.document_mask else None
    return windows, PackedTokens(held_out.tokens[: validation_tokens + 1], length, end)


def language_task(
    manifest: RunManifest, windows: tuple[PackedTokens, PackedTokens], seed: int, device: torch.device = CPU
) -> LanguageTask:
    """The task of one simulation: initial weights and data orders follow from `seed`.

    Raises:
        UserError: the model cannot be built.
    """
    model = build_initial_model(manifest.model_copy(update={"seed": seed}), load_tokenizer(manifest.tokenizer))
    inner = manifest.inner
    return LanguageTask(model, *windows, inner.batch_sequences, seed, router_loss=inner.router_loss, device=device)
