import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from peer.outer.numerics.scratch import FEWEST, MAPPED_BYTES, MOST_KEPT, Scratch, copy_of, scratch_vector

N = 2 * FEWEST


def test_memory_is_lent_again_once_no_view_of_it_is_left():
    scratch = Scratch(N, most=2)
    vector = scratch.vector(N)
    place, view = vector.data_ptr(), vector[5:].numpy()
    del vector
    other = scratch.vector(N)
    assert other.data_ptr() != place
    del view
    assert scratch.vector(N - 7).data_ptr() == place


def test_who_comes_when_all_is_lent_gets_memory_that_nobody_else_has():
    scratch = Scratch(N, most=2)
    vectors = [scratch.vector(N).fill_(index) for index in range(5)]
    assert [vector.unique().tolist() for vector in vectors] == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    kept = {vector.data_ptr() for vector in vectors[:2]}
    del vectors
    assert {vector.data_ptr() for vector in [scratch.vector(N), scratch.vector(N)]} == kept


def test_vectors_of_any_length_have_that_length():
    scratch = Scratch(N, most=1)
    for length in (0, 1, FEWEST - 1, FEWEST, N, N + 1):
        vector = scratch.vector(length)
        assert (vector.shape, vector.dtype, vector.is_contiguous()) == ((length,), torch.float32, True)


def test_threads_never_share_what_they_hold():
    def work(number: int) -> bool:
        for _ in range(50):
            vector = scratch_vector(N)
            vector.fill_(number)
            if vector.unique().tolist() != [float(number)]:
                return False
        return True

    threads = MOST_KEPT + 2
    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(threads)))


def test_a_copy_is_a_copy_whatever_its_length():
    for length in (0, 1, FEWEST, N):
        x = torch.arange(length, dtype=torch.float32)
        copy = copy_of(x)
        assert torch.equal(copy, x)
        copy.fill_(-1.0)
        assert torch.equal(x, torch.arange(length, dtype=torch.float32))


MEASURE = """
import mmap
from peer.outer.numerics.scratch import MAPPED_BYTES, pages_of

def mapped_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * mmap.PAGESIZE

sizes = [mapped_bytes()]
pages = pages_of(8 * MAPPED_BYTES.start)
pages.fill(1)
sizes.append(mapped_bytes())
del pages
sizes.append(mapped_bytes())
print(*sizes)
"""


def test_pages_that_are_freed_go_back_to_the_system():
    # in a process of its own: here, other tests' threads end when they like, and their stacks with them
    printed = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True).stdout
    before, held, after = map(int, printed.split())
    assert held - before >= 8 * MAPPED_BYTES.start
    assert after - before < MAPPED_BYTES.start
