"""The places of the k largest magnitudes of each row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SPREAD = 4  # columns of maxima per value to keep
_MIN_FOLD = 4
_PLACE_BITS = 16
_PLACE_MASK = (1 << _PLACE_BITS) - 1
_MAX_SURPLUS = 3  # candidates per value to keep, beyond which the short cut is none


def largest_places(rows: Tensor, k: int) -> Tensor:
    """Fp32 [t, w], k < w -> int64 [t, k], increasing; NaN counts as the largest. Ties go either way."""
    magnitudes = rows.abs()
    fold = rows.shape[1] // (_SPREAD * k)
    if rows.device.type == "cpu" and fold >= _MIN_FOLD and rows.numel():
        places = _of_candidates(magnitudes, k, fold)
        if places is not None:
            return places
    return magnitudes.topk(k, dim=1, sorted=False).indices.sort(dim=1).values


def _of_candidates(magnitudes: Tensor, k: int, fold: int) -> Tensor | None:
    """By a bound first: at least k values reach the k-th largest of the maxima of disjoint sets.

    None where so many reach it that the bound does not help: blocks of zeros, many ties, NaN.
    """
    num_rows, width = magnitudes.shape
    columns = width // fold
    maxima = magnitudes[:, : fold * columns].view(num_rows, fold, columns).amax(dim=1).numpy()
    bounds = np.partition(maxima, columns - k, axis=1)[:, columns - k, None]
    values = magnitudes.numpy()
    flat = np.flatnonzero(~(values < bounds))  # so that NaN is a candidate
    rows, places = np.divmod(flat, width)
    counts = np.bincount(rows, minlength=num_rows)
    most = int(counts.max())
    if counts.min() < k or most > _MAX_SURPLUS * k:
        return None
    # One integer for magnitude and place, so that a partition of the one brings the other along.
    keys = np.zeros((num_rows, most), np.int64)
    shifts = np.arange(num_rows) * most - (np.cumsum(counts) - counts)
    keys.reshape(-1)[np.arange(flat.size) + shifts[rows]] = _keys(values.reshape(-1)[flat], places)
    chosen = np.partition(keys, most - k, axis=1)[:, most - k :] & _PLACE_MASK
    return torch.from_numpy(np.sort(chosen, axis=1))


def _keys(magnitudes: NDArray[np.float32], places: NDArray[np.int64]) -> NDArray[np.int64]:
    return (magnitudes.view(np.int32).astype(np.int64) << _PLACE_BITS) | places
