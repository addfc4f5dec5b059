from __future__ import annotations

import asyncio
import gc
import warnings
from types import SimpleNamespace

import pytest

from peer.protocol.records import PeerRecord
from peer.swarm.net.directory import Directory
from peer.swarm.net.stream import StreamClosedError


async def fail():
    raise ValueError("nobody asks")


async def test_what_escapes_a_background_task_is_logged_with_its_traceback(network, caplog):
    task = network.node().spawn(fail())
    await asyncio.wait({task})
    await asyncio.sleep(0)  # whoever else was told of its end
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "the background task fail failed")
    ]
    assert 'raise ValueError("nobody asks")' in caplog.text


async def test_a_node_ends_once_a_task_that_it_cannot_do_without_has_failed(network):
    node, running = network.node(), asyncio.get_running_loop().create_future()
    node.p2p._child = SimpleNamespace(wait=lambda: running)
    closed = asyncio.ensure_future(node.closed())
    await asyncio.wait({node.spawn(fail())})
    await asyncio.sleep(0.01)
    assert not closed.done()
    directory = Directory(node, "0" * 64)
    directory.announce(lambda: PeerRecord(nickname=".gpu1"))
    assert "task that it cannot do without failed" in await asyncio.wait_for(closed, 5.0)
    assert "nickname" in await node.closed()


async def test_a_node_ends_with_its_daemon(network):
    node = network.node()
    node.p2p._child = SimpleNamespace(wait=lambda: asyncio.sleep(0.0, 9))
    assert await asyncio.wait_for(node.closed(), 5.0) == "its libp2p daemon ended with code 9"


@pytest.mark.parametrize("name", ["0OIl", "\u00e9", " ", "1"])
async def test_a_name_that_is_no_peer_id_cannot_be_reached_and_ends_nothing(network, name):
    """Any leader can name one."""
    with pytest.raises(StreamClosedError, match="cannot be reached"):
        await network.node().open(name, "x", "round")


async def test_a_background_task_that_ends_before_it_began_is_no_trouble(network, caplog):
    node = network.node()
    gc.collect()  # what other tests have left
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        task = node.spawn(fail())
        task.cancel()
        await asyncio.wait({task})
        del task
        gc.collect()
    assert [str(one.message) for one in warned] == []
    assert caplog.records == []
    assert node._tasks == set()


@pytest.mark.parametrize(("maddrs", "client", "told"), [
    (["/ip4/127.0.0.1/tcp/1/p2p/X", "/ip4/192.0.2.2/tcp/1/p2p/X"], False, ("/ip4/192.0.2.2/tcp/1",)),
    (["/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/udp/1/quic"], False, ("/ip4/127.0.0.1/tcp/1",)),
    ([f"/ip4/10.0.0.{n}/tcp/1" for n in range(9)], False, tuple(f"/ip4/10.0.0.{n}/tcp/1" for n in range(3))),
    (["/ip4/192.0.2.2/tcp/1"], True, ()),
])  # fmt: skip
async def test_a_node_announces_where_others_can_dial_it(network, maddrs, client, told):
    node = network.node()
    node.maddrs, node.client = tuple(maddrs), client
    assert node.host_addresses == told
