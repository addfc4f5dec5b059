"""A long run's chain of certificates: opening it, one more round, the choice between two chains, memory."""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark
from peer.protocol.fork_choice import ForkRule
from peer.protocol.identity import Identity
from peer.protocol.lineage import Certificate, Link, Member
from peer.protocol.records import dump_json
from peer.swarm.state.chain import ChainStore

NAME = "chain"
ABOUT = "A chain of certificates of four members each, out of eight that come and go"
GENESIS, RUN = "0" * 64, "1" * 64
PEERS, MEMBERS, REPEATS = 8, 4, 5
FORK = 8
FLAT_BYTES, CONSTANT_BYTES = 100, 1e7  # of a round, and of those that are held as objects


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Writes a chain of so many rounds, opens it as a peer that starts does, and measures: seconds and memory of\n"
        "that, seconds to record one more round, and to choose between this chain and one that left it 8 rounds ago.\n"
        "Signatures are not verified: who opens its own chain has verified them.",
    )
    parser.add_argument("--rounds", type=int, default=100_000, metavar="N", help="of the chain (default: 100000)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Measure one chain."""
    check_count("--rounds", arguments.rounds, 100)
    peers = sorted(Identity.generate().peer_id for _ in range(PEERS))
    with tempfile.TemporaryDirectory(prefix="atoll-chain-") as name:
        path = Path(name) / "chain.jsonl"
        tip, fork = write(path, arguments.rounds, peers)
        say(f"{arguments.rounds} rounds, {path.stat().st_size / 1e6:.0f} MB")
        store = ChainStore(Path(name), GENESIS)
        gc.collect()
        before, began = own_bytes(), time.monotonic()
        assert store.load(path, tip), "the chain leads to its tip"
        opening = time.monotonic() - began
        gc.collect()
        held = own_bytes() - before
        chain = store.chain
        since = range(arguments.rounds - FORK, arguments.rounds)
        branch = [certificate_of(round, fork, peers, 1)[0] for round in since]
        ancestor = chain[:-FORK]
        choosing = timed(lambda: ForkRule().judge(ancestor, chain[-FORK:], branch))
        after = [certificate_of(arguments.rounds + place, tip, peers)[0] for place in range(REPEATS)]
        appending = timed(lambda: store.append(after.pop()))
    limit = FLAT_BYTES * arguments.rounds + CONSTANT_BYTES
    figures = (
        Figure(name="open", value=opening, unit="s"),
        Figure(name="memory", value=held / 1e6, unit="MB", limit=limit / 1e6),
        Figure(name="choose between two chains", value=1e3 * median(choosing), unit="ms", limit=10.0),
        Figure(name="record a round", value=1e3 * median(appending), unit="ms"),
    )
    samples = {"rounds": arguments.rounds, "choosing_s": choosing, "appending_s": appending}
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=figures, samples=samples)


def certificate_of(round: int, parent: str, peers: list[str], digest: int = 0) -> tuple[Certificate, str]:
    """One of a round, with the id that it leads to."""
    who = sorted(peers[(round // 100 + place) % PEERS] for place in range(MEMBERS))
    link = Link(
        run_id=RUN, round=round, parent=parent, roster=tuple(Member(peer_id=peer, tokens=64_000) for peer in who),
        update_digest=f"{round:064x}", state_digest=f"{digest:064x}",
    )  # fmt: skip
    return Certificate(link=link, signatures=dict.fromkeys(who, f"{round:0128x}")), link.id


def write(path: Path, rounds: int, peers: list[str]) -> tuple[str, str]:
    """Write a chain; -> the ids of its tip, and of `FORK` rounds before."""
    ids = [GENESIS]
    with path.open("wb") as file:
        for round in range(rounds):
            certificate, lineage_id = certificate_of(round, ids[-1], peers)
            file.write(dump_json(certificate) + b"\n")
            ids.append(lineage_id)
    return ids[-1], ids[-1 - FORK]


def own_bytes() -> int:
    """Memory of this process alone."""
    status = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) << 10


def timed(work: Callable[[], object]) -> list[float]:
    """Seconds of each of some repetitions."""
    seconds = []
    for _ in range(REPEATS):
        began = time.monotonic()
        work()
        seconds.append(time.monotonic() - began)
    return seconds


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
