"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import ctypes, re, resource
from peer.swarm.runtime.malloc import trim_malloc_arenas

def resident_kb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read()).group(1))

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def block(size):
    address = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(address, 1, size)
    return address

trim_malloc_arenas()
libc.free(block(16 << 20))
"""
# After one large block was freed, glibc would take the next from its heap, where a later small block holds it fast.
LARGE = PRELUDE + """
large = block(2 << 20)
small = [block(100_000) for _ in range(20)]
before = resident_kb()
libc.free(large)
print(before - resident_kb())
"""
SLICES = PRELUDE + """
import threading

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    for _ in range(20):
        libc.free(block((1 << 20) + 64))

for _ in range(2):
    before = faults()
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(faults() - before)
"""
THREADS = PRELUDE + """
import threading
before, over = resident_kb(), threading.Event()

def work(done):
    for address in [block((1 << 20) + 64) for _ in range(3)]:
        libc.free(address)
    done.set()
    over.wait()

for _ in range(6):
    done = threading.Event()
    threading.Thread(target=work, args=(done,)).start()
    done.wait()
print(resident_kb() - before)
over.set()
"""


def run(program: str) -> int:
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def test_a_slice_of_fp32_is_returned_even_below_small_ones() -> None:
    assert run(LARGE) > 1.75 * 1024


@pytest.mark.parametrize("threads", [1, 3])
def test_a_slice_of_fp16_is_not_mapped_anew(threads: int) -> None:
    assert run(SLICES.replace("THREADS", str(threads))) < 3 * 256  # pages of three such blocks, of 20 for each thread


def test_what_one_thread_has_freed_another_one_uses() -> None:
    assert run(THREADS) < 4.5 * 1024  # of 18 MiB, one thread after the other
