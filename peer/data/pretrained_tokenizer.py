"""Tokenizers made of files: a transformers tokenizer from the hub, or the organiser's `tokenizer.json`.

Files of both come from strangers. Nothing in them can name another file or code, and no text can become a control
token.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from peer.data.encode import ControlTokens, FastEncoder, TextEncoder
from peer.data.encode import TokenIds as TokenIds
from peer.errors import UserError
from peer.protocol import hashing

MAX_IDS = 2**22
MAX_IDS_PER_BYTE = 20  # one character of three bytes can become eighteen (NFKD), each one an id
MAX_CHARS_PER_ID = 64  # on average over the vocabulary
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_PROBES = (
    "The quick brown fox jumps over 13 lazy dogs; it's 12.50 dollars.",
    "def f(x: int) -> str:\n    return f\"{x!r}\"  # tab\there\r\n\n\n",
    "na\u00efve cafe\u0301 \u00df\u0130 \u4f60\u597d\uff01 \u3053\u3093 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f4bb \ufb01 \u00a0\x00",
    "</s> <s> <pad> <unk> <|endoftext|> <|im_start|> [PAD] [CLS]",
)  # fmt: skip
_RUNS = ("a", "A", "0", " ", "\n", "'", "!", "_", "\u00e9", "\u4f60", "aA", "a ", "a1", "a'", " \n", "=-")
_RUN_CHARS = 2048


class PretrainedTokenizer:
    """What tokenizers of files share; subclasses say how a text becomes ids and back.

    Args:
        vocab: token -> id, added tokens with it.
        eos: the end-of-text token.
        control: those that no text may become.
        name: for messages.

    Raises:
        UserError: no end-of-text token, so that documents could not be told apart; too many ids.
    """

    def __init__(self, vocab: Mapping[str, int], eos: str | None, control: Iterable[str], name: str) -> None:
        if eos is None or eos not in vocab:
            raise UserError(f"the tokenizer {name} has no eos token", "choose one that marks the end of a text")
        self._vocab, self._name = dict(vocab), name
        self.eos_id, self.vocab_size = vocab[eos], 1 + max(vocab.values())
        if self.vocab_size > MAX_IDS:
            what = f"the tokenizer {name} has ids up to {self.vocab_size - 1}; the limit is {MAX_IDS - 1}"
            raise UserError(what, "choose one with a smaller vocabulary")
        self._control = ControlTokens({t: vocab[t] for t in (*control, eos) if t in vocab}, self.vocab_size)

    def _ids(self, text: str) -> list[int]:
        raise NotImplementedError

    def _definition(self) -> str:
        """Content of the `tokenizer.json` that does the same."""
        raise NotImplementedError

    def _chat(self) -> tuple[Any, dict[str, str]]:
        """The chat template, if there is one, and the special tokens that it may name."""
        raise NotImplementedError

    def encoder(self) -> TextEncoder:
        """The same ids, from a process that has neither torch nor transformers."""
        template, special = self._chat()
        chat = (template, special) if isinstance(template, str) else None
        return FastEncoder(self._definition(), self.eos_id, self._control.ids, self.vocab_size, chat)

    def _text(self, ids: list[int]) -> str:
        raise NotImplementedError

    def encode(self, text: str) -> TokenIds:
        """Text -> int32 [n], none of them a control token; a lone surrogate becomes `?`.

        Raises:
            UserError: the tokenizer fails of this text.
        """
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        return self._control.avoided(text, self._checked_ids(text), self._checked_ids)

    def _checked_ids(self, text: str) -> TokenIds:
        try:
            return np.asarray(self._ids(text), dtype=np.int32)
        except BaseException as error:
            if not _is_failure(error):
                raise
            what = f"the tokenizer {self._name} fails of a text of {len(text)} characters: {one_line(error)}"
            raise UserError(what, "leave the text out, or tell the run's organiser") from None

    def decode(self, ids: TokenIds) -> str:
        """Ids -> text, empty if the tokenizer fails of them; ids past the vocabulary, which a padded embedding can
        sample, are dropped.
        """
        try:
            return self._text(ids[(ids >= 0) & (ids < self.vocab_size)].tolist())
        except BaseException as error:
            if not _is_failure(error):
                raise
            return ""

    @cached_property
    def digest(self) -> str:
        """Of what it does, 64 hex digits: its ids, where texts end, and what it makes of a few texts."""
        vocab = sorted(self._vocab.items(), key=lambda item: (item[1], item[0]))
        probed = [self.encode(text).tolist() for text in _PROBES]
        return hashing.digest(json.dumps(["atoll-tokenizer-1", vocab, self.eos_id, probed]).encode()).hex()


class HubTokenizer(PretrainedTokenizer):
    """A transformers tokenizer."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, unknown = tokenizer, tokenizer.unk_token
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        control = {*tokenizer.all_special_tokens, *added} - {unknown}
        super().__init__(tokenizer.get_vocab(), tokenizer.eos_token, control, name)

    def _ids(self, text: str) -> list[int]:
        # `verbose=False` because documents are longer than any model's window
        out = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return list(out["input_ids"])

    def _definition(self) -> str:
        return str(self._tokenizer.backend_tokenizer.to_str())

    def _chat(self) -> tuple[Any, dict[str, str]]:
        template = self._tokenizer.chat_template
        named = {key: str(token) for key in _SPECIAL if (token := getattr(self._tokenizer, key)) is not None}
        return template.get("default") if isinstance(template, dict) else template, named

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def save(self, path: Path) -> None:
        """Write the tokenizer's own files."""
        self._tokenizer.save_pretrained(str(path))


