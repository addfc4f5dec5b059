"""The lease code of production in a simulated swarm of a thousand home computers that come and go."""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, run_benchmark
from peer.data.shared import AHEAD_S, MAX_OPEN, SHARD_TOKENS
from peer.protocol.coverage import SourceCoverage
from peer.protocol.data_spec import PARTS_PER_SHARD
from peer.protocol.ranges import MAX_LEASED, Range, joined, write_ranges
from peer.swarm.agent.lease_book import LeaseBook, SeenLeases, parts_of
from peer.swarm.runtime.timing import STANDARD

NAME = "leases"
ABOUT = "An epoch of shards that home computers lease from each other, each with the code of production"
TICK_S = 20.0  # between two looks of a peer at the directory; in production 2 s
TTL_S = 40.0  # of a record: two ticks; in production 15 s
SLOWEST, FASTEST = 1_000.0, 30_000.0  # tokens/s
ROUND_S = 300.0
ONLINE_S, OFFLINE_S = 3 * 3600.0, 3600.0  # on average
KILLED = 0.5  # of those that leave: without a word
MOST_TICKS = 20_000


@dataclass
class Peer:
    """One computer, its trainer and its record."""

    book: LeaseBook
    parts_per_s: float
    online: bool
    changes_at: float
    commits_at: float
    open: list[Range] = field(default_factory=list)
    pending: list[Range] = field(default_factory=list)
    begun: float = 0.0  # parts of the first open piece
    expires_at: float = 0.0


@dataclass
class Totals:
    """Of the whole epoch. Parts, but for `records` and `bytes`, of records that said something."""

    trained: int = 0
    lost: int = 0
    idle_ticks: int = 0
    ticks: int = 0
    records: int = 0
    bytes: int = 0
    longest: int = 0
    claimed_falsely: int = 0


