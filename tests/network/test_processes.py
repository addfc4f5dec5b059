"""What the tests look at other processes with."""

from __future__ import annotations

import subprocess
import sys

from tests.network.processes import descendants

THREADS_THAT_COME_AND_GO = """
import subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
while child.poll() is None:
    for thread in [threading.Thread(target=int) for _ in range(8)]:
        thread.start()
"""


def test_descendants_are_found_while_threads_end() -> None:
    command = [sys.executable, "-c", THREADS_THAT_COME_AND_GO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert all(descendants(parent.pid) == [child] for _ in range(1000))
        finally:
            parent.kill()  # the child's input ends with it
