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
from peer.swarm.agent.lease_book import LeaseBook, SeenLeases, Shard, shards_of
from peer.swarm.runtime.timing import STANDARD

NAME = "leases"
ABOUT = "An epoch of shards that home computers lease from each other, each with the code of production"
TICK_S = 5.0  # between two looks of a peer at the directory; in production 2 s
TTL_S = 15.0  # of a record
SLOWEST, FASTEST = 1_000.0, 30_000.0  # tokens/s
ROUND_S = 300.0
ONLINE_S, OFFLINE_S = 3 * 3600.0, 3600.0  # on average
KILLED = 0.5  # of those that leave: without a word
MOST_TICKS = 40_000
HOSTILE = {
    "one in a hundred leases everything": "greedy",
    "one in a hundred never hands back": "keepers",
    "one in a hundred claims what it did not lease": "liars",
}


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

    @property
    def wanted(self) -> int:
        return min(MAX_OPEN, 2 + int(self.parts_per_s * AHEAD_S / PARTS_PER_SHARD))

    def train(self) -> float:
        """One tick; -> parts that it could have trained and had no lease for."""
        self.begun += self.parts_per_s * TICK_S
        while self.open and self.begun >= (size := self.open[0].end - self.open[0].first):
            self.pending.append(self.open.pop(0))
            self.begun -= size
        idle = 0.0 if self.open else self.begun
        self.begun -= idle
        return idle

    def settle(self) -> None:
        """The parts of the first piece that are trained wait for a certificate."""
        if self.open and (whole := int(self.begun)):
            middle = self.open[0].first + whole
            self.pending.append(self.open[0]._replace(end=middle))
            self.open[0], self.begun = self.open[0]._replace(first=middle), self.begun - whole


@dataclass
class Totals:
    """Of the whole epoch. Parts, but for `records` and `bytes`, of records that said something."""

    lost: int = 0
    idle: float = 0.0
    possible: float = 0.0
    records: int = 0
    bytes: int = 0
    longest: int = 0
    claimed_falsely: int = 0


