"""A limited line of a real agent, which serves its state to a newcomer: bytes counted on the wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peer.protocol.line_limits import BITS_PER_MBIT, LineLimits
from tests.network.chaos.namespaces import Internet
from tests.network.chaos.wide import WideSwarm

pytestmark = [pytest.mark.timeout(200), pytest.mark.long]
MBIT, WINDOW_S = 8.0, 3.0


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as internet:
        yield internet


def sent(internet: Internet, name: str) -> int:
    """Bytes that have left a host: what its side of the router has received."""
    with internet.hub.entered():
        rows = Path("/proc/thread-self/net/dev").read_text().splitlines()
    device = f"v{internet.addresses[name].split('.')[2]}"
    return next(int(row.split(":")[1].split()[0]) for row in rows if row.strip().startswith(f"{device}:"))


@contextmanager
def counting(internet: Internet, name: str) -> Iterator[list[tuple[float, int]]]:
    """What `sent` says meanwhile, with the seconds."""
    counts: list[tuple[float, int]] = []
    over = threading.Event()

    def count() -> None:
        while not over.wait(0.05):
            counts.append((time.monotonic(), sent(internet, name)))

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


def test_a_donor_keeps_to_its_upload_limit_while_it_serves_a_newcomer(internet: Internet, tmp_path: Path) -> None:
    for name in ("bootstrap", "donor", "other", "late"):
        internet.host(name)
    recipe = "name: diloco, compressor: fp32, outer_momentum: 0.6"
    swarm = WideSwarm(tmp_path, internet, hidden=384, steps=5, recipe=recipe)  # 4.5 MB a vector
    swarm.limits = {"donor": LineLimits(up_mbit=MBIT)}
    try:
        swarm.bootstrap()
        donor, other = swarm.add("donor", "other")
        swarm.drive(lambda: donor.round >= 1 and other.round >= 1)
        other.kill()  # the donor alone makes no round: what it sends is state
        with counting(internet, "donor") as counts:
            (late,) = swarm.add("late")
        assert late.round >= 1
    finally:
        swarm.close()
    rates = [
        (later - before) / (end - start)
        for start, before in counts
        for end, later in counts
        if WINDOW_S <= end - start < WINDOW_S + 0.1
    ]
    assert max(rates) == pytest.approx(MBIT * BITS_PER_MBIT / 8, rel=0.05)
