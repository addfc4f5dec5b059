"""Loops over fp32 vectors as machine code: one pass where a chain of tensor operations makes one for each.

They yield what the tensor operations yield, bit for bit: each operation rounds once. So it is nobody else's business
whether a peer has them; where no compiler was at hand when Atoll was installed the tensor operations do the work. None
holds the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("kernels.c")
_VECTOR, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
_QUANTIZE = [_VECTOR, _COUNT, _COUNT, _NUMBER, _NUMBER, _VECTOR, _VECTOR]
_DEQUANTIZE = [_VECTOR, _VECTOR, _COUNT, _COUNT, _VECTOR]
_CHECK = [_VECTOR, _VECTOR, _COUNT, _COUNT, ctypes.c_uint32, ctypes.c_uint32]
_ANSWERS = ("quantize", "check", "all_finite")


class Kernels:
    """The compiled loops. Vectors are contiguous, fp32 and on the CPU: ask `kernels_for`.

    Nothing behind the end of a vector or of a payload is read or written: every size is looked at first, where the
    tensor operations would have refused it. Methods raise ValueError for sizes that do not fit together.

    Args:
        path: of the library.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.made_of.restype = ctypes.c_ulong
        for name, arguments in (
            ("quantize_int8", _QUANTIZE), ("quantize_int4", _QUANTIZE),
            ("dequantize_int8", _DEQUANTIZE), ("dequantize_int4", _DEQUANTIZE),
            ("check_int8", _CHECK), ("check_int4", _CHECK), ("all_finite", [_VECTOR, _COUNT]),
            ("add_scaled", [_VECTOR, _VECTOR, _COUNT, _NUMBER]),
            ("nesterov", [_VECTOR, _VECTOR, _VECTOR, _COUNT, _NUMBER, _NUMBER, _VECTOR, _VECTOR]),
        ):  # fmt: skip
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int if name.startswith(_ANSWERS) else None
        self._library = library

    @property
    def made_of(self) -> int:
        """CRC-32 of the source that the library was built of."""
        return int(self._library.made_of())

    def quantize(
        self, bits: int, rows: Tensor, least: float, most: float, scales: Tensor, codes: Tensor
    ) -> bool:
        """Rows -> scales, max |x| / levels within [least, most] or 0, and codes, round(x / scale).

        Args:
            bits: 8: `int8` of `int8.py`, with fp32 scales; 4: `int4` of `levels.py`, with bf16 scales.
            rows: fp32 [r, w].
            scales: r of them, 4 or 2 bytes each; written.
            codes: r w of 8 bits, or r ceil(w / 2) bytes; written.

        Returns:
            False where a value is NaN or infinite; what was written then means nothing.
        """
        function = self._library.quantize_int8 if bits == 8 else self._library.quantize_int4
        _check_sizes((scales.nbytes, codes.nbytes), _sizes(bits, *rows.shape))
        places = scales.data_ptr(), codes.data_ptr()
        return bool(function(rows.data_ptr(), rows.numel(), rows.shape[1], least, most, *places))

    def dequantize(self, bits: int, scales: memoryview, codes: memoryview, out: Tensor) -> None:
        """The inverse of `quantize` of so many bits: out = scale * code, fp32 [r, w]."""
        function = self._library.dequantize_int8 if bits == 8 else self._library.dequantize_int4
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


def kernels_for(*vectors: Tensor) -> Kernels | None:
    """The compiled loops, if there are any and they take these vectors; what they read of bytes they always take."""
    for x in vectors:  # a generator would cost more than all it asks
        if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
            return None
    return compiled()


@lru_cache(maxsize=1)
def compiled() -> Kernels | None:
    """The compiled loops, if they were built when Atoll was installed, of the source that lies beside them."""
    path = SOURCE.with_name(f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        kernels = Kernels(path)
        source = zlib.crc32(SOURCE.read_bytes())
    except (OSError, AttributeError):
        log.info("no compiled loops: rounds take more processor time; install Atoll anew with a C compiler at hand")
        return None
    if source != kernels.made_of:
        log.warning("%s was built of another %s: it is not used; install Atoll anew", path.name, SOURCE.name)
        return None
    return kernels


def _sizes(bits: int, rows: int, width: int) -> tuple[int, int]:
    """Bytes of scales and codes."""
    return (4 * rows, rows * width) if bits == 8 else (2 * rows, rows * -(-width // 2))


def _check_sizes(given: Sequence[int], needed: Sequence[int]) -> None:
    if tuple(given) != tuple(needed):
        raise ValueError(f"sizes {tuple(given)} do not fit: must be {tuple(needed)}")


def _address(view: memoryview) -> int:
    place: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]  # `.ctypes` makes objects of its own
    return place
