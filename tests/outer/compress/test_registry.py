"""Codecs by name."""

from __future__ import annotations

import pytest

from peer.errors import UserError
from peer.outer.compress.identity import Fp32
from peer.outer.compress.int8 import BlockInt8
from peer.outer.compress.registry import COMPRESSORS, compressor


def test_known_names() -> None:
    assert compressor("fp32") == Fp32()
    assert compressor("int8") == BlockInt8(block=256)
    assert all(codec.name == name for name, codec in COMPRESSORS.items())


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown compressor 'int4'") as caught:
        compressor("int4")
    assert caught.value.hint == "did you mean 'int8'?"
