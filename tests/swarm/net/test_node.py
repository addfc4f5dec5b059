from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from peer.swarm.net.stream import StreamClosedError


async def fail():
    raise ValueError("nobody asks")


async def test_what_escapes_a_background_task_is_logged_with_its_traceback(network, caplog):
    task = network.node().spawn(fail())
    await asyncio.wait({task})
    await asyncio.sleep(0)  # whoever else was told of its end
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "a background task failed")
    ]
    assert 'raise ValueError("nobody asks")' in caplog.text


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
