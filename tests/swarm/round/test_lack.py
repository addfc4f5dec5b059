"""What a member says that it lacks when a round fails."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from peer.outer.compress.registry import compressor
from peer.outer.state.reduced_update import ReduceFormat
from peer.protocol.identity import Identity
from peer.protocol.wire import AbortMessage, Kind
from peer.protocol.word import SignedWord
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.round.giving_up import Lack
from peer.swarm.round.inbox import RoundBuffers
from peer.swarm.round.persistent_group import PersistentGroup
from peer.swarm.runtime.futures import deliver
from peer.swarm.runtime.timing import STANDARD

ORDER = ("me", "a", "b", "x")
OTHERS = ORDER[1:]
A, B = (Identity.generate().peer_id for _ in range(2))
BEGAN, DEADLINE = 100.0, 110.0


async def buffers(sent=None, signed=None, voted=(), useless=()):
    """A round of four members, in which this much came, at these times."""
    found = RoundBuffers(ORDER, 0, ReduceFormat(400, compressor("int8"), 1024))
    found.times.began, found.deadline, found.useless = BEGAN, DEADLINE, set(useless)
    found.times.came |= {"contribution": sent or {}, "reduced": signed or {}}
    for peer_id, inbox in found.inboxes.items():
        for future in (inbox.sent, *inbox.contributed) if peer_id in (sent or {}) else ():
            deliver(future, object())
        for future in (inbox.signed,) if peer_id in (signed or {}) else ():
            deliver(future, object())
        for future in (inbox.vote,) if peer_id in voted else ():
            deliver(future, object())
    return found


def at(time, *names):
    return dict.fromkeys(names or OTHERS, time)


@pytest.mark.parametrize(
    ("came", "stage", "names"),
    [
        ({}, "contribution", "abx"),
        ({"sent": at(101.0, "a", "b")}, "contribution", "x"),
        ({"sent": at(101.0), "signed": at(102.0, "a", "b")}, "reduced", "x"),
        ({"sent": at(101.0), "signed": at(102.0)}, "vote", "abx"),
        # it came, but so late that the others had no time for what follows
        ({"sent": at(101.0) | at(109.9, "x")}, "contribution", "x"),
        ({"sent": at(101.0), "signed": at(102.0) | at(109.9, "x")}, "reduced", "x"),
        # late as it was, what follows came from all but one
        ({"sent": at(101.0) | at(109.0, "b"), "signed": at(109.5, "a", "b")}, "reduced", "x"),
        # in time by half of what was left: what follows could have come
        ({"sent": at(101.0) | at(104.9, "x")}, "reduced", "abx"),
        ({"sent": at(104.0), "signed": at(104.5) | at(106.9, "x")}, "vote", "abx"),
        # what came is of no use
        ({"sent": at(101.0), "useless": [("contribution", "x")]}, "contribution", "x"),
        ({"sent": at(101.0), "signed": at(102.0), "useless": [("reduced", "x")]}, "reduced", "x"),
    ],
)
async def test_the_first_stage_that_failed_and_by_whom(came, stage, names):
    found = await buffers(**came)
    assert found.lack() == found.lack(DEADLINE) == Lack(stage, frozenset(names))
    found.close(RuntimeError("over"))


@pytest.mark.parametrize(
    ("came", "half"),
    [({}, 105.0), ({"sent": at(104.0)}, 107.0), ({"sent": at(108.0)}, 109.0),
     ({"sent": at(101.0), "signed": at(106.0)}, 108.0)],
)  # fmt: skip
async def test_in_the_first_half_of_what_a_stage_has_nothing_is_lacking(came, half):
    found = await buffers(**came)
    assert found.lack(half - 0.1) is None
    assert found.lack(half) is not None
    found.close(RuntimeError("over"))


async def test_of_one_member_the_first_stage_is_told_at_any_time():
    found = await buffers(sent=at(101.0, "x"), useless=[("contribution", "a")])
    assert found.lack_of("x") == Lack("reduced", frozenset("x"))
    assert found.lack_of("a") == Lack("contribution", frozenset("a"))
    assert found.lack_of("stranger") is None
    found.close(RuntimeError("over"))


@pytest.mark.parametrize(
    ("stage", "counts"),
    [("waiting", True), ("reduced", True), ("vote", True), ("contribution", False), ("join", False), ("stream", False)],
)
def test_who_lacks_what_no_other_delays_names_no_member_that_delayed_it(stage, counts):
    """Before a contribution nothing is sent that a third member could have delayed."""
    word = SignedWord(lacks=stage, lacking=(A,), delayed_by=(B,), round=3, signature="00" * 64)
    assert Lack.said(word) == Lack(stage, frozenset({A}), frozenset({B} if counts else ()))


async def test_a_member_is_not_heard_saying_the_word_that_another_ended_the_group_with():
    """It waits in the next round, and its stream ends as the group does."""
    found, spoken = await buffers(), list[str]()
    owner = SimpleNamespace(on_words=lambda _, remote, __: spoken.append(remote), on_break=lambda _: None,
                            on_ahead=lambda *_: None)  # fmt: skip
    group = PersistentGroup(found, "9" * 64, lambda *_: None, owner, STANDARD)
    joined = asyncio.Event()

    class Stream:
        remote = "a"

        @contextlib.asynccontextmanager
        async def within(self, *_):
            yield

        async def receive(self, limits):
            if Kind.CONTRIBUTION in limits:
                raise StreamClosedError("a", "over")
            joined.set()
            return Kind.JOIN, b""

    async def fill(_):
        """The whole round has come."""

    found.inboxes["a"].fill = fill
    following = asyncio.ensure_future(group.follow(Stream()))
    await joined.wait()
    group.ended_by("b", AbortMessage(reason="gives up"))
    await following
    assert spoken == ["b"]
    found.close(RuntimeError("over"))
