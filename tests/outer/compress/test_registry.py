"""Codecs by name."""

from __future__ import annotations

import pytest

from peer.errors import UserError
from peer.outer.compress.identity import Fp32
from peer.outer.compress.int8 import BlockInt8
from peer.outer.compress.registry import COMPRESSORS, VALUES, codec, compressor


def test_known_names() -> None:
    assert compressor("fp32") == Fp32()
    assert compressor("int8") == BlockInt8(block=256)
    assert all(codec.name == name for name, codec in COMPRESSORS.items())


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown compressor 'int88'") as caught:
        compressor("int88")
    assert caught.value.hint == "did you mean 'int8'?"


NAMES = [
    *COMPRESSORS,
    *(f"top64/4096+{values}" for values in VALUES),
    *(f"threshold0.01+{values}" for values in COMPRESSORS),
    "top1/1+fp32",
    "top65536/65536+int2",
    "top64/64x64+int2",
    "dct64+top32/4096+int8",
    "dct64+top4/64+sign",
    "dct8+top3/64+int4",
    "threshold0.01@1000+fp16",
    "threshold1e-05+int8",
    "random0.01+fp32",
    "random1+int4",
    "randomblock0.125+fp32",
]


@pytest.mark.parametrize("name", NAMES)
def test_canonical_names_are_their_own_codecs_names(name: str) -> None:
    assert codec(name).name == name
    assert codec(codec(name).name) == codec(name)
    assert codec(name).bind([(3, 4)]).seeded(2).name == name


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("top064/04096+int2", "top64/4096+int2"),
        ("random1.0+fp32", "random1+fp32"),
        ("threshold.010@32+int8", "threshold0.01+int8"),
        ("randomblock1e-3+fp32", "randomblock0.001+fp32"),
    ],
)
def test_other_spellings_become_canonical(written: str, canonical: str) -> None:
    assert codec(written).name == canonical


@pytest.mark.parametrize(
    ("expression", "what", "hint"),
    [
        ("int5", "unknown codec 'int5'", "did you mean 'int8'?"),
        ("tpo64/4096+int2", "unknown codec", "did you mean 'top64/4096+int2'?"),
        ("", "unknown codec ''", "known: "),
        ("top64/4096", "not of the form of 'top'", "for example top64/4096+int2"),
        ("top64/4096+int3", "unknown values 'int3'", "did you mean 'int8'?"),
        ("top0/64+int8", "K=0: must be from 1 to 64", "for example top"),
        ("top65/64+int8", "K=65: must be from 1 to 64", "for example top"),
        ("top4/65537+int8", "BLOCK=65537: must be from 1 to 65536", "for example top"),
        ("top4/64x32+int8", "tiles of 64x32: must be square", "for example top"),
        ("top4/257x257+int8", "SIDE=257: must be from 1 to 256", "for example top"),
        ("dct65+top4/65+int8", "SIDE=65: must be from 2 to 64", "for example dct64"),
        ("dct64+top4/128+int8", r"blocks of 128: must be 64 \(1-D\) or 4096 \(tiles\)", "for example dct64"),
        ("dct64+top65/64+int8", "K=65: must be from 1 to 64", "for example dct64"),
        ("threshold0+int8", r"RATIO=0: must be in \(0, 1\]", "for example threshold0.01"),
        ("threshold0.1@0+int8", "EVERY=0: must be from 1", "for example threshold0.01"),
        ("random1.5+int8", r"RATIO=1.5: must be in \(0, 1\]", "for example random0.01"),
        ("random1e--+int8", "RATIO=1e--: must be", "for example random0.01"),
        ("randomblock2+int8", "RATIO=2: must be", "for example randomblock0.01"),
        ("random0.1+top4/64+int8", "not of the form of 'random'", "for example random0.01"),
        ("top9999999999/1+fp32", "not of the form of 'top'", "for example top"),
    ],
)
def test_a_mistake_is_named_with_its_limit_and_an_example(expression: str, what: str, hint: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        codec(expression)
    assert caught.value.hint.startswith(hint)
