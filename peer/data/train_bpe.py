"""A byte-level BPE from text: the same text gives the same tokenizer, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from peer.data.pretrained_tokenizer import MAX_IDS, FolderTokenizer
from peer.data.tokenizer import SPECIAL_TOKENS
from peer.errors import UserError

# Words with the space before them, digits one by one, ends of lines with the punctuation before: the pattern of Qwen2,
# whose class transformers puts beside every model of that kind.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Longer ones are cut: a word of megabytes takes hours, and no piece of it helps elsewhere.
_LONG = re.compile(r"\S{256}|\s{256}")
LEAST_IDS = 256 + len(SPECIAL_TOKENS)


def train_bpe(texts: Iterable[str], vocab_size: int, *, show_progress: bool = False) -> FolderTokenizer:
    """Merge the most frequent pairs of bytes, then of pieces, within words, until there are enough pieces.

    Special tokens and bytes have the ids that the tokenizer of bytes gives them, and any text comes back whole. Method:
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.

    Args:
        texts: documents, read once.
        vocab_size: ids in all, special tokens and the 256 bytes among them; less text than that needs gives fewer.

    Raises:
        UserError: a size that is no vocabulary.
    """
    if not LEAST_IDS <= vocab_size <= MAX_IDS:
        raise UserError(
            f"--vocab-size {vocab_size}: must be between {LEAST_IDS} (the bytes, and {len(SPECIAL_TOKENS)} special "
            f"tokens) and {MAX_IDS}",
            "small models train well with some thousand ids, large ones with 32768 to 131072",
        )
    raw = FastTokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), pieces])
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=show_progress,
    )  # fmt: skip
    plain = (piece for text in texts for piece in _pieces(text.encode("utf-8", "replace").decode()))
    with ThreadPoolExecutor(1) as thread:  # so that this one can be interrupted: Rust returns at the end
        thread.submit(raw.train_from_iterator, plain, trainer).result()
    contents = {"tokenizer.json": raw.to_str().encode(), "tokenizer_config.json": json.dumps(SPECIAL_TOKENS).encode()}
    return FolderTokenizer(contents, "that was trained")


def _pieces(text: str) -> Iterator[str]:
    start = 0
    for long in _LONG.finditer(text):
        yield text[start : long.end()]
        start = long.end()
    yield text[start:]
