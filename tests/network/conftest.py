"""A fresh swarm for each test, cleaned up however the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.network.harness import TestSwarm


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_swarm(tmp_path: Path) -> Iterator[Callable[..., TestSwarm]]:
    """Makes swarms of a test; all their processes end with it."""
    swarms: list[TestSwarm] = []

    def make(**options: Any) -> TestSwarm:
        swarms.append(TestSwarm(tmp_path / f"swarm{len(swarms)}", **options))
        return swarms[-1]

    yield make
    for swarm in swarms:
        swarm.close()
