"""Memory that is lent: never to two at once, never more kept than allowed, and lent again where it can be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from peer.outer.numerics.lending_pool import LendingPool

Bytes = NDArray[np.uint8]
BORROWS = st.tuples(st.just("borrow"), st.integers(1, 50))
RETURNS = st.tuples(st.just("return"), st.integers(0, 9))
LIMITS = st.tuples(st.just("limit"), st.integers(0, 120))


def pool_of(limit: int, least: int = 0) -> LendingPool[np.uint8]:
    return LendingPool(lambda n: np.empty(n, np.uint8), limit, least)


def place(array: Bytes) -> int:
    return int(array.ctypes.data)


@given(st.lists(st.one_of(BORROWS, RETURNS, LIMITS)), st.integers(0, 120), st.integers(0, 20))
def test_nobody_shares_and_no_more_is_kept_than_allowed(events: list[tuple[str, int]], limit: int, least: int) -> None:
    pool, lent = pool_of(limit, least), list[Bytes]()
    for number, (what, amount) in enumerate(events):
        before = pool.size
        if what == "borrow":
            array = pool.lend(amount)
            assert array.shape == (amount,)
            array.fill(number % 251)
            lent.append(array)
            del array
        elif what == "return" and amount < len(lent):
            lent.pop(amount)
        elif what == "limit":
            pool.keep(amount)
            limit = amount
        assert pool.size <= max(limit, before)  # what was lent when the limit fell comes back first
        assert sum(map(len, lent)) == len({place(one) + offset for one in lent for offset in range(len(one))})
    lent.clear()
    pool.keep(limit)
    assert pool.size <= limit


def test_the_smallest_free_block_that_fits_is_lent_again() -> None:
    pool = pool_of(100)
    small, large = pool.lend(10), pool.lend(40)
    places = place(small), place(large)
    del small, large
    first = pool.lend(8)
    assert place(first) == places[0]
    assert place(pool.lend(9)) == places[1]
    assert pool.size == 50


@pytest.mark.parametrize("part", [lambda array: array.data[3:4], lambda array: array.data[1:].cast("c")[2:3]])
def test_a_block_is_lent_as_long_as_a_part_of_it_exists(part: Callable[[Bytes], memoryview]) -> None:
    pool = pool_of(10)
    held = part(pool.lend(10))
    before = place(np.frombuffer(held, np.uint8))
    other = pool.lend(10)
    assert not place(other) <= before < place(other) + 10
    del held
    assert before - place(pool.lend(10)) == 3


def test_blocks_that_are_kept_have_a_least_size() -> None:
    pool = pool_of(limit=20, least=10)
    one, other, beyond = pool.lend(3), pool.lend(10), pool.lend(4)
    assert (len(one), len(other), len(beyond), pool.size) == (3, 10, 4, 20)
    kept = {place(one), place(other)}
    del one, other
    assert {place(array) for array in [pool.lend(9), pool.lend(9)]} <= kept
    assert place(beyond) not in kept


def test_what_is_cleared_stays_with_its_borrower() -> None:
    pool = pool_of(10)
    held = pool.lend(10)
    held.fill(7)
    pool.clear()
    assert pool.size == 0
    pool.lend(10).fill(1)
    assert held.tolist() == [7] * 10


def test_threads_never_share_what_they_hold() -> None:
    pool = pool_of(limit=400)

    def work(number: int) -> bool:
        for _ in range(300):
            array = pool.lend(100)
            array.fill(number)
            if (array != number).any():
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert pool.size <= 400
