"""Text <-> token ids. `bytes` needs no files and no network; `hub` is any pretrained tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peer.errors import UserError
from peer.hub import TOKENIZER_FILES, fetch
from peer.protocol.manifest import TokenizerSpec

TokenIds = npt.NDArray[np.int32]

_BYTE_OFFSET = 3  # ByT5: 0 pad, 1 eos, 2 unk, then the 256 bytes
_BYTE_VOCAB = 256 + _BYTE_OFFSET
_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # in the order of their ids


class Tokenizer(Protocol):
    """What the data and the samples need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` or `eos_id` can give."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> TokenIds:
        """Text -> int32 [n], without special tokens around it."""

    def decode(self, ids: TokenIds) -> str:
        """Ids -> text; special tokens are dropped and malformed pieces never raise."""

    def save(self, path: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(path)` loads."""


class ByteTokenizer:
    """UTF-8 bytes shifted by 3: the ids of `ByT5Tokenizer(extra_ids=0)`, in one numpy operation.

    Text that spells a special token (`</s>`) stays text: a document cannot inject control tokens.
    """

    vocab_size = _BYTE_VOCAB
    eos_id = 1

    def encode(self, text: str) -> TokenIds:
        """Text -> int32 [number of UTF-8 bytes]; a lone surrogate becomes `?`."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32) + np.int32(_BYTE_OFFSET)

    def decode(self, ids: TokenIds) -> str:
        """Ids -> text; ids outside the 256 bytes and broken UTF-8 sequences are dropped."""
        is_byte = (ids >= _BYTE_OFFSET) & (ids < _BYTE_VOCAB)
        return (ids[is_byte] - _BYTE_OFFSET).astype(np.uint8).tobytes().decode("utf-8", "ignore")

    def save(self, path: Path) -> None:
        """Write files with which `AutoTokenizer` gives these ids beside a model of any architecture.

        `ByT5Tokenizer` itself would not do: many architectures insist on a tokenizer made of a `tokenizer.json`, and it
        ends every prompt. Some (qwen2, qwen3_5) also compose characters first (NFC), whatever the files say.
        """
        letters = bytes_to_unicode()  # type: ignore[no-untyped-call]  # how a byte-level vocabulary spells the bytes
        vocab = {token: number for number, token in enumerate(_SPECIAL.values())}
        vocab |= {letters[byte]: byte + _BYTE_OFFSET for byte in range(256)}
        raw = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=raw, split_special_tokens=True, clean_up_tokenization_spaces=False, **_SPECIAL
        ).save_pretrained(str(path))


class HubTokenizer:
    """A pretrained transformers tokenizer behind the same interface.

    Raises:
        UserError: the tokenizer has no end-of-text token, so documents could not be told apart.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer {name} has no eos token", "choose one that marks the end of a text")
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_id = int(tokenizer.eos_token_id)

    def encode(self, text: str) -> TokenIds:
        """Text -> int32 [n]; `verbose=False` because documents are longer than any model's window."""
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: TokenIds) -> str:
        """Ids -> text; ids past the vocabulary (a padded embedding can sample them) are dropped."""
        known = ids[(ids >= 0) & (ids < self.vocab_size)]
        return str(self._tokenizer.decode(known.tolist(), skip_special_tokens=True))

    def save(self, path: Path) -> None:
        """Write the tokenizer's own files."""
        self._tokenizer.save_pretrained(str(path))


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """The run's tokenizer; code from the hub is never run.

    Raises:
        UserError: unknown name or revision, no network, a tokenizer that needs remote code, or one without eos.
    """
    if spec.kind == "bytes":
        return ByteTokenizer()
    try:
        folder = fetch(str(spec.name), spec.revision, TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(
            f"cannot load the tokenizer {spec.name} at revision {spec.revision!r}: {' '.join(str(error).split())}",
            "check the name and the network; tokenizers that need their own code are not accepted",
        ) from None
    return HubTokenizer(tokenizer, str(spec.name))
