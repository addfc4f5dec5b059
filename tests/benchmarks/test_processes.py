"""Processor time of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks.processes import cpu_seconds, own_cpu_seconds


def test_processor_time_is_that_of_the_process_to_less_than_a_tick() -> None:
    before = time.process_time()
    own = own_cpu_seconds(os.getpid())
    assert before <= own <= time.process_time()
    assert own_cpu_seconds(os.getpid()) > own


def test_a_session_counts_all_its_processes_and_one_that_has_ended_is_an_error() -> None:
    script = "import os, sys; os.fork(); sum(range(300_000)); print(os.times().user, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        leader = own_cpu_seconds(process.pid)
        assert 0.0 < leader < cpu_seconds(process.pid)
        process.communicate(b"")
    with pytest.raises(OSError, match=r"Invalid argument|No such process"):
        own_cpu_seconds(process.pid)
