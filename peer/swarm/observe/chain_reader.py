"""Reads the chain of a run from its peers, and checks it, without taking part."""

from __future__ import annotations

from collections import Counter

from peer.errors import ProtocolError, UserError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.coverage import Coverage
from peer.protocol.manifest import MAX_ROUNDS, RunManifest
from peer.swarm.catchup.chain_scout import LINKS_PER_REQUEST, check_links
from peer.swarm.catchup.donor_requests import DonorRequests
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError

FOLDER = "name the output folder of a peer"
HINT = f"try again when a peer of the run is online, or {FOLDER}"


async def coverage_of_run(
    node: Node, manifest: RunManifest, rounds_total: int | None, directory: Directory
) -> tuple[int, Coverage]:
    """(rounds, what was trained on) by the chain of the node whose address was given, else by that of a peer.

    Those that claim the most come first. A stranger can claim anything, and sign a chain of its own.

    Args:
        rounds_total: of the run, if it ends.

    Raises:
        UserError: no peer shows one, or it is shown to invited peers alone.
    """
    if manifest.trust.invited:
        raise UserError(f"run {manifest.name} is for invited peers, who show its chain to each other alone", FOLDER)
    heaviest = sorted(directory.peers.items(), key=lambda item: -item[1].lineage_weight)
    problem = "no peer answers"
    for donor in dict.fromkeys([*node.introducers, *(peer_id for peer_id, _ in heaviest)]):
        try:
            found = await _read(node, manifest, rounds_total or MAX_ROUNDS, donor)
            if found[0]:
                return found
            problem = "no round has been made"
        except (ProtocolError, StreamClosedError) as error:
            problem = str(error)
    raise UserError(f"no peer of the run shows its chain: {problem}", HINT)


async def _read(node: Node, manifest: RunManifest, most: int, donor: str) -> tuple[int, Coverage]:
    plan, shared = RunPlan.of(manifest), manifest.data.shared
    coverage, seen, rounds = Coverage(shared.shards if shared is not None else ()), Counter[str](), 0
    parent, requests = manifest.genesis or "", DonorRequests(node, manifest.run_id)
    while links := await requests.links(donor, rounds, LINKS_PER_REQUEST):
        if rounds + len(links) > most:
            raise ProtocolError(f"{donor} shows more than the {most:,} rounds that there can be")
        await check_links(links, manifest.run_id, parent, rounds, plan.roster_limits, seen)
        coverage.add_all(links)
        parent, rounds = links[-1].link.id, rounds + len(links)
    return rounds, coverage
