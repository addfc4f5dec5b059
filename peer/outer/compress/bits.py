"""Codes of 1 to 16 bits in bytes: the first code in the lowest bits, each row padded with zeros to a whole byte.

All of it is shifts on views of wider integers, little-endian as every machine that torch runs on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from peer.outer.compress.base import PayloadError

Bytes = NDArray[np.uint8]
INDEX_BITS = (8, 12, 16)
_ALIGNED = 8  # bytes


def packed_bytes(width: int, bits: int) -> int:
    """Bytes of a row of `width` codes: ceil(width bits / 8)."""
    return -(-width * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Uint8 [r, w], each below 2^bits, bits in {1, 2, 4, 8} -> uint8 [r, ceil(w bits / 8)]."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    codes = _pad(codes, per_byte)
    if bits == 4:
        pairs = codes.view(torch.int16)
        return pairs.bitwise_or(pairs >> 4).to(torch.uint8)
    if bits == 2:
        fours = codes.view(torch.int32)
        fours = fours.bitwise_or(fours >> 6)
        return fours.bitwise_or_(fours >> 12).to(torch.uint8)
    eights = codes.view(torch.int64)
    eights = eights.bitwise_or(eights >> 7)
    eights.bitwise_or_(eights >> 14)
    return eights.bitwise_or_(eights >> 28).to(torch.uint8)


def tensor_of(array: Bytes) -> Tensor:
    """The same bytes for torch: a copy where they are read-only, which it warns of, or may not be viewed as wider
    numbers.
    """
    place: int = array.__array_interface__["data"][0]
    return torch.from_numpy(array if array.flags.writeable and place % _ALIGNED == 0 else array.copy())


def lookup(packed: Bytes, table: Tensor, out: Tensor) -> None:
    """The inverse of `pack`, with a value for every code of a byte at once.

    Args:
        packed: uint8 [r, ceil(w / p)].
        table: fp32 [256, p], the p values of each byte; see `byte_table`.
        out: fp32 [r, w], contiguous; written.
    """
    per_byte = table.shape[1]
    width = out.shape[1]
    bytes_ = tensor_of(packed).flatten().to(torch.int32)
    if width % per_byte or out.storage_offset() % per_byte:  # no row, or not this vector, is one of wider elements
        out.copy_(table[bytes_].view(out.shape[0], -1)[:, :width])
        return
    wide = {2: torch.float64, 4: torch.complex128}.get(per_byte)  # one element a byte is fastest to pick
    if wide is None:
        torch.index_select(table, 0, bytes_, out=out.view(-1, per_byte))
    else:
        torch.index_select(table.view(wide).view(-1), 0, bytes_, out=out.view(-1).view(wide))


def check_padding(packed: Bytes, width: int, bits: int) -> None:
    """Refuse rows of `width` codes, as `pack` packs them, whose last byte holds more.

    Raises:
        PayloadError: the padding is not zero.
    """
    used = width * bits % 8
    if used and bool((packed[:, -1] >> used).any()):
        raise PayloadError(f"{width} packed codes are padded with bits that are not zero")


def byte_table(values: Sequence[float]) -> Tensor:
    """Fp32 [256, p]: what the p codes in each byte mean, given what each code of 8 / p bits means."""
    bits = len(values).bit_length() - 1
    rows = [[values[(byte >> shift) % len(values)] for shift in range(0, 8, bits)] for byte in range(256)]
    return torch.tensor(rows, dtype=torch.float32)


def pack_indices(indices: Tensor, bits: int) -> Tensor:
    """Int64 [r, k], each below 2^bits, bits in {8, 12, 16} -> uint8 [r, ceil(k bits / 8)]."""
    if bits == 8:
        return indices.to(torch.uint8)
    if bits == 16:
        return torch.stack((indices & 255, indices >> 8), dim=2).to(torch.uint8).flatten(1)
    pairs = _pad(indices, 2)
    low, high = pairs[:, 0::2], pairs[:, 1::2]
    threes = torch.stack((low & 255, (low >> 8) | ((high & 15) << 4), high >> 4), dim=2)
    return threes.to(torch.uint8).flatten(1)[:, : packed_bytes(indices.shape[1], bits)]


def unpack_indices(packed: Tensor, width: int, bits: int) -> Tensor:
    """The inverse of `pack_indices`: uint8 [r, ceil(k bits / 8)] -> int64 [r, k].

    Raises:
        PayloadError: the padding is not zero.
    """
    wide = packed.to(torch.int64)
    if bits == 8:
        return wide
    if bits == 16:
        return wide[:, 0::2] | (wide[:, 1::2] << 8)
    wide = _pad(wide, 3)
    first, second, third = wide[:, 0::3], wide[:, 1::3], wide[:, 2::3]
    pairs = torch.stack((first | ((second & 15) << 8), (second >> 4) | (third << 4)), dim=2)
    return _unpadded(pairs.flatten(1), width)


def _pad(codes: Tensor, multiple: int) -> Tensor:
    missing = -codes.shape[1] % multiple
    return F.pad(codes, (0, missing)) if missing else codes


def _unpadded(codes: Tensor, width: int) -> Tensor:
    if bool(codes[:, width:].any()):
        raise PayloadError(f"{width} packed codes are padded with bits that are not zero")
    return codes[:, :width]
