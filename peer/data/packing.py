"""Documents -> one token stream -> fixed windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peer.data.encode import DocumentEncoder, narrowed
from peer.errors import UserError


class PackedTokens:
    """A token stream seen as windows of `sequence_length + 1` tokens.

    Window i is tokens [i*T, (i+1)*T] inclusive: inputs are its first T tokens, labels its last T, and neighbours
    overlap by one token, so that every token but the stream's first is predicted exactly once. A rest shorter than
    one window is not used.

    Args:
        tokens: integers [n] of any type, as `DocumentEncoder` gives them; may be mapped from a file.
        sequence_length: T, tokens.
        document_end: the token that ends documents, where attention stays inside a document; None: it does not.
    """

    def __init__(
        self, tokens: npt.NDArray[Any], sequence_length: int, document_end: int | None = None
    ) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.document_end = document_end

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


def pack_documents(documents: Iterable[str], encoder: DocumentEncoder, sequence_length: int) -> PackedTokens:
    """Encode documents, end each with eos, and join them, in their order."""
    pieces = [narrowed(tokens) for one in documents for tokens in encoder.tokens_of([one])]
    return PackedTokens(np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint16), sequence_length)


def check_enough(purpose: str, packed: PackedTokens, windows: int) -> None:
    """Raise UserError if tokens do not fill so many windows, usually one batch."""
    if len(packed) < windows:
        length = packed.sequence_length
        raise UserError(
            f"the {purpose} text has {len(packed.tokens)} tokens; {windows} sequences of {length} tokens need "
            f"{windows * length + 1}",
            "add text, or lower the batch size or the sequence length",
        )
