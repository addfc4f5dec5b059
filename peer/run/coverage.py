"""`atoll data coverage`: what of a run's data was trained on, by its certified chain."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peer.errors import UserError
from peer.system.exit_signals import exiting_on_signals
from peer.system.output_files import named_path, replace_file

if TYPE_CHECKING:
    from peer.protocol.coverage import Coverage
    from peer.protocol.manifest import RunManifest

INTERRUPTED = 130
DESCRIPTION = """\
What of a run's data was trained on once, more often and never, in which epoch, and what each peer claims to have read:
by the certified chain, from the folder of a peer or of a bootstrap, or from a run that is under way. A claim is its
peer's own; the chain proves who made it, not that it is true."""

EPILOG = """\
examples:
  atoll data coverage runs/peer
  atoll data coverage /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... --picture coverage.png
  atoll data coverage runs/peer --json > coverage.json"""


class Counted(NamedTuple):
    """What a chain says. `given_up`: by the peer whose folder it is; empty of a run that is visited."""

    manifest: RunManifest
    rounds: int
    coverage: Coverage
    given_up: dict[str, int]


def add_coverage_command(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action to `atoll data`."""
    parser = actions.add_parser(
        "coverage", help="what of the data was trained on, by the chain", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("source", metavar="RUN-FOLDER|MULTIADDR",
        help="a peer's --output-dir, a bootstrap's --state-dir, or the address of either")  # fmt: skip
    add("--run", metavar="NAME", help="of several runs at an address this one")
    add("--run-id", metavar="ID", help="of several runs this one")
    add("--picture", type=named_path, metavar="FILE", help="draw it as a PNG, too")
    add("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(execute=_coverage)


def _coverage(arguments: argparse.Namespace) -> int:
    with exiting_on_signals(INTERRUPTED):
        from peer.run.coverage_picture import draw_coverage

    read = _of_address if arguments.source.startswith("/") and "/p2p/" in arguments.source else _of_folder
    manifest, rounds, coverage, given_up = read(arguments)
    if not coverage.sources:
        raise UserError(
            f"the peers of run {manifest.name} lease no data from each other, so its chain does not say what was read",
            "data.assignment: leases does that, where the data is on every machine (see docs/data.md)",
        )
    document = {
        "run": manifest.name, "run_id": manifest.run_id, "rounds": rounds, **coverage.document(),
        **({"given_up": given_up} if given_up else {}),
    }  # fmt: skip
    if arguments.picture is not None:
        try:
            replace_file(arguments.picture, draw_coverage(coverage, f"{manifest.name}, round {rounds}"))
        except OSError as error:
            raise UserError(f"cannot write {arguments.picture}: {error.strerror}", "name another file") from None
    print(json.dumps(document, indent=2) if arguments.json else in_words(document))
    return 0


def in_words(document: dict[str, Any]) -> str:
    """Some lines for a terminal."""
    per_shard = document["parts_of_a_shard"]
    lines = [f"{document['run']}: {document['rounds']:,} rounds"]
    for number, source in enumerate(document["sources"]):
        lines.append(f"source {number + 1}: {source['shards']:,} shards" + ("" if source["shards"] else ", not leased"))
        for one in source["epochs"] if source["shards"] else ():
            once, more, never = (one[f"parts_{how}"] / per_shard for how in ("once", "twice_or_more", "never"))
            lines.append(
                f"  epoch {one['epoch']}: {one['share_covered']:.1%} trained on; {once:,.1f} shards once, {more:,.1f} "
                f"more often, {never:,.1f} never; {one['share_read_twice']:.2%} of what was read had been read before"
            )
    lines += [
        f"  {peer_id}: {one['parts'] / per_shard:,.1f} shards, {one['again'] / per_shard:,.1f} of them read before"
        + (f", {one['refused'] / per_shard:,.1f} more that are not believed" if one["refused"] else "")
        for peer_id, one in document["peers"].items()
    ]
    if (given_up := document.get("given_up", {"rounds": 0}))["rounds"]:
        lines.append(
            f"given up by this peer when a split healed: {given_up['rounds']:,} rounds of "
            f"{given_up['parts'] / per_shard:,.1f} shards; "
            f"the others also trained on {given_up['trained_twice'] / per_shard:,.1f} of them"
        )
    return "\n".join(lines)


def _of_folder(arguments: argparse.Namespace) -> Counted:
    from peer.run.kept_chain import find_chain, manifest_beside
    from peer.swarm.state.certificate_file import CertificateFile

    if arguments.run is not None:
        raise UserError(f"--run={arguments.run}: names one of several runs at an address", "of a folder give --run-id")
    path = find_chain(Path(arguments.source), arguments.run_id)
    manifest = manifest_beside(path)
    shared = manifest.data.shared
    chain = CertificateFile(path, manifest.genesis or "", shared.shards if shared is not None else ())
    chain.load()
    return Counted(manifest, len(chain), chain.coverage, given_up_in(path.parent, chain.coverage))


def given_up_in(folder: Path, coverage: Coverage) -> dict[str, int]:
    """Rounds that this peer gave up for a heavier chain, the parts that they claimed, and those that it claims too."""
    from peer.swarm.state.given_up import read_given_up

    rounds = list(read_given_up(folder))
    counted = [coverage.holds(claim) for one in rounds for claim in one.claims]
    parts, held = (sum(numbers) for numbers in zip(*counted, strict=True)) if counted else (0, 0)
    return {"rounds": len(rounds), "parts": parts, "trained_twice": held}


def _of_address(arguments: argparse.Namespace) -> Counted:
    from peer.protocol.address import parse_peer_address
    from peer.swarm.net.socket_folder import open_socket_folder
    from peer.system.preflight import check_reachable

    address = parse_peer_address(arguments.source)
    open_socket_folder()
    check_reachable([address])
    logging.basicConfig(level=logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="atoll-coverage-") as folder:
        try:
            return asyncio.run(_visit(str(address), Path(folder) / "identity.key", arguments))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _visit(address: str, identity: Path, arguments: argparse.Namespace) -> Counted:
    from peer.swarm.observe.chain_reader import coverage_of_run
    from peer.swarm.observe.reader import visit_run

    async with visit_run(address, identity, arguments.run_id, arguments.run) as visit:
        found = await coverage_of_run(visit.node, visit.manifest, visit.control.rounds_total, visit.directory)
        return Counted(visit.manifest, *found, {})
