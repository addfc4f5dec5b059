from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

# An owner that starts one process as the agent is started, and one that the agent in turn forks.
OWNER = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1], str(os.getpid())], stdout=sys.stdout)
signal.pause()
"""
AGENT = """
import os, signal, sys
from peer.system.death_signal import children_die_with_us, die_with_parent
die_with_parent(int(sys.argv[1]))
children_die_with_us()
if os.fork() == 0:
    print(os.getppid(), os.getpid(), os.getpgid(0), flush=True)
while True: signal.pause()
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(*pids):
    deadline = time.monotonic() + 5.0
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        os.sched_yield()
    return not any(alive(pid) for pid in pids)


def start_family():
    owner = subprocess.Popen([sys.executable, "-S", "-c", OWNER, AGENT], stdout=subprocess.PIPE, cwd=ROOT)
    agent, child, group = (int(number) for number in owner.stdout.readline().split())
    owner.stdout.close()
    return owner, agent, child, group


def test_nobody_outlives_an_owner_that_was_killed():
    owner, agent, child, _ = start_family()
    assert alive(agent)
    assert alive(child)
    owner.kill()
    owner.wait()
    assert until_gone(agent, child)


def test_a_forked_child_dies_with_its_parent_and_has_a_group_of_its_own():
    owner, agent, child, group = start_family()
    assert group == child != os.getpgid(agent)
    os.kill(agent, signal.SIGKILL)
    assert until_gone(child)
    owner.kill()
    owner.wait()


def test_a_process_whose_owner_is_gone_already_ends_at_once():
    code = "from peer.system.death_signal import die_with_parent\ndie_with_parent(1 << 22)\nraise SystemExit(9)"
    assert subprocess.run([sys.executable, "-S", "-c", code], check=False, timeout=30, cwd=ROOT).returncode == 0
