"""Text <-> token ids. `bytes` needs no files and no network, `hub` is any pretrained tokenizer, `folder` a file's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peer.data.encode import ByteEncoder, TextEncoder
from peer.data.pretrained_tokenizer import FolderTokenizer, HubTokenizer, examine, one_line, silence_rust
from peer.data.pretrained_tokenizer import TokenIds as TokenIds
from peer.errors import UserError
from peer.hub import TOKENIZER_FILES, fetch
from peer.protocol import hashing
from peer.protocol.manifest import TokenizerSpec
from peer.system.bounded_child import run_bounded
from peer.tokenizer_files import TokenizerFiles, list_files, read_folder

_BYTE_OFFSET = 3  # ByT5: 0 pad, 1 eos, 2 unk, then the 256 bytes
_BYTE_VOCAB = 256 + _BYTE_OFFSET
SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # in the order of their ids


class Tokenizer(Protocol):
    """What the data and the samples need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` or `eos_id` can give."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""

    @property
    def digest(self) -> str:
        """Equal for tokenizers that do the same, 64 hex digits."""

    def encode(self, text: str) -> TokenIds:
        """Text -> int32 [n], without special tokens around it."""

    def decode(self, ids: TokenIds) -> str:
        """Ids -> text; special tokens are dropped and malformed pieces never raise."""

    def encoder(self) -> TextEncoder:
        """The same ids, from a process that has neither torch nor transformers."""

    def save(self, path: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(path)` loads."""


class ByteTokenizer:
    """UTF-8 bytes shifted by 3: the ids of `ByT5Tokenizer(extra_ids=0)`, in one numpy operation.

    Text that spells a special token (`</s>`) stays text: a document cannot inject control tokens.
    """

    vocab_size = _BYTE_VOCAB
    eos_id = 1
    digest = hashing.digest(b"atoll-tokenizer-1 bytes").hex()

    def encode(self, text: str) -> TokenIds:
        """Text -> int32 [number of UTF-8 bytes]; a lone surrogate becomes `?`."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32) + np.int32(_BYTE_OFFSET)

    def decode(self, ids: TokenIds) -> str:
        """Ids -> text; ids outside the 256 bytes and broken UTF-8 sequences are dropped."""
        is_byte = (ids >= _BYTE_OFFSET) & (ids < _BYTE_VOCAB)
        return (ids[is_byte] - _BYTE_OFFSET).astype(np.uint8).tobytes().decode("utf-8", "ignore")

    def encoder(self) -> TextEncoder:
        """See `Tokenizer.encoder`."""
        return ByteEncoder()

    def save(self, path: Path) -> None:
        """Write files with which `AutoTokenizer` gives these ids beside a model of any architecture.

        `ByT5Tokenizer` itself would not do: many architectures insist on a tokenizer made of a `tokenizer.json`, and it
        ends every prompt. Some (qwen2, qwen3_5) also compose characters first (NFC), whatever the files say.
        """
        letters = bytes_to_unicode()  # type: ignore[no-untyped-call]  # how a byte-level vocabulary spells the bytes
        vocab = {token: number for number, token in enumerate(SPECIAL_TOKENS.values())}
        vocab |= {letters[byte]: byte + _BYTE_OFFSET for byte in range(256)}
        raw = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=raw, split_special_tokens=True, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS
        ).save_pretrained(str(path))


def as_transformers(tokenizer: Tokenizer) -> Any:
    """The tokenizer as transformers has it: what an export of a model holds."""
    with tempfile.TemporaryDirectory(prefix="atoll-tokenizer-") as name:
        tokenizer.save(Path(name))
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)


def load_tokenizer(spec: TokenizerSpec, home: Path | None = None) -> Tokenizer:
    """The run's tokenizer, tried first in a child with limits of time and memory: it is a stranger's.

    Args:
        home: this peer's folder, where the files that the manifest lists are kept.

    Raises:
        UserError: unknown name or revision, no network, no files, a tokenizer that needs remote code or has no eos, one
            that needs too much or does something else than the manifest's `digest` says.
    """
    if spec.kind == "bytes":
        return ByteTokenizer()
    name, contents = spec.name or "of this run", _files_of(spec, home)

    def examined() -> str:
        silence_rust()
        return examine(_made_of(spec, contents), name)

    digest = run_bounded(examined, f"the tokenizer {name}", "choose another tokenizer")
    if spec.digest not in (None, digest):
        raise UserError(
            f"the tokenizer {name} does not do here what it does for the run's organiser: its digest is "
            f"{digest[:16]}, the manifest's tokenizer.digest {str(spec.digest)[:16]}",
            "install the versions of tokenizers and transformers that the organiser has",
        )
    return _made_of(spec, contents)


def published_spec(spec: TokenizerSpec, tokenizer: Tokenizer) -> TokenizerSpec:
    """What a manifest says of it for other machines: the files of a folder instead of its name, and the digest."""
    if spec.kind == "bytes":
        return spec
    files = {"name": None, "files": list_files(read_folder(Path(spec.name)))} if spec.kind == "folder" and spec.name \
        else {}
    return spec.model_copy(update={**files, "digest": tokenizer.digest})


def _files_of(spec: TokenizerSpec, home: Path | None) -> Path | dict[str, bytes]:
    """The folder of a download, or the contents of the organiser's files."""
    if spec.kind == "folder":
        if spec.name is not None:
            return read_folder(Path(spec.name))
        assert home is not None, "a manifest of the network is read by a peer"
        return TokenizerFiles(home, spec.files).read()
    try:
        return Path(fetch(str(spec.name), spec.revision, TOKENIZER_FILES))
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise _cannot_load(spec, error) from None


def _made_of(spec: TokenizerSpec, found: Path | dict[str, bytes]) -> HubTokenizer | FolderTokenizer:
    if isinstance(found, dict):
        return FolderTokenizer(found, spec.name or "of this run")
    try:
        tokenizer = AutoTokenizer.from_pretrained(found, local_files_only=True, trust_remote_code=False)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise _cannot_load(spec, error) from None
    return HubTokenizer(tokenizer, str(spec.name))


def _cannot_load(spec: TokenizerSpec, error: BaseException) -> UserError:
    return UserError(
        f"cannot load the tokenizer {spec.name} at revision {spec.revision!r}: {one_line(error)}",
        "check the name and the network; tokenizers that need their own code are not accepted",
    )
