"""A model's parameters as one flat fp32 vector, and that vector cut into shards."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from peer.errors import UserError
from peer.outer.math.ranges import Ranges
from peer.outer.optim.every_step import is_hidden_matrix

MAX_CELLS = 1 << 12  # 64 members still have shards of 64 cells: equal to a few per cent
MAX_CELL_ELEMENTS = 1 << 19  # those of a slice, which must hold whole cells


class Cut(NamedTuple):
    """How a model is cut into fragments of whole blocks.

    Attributes:
        order: `strided`: block i belongs to fragment i mod F; `consecutive`: neighbours share a fragment.
        ends: what is in no block. `split`: parameters before the first block (embeddings) go to fragment 0, the rest
            (final norm, head) to the last; `apart`: all of it is the last fragment.
    """

    num_fragments: int = 1
    order: str = "strided"
    ends: str = "split"


WHOLE: Final = Cut()


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Where each parameter of a model lies in the flat vector.

    Attributes:
        names: parameter names, fragment by fragment, in the model's own order within each; tied weights appear once,
            under their first name.
        offsets: index of each parameter's first element in the flat vector.
        numel: length of the flat vector.
        sizes: elements of each fragment, where there are several.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: torch.nn.Module, cut: Cut = WHOLE) -> FlatLayout:
        """The layout of all parameters of `model` that train.

        Args:
            cut: into fragments; each is one range of the flat vector.

        Raises:
            UserError: more fragments than blocks.
        """
        named = [(name, tuple(parameter.shape)) for name, parameter in trained_parameters(model).items()]
        if (num_fragments := cut.num_fragments) > 1:
            of_each = fragment_of_each([name for name, _ in named], cut)
            named = [one for fragment in range(num_fragments) for one, own in zip(named, of_each, strict=True)
                     if own == fragment]  # fmt: skip
            sizes = [0] * num_fragments
            for (_, shape), fragment in zip(named, sorted(of_each), strict=True):
                sizes[fragment] += math.prod(shape)
        offsets = list(itertools.accumulate((math.prod(shape) for _, shape in named), initial=0))
        return cls(
            names=tuple(name for name, _ in named), shapes=tuple(shape for _, shape in named),
            offsets=tuple(offsets[:-1]), numel=offsets[-1], sizes=tuple(sizes) if num_fragments > 1 else (),
        )  # fmt: skip

    @classmethod
    def of_named(cls, named: Iterable[tuple[str, tuple[int, ...]]]) -> FlatLayout:
        """The layout of parameters by their names: the same in every program that has them, whatever their order."""
        named = sorted(named)
        offsets = list(itertools.accumulate((math.prod(shape) for _, shape in named), initial=0))
        names, shapes = tuple(name for name, _ in named), tuple(shape for _, shape in named)
        return cls(names=names, shapes=shapes, offsets=tuple(offsets[:-1]), numel=offsets[-1])

    @property
    def hidden(self) -> tuple[int, ...]:
        """Places of the matrices inside transformer blocks, ascending."""
        named = zip(self.names, self.shapes, strict=True)
        return tuple(place for place, (name, shape) in enumerate(named) if is_hidden_matrix(name, shape))

    def copy_to_flat(self, model: torch.nn.Module, out: Tensor, start: int = 0) -> None:
        """Copy the model's parameters, of any device and dtype, into `out` (fp32, any device): as many as it holds from
        element `start` on; both ends are those of parameters.
        """
        for parameter, view in self._pairs(model, out, start):
            view.copy_(parameter)

    def copy_from_flat(self, flat: Tensor, model: torch.nn.Module, start: int = 0) -> None:
        """The inverse of `copy_to_flat`, rounding to each parameter's dtype."""
        for parameter, view in self._pairs(model, flat, start):
            parameter.copy_(view)

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` ([numel], any dtype and device) as one view per parameter, in order."""
        assert flat.shape == (self.numel,), f"flat vector is {tuple(flat.shape)}, the layout needs ({self.numel},)"
        return [
            flat[offset : offset + math.prod(shape)].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def merged_ranges(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """[start, stop) of the parameters at `indices` (ascending), adjacent ones as one range."""
        ranges: list[tuple[int, int]] = []
        for index in indices:
            _append(ranges, self.offsets[index], self.offsets[index] + math.prod(self.shapes[index]))
        return ranges

    def shapes_within(self, ranges: Ranges) -> list[tuple[int, ...]]:
        """Shapes of the tensors in `ranges`, which hold whole tensors."""
        places = list(zip(self.shapes, self.offsets, strict=True))
        return [shape for start, stop in ranges for shape, offset in places if start <= offset < stop]

    def digest(self) -> str:
        """SHA-256 of names and shapes as 64 hex digits: equal layouts mean exchangeable flat vectors."""
        described = json.dumps(list(zip(self.names, self.shapes, strict=True)), separators=(",", ":"))
        return hashlib.sha256(described.encode()).hexdigest()

    def _pairs(self, model: torch.nn.Module, flat: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        stop = first + flat.numel()
        fits = flat.dim() == 1 and stop <= self.numel
        assert fits, f"flat vector is {tuple(flat.shape)} from {first} on, the layout has ({self.numel},)"
        assert flat.dtype == torch.float32, f"flat vector is {flat.dtype}, must be torch.float32"
        parameters, copied = trained_parameters(model), 0
        missing = sorted(set(self.names) - parameters.keys())
        assert not missing, f"parameters {missing} are not there"
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            parameter = parameters[name]
            assert parameter.shape == shape, f"{name} has shape {tuple(parameter.shape)}, the layout has {shape}"
            if first <= offset and offset + parameter.numel() <= stop:
                copied += parameter.numel()
                yield parameter.detach(), flat[offset - first :][: parameter.numel()].view(shape)
        assert copied == flat.numel(), f"flat vector is {flat.numel()} long; the parameters in it have {copied}"


@lru_cache(maxsize=256)  # auditors ask for every round since a reducer came
def shards_of(numel: int, count: int, block: int, cells: tuple[int, ...] = ()) -> tuple[tuple[int, int], ...]:
    """[start, stop) of each of the shards that so many members reduce; whole cells, as `partition` cuts them.

    Args:
        cells: of each shard, where they are not as equal as they can be; all cells there are.
    """
    cell = cell_of(numel, block)
    if not cells:
        return partition(numel, count, cell)
    return tuple(itertools.pairwise(min(at * cell, numel) for at in itertools.accumulate(cells, initial=0)))


def cell_of(numel: int, block: int) -> int:
    """Elements of a cell, of which shards consist whatever their number: a codec's block times a power of two, the
    least of which a vector of `numel` has at most MAX_CELLS.
    """
    cell = block
    while cell * MAX_CELLS < numel and 2 * cell <= MAX_CELL_ELEMENTS:
        cell *= 2
    return cell


def partition(numel: int, count: int, block: int) -> tuple[tuple[int, int], ...]:
    """Cut [0, numel) into `count` contiguous ranges [start, stop) whose inner boundaries are multiples of `block`.

    Sizes differ by at most one block. With fewer blocks than ranges, some are empty.
    """
    assert numel >= 0, f"numel={numel}"
    assert count >= 1, f"count={count}"
    assert block >= 1, f"block={block}"
    num_blocks = -(-numel // block)
    # Rounding down leaves the last range one of the larger ones, so the short last block never falls to a smaller one.
    cuts = [min(i * num_blocks // count * block, numel) for i in range(count + 1)]
    return tuple(itertools.pairwise(cuts))


def strided_fragments(
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    blocks_per_fragment: int | None = None,
    num_fragments: int | None = None,
    cut: Cut | None = None,
) -> tuple[Ranges, ...]:
    """Ranges [start, stop) of the flat vector for each fragment; every element once (arXiv 2501.18512, section 2.3).

    The first whole-number component of a name is its transformer block ("model.layers.3.mlp.up.weight" is in block
    3). Blocks are counted in ascending order, and the i-th belongs to fragment i mod F. Tensors without a number go
    to fragment 0 if they come before the first block (embeddings), else to the last fragment (final norm, head). A
    `cut` can say otherwise.

    Args:
        names: parameter names, in the order of the flat vector.
        blocks_per_fragment: F = ceil(blocks / this); published: 3. Either this or `num_fragments`.
        num_fragments: F, at most the number of blocks; 1 also fits a model without blocks.
        cut: in place of both.

    Returns:
        F tuples of ascending ranges; neighbours that touch are one range.

    Raises:
        UserError: both numbers or none, or one out of its range.
    """
    assert len(names) == len(shapes), f"{len(names)} names and {len(shapes)} shapes"
    if cut is None:
        cut = Cut(num_fragments=_fragment_count(count_blocks(names), blocks_per_fragment, num_fragments))
    of_each = fragment_of_each(names, cut)
    fragments: list[list[tuple[int, int]]] = [[] for _ in range(max(of_each, default=0) + 1)]
    start = 0
    for fragment, shape in zip(of_each, shapes, strict=True):
        stop = start + math.prod(shape)
        _append(fragments[fragment], start, stop)
        start = stop
    return tuple(tuple(ranges) for ranges in fragments)


def fragment_of_each(names: Sequence[str], cut: Cut) -> list[int]:
    """The fragment that each parameter belongs to; see `strided_fragments` and `Cut`."""
    blocks = [_block(name) for name in names]
    ranks = {block: rank for rank, block in enumerate(sorted({block for block in blocks if block is not None}))}
    last = cut.num_fragments - 1
    count = _fragment_count(len(ranks), None, max(1, last if cut.ends == "apart" else last + 1))
    found, others = [], last if cut.ends == "apart" else 0
    for block in blocks:
        if block is None:
            found.append(others)
            continue
        others, rank = last, ranks[block]
        found.append(rank * count // len(ranks) if cut.order == "consecutive" else rank % count)
    return found


def count_blocks(names: Sequence[str]) -> int:
    """How many transformer blocks these parameters belong to."""
    return len({_block(name) for name in names} - {None})


def _fragment_count(num_blocks: int, blocks_per_fragment: int | None, num_fragments: int | None) -> int:
    if (blocks_per_fragment is None) == (num_fragments is None):
        raise UserError(
            f"blocks_per_fragment={blocks_per_fragment} and num_fragments={num_fragments}: give exactly one",
            "published: 3 blocks",
        )
    if blocks_per_fragment is not None:
        if blocks_per_fragment < 1:
            raise UserError(f"blocks_per_fragment={blocks_per_fragment}: must be at least 1", "published: 3 blocks")
        return max(1, -(-num_blocks // blocks_per_fragment))
    assert num_fragments is not None
    if not 1 <= num_fragments <= max(1, num_blocks):
        raise UserError(
            f"num_fragments={num_fragments}: must be in [1, {max(1, num_blocks)}]",
            f"the model has {num_blocks} blocks, and each fragment needs one",
        )
    return num_fragments


def _block(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isascii() and part.isdecimal()), None)


def _append(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Nothing if the range is empty; one range with the last if they touch."""
    if start == stop:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that a swarm trains, by name; tied ones appear once."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad and one.is_floating_point()}
