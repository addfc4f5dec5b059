"""Two clients in one group through a relay: `python -m tests.network.chaos.clients --report FILE`.

A bootstrap, one member with a public address, two members behind routers of their own that let nothing in. Until libp2p
has found them a relay, which takes it more than three minutes, the clients take turns; then all three make rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.network.chaos.namespaces import Internet
from tests.network.chaos.relay import Link
from tests.network.chaos.wide import WideSwarm

CLIENTS = ("home", "cafe")
ROUNDS = 5
RELAY_TIMEOUT_S = 900.0
TURNS_PER_STEP = 50


def run(folder: Path, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Until so many rounds of all three are committed; -> counts.

    Raises:
        AssertionError: not within RELAY_TIMEOUT_S.
    """
    with Internet() as internet:
        for name in ("bootstrap", "public"):
            internet.host(name)
        for name in CLIENTS:
            internet.behind(name, Link(), nat=True)
        swarm = WideSwarm(folder, internet, steps=5, wait=3.0)
        try:
            swarm.bootstrap()
            for member in swarm.add("public", *CLIENTS):
                member.pace = TURNS_PER_STEP
            began = time.monotonic()
            public, *clients = swarm.members
            swarm.drive(lambda: len(public.committed) >= rounds, RELAY_TIMEOUT_S)
            before = [len(record.members) for record in public.committed]
            swarm.drive(lambda: any(len(r.members) == 3 for r in public.committed), RELAY_TIMEOUT_S)
            relayed_after_s = time.monotonic() - began
            swarm.drive(lambda: sum(len(r.members) == 3 for r in public.committed) >= rounds, RELAY_TIMEOUT_S)
            return {
                "clients": sum(member.client for member in clients), "rounds_before_relay": len(before),
                "largest_group_before_relay": max(before), "relayed_after_s": round(relayed_after_s, 1),
                "rounds_of_all": sum(len(record.members) == 3 for record in public.committed),
                "aborted": sum(r.status == "aborted" for member in swarm.members for r in member.records),
            }  # fmt: skip
        finally:
            swarm.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True, metavar="FILE", help="where the counts go, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="atoll-clients-") as folder:
        counts = run(Path(folder))
    arguments.report.write_text(json.dumps({"name": "clients", "counts": counts}, indent=1) + "\n")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
