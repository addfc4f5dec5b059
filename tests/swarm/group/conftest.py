from tests.swarm.virtual_time import pytest_asyncio_loop_factories  # noqa: F401
