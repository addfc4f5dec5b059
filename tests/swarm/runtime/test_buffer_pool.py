"""Memory that is lent again once nobody has a view of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from peer.swarm.runtime.buffer_pool import BufferPool

LENGTH = 10_000


def place(view):
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.fixture
async def own():
    own = BufferPool()
    own.wake(2 * LENGTH)
    return own


async def test_what_nobody_holds_is_lent_again(own):
    first, second = own.lend(LENGTH), own.lend(LENGTH)
    places = {place(first), place(second)}
    assert (len(first), len(places), own.size) == (LENGTH, 2, 2 * LENGTH)
    del first, second
    shorter, exact = own.lend(LENGTH - 1), own.lend(LENGTH)
    assert {place(shorter), place(exact)} == places
    assert (len(shorter), own.size) == (LENGTH - 1, 2 * LENGTH)


@pytest.mark.parametrize(
    "part_of",
    [lambda view: view[5:10], lambda view: view[5:10].cast("c"), lambda view: np.frombuffer(view[5:10], np.uint8)[1:],
     lambda view: torch.frombuffer(view, dtype=torch.uint8)[5:10], lambda view: np.asarray(view)[5:10].view("S1")],
    ids=["slice", "cast", "numpy", "torch", "array"],
)  # fmt: skip
async def test_what_a_part_of_is_held_is_not(own, part_of):
    view = own.lend(LENGTH)
    view[5:10] = b"abcde"
    before, part = place(view), part_of(view)
    content = bytes(part.numpy() if isinstance(part, torch.Tensor) else part)
    del view
    other = own.lend(LENGTH)
    other[:] = bytes(LENGTH)
    assert place(other) != before
    assert content == bytes(part.numpy() if isinstance(part, torch.Tensor) else part)
    del part, other
    assert before in {place(view) for view in (own.lend(LENGTH), own.lend(LENGTH))}


async def test_no_more_is_kept_than_an_update(own):
    lent = [own.lend(LENGTH) for _ in range(4)]
    assert len({place(view) for view in lent}) == 4
    assert own.size == 2 * LENGTH
    del lent
    longer = own.lend(LENGTH + 1)  # another group has other parts: what does not fit makes room
    assert (len(longer), own.size) == (LENGTH + 1, LENGTH + 1)
    others = [own.lend(size) for size in (3, 4, 5)]
    assert own.size == LENGTH + 1 + 3 + 4 + 5
    del others
    assert len(own.lend(LENGTH - 2)) == LENGTH - 2  # the first of those that are free go
    assert own.size == (LENGTH + 1) + (LENGTH - 2)
    own.wake(LENGTH)
    del longer
    assert own.lend(LENGTH) is not None
    assert own.size == LENGTH + 1  # it fits: nothing is mapped
    assert len(own.lend(3 * LENGTH)) == 3 * LENGTH
    assert own.size == 0


async def test_it_is_given_back_when_no_round_follows(own):
    own.lend(LENGTH)
    own.rest(0.0)
    own.wake(2 * LENGTH)  # a round follows
    for _ in range(5):
        await asyncio.sleep(0)
    assert own.size == LENGTH
    own.rest(0.0)
    while own.size:
        await asyncio.sleep(0)
