"""Text -> token ids, without the libraries of models: what a process needs that does nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as FastTokenizer

TokenIds = npt.NDArray[np.int32]
BYTE_OFFSET = 3  # ByT5: 0 pad, 1 eos, 2 unk, then the 256 bytes


class TextEncoder(Protocol):
    """Encodes documents; `document` says all of it in JSON, for another process."""

    eos_id: int

    @property
    def document(self) -> Mapping[str, Any]: ...

    def encode_all(self, texts: Sequence[str]) -> list[TokenIds]:
        """int32 [n] of each text, without special tokens around it."""


class ByteEncoder:
    """UTF-8 bytes shifted by 3; a lone surrogate becomes `?`."""

    eos_id = 1
    document: Mapping[str, Any] = {"kind": "bytes"}

    def encode_all(self, texts: Sequence[str]) -> list[TokenIds]:
        """See `TextEncoder.encode_all`."""
        return [_bytes_of(text) for text in texts]


def _bytes_of(text: str) -> TokenIds:
    return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32) + np.int32(BYTE_OFFSET)


class ControlTokens:
    """Keeps text from becoming control tokens.

    Some vocabularies hold control tokens as pieces of text (Unigram ones do). Where one comes out nevertheless, the
    text is encoded in pieces that break its spelling; of a control token of a single character nothing is left.

    Args:
        ids: of each control token by its spelling.
        vocab_size: one more than the largest id.
    """

    def __init__(self, ids: Mapping[str, int], vocab_size: int) -> None:
        self.ids = dict(ids)
        self._is_control = np.zeros(vocab_size, dtype=bool)
        self._is_control[list(ids.values())] = True
        inside = [f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in sorted(ids) if token[1:]]
        self._inside = re.compile("|".join(inside)) if inside else None

    def avoided(self, text: str, ids: TokenIds, encode: Callable[[str], TokenIds]) -> TokenIds:
        """The ids of a text, of which `encode` made `ids`: none of them a control token."""
        if not self._is_control[ids].any():
            return ids
        pieces = self._inside.split(text) if self._inside is not None else [text]
        ids = np.concatenate([encode(piece) for piece in pieces])
        return ids[~self._is_control[ids]]


class FastEncoder:
    """A `tokenizer.json`. Text that looks like a control token stays text.

    Args:
        definition: content of that file.
        control, vocab_size: see `ControlTokens`.
    """

    def __init__(self, definition: str, eos_id: int, control: Mapping[str, int], vocab_size: int) -> None:
        self._tokenizer = FastTokenizer.from_str(definition)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._control = ControlTokens(control, vocab_size)
        self.eos_id = eos_id
        self.document = {
            "kind": "fast", "definition": definition, "eos_id": eos_id, "control": dict(control),
            "vocab_size": vocab_size,
        }  # fmt: skip

    def encode_all(self, texts: Sequence[str]) -> list[TokenIds]:
        """See `TextEncoder.encode_all`; no ids of a text that the tokenizer fails of."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        try:
            encoded = self._tokenizer.encode_batch_fast(clean, add_special_tokens=False)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's
                raise
            if len(texts) == 1:
                return [np.empty(0, dtype=np.int32)]
            return [ids for text in texts for ids in self.encode_all([text])]
        found = [np.asarray(one.ids, dtype=np.int32) for one in encoded]
        return [self._control.avoided(text, ids, self._encode) for text, ids in zip(clean, found, strict=True)]

    def _encode(self, text: str) -> TokenIds:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def encoder_of(document: Mapping[str, Any]) -> TextEncoder:
    """The encoder that `TextEncoder.document` describes."""
    if document["kind"] == "bytes":
        return ByteEncoder()
    return FastEncoder(
        document["definition"], document["eos_id"], document["control"], document["vocab_size"]
    )
