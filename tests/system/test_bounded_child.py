"""What a stranger's numbers make of a child does not happen to this process."""

from __future__ import annotations

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


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("work", "limits"),
    [(_endless, {"cpu_s": 1}), (lambda: time.sleep(1000), {"wall_s": 0.5}), (_large, {"memory_bytes": 2**28})],
)
def test_what_needs_too_much_is_a_users_problem(work, limits):
    with pytest.raises(UserError, match=r"the model x needs more than .* to be made"):
        run_bounded(work, "the model x", "choose a smaller model", **limits)


def test_the_limit_of_memory_is_no_less():
    assert run_bounded(_large, "x", "y", memory_bytes=2**31) == 2**30
