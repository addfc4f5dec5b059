"""Loops over fp32 vectors as machine code: one pass where a chain of tensor operations makes one for each.

They yield the same bits as the tensor operations: each operation rounds once. So a peer without them does not affect
others; without a compiler at installation the tensor operations do the work. None holds the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("kernels.c")
_VECTOR, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
_QUANTIZE = [_VECTOR, _VECTOR, _COUNT, _COUNT, _NUMBER, _NUMBER, _VECTOR, _VECTOR]
_DEQUANTIZE = [_VECTOR, _VECTOR, _COUNT, _COUNT, _VECTOR]
_CHECK = [_VECTOR, _VECTOR, _COUNT, _COUNT, ctypes.c_uint32, ctypes.c_uint32]
_ANSWERS = ("quantize", "check", "all_finite")
_STEP = [_VECTOR, _VECTOR, _NUMBER, _NUMBER, _VECTOR, _VECTOR]
STRIP = 1024  # values of each vector that `inner_products` has rounded at a time
LONGEST_ROW = 2048  # of what `nesterov_coded` reads and `quantize_difference` writes


class Coded(NamedTuple):
    """Values that still lie in a payload: what `Kernels.quantize` wrote of fp32 [rows, width].

    Attributes:
        bits: of a code.
        limits: the least and the largest scale that is not 0.
    """

    bits: int
    scales: memoryview
    codes: memoryview
    rows: int
    width: int
    limits: tuple[float, float]

    @property
    def bound(self) -> float:
        """What no value exceeds in magnitude: the largest scale times the largest code."""
        scales = np.frombuffer(self.scales, "<u4" if self.bits == 8 else "<u2").astype("<u4", copy=False)
        largest = scales.max(initial=0) << (0 if self.bits == 8 else 16)  # bits are ordered as the numbers are
        return float(np.uint32(largest).view(np.float32)) * (1 << (self.bits - 1))


class Kernels:
    """The compiled loops. Vectors are contiguous, fp32 and on the CPU: ask `kernels_for`.

    Nothing behind the end of a vector or of a payload is read or written: every size is looked at first, where the
    tensor operations would have refused it. Methods raise ValueError for sizes that do not fit together.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.made_of.restype = ctypes.c_ulong
        for name, arguments in (
            *((f"quantize_int{bits}", _QUANTIZE) for bits in (2, 4, 8)),
            *((f"dequantize_int{bits}", _DEQUANTIZE) for bits in (2, 4, 8)),
            ("check_int8", _CHECK), ("check_int4", _CHECK), ("all_finite", [_VECTOR, _COUNT]),
            ("largest", [_VECTOR, _COUNT]),
            ("inner_products", [_VECTOR, _VECTOR, _COUNT, _COUNT, _VECTOR, _VECTOR]),
            ("add_scaled", [_VECTOR, _VECTOR, _COUNT, _NUMBER]),
            ("nesterov", [_VECTOR, _VECTOR, _VECTOR, _COUNT, _NUMBER, _NUMBER, _VECTOR, _VECTOR]),
            *((f"nesterov_int{bits}", [_VECTOR, _VECTOR, _COUNT, _COUNT, *_STEP]) for bits in (2, 4, 8)),
        ):  # fmt: skip
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int if name.startswith(_ANSWERS) else None
        library.largest.restype = _NUMBER
        self._library = library

    @property
    def made_of(self) -> int:
        """CRC-32 of the source that the library was built of."""
        return int(self._library.made_of())

    def quantize(
        self, bits: int, rows: Tensor, least: float, most: float, scales: Tensor, codes: Tensor
    ) -> bool:
        """Rows -> scales within [least, most] or 0, and codes.

        Args:
            bits: 8: `int8` of `int8.py`, with fp32 scales; 4: `int4` of `levels.py`, with bf16 scales; 2: `int2` of
                `coarse.py`, with two bf16 scales a row.
            rows: fp32 [r, w].
            scales: of r rows, 4 or, of 4 bits, 2 bytes each; written.
            codes: r rows of ceil(w bits / 8) bytes; written.

        Returns:
            False where a value is NaN or infinite, and of 2 bits also where a row's sum is, or is wider than 1024: what
            was written then means nothing.
        """
        function = getattr(self._library, f"quantize_int{bits}")
        _check_sizes((scales.nbytes, codes.nbytes), _sizes(bits, *rows.shape))
        places = scales.data_ptr(), codes.data_ptr()
        return bool(function(rows.data_ptr(), None, rows.numel(), rows.shape[1], least, most, *places))

    def quantize_difference(self, x: Tensor, minus: Tensor, into: Sequence[Coded]) -> bool:
        """`quantize` of x - minus, fp32 [n] each, into payloads that can be written, in rows of at most LONGEST_ROW
        values.

        Returns:
            False where that would; what was written then means nothing.
        """
        _check_coded(into, x, minus)
        first, second = x.data_ptr(), minus.data_ptr()
        for bits, scales, codes, rows, width, limits in into:
            function = getattr(self._library, f"quantize_int{bits}")
            if not function(first, second, rows * width, width, *limits, _address(scales), _address(codes)):
                return False
            first, second = first + 4 * rows * width, second + 4 * rows * width
        return True

    def dequantize(self, bits: int, scales: memoryview, codes: memoryview, out: Tensor) -> None:
        """The inverse of `quantize` of so many bits, into fp32 [r, w]."""
        function = getattr(self._library, f"dequantize_int{bits}")
        _check_sizes((scales.nbytes, codes.nbytes), _sizes(bits, *out.shape))
        function(_address(scales), _address(codes), out.numel(), out.shape[1], out.data_ptr())

    def fits(
        self, bits: int, scales: memoryview, codes: memoryview, shape: tuple[int, int], limits: tuple[int, int]
    ) -> bool:
        """Whether `quantize` of so many bits could have written this: no code below -levels, no scale that is neither
        0 nor, by its bits, within the limits, no padding. False as well for rows of no values.

        Args:
            shape: r, w of the rows.
            limits: the bits of the least and of the largest scale.
        """
        function = self._library.check_int8 if bits == 8 else self._library.check_int4
        _check_sizes((scales.nbytes, codes.nbytes), _sizes(bits, *shape))
        return bool(function(_address(scales), _address(codes), shape[0] * shape[1], shape[1], *limits))

    def all_finite(self, x: Tensor) -> bool:
        """Whether no element of fp32 [n] is NaN or infinite."""
        return bool(self._library.all_finite(x.data_ptr(), x.numel()))

    def largest(self, x: Tensor) -> float:
        """The largest magnitude in fp32 [n]: NaN or infinite if any is; 0 for no values."""
        return float(self._library.largest(x.data_ptr(), x.numel()))

    def inner_products(self, vectors: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
        """Of all pairs of vectors, fp32 [n] each, whose values are multiplied by their scale and rounded to integers
        first, ties to even; exact for n up to 2^23.

        Args:
            scales: one for each; no value times its scale may be above 2^15 in magnitude.

        Returns:
            fp64 [count, count].
        """
        count, numel = len(vectors), vectors[0].numel()
        _check_sizes([x.numel() for x in vectors], [numel] * len(scales))
        places, factors = np.array([x.data_ptr() for x in vectors], np.uintp), np.array(scales, np.float32)
        strips, sums = (torch.empty(count, width, dtype=torch.float64) for width in (STRIP, count))  # aligned
        arrays = places.ctypes.data, factors.ctypes.data
        self._library.inner_products(*arrays, count, numel, strips.data_ptr(), sums.zero_().data_ptr())
        return sums + sums.tril(-1).T

    def add_scaled(self, total: Tensor, x: Tensor, factor: float) -> None:
        """total <- total + factor x, in place; fp32 [n] each."""
        _check_sizes((x.numel(),), (total.numel(),))
        self._library.add_scaled(total.data_ptr(), x.data_ptr(), total.numel(), factor)

    def nesterov(
        self, old: tuple[Tensor, Tensor], aggregate: Tensor, beta: float, lr: float, new: tuple[Tensor, Tensor]
    ) -> None:
        """m <- beta m + D; anchor <- anchor - lr (beta m + D); (anchor, m), fp32 [n] each; `new` may be `old`."""
        _check_sizes([tensor.numel() for tensor in (*old, *new)], [aggregate.numel()] * 4)
        places = [tensor.data_ptr() for tensor in (*old, aggregate)]
        self._library.nesterov(*places, aggregate.numel(), beta, lr, *(tensor.data_ptr() for tensor in new))

    def nesterov_coded(
        self, old: tuple[Tensor, Tensor], aggregate: Sequence[Coded], beta: float, lr: float,
        new: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """`nesterov` of a D that is read from its payloads on the way, in rows of at most LONGEST_ROW values."""
        _check_coded(aggregate, *old, *new)
        places = [tensor.data_ptr() for tensor in (*old, *new)]
        for one in aggregate:
            function, count = getattr(self._library, f"nesterov_int{one.bits}"), one.rows * one.width
            anchor, momentum, *written = places
            function(_address(one.scales), _address(one.codes), count, one.width, anchor, momentum, beta, lr, *written)
            places = [place + 4 * count for place in places]


def kernels_for(*vectors: Tensor) -> Kernels | None:
    """The compiled loops, if there are any and they take these vectors; what they read of bytes they always take."""
    for x in vectors:  # a generator would cost more than all it asks
        if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
            return None
    return compiled()


def add_scaled(total: Tensor, x: Tensor, factor: float) -> None:
    """total <- total + factor x, in place; fp32 [n] each."""
    if kernels := kernels_for(total, x):
        kernels.add_scaled(total, x, factor)
    else:
        total.add_(x * factor)


@lru_cache(maxsize=1)
def compiled() -> Kernels | None:
    """The compiled loops, if they were built at installation from the current source."""
    path = SOURCE.with_name(f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        kernels = Kernels(path)
        source = zlib.crc32(SOURCE.read_bytes())
    except (OSError, AttributeError):
        log.info("no compiled loops: rounds take more CPU time; install a C compiler and reinstall Atoll")
        return None
    if source != kernels.made_of:
        log.warning("%s was built from another %s and is not used; reinstall Atoll", path.name, SOURCE.name)
        return None
    return kernels


def _sizes(bits: int, rows: int, width: int) -> tuple[int, int]:
    """Bytes of scales and codes."""
    return rows * (2 if bits == 4 else 4), rows * -(-width * bits // 8)


def _check_sizes(given: Sequence[int], needed: Sequence[int]) -> None:
    if tuple(given) != tuple(needed):
        raise ValueError(f"sizes {tuple(given)} do not fit: must be {tuple(needed)}")


def _check_coded(coded: Sequence[Coded], *vectors: Tensor) -> None:
    """That these payloads hold what they say, and as much as each of the vectors."""
    total = sum(one.rows * one.width for one in coded)
    _check_sizes([vector.numel() for vector in vectors], [total] * len(vectors))
    for bits, scales, codes, rows, width, _ in coded:
        if not 1 <= width <= LONGEST_ROW:
            raise ValueError(f"rows of {width} values: must be 1 to {LONGEST_ROW}")
        _check_sizes((scales.nbytes, codes.nbytes), _sizes(bits, rows, width))


def _address(view: memoryview) -> int:
    place: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]  # `.ctypes` makes objects of its own
    return place