class LeaseSwarm:
    """Peers with one chain and one directory, which shows what was in it when a tick began.

    Args:
        greedy: peers that lease as much as others believe, and train nothing.
        liars: peers that also claim, each round, up to twice their possible work, on parts that no peer has claimed.
    """

    def __init__(self, peers: int, shards: int, seed: int, greedy: int = 0, liars: int = 0) -> None:
        self.chain, self.now, self.totals, self._rng = SourceCoverage(shards), 0.0, Totals(), random.Random(seed)
        self.peers = {f"peer{number}": self._peer(f"peer{number}", seed) for number in range(peers)}
        names = sorted(self.peers)
        self._rng.shuffle(names)
        self._greedy, self._liars = set(names[:greedy]), set(names[greedy : greedy + liars])
        self._records: dict[str, list[Range]] = {}

    def _peer(self, name: str, seed: int) -> Peer:
        tokens_per_s = SLOWEST * (FASTEST / SLOWEST) ** self._rng.random()
        return Peer(
            LeaseBook(str(seed), name, STANDARD.lease_s), tokens_per_s * PARTS_PER_SHARD / SHARD_TOKENS,
            self._rng.random() < ONLINE_S / (ONLINE_S + OFFLINE_S), self._rng.expovariate(1 / ONLINE_S),
            self._rng.uniform(0, ROUND_S),
        )  # fmt: skip

    def run(self, say: Say) -> None:
        """Until every part of the first epoch was claimed."""
        epoch = self.chain.epochs[0]
        for tick in range(MOST_TICKS):
            if epoch.done.all():
                return
            if tick % 100 == 0:
                say(f"{self.now / 3600:.1f} h: {epoch.covered / len(epoch.counts):.1%} of the epoch")
            shown = {name: one for name, one in self._records.items() if self.peers[name].expires_at > self.now}
            seen = SeenLeases(self.chain.shards, shown)
            order = list(self.peers)
            self._rng.shuffle(order)
            for name in order:
                self._live(name, self.peers[name], seen)
            self.now += TICK_S

    def _live(self, name: str, peer: Peer, seen: SeenLeases) -> None:
        if self.now >= peer.changes_at:
            self._come_or_go(name, peer)
        if not peer.online:
            return
        if name in self._greedy:
            peer.expires_at = self.now + TTL_S
            if not peer.open:
                peer.open = [Range(0, *parts_of(self._rng.randrange(self.chain.shards - MAX_LEASED)))]
            self._records[name] = [Range(0, peer.open[0].shard, peer.open[0].shard + MAX_LEASED)]
            return
        self._train(peer)
        if self.now >= peer.commits_at:
            peer.commits_at += ROUND_S
            self._commit(name, peer)
        number = int(self.now)
        peer.book.hear(peer.open, joined(peer.pending), number)
        wanted = min(MAX_OPEN, 2 + int(peer.parts_per_s * AHEAD_S / PARTS_PER_SHARD))
        taken, lost = peer.book.update(self.chain, seen, wanted, number, self.now)
        if peer.open and peer.open[0] in lost:
            peer.begun = 0.0
        peer.open = [piece for piece in peer.open if piece not in lost] + taken
        self._records[name], peer.expires_at = peer.book.leases, self.now + TTL_S
        text = write_ranges(peer.book.leases)
        self.totals.records, self.totals.bytes = self.totals.records + 1, self.totals.bytes + len(text)
        self.totals.longest = max(self.totals.longest, len(text))

    def _come_or_go(self, name: str, peer: Peer) -> None:
        peer.online = not peer.online
        peer.changes_at = self.now + self._rng.expovariate(1 / (ONLINE_S if peer.online else OFFLINE_S))
        if not peer.online:
            self.totals.lost += sum(one.end - one.first for one in peer.pending) + int(peer.begun)
            peer.open, peer.pending, peer.begun = [], [], 0.0
            peer.book.hear([], [], int(self.now))
            if self._rng.random() >= KILLED:
                self._records.pop(name, None)

    def _train(self, peer: Peer) -> None:
        left = peer.parts_per_s * TICK_S
        self.totals.ticks += 1
        while peer.open and left > 0:
            piece = peer.open[0]
            step = min(left, piece.end - piece.first - peer.begun)
            peer.begun, left = peer.begun + step, left - step
            if peer.begun >= piece.end - piece.first - 1e-9:
                self._trained(peer, piece)
                peer.begun = 0.0
                peer.open.pop(0)
            elif peer.begun >= 1.0:
                whole_parts = int(peer.begun)
                middle = piece.first + whole_parts
                self._trained(peer, piece._replace(end=middle))
                peer.open[0], peer.begun = piece._replace(first=middle), peer.begun - whole_parts
        self.totals.idle_ticks += left > 0

    def _trained(self, peer: Peer, piece: Range) -> None:
        peer.pending.append(piece)
        self.totals.trained += piece.end - piece.first

    def _commit(self, name: str, peer: Peer) -> None:
        for one in joined(peer.pending):
            self.chain.add(*one)
        peer.pending = []
        if name in self._liars:
            most = 2 + int(peer.parts_per_s * ROUND_S)  # beside the same number that it has trained
            free = (self.chain.epochs[0].counts == 0).nonzero()[0]
            if len(free):
                first = int(free[self._rng.randrange(len(free))])
                end = min(first + most, len(self.chain.epochs[0].counts))
                self.totals.claimed_falsely += end - first - (self.chain.add(0, first, end) or 0)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Computers of 1,000 to 30,000 tokens/s, online for three hours on average and offline for one; half of those\n"
        "that leave say nothing. Shards are of 2^20 tokens, rounds of 5 minutes. A peer looks at the directory every\n"
        "20 s, and sees what was in it at the last look. The epoch ends when the chain holds all of it. Then the same\n"
        "with one peer in a hundred that leases and never trains, and one that claims untrained parts.",
    )
    parser.add_argument("--peers", type=int, default=1000, metavar="N", help="computers (default: 1000)")
    parser.add_argument("--shards", type=int, default=100_000, metavar="N", help="of the corpus (default: 100000)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Simulate both swarms."""
    check_count("--peers", arguments.peers, 1)
    check_count("--shards", arguments.shards, MAX_LEASED + 1)
    hostile = max(1, arguments.peers // 100)
    figures: list[Figure] = []
    samples: dict[str, object] = {"peers": arguments.peers, "shards": arguments.shards, "hostile": hostile}
    for name, kinds in {"home": {}, "hostile": {"greedy": hostile, "liars": hostile}}.items():
        swarm = LeaseSwarm(arguments.peers, arguments.shards, arguments.seed, **kinds)
        began = time.process_time()
        swarm.run(say)
        figures += figures_of(name, swarm)
        samples[name] = {**vars(swarm.totals), "hours": swarm.now / 3600, "cpu_s": time.process_time() - began}
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=tuple(figures), samples=samples)


def figures_of(name: str, swarm: LeaseSwarm) -> list[Figure]:
    """What the chain says of the first epoch, and what it cost."""
    sums, totals = swarm.chain.sums()[0], swarm.totals
    parts = len(swarm.chain.epochs[0].counts)
    found = [
        Figure(name=f"{name}: read twice, by the chain", value=100 * sums.read_twice, unit="%", limit=2.0),
        Figure(name=f"{name}: never read", value=sums.never / PARTS_PER_SHARD, unit="shards", limit=0.0),
        Figure(name=f"{name}: trained, and lost with a peer that left", value=100 * totals.lost / parts, unit="%"),
        Figure(name=f"{name}: looks without enough leased", value=100 * totals.idle_ticks / totals.ticks, unit="%"),
        Figure(name=f"{name}: leases in a record, mean", value=totals.bytes / totals.records, unit="B"),
        Figure(name=f"{name}: leases in a record, largest", value=float(totals.longest), unit="B", limit=192.0),
        Figure(name=f"{name}: the epoch", value=swarm.now / 3600, unit="h"),
    ]
    if totals.claimed_falsely:
        false = 100 * totals.claimed_falsely / parts
        found.append(Figure(name=f"{name}: claimed falsely, never trained", value=false, unit="%"))
    return found


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
