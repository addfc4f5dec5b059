"""Hours of a swarm in seconds: whole peers in one process and virtual time, under the faults that honest machines have.

Rounds, matchmaking, the directory and the rules of blame are the production ones, with their default waits; machines,
lines, the DHT's table and the trainers are played. A seed decides all but who audits whom, so that a pause can be seen
again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from peer.swarm.runtime.tasks import cancel_and_wait
from tests.swarm.machines import Programme, Swarm
from tests.swarm.virtual_time import VirtualTimeLoop

REFUSED = re.compile(r"(\w+) gets no seat from this peer for (\d+) s")
PROGRAMMES = {
    "quiet": Programme(away_every_s=0.0),
    "pair": Programme(peers=2, away_every_s=200.0),
    "all-needed": Programme(peers=3, min_group=3, away_every_s=200.0, away_s=(3.0, 120.0)),
    "slow": Programme(peers=3, slow=3.0, step_s=2.7, away_every_s=0.0),
    "together": Programme(away_every_s=200.0, together=0.3),
    "one-line": Programme(away_every_s=200.0, one_line=0.6),
    "sleepers": Programme(away_every_s=150.0, away_s=(3.0, 90.0), asleep=1.0),
    "kills": Programme(away_every_s=200.0, killed=0.6),
    "halves": Programme(peers=6, away_every_s=0.0, halves_every_s=400.0, away_s=(10.0, 240.0)),
    "too-many": Programme(peers=6, max_group=4, away_every_s=0.0),
    "newcomers": Programme(peers=2, newcomers=4, away_every_s=400.0, killed=0.2),
    "everything": Programme(peers=6, newcomers=2, slow=2.0, together=0.1, one_line=0.2, killed=0.2, asleep=0.3),
}


class Log(logging.Handler):
    """What the peers of a swarm log, with short names."""

    def __init__(self, swarm, echo):
        super().__init__()
        self._swarm, self._echo, self.refused = swarm, echo, Counter()

    def emit(self, record):
        text = record.getMessage()
        for machine in self._swarm.machines:
            text = text.replace(machine.name, f"p{machine.number}")
        if (refused := REFUSED.fullmatch(text)) is not None:
            self.refused[refused[1]] += int(refused[2])
        if self._echo:
            print(f"{self._swarm.loop.time():8.1f} {text}")


@contextmanager
def _logged_to(log, level):
    """The records of all peers go there, and nowhere else."""
    logger = logging.getLogger("peer")
    before = logger.level, logger.propagate
    logger.addHandler(log)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(log)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def play(programme, seed, hours, echo=False):
    """A swarm's hours; -> `Outcome`."""
    loop = VirtualTimeLoop()

    async def whole(folder):
        swarm = Swarm(programme, seed, Path(folder))
        log = Log(swarm, echo)
        with _logged_to(log, logging.INFO if echo else logging.WARNING):
            try:
                outcome = await swarm.live(hours)
                outcome.refused_s = log.refused.total()
                return outcome
            finally:
                await swarm.network.close()
                await cancel_and_wait(asyncio.all_tasks() - {asyncio.current_task()})

    try:
        with tempfile.TemporaryDirectory() as folder:
            return loop.run_until_complete(whole(folder))
    finally:
        loop.close()
