from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.data.encode import ByteEncoder, DocumentEncoder
from peer.data.packing import PackedTokens, check_enough, pack_documents
from peer.errors import UserError

ENCODER = DocumentEncoder(ByteEncoder())


def test_documents_are_joined_with_eos():
    packed = pack_documents(["ab", "c"], ENCODER, sequence_length=2)
    assert packed.tokens.tolist() == [100, 101, 1, 102, 1]
    assert packed.tokens.dtype == np.uint16
    assert packed.window(0).tolist() == [100, 101, 1]
    assert packed.window(1).tolist() == [1, 102, 1]
    assert packed.window(1).dtype == torch.int64


@given(st.integers(0, 200), st.integers(1, 20))
def test_every_token_is_a_label_once(count, length):
    packed = PackedTokens(np.arange(count, dtype=np.int32), length)
    labels = [token for i in range(len(packed)) for token in packed.window(i)[1:].tolist()]
    assert labels == list(range(1, len(packed) * length + 1))
    assert count - 1 - len(labels) < length


def test_windows_outside_raise():
    packed = PackedTokens(np.arange(9, dtype=np.int32), 4)
    assert len(packed) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            packed.window(index)


def test_too_few_tokens_say_how_many_are_needed():
    with pytest.raises(UserError, match="validation text has 4 tokens; 2 sequences of 8 tokens need 17"):
        check_enough("validation", pack_documents(["abc"], ENCODER, sequence_length=8), 2)
    check_enough("training", pack_documents(["a" * 16], ENCODER, sequence_length=8), 2)
    with pytest.raises(UserError, match="has 0 tokens"):
        check_enough("training", pack_documents([], ENCODER, sequence_length=8), 1)