class LeaseSwarm:
    """Peers with one chain and one directory, which shows what was in it when a tick began.

    A peer for which nothing has changed since its last look is passed over: its book would answer nothing.

    Args:
        greedy: peers that lease as much as others believe, elsewhere every hour, and train nothing.
        keepers: peers that lease as the others do, never train, and never hand back.
        liars: peers that also claim, each round, up to twice their possible work, on parts that no peer has claimed.
    """

    def __init__(
        self, peers: int, shards: int, seed: int, greedy: int = 0, keepers: int = 0, liars: int = 0
    ) -> None:
        self.chain, self.now, self.totals, self._rng = SourceCoverage(shards), 0.0, Totals(), random.Random(seed)
        self.peers = {f"peer{number}": self._peer(f"peer{number}", seed) for number in range(peers)}
        names = sorted(self.peers)
        self._rng.shuffle(names)
        self._greedy, names = set(names[:greedy]), names[greedy:]
        self._keepers, self._liars = set(names[:keepers]), set(names[keepers : keepers + liars])
        self._seen = SeenLeases(shards)
        self._records: dict[str, list[Range]] = {}  # that the directory shows at the next tick
        self._shown: dict[str, list[Range]] = {}
        self._concerned: set[str] = set()

    def _peer(self, name: str, seed: int) -> Peer:
        tokens_per_s = SLOWEST * (FASTEST / SLOWEST) ** self._rng.random()
        return Peer(
            LeaseBook(str(seed), name, STANDARD.lease_s), tokens_per_s * PARTS_PER_SHARD / SHARD_TOKENS,
            self._rng.random() < ONLINE_S / (ONLINE_S + OFFLINE_S), self._rng.expovariate(1 / ONLINE_S),
            self._rng.uniform(0, ROUND_S),
        )  # fmt: skip

    def run(self, say: Say) -> None:
        """Until every part of the first epoch was claimed."""
        epoch, order = self.chain.epochs[0], list(self.peers)
        for tick in range(MOST_TICKS):
            if epoch.covered == len(epoch.counts):
                return
            if tick % 400 == 0:
                say(f"{self.now / 3600:.1f} h: {epoch.covered / len(epoch.counts):.1%} of the epoch")
            self._show()
            self._rng.shuffle(order)
            for name in order:
                self._live(name, self.peers[name])
            self.now += TICK_S

    def _show(self) -> None:
        """What peers have published, and what has expired; a peer whose shard another one holds now looks at it."""
        for name, peer in self.peers.items():
            if not peer.online and peer.expires_at <= self.now and self._shown.get(name):
                self._records[name] = []
        for name, ranges in self._records.items():
            self._seen.put(name, ranges)
            self._shown[name] = ranges
            for shard in shards_of(ranges):
                if len(holders := self._seen.holders.get(shard, ())) > 1:
                    self._concerned.update(holders)
        self._records = {}

    def _live(self, name: str, peer: Peer) -> None:
        if self.now >= peer.changes_at:
            self._come_or_go(peer)
        if not peer.online:
            return
        if name in self._greedy:
            if self.now % 3600 < TICK_S or not self._shown.get(name):
                first = self._rng.randrange(self.chain.shards - MAX_LEASED)
                self._records[name] = [Range(0, first, first + MAX_LEASED)]
            return
        committed = self.now >= peer.commits_at
        if name not in self._keepers:
            self.totals.possible += peer.parts_per_s * TICK_S
            self.totals.idle += peer.train()
            if committed:
                peer.commits_at += ROUND_S
                self._commit(name, peer)
        if committed or name in self._concerned or len(peer.open) < peer.wanted:
            self._concerned.discard(name)
            self._lease(name, peer)

    def _lease(self, name: str, peer: Peer) -> None:
        peer.settle()
        number, first = int(self.now), peer.open[0] if peer.open else None
        peer.book.hear(peer.open, joined(peer.pending), number)
        taken, lost = peer.book.update(self.chain, self._seen, peer.wanted, number, self.now)
        if first in lost:
            peer.begun = 0.0
        peer.open = [piece for piece in peer.open if piece not in lost] + taken
        held = joined(peer.book.leases)
        if held != self._shown.get(name):
            self._records[name] = held
        text = write_ranges(held)
        self.totals.records, self.totals.bytes = self.totals.records + 1, self.totals.bytes + len(text)
        self.totals.longest = max(self.totals.longest, len(text))

    def _come_or_go(self, peer: Peer) -> None:
        peer.online = not peer.online
        peer.changes_at = self.now + self._rng.expovariate(1 / (ONLINE_S if peer.online else OFFLINE_S))
        if not peer.online:
            peer.settle()
            self.totals.lost += sum(one.end - one.first for one in peer.pending)
            peer.open, peer.pending, peer.begun = [], [], 0.0
            peer.expires_at = self.now + (TTL_S if self._rng.random() < KILLED else 0.0)

    def _commit(self, name: str, peer: Peer) -> None:
        peer.settle()
        claimed = joined(peer.pending)
        peer.pending = []
        if name in self._liars and (false := self._false_claim(peer)) is not None:
            claimed.append(false)
        for one in claimed:
            self.chain.add(*one)
            shards: list[Shard] = [(one.epoch, shard) for shard in range(one.shard, -(-one.end // PARTS_PER_SHARD))]
            self._concerned.update(holder for shard in shards for holder in self._seen.holders.get(shard, ()))

    def _false_claim(self, peer: Peer) -> Range | None:
        most = 2 + int(peer.parts_per_s * ROUND_S)  # beside the same number that it has trained
        counts = self.chain.epochs[0].counts
        free = (counts == 0).nonzero()[0]
        if not len(free):
            return None
        first = int(free[self._rng.randrange(len(free))])
        end = min(first + most, len(counts))
        self.totals.claimed_falsely += int((counts[first:end] == 0).sum())
        return Range(0, first, end)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Computers of 1,000 to 30,000 tokens/s, online for three hours on average and offline for one; half of those\n"
        "that leave say nothing. Shards are of 2^20 tokens, rounds of 5 minutes. A peer looks at the directory every\n"
        "5 s, and sees what was in it at the last look. The epoch ends when the chain holds all of it. Then the same\n"
        "with one peer in a hundred that leases and never trains, in two ways, and one that claims untrained parts.",
    )
    parser.add_argument("--peers", type=int, default=1000, metavar="N", help="computers (default: 1000)")
    parser.add_argument("--shards", type=int, default=100_000, metavar="N", help="of the corpus (default: 100000)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Simulate the four swarms."""
    check_count("--peers", arguments.peers, 1)
    check_count("--shards", arguments.shards, MAX_LEASED + 1)
    hostile = max(1, arguments.peers // 100)
    figures: list[Figure] = []
    samples: dict[str, object] = {"peers": arguments.peers, "shards": arguments.shards, "hostile": hostile}
    for name, kind in {"home": "", **HOSTILE}.items():
        say(name)
        swarm = LeaseSwarm(arguments.peers, arguments.shards, arguments.seed, **({kind: hostile} if kind else {}))
        began = time.process_time()
        swarm.run(say)
        figures += figures_of(name, swarm, of_home=not kind)
        samples[name] = {**vars(swarm.totals), "hours": swarm.now / 3600, "cpu_s": time.process_time() - began}
    return BenchReport(name=NAME, about=ABOUT, seed=arguments.seed, figures=tuple(figures), samples=samples)


def figures_of(name: str, swarm: LeaseSwarm, *, of_home: bool) -> list[Figure]:
    """What the chain says of the first epoch, and what it cost."""
    sums, totals = swarm.chain.sums()[0], swarm.totals
    parts = len(swarm.chain.epochs[0].counts)
    found = [
        Figure(name=f"{name}: read twice, by the chain", value=100 * sums.read_twice, unit="%", limit=2.0),
        Figure(name=f"{name}: never read", value=sums.never / PARTS_PER_SHARD, unit="shards", limit=0.0),
        Figure(name=f"{name}: the epoch", value=swarm.now / 3600, unit="h"),
    ]
    if of_home:
        found += [
            Figure(name=f"{name}: trained, and lost with a peer that left", value=100 * totals.lost / parts, unit="%"),
            Figure(name=f"{name}: time without a lease at hand", value=100 * totals.idle / totals.possible, unit="%"),
            Figure(name=f"{name}: leases in a record, mean", value=totals.bytes / totals.records, unit="B"),
            Figure(name=f"{name}: leases in a record, largest", value=float(totals.longest), unit="B", limit=192.0),
        ]
    if totals.claimed_falsely:
        false = 100 * totals.claimed_falsely / parts
        found.append(Figure(name=f"{name}: claimed falsely, never trained", value=false, unit="%"))
    return found


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
