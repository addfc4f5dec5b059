"""G17: claims without end. Donors show chains that verify, a link every 20 s, or thousands as fast as they are read; a
former member says that it takes part, invites, and never comes.

Counted: rounds a second of three honest members before and during each, and what the memory of any process gained.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.network.chaos.forger import Forgery
from tests.network.chaos.forgeries import Siege
from tests.network.chaos.namespaces import Internet
from tests.network.chaos.observe import family

DRIP_S = 20.0
MANY_LINKS = 3000
STRANGERS = 3
MEASURED_S = 40.0
Row = dict[str, Any]


def run(
    folder: Path, *, measured_s: float = MEASURED_S, seed: int = 0, tell: Callable[[Row], None] = lambda _: None
) -> Row:
    """Quiet, then one kind of claim after the other; -> counts."""
    counts: Row = {}
    with Internet() as internet:
        siege = Siege(folder, internet, 60)
        try:
            siege.open()
            siege.rounds(2)
            pids = [siege.swarm.bootstraps[0].process.pid, *(m.agent.pid or 0 for m in siege.honest)]
            processes = [family(pid)[0] for pid in pids]
            quiet = _rate(siege, measured_s)
            counts["rounds_per_minute_quiet"] = round(60 * quiet, 1)
            for name, forgeries in _ways(siege, seed).items():
                before = [each.rss_bytes for each in processes]
                with contextlib.ExitStack() as strangers:
                    for number, forgery in enumerate(forgeries):
                        strangers.enter_context(siege.forging(forgery, folder / f"{name}{number}"))
                    rate = _rate(siege, measured_s)
                    gained = max(each.rss_bytes - was for each, was in zip(processes, before, strict=True))
                counts[f"rounds_per_minute_{name}"] = round(60 * rate, 1)
                counts[f"share_of_rounds_{name}"] = round(rate / quiet, 2)
                counts[f"largest_{name}_memory_growth_mb"] = round(gained / 1e6, 1)
                tell(counts)
        finally:
            siege.swarm.close()
    return counts


def _ways(siege: Siege, seed: int) -> dict[str, list[Forgery]]:
    """Who is at work at once, by what it does."""
    dripping = [Forgery(base="genesis", rounds=300, drip_s=DRIP_S, seed=seed + number) for number in range(STRANGERS)]
    flooding = [Forgery(base="genesis", rounds=MANY_LINKS, seed=seed + number) for number in range(STRANGERS)]
    absent = [Forgery(base="tip", rounds=-1, former=str(siege.key), seed=seed)]
    return {"drips": dripping, "floods": flooding, "absent": absent}


def _rate(siege: Siege, seconds: float) -> float:
    before, began = [len(member.committed) for member in siege.honest], time.monotonic()
    siege.watch(seconds)
    made = min(len(member.committed) - count for member, count in zip(siege.honest, before, strict=True))
    return made / (time.monotonic() - began)
