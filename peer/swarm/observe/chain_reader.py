"""Reads the chain of a run from its peers, and checks it, without taking part."""

from __future__ import annotations

from collections import Counter

from peer.errors import ProtocolError, UserError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.coverage import Coverage
from peer.protocol.lineage import RosterLimits, check_chain
from peer.protocol.manifest import RunManifest
from peer.swarm.catchup.donor_requests import DonorRequests
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError

LINKS = 1024  # of one request
HINT = "try again when a peer of the run is online, or name the output folder of a peer"


async def coverage_of_run(node: Node, manifest: RunManifest, directory: Directory) -> tuple[int, Coverage]:
    """(rounds, what was trained on) by the heaviest chain that a peer shows; the bootstrap that has followed it, too.

    Raises:
        UserError: no peer shows one.
    """
    await directory.refresh()
    heaviest = sorted(directory.peers.items(), key=lambda item: -item[1].lineage_weight)
    problem = "no peer answers"
    for donor in [*(peer_id for peer_id, _ in heaviest), *node.introducers]:
        try:
            return await _read(node, manifest, donor)
        except (ProtocolError, StreamClosedError) as error:
            problem = str(error)
    raise UserError(f"no peer of the run shows its chain: {problem}", HINT)


async def _read(node: Node, manifest: RunManifest, donor: str) -> tuple[int, Coverage]:
    plan, shared = RunPlan.of(manifest), manifest.data.shared
    limits = RosterLimits(
        manifest.rounds.min_group, manifest.rounds.max_group, plan.weight_rule, plan.recipe.fragment_of, plan.claim_rule
    )
    coverage, seen, rounds = Coverage(shared.shards if shared is not None else ()), Counter[str](), 0
    parent, requests = manifest.genesis or "", DonorRequests(node, manifest.run_id)
    while links := await requests.links(donor, rounds, LINKS):
        check_chain(links, manifest.run_id, parent, rounds, limits, seen)
        coverage.add_all(links)
        parent, rounds = links[-1].link.id, rounds + len(links)
    return rounds, coverage
