"""Documents -> one token stream -> fixed windows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from peer.data.tokenizer import TokenIds, Tokenizer
from peer.errors import UserError


class PackedTokens:
    """A token stream seen as windows of `sequence_length + 1` tokens.

    Window i is tokens [i*T, (i+1)*T] inclusive: inputs are its first T tokens, labels its last T, and neighbours
    overlap by one token, so that every token but the stream's first is predicted exactly once. A rest shorter than
    one window is not used.

    Args:
        tokens: int32 [n].
        sequence_length: T, tokens.
    """

    def __init__(self, tokens: TokenIds, sequence_length: int) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

    def window(self, index: int) -> torch.Tensor:
        """Window `index` as int64 [T + 1].

        Raises:
            IndexError: index outside [0, len).
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence_length
        return torch.from_numpy(self.tokens[start : start + self.sequence_length + 1].astype(np.int64))


def pack_documents(
    texts: Iterable[str], tokenizer: Tokenizer, sequence_length: int, min_sequences: int, purpose: str = "training"
) -> PackedTokens:
    """Encode documents, end each with eos, join them, and check that they fill a batch.

    Args:
        texts: documents; the order is kept.
        sequence_length: tokens per window.
        min_sequences: windows needed, usually one batch.
        purpose: what the tokens are for, in messages.

    Raises:
        UserError: fewer tokens than `min_sequences` windows need.
    """
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    pieces = [piece for text in texts for piece in (tokenizer.encode(text), eos)]
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    packed = PackedTokens(tokens, sequence_length)
    if len(packed) < min_sequences:
        raise UserError(
            f"the {purpose} text has {len(tokens)} tokens; {min_sequences} sequences of {sequence_length} tokens "
            f"need {min_sequences * sequence_length + 1}",
            "add text, or lower the batch size or the sequence length",
        )
    return packed
