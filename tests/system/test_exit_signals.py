from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from peer.system.exit_signals import exit_on_signals
exit_on_signals(7)
os.kill(os.getpid(), int(sys.argv[1]))
signal.sigtimedwait([], 0)  # a handler runs here at the latest
sys.exit(0)
"""


@pytest.mark.parametrize(("number", "prefix", "code"), [
    (signal.SIGINT, [], 7), (signal.SIGTERM, [], 7), (signal.SIGHUP, [], 7), (signal.SIGHUP, ["nohup"], 0),
])  # fmt: skip
def test_a_closed_terminal_ends_a_process_as_ctrl_c_does_unless_nohup_is_used(
    number: signal.Signals, prefix: list[str], code: int
) -> None:
    outside = ["env", "--default-signal=HUP"]  # the tests themselves may run under nohup
    command = [*outside, *prefix, sys.executable, "-c", PROGRAM, str(int(number))]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == code
