"""What a stranger's numbers make of a child does not happen to this process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from peer.errors import UserError
from peer.system.bounded_child import run_bounded


def test_what_it_returns_and_raises_comes_back():
    assert run_bounded(lambda: {"a": [1, None]}, "x", "y") == {"a": [1, None]}

    def refuse():
        raise UserError("no", "do that")

    with pytest.raises(UserError, match="no") as caught:
        run_bounded(refuse, "x", "y")
    assert caught.value.hint == "do that"


def _endless():
    while True:
        pass


def _large():
    return len(bytearray(2**30))


def _wrong():
    raise RuntimeError("no such kernel\x1b[2J")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("work", "limits", "said"),
    [
        (_endless, {"cpu_s": 1}, "the model x needs more than 1 s of CPU to be made"),
        (lambda: time.sleep(1000), {"wall_s": 0.5}, "the model x needs more than 0.5 s to be made"),
        (_large, {"memory_bytes": 2**28}, "the model x needs more than 0.25 GiB of memory to be made"),
        (_wrong, {}, "the model x cannot be made: RuntimeError: no such kernel?[2J"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), {}, "the model x cannot be made: its process, which had 60 s of "
         "CPU and 2 GiB of memory, ended with a signal, SIGKILL"),
        (lambda: os._exit(3), {}, "the model x cannot be made: its process, which had 60 s of CPU and 2 GiB of memory, "
         "ended with exit code 3"),
    ],
)  # fmt: skip
def test_what_ends_the_child_is_named(work, limits, said):
    """A limit is blamed only where it was reached."""
    with pytest.raises(UserError) as caught:
        run_bounded(work, "the model x", "choose a smaller model", **limits)
    assert (caught.value.what, caught.value.hint) == (said, "choose a smaller model")


def test_the_limit_of_memory_is_no_less():
    assert run_bounded(_large, "x", "y", memory_bytes=2**31) == 2**30
