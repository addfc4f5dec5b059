from __future__ import annotations

import asyncio

import pytest

from peer.errors import in_words
from peer.swarm.net.stream import StreamClosedError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("7 is too much"), "7 is too much"),
        (ValueError(), "ValueError"),
        (TimeoutError(), "no answer in time"),
        (TimeoutError("after 3 s"), "after 3 s"),
    ],
)
def test_every_error_says_something(error, words):
    assert in_words(error) == words


async def test_a_peer_that_takes_no_stream_in_time_is_said_to_be_silent(network):
    node, other = network.node(), network.node()

    async def hang(*_):
        await asyncio.Event().wait()

    node.p2p.call_binary_stream_handler = hang
    with pytest.raises(StreamClosedError, match="cannot be reached: no answer in time"):
        await node.open(other.peer_id, "atoll/x", "round", timeout_s=0.01)