class FolderTokenizer(PretrainedTokenizer):
    """The organiser's `tokenizer.json`, with the special tokens and the chat template that its config names.

    Args:
        contents: the files by name, as `peer.tokenizer_files` reads them.

    Raises:
        UserError: they make no tokenizer.
    """

    def __init__(self, contents: Mapping[str, bytes], name: str) -> None:
        try:
            self._raw = FastTokenizer.from_str(contents["tokenizer.json"].decode("utf-8"))
        except BaseException as error:
            raise UserError(f"the tokenizer.json of {name} cannot be read: {one_line(error)}", _MAKE_ONE) from None
        self._config = _read_config(contents, name)
        vocab = self._raw.get_vocab()
        self._named = {key: token for key in _SPECIAL if (token := _spelling(self._config.get(key))) in vocab}
        self._raw.add_special_tokens([AddedToken(token, special=True) for token in self._named.values()])
        self._raw.no_truncation()
        self._raw.no_padding()
        self._raw.encode_special_tokens = True
        if getattr(self._raw.model, "dropout", None) is not None:
            self._raw.model.dropout = None  # the same text has the same ids
        added = [token.content for token in self._raw.get_added_tokens_decoder().values() if token.special]
        control = set(added) - {self._named.get("unk_token")}
        super().__init__(vocab, self._named.get("eos_token"), control, name)

    def _ids(self, text: str) -> list[int]:
        return list(self._raw.encode(text, add_special_tokens=False).ids)

    def _definition(self) -> str:
        return str(self._raw.to_str())

    def _chat(self) -> tuple[Any, dict[str, str]]:
        return self._config.get("chat_template"), self._named

    def _text(self, ids: list[int]) -> str:
        return str(self._raw.decode(ids, skip_special_tokens=True))

    def save(self, path: Path) -> None:
        """Write files with which `AutoTokenizer` gives these ids; a chat template goes with them."""
        template = self._config.get("chat_template")
        more = {"chat_template": template} if isinstance(template, str) else {}
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=FastTokenizer.from_str(self._raw.to_str()), clean_up_tokenization_spaces=False,
            **self._named, **more,
        ).save_pretrained(str(path))  # fmt: skip


def examine(tokenizer: PretrainedTokenizer, name: str) -> str:
    """Try a stranger's tokenizer on what makes bad ones hang or burst; -> its digest.

    Raises:
        UserError: it makes no ids of text, too many, or fails of some text.
    """
    if not any(tokenizer.encode(text).size for text in _PROBES):
        raise UserError(f"the tokenizer {name} makes no ids of text", "choose another one")
    for piece in _RUNS:
        for text in (piece * _RUN_CHARS, piece * _RUN_CHARS + "\x01"):
            num_ids, num_bytes = tokenizer.encode(text).size, len(text.encode())
            if num_ids > MAX_IDS_PER_BYTE * num_bytes:
                raise UserError(f"the tokenizer {name} makes {num_ids} ids of {num_bytes} bytes", "choose another one")
    num_chars = len(tokenizer.decode(np.arange(tokenizer.vocab_size, dtype=np.int32)))
    if num_chars > MAX_CHARS_PER_ID * tokenizer.vocab_size:
        what = f"the tokenizer {name} makes {num_chars} characters of its {tokenizer.vocab_size} ids"
        raise UserError(what, "choose another one")
    if (chat := tokenizer.encoder().chat) is not None:
        with contextlib.suppress(ValueError):  # one that refuses this conversation may take those of the data
            chat.spans([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    return tokenizer.digest


def silence_rust() -> None:
    """Send standard error of this process, a child that tries a tokenizer, nowhere: Rust reports each panic there."""
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _is_failure(error: BaseException) -> bool:
    """Whether a tokenizer failed; a panic in Rust is a BaseException of a class that cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(error: BaseException, most: int = 200) -> str:
    """What an error says, on one line of bounded length."""
    return " ".join(str(error).split())[:most] or type(error).__name__


_MAKE_ONE = "save it with save_pretrained of transformers, or make one with atoll tokenizer train"


def _read_config(contents: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The special tokens and the chat template of its other files; nothing else in them counts."""
    config: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            document = json.loads(contents.get(file, b"{}"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"the {file} of {name} cannot be read: {one_line(error)}", _MAKE_ONE) from None
        if not isinstance(document, dict):
            raise UserError(f"the {file} of {name} is no mapping", _MAKE_ONE)
        config |= {key: document[key] for key in (*_SPECIAL, "chat_template") if document.get(key) is not None}
    if "chat_template.jinja" in contents:
        config["chat_template"] = contents["chat_template.jinja"].decode("utf-8", "replace")
    return config


def _spelling(token: Any) -> str | None:
    """A token as a config names it: as text, or as a mapping with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
