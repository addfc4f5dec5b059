"""Codecs by the name or expression that a manifest gives them."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NoReturn, TypeVar

import torch

from peer.errors import UserError, did_you_mean
from peer.outer.compress.base import Codec, Compressor
from peer.outer.compress.blockwise import Blockwise
from peer.outer.compress.coarse import Int2Values, SignValues
from peer.outer.compress.dct import MAX_SIDE, Cosine
from peer.outer.compress.identity import Fp32
from peer.outer.compress.int8 import BlockInt8
from peer.outer.compress.levels import Fp4Values, IntegerValues
from peer.outer.compress.randomk import RandomK
from peer.outer.compress.records import MAX_BLOCK, Records
from peer.outer.compress.threshold import DEFAULT_EVERY, Threshold
from peer.outer.compress.topk import TopK
from peer.outer.compress.values import Fp32Values, HalfValues, Values

_Named = TypeVar("_Named")
VALUES: Final[Mapping[str, Values]] = MappingProxyType(
    {
        "fp32": Fp32Values(),
        "fp16": HalfValues(torch.float16),
        "bf16": HalfValues(torch.bfloat16),
        "int8": IntegerValues(8),
        "int4": IntegerValues(4),
        "fp4": Fp4Values(),
        "int2": Int2Values(),
        "sign": SignValues(),
    }
)
COMPRESSORS: Final[Mapping[str, Compressor]] = MappingProxyType(
    {
        "fp32": Fp32(),
        "fp16": Blockwise(VALUES["fp16"], block=256),
        "bf16": Blockwise(VALUES["bf16"], block=256),
        "int8": BlockInt8(),
        "int4": Blockwise(VALUES["int4"], block=128),
        "fp4": Blockwise(VALUES["fp4"], block=128),
        "int2": Blockwise(VALUES["int2"], block=256),
        "sign": Blockwise(VALUES["sign"], block=256),
    }
)
_EXAMPLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "top": "top64/4096+int2",
        "dct": "dct64+top32/4096+int8",
        "threshold": "threshold0.01+int8",
        "random": "random0.01+fp32",
        "randomblock": "randomblock0.01+fp32",
    }
)


def compressor(name: str) -> Compressor:
    """The dense codec called `name`.

    Raises:
        UserError: no such codec; names the nearest.
    """
    if name not in COMPRESSORS:
        raise UserError(f"unknown compressor {name!r}", did_you_mean(name, COMPRESSORS))
    return COMPRESSORS[name]


def codec(expression: str) -> Codec:
    """The codec that an expression describes; `codec(c.name)` is c again, unbound and unseeded.

    Grammar, without spaces:

        codec  = dense | sparse
        dense  = fp32 | fp16 | bf16 | int8 | int4 | fp4 | int2 | sign
        sparse = "top" K "/" BLOCK "+" dense                   the K largest of every BLOCK consecutive values
               | "top" K "/" SIDE "x" SIDE "+" dense           of every tile of a matrix, SIDE^2 values of a vector
               | "dct" SIDE "+top" K "/" SIDE^2 "+" dense      of the 2-D cosine coefficients of every tile
               | "dct" SIDE "+top" K "/" SIDE "+" dense        of the 1-D coefficients of SIDE consecutive values
               | "threshold" RATIO ["@" EVERY] "+" dense       above a threshold refreshed every EVERY payloads (32)
               | "random" RATIO "+" dense                      seeded coordinates
               | "randomblock" RATIO "+" dense                 one seeded stretch

    K is from 1 to the size of the block, BLOCK and SIDE^2 are at most 65536, SIDE is at most 64 after "dct", RATIO is
    within (0, 1], EVERY at least 1.

    Raises:
        UserError: the part that is wrong, its limit, an example.
    """
    if expression in COMPRESSORS:
        return COMPRESSORS[expression]
    kind = _kind(expression)
    if kind not in _PARSERS:
        raise UserError(f"unknown codec {expression!r}", did_you_mean(expression, [*COMPRESSORS, *_EXAMPLES.values()]))
    return _PARSERS[kind](expression)


def _top(expression: str) -> Codec:
    match = _match(expression, r"top(\d{1,9})/(\d{1,9})(?:x(\d{1,9}))?\+(\w+)")
    k, block, values = int(match[1]), int(match[2]), _named(expression, match[4], VALUES)
    if match[3] is None:
        _check(expression, "BLOCK", block, 1, MAX_BLOCK)
        _check(expression, "K", k, 1, block)
        return TopK(Records(k, values), line=block)
    if int(match[3]) != block:
        _refuse(expression, f"tiles of {match[2]}x{match[3]}: must be square")
    _check(expression, "SIDE", block, 1, math.isqrt(MAX_BLOCK))
    _check(expression, "K", k, 1, block**2)
    return TopK(Records(k, values), line=block**2, side=block)


def _dct(expression: str) -> Codec:
    match = _match(expression, r"dct(\d{1,9})\+top(\d{1,9})/(\d{1,9})\+(\w+)")
    side, k, block = int(match[1]), int(match[2]), int(match[3])
    records = Records(k, _named(expression, match[4], VALUES))
    _check(expression, "SIDE", side, 2, MAX_SIDE)
    if block not in (side, side**2):
        _refuse(expression, f"blocks of {block}: must be {side} (1-D) or {side**2} (tiles)")
    _check(expression, "K", k, 1, block)
    return TopK(records, line=side, side=None if block == side else side, transform=Cosine())


def _threshold(expression: str) -> Codec:
    match = _match(expression, r"threshold([0-9.e-]{1,30})(?:@(\d{1,9}))?\+(\w+)")
    every = DEFAULT_EVERY if match[2] is None else int(match[2])
    _check(expression, "EVERY", every, 1, 999_999_999)
    return Threshold(_ratio(expression, match[1]), _named(expression, match[3], COMPRESSORS), every)


def _random(expression: str) -> Codec:
    match = _match(expression, r"random(block)?([0-9.e-]{1,30})\+(\w+)")
    values = _named(expression, match[3], COMPRESSORS)
    return RandomK(_ratio(expression, match[2]), values, contiguous=match[1] is not None)


_PARSERS: Final[Mapping[str, Callable[[str], Codec]]] = MappingProxyType(
    {"top": _top, "dct": _dct, "threshold": _threshold, "random": _random, "randomblock": _random}
)


def _kind(expression: str) -> str:
    return expression[: len(expression) - len(expression.lstrip(string.ascii_lowercase))]


def _match(expression: str, pattern: str) -> re.Match[str]:
    match = re.fullmatch(pattern, expression, re.ASCII)
    return match if match is not None else _refuse(expression, f"not of the form of {_kind(expression)!r}")


def _check(expression: str, what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        _refuse(expression, f"{what}={value}: must be from {low} to {high}")


def _ratio(expression: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if 0.0 < value <= 1.0 else _refuse(expression, f"RATIO={text}: must be in (0, 1]")


def _named(expression: str, name: str, known: Mapping[str, _Named]) -> _Named:
    if name not in known:
        raise UserError(f"codec {expression!r}: unknown values {name!r}", did_you_mean(name, known))
    return known[name]


def _refuse(expression: str, problem: str) -> NoReturn:
    raise UserError(f"codec {expression!r}: {problem}", f"for example {_EXAMPLES[_kind(expression)]}")
