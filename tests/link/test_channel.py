"""The agent's end of the channel to its trainer."""

from __future__ import annotations

import asyncio
import socket

import pytest

from peer.link.channel import Channel
from peer.link.messages import Save, Saved, Stop, decode, encode


async def test_who_asks_an_agent_that_starts_for_its_state_is_not_left_waiting():
    ours, theirs = socket.socketpair()
    channel, (reader, writer) = await Channel.over(theirs), await asyncio.open_unix_connection(sock=ours)
    writer.writelines(encode(message) for message in (Save(path="/a/outer-7.part"), Stop(linger_s=3.0)))
    assert await channel.expect(Stop) == Stop(linger_s=3.0)
    answer = decode(await asyncio.wait_for(reader.readline(), 5.0))
    assert isinstance(answer, Saved)
    assert (answer.path, answer.problem) == ("/a/outer-7.part", "the agent is still starting")
    writer.close()
    with pytest.raises(EOFError, match="the trainer is gone"):
        await channel.expect(Stop)


async def test_a_trainer_that_left_messages_unread_is_gone_and_nothing_else():
    ours, theirs = socket.socketpair()
    channel = await Channel.over(theirs)
    channel.tell(Saved(path="/a", round=1, lineage_id="a" * 64))
    ours.close()
    assert await channel.receive() is None
    channel.tell(Saved(path="/a", round=1, lineage_id="a" * 64))
    await channel.flush()
