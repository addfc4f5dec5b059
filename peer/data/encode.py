"""Text and conversations -> token ids, without the libraries of models: what a process needs that does nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as FastTokenizer

from peer.data.chat import BYTE_TEMPLATE, ChatTemplate, Conversation
from peer.errors import UserError

TokenIds = npt.NDArray[np.int32]
BYTE_OFFSET = 3  # ByT5: 0 pad, 1 eos, 2 unk, then the 256 bytes
BYTE_EOS = "</s>"
# Above the ids of any tokenizer: a token that is read and not learned, and an end token inside a conversation.
UNLEARNED, INNER = 1 << 24, 1 << 25
ID_MASK = UNLEARNED - 1


class TextEncoder(Protocol):
    """Encodes documents; `document` says all of it in JSON, for another process."""

    eos_id: int

    @property
    def document(self) -> Mapping[str, Any]: ...

    @property
    def chat(self) -> ChatTemplate | None:
        """How conversations become text, if there is a template."""

    def encode_all(self, texts: Sequence[str]) -> list[TokenIds]:
        """int32 [n] of each text, without special tokens around it."""

    def encode_rendered(self, text: str) -> tuple[TokenIds, TokenIds]:
        """int32 [n] of a text in which control tokens count, and the character at which each token begins."""


class ByteEncoder:
    """UTF-8 bytes shifted by 3; a lone surrogate becomes `?`."""

    eos_id = 1
    document: Mapping[str, Any] = {"kind": "bytes"}
    chat = ChatTemplate(BYTE_TEMPLATE, {"eos_token": BYTE_EOS}, [BYTE_EOS])

    def encode_all(self, texts: Sequence[str]) -> list[TokenIds]:
        """See `TextEncoder.encode_all`."""
        return [_bytes_of(text) for text in texts]

    def encode_rendered(self, text: str) -> tuple[TokenIds, TokenIds]:
        """See `TextEncoder.encode_rendered`."""
        ids: list[int] = []
        begins: list[int] = []
        at = 0
        for turn in text.split(BYTE_EOS):
            sizes = [len(char.encode("utf-8", "replace")) for char in turn]
            ids += [*_bytes_of(turn).tolist(), self.eos_id]
            begins += [*np.repeat(np.arange(at, at + len(turn)), sizes).tolist(), at + len(turn)]
            at += len(turn) + len(BYTE_EOS)
        return np.array(ids[:-1], dtype=np.int32), np.array(begins[:-1], dtype=np.int32)


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
        chat: the chat template, and the special tokens that it may name.
    """

    def __init__(
        self, definition: str, eos_id: int, control: Mapping[str, int], vocab_size: int,
        chat: tuple[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._tokenizer = FastTokenizer.from_str(definition)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._control = ControlTokens(control, vocab_size)
        self._definition, self._chat = definition, chat
        self.eos_id = eos_id
        self.document = {
            "kind": "fast", "definition": definition, "eos_id": eos_id, "control": dict(control),
            "vocab_size": vocab_size, "chat": chat,
        }  # fmt: skip

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """See `TextEncoder.chat`."""
        try:
            return None if self._chat is None else ChatTemplate(*self._chat, list(self._control.ids))
        except Exception:  # a stranger's template: its compiler raises more than TemplateError
            return None

    @cached_property
    def _rendered_tokenizer(self) -> FastTokenizer:
        tokenizer = FastTokenizer.from_str(self._definition)
        tokenizer.encode_special_tokens = False
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def encode_rendered(self, text: str) -> tuple[TokenIds, TokenIds]:
        """See `TextEncoder.encode_rendered`."""
        found = self._rendered_tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)
        begins = [begin for begin, _ in found.offsets]
        return np.asarray(found.ids, dtype=np.int32), np.asarray(begins, dtype=np.int32)

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
        document["definition"], document["eos_id"], document["control"], document["vocab_size"], document.get("chat")
    )


class DocumentEncoder:
    """Documents -> tokens that end: ids, with UNLEARNED and INNER added where a conversation needs them.

    Args:
        train_on: what is learned of a conversation, `assistant` or `all`.

    Attributes:
        left_out: why -> how many conversations.
    """

    def __init__(self, encoder: TextEncoder, train_on: str = "assistant") -> None:
        self._encoder, self._learns_all = encoder, train_on == "all"
        self._eos = np.array([encoder.eos_id], dtype=np.int32)
        self.left_out: Counter[str] = Counter()

    def tokens_of(self, documents: Sequence[str]) -> list[TokenIds]:
        """int32 [n] of each document, its end with it; empty for a conversation that is left out.

        Raises:
            UserError: a conversation, and no chat template.
        """
        texts = [one for one in documents if not isinstance(one, Conversation)]
        encoded = iter(self._encoder.encode_all(texts))
        return [
            self._of_conversation(one) if isinstance(one, Conversation) else np.concatenate([next(encoded), self._eos])
            for one in documents
        ]

    def _of_conversation(self, conversation: Conversation) -> TokenIds:
        if self._encoder.chat is None:
            raise UserError(
                "the data has conversations, and the run's tokenizer has no chat template that works",
                "name a tokenizer that has one (mostly that of the Instruct model), or leave those rows out",
            )
        try:
            text, spans = self._encoder.chat.spans(conversation.messages)
        except ValueError as why:
            self.left_out[str(why)] += 1
            return np.empty(0, dtype=np.int32)
        ids, begins = self._encoder.encode_rendered(text)
        learned = np.full(len(ids), self._learns_all)
        for start, stop in spans:
            learned |= (begins >= start) & (begins < stop)
        if len(ids) == 0 or ids[-1] != self._eos[0]:
            ids, learned = np.append(ids, self._eos), np.append(learned, self._learns_all)
        inner = ids == self._eos[0]
        inner[-1] = False
        marks: TokenIds = np.where(learned, 0, UNLEARNED).astype(np.int32) + np.where(inner, INNER, 0).astype(np.int32)
        return ids + marks


def narrowed(ids: TokenIds) -> npt.NDArray[Any]:
    """The same in two bytes a token, where they fit."""
    return ids.astype(np.uint16 if ids.size == 0 or ids.max() < 1 << 16 else np.uint32)
