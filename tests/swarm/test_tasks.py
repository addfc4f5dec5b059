from __future__ import annotations

import asyncio
import gc

from peer.swarm.tasks import cancel_and_wait


async def test_outcomes_of_ended_tasks_are_dropped_without_a_word(caplog):
    async def fail():
        raise ValueError("nobody asks")

    async def fail_when_cancelled():
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("nobody asks")

    tasks = [asyncio.ensure_future(work) for work in (fail(), fail_when_cancelled(), asyncio.sleep(60.0))]
    await asyncio.sleep(0)
    await cancel_and_wait(iter(tasks))
    assert all(task.done() for task in tasks)
    del tasks
    gc.collect()
    assert "never retrieved" not in caplog.text
