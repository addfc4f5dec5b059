"""The process of one peer of `benchmarks.state_transfer`: a donor that averages with the others, or the newcomer.

Only this file of the benchmark uses `peer.swarm`. Rounds are complete: exchange, votes, the update applied and recorded
on disk; there are no trainer and no directory. The newcomer's chain and state are verified as in production.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from benchmarks.contributions import fill
from benchmarks.member import MemberSetup, respond
from benchmarks.swarm_peer import RECIPE, RUN, TOKENS, run_peer
from peer.link.memory import SharedState
from peer.link.supervisor import create_descriptor
from peer.outer.compress.registry import compressor
from peer.outer.optim.optimizers import Nesterov
from peer.outer.round import Due, Exchanged, Group, RoundAborted, run_round
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import ReduceFormat
from peer.outer.state.wire_format import AnyUpdate
from peer.protocol.fork_choice import ForkRule
from peer.protocol.lineage import Certificate, Link, RosterLimits
from peer.protocol.manifest import RoundSpec
from peer.protocol.weights import WeightRule
from peer.swarm.catchup.chain_scout import ChainRules, ChainScout
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.history_client import HistoryClient
from peer.swarm.catchup.history_server import HistoryServer
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.group.roster import RosterAuthority
from peer.swarm.net.node import Node
from peer.swarm.round.exchange import Exchange
from peer.swarm.round.strategy_choice import strategies_of
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.store import StateStore

SCALE = 1e-3
T = TypeVar("T")


class StatePeer:
    """A donor, or the newcomer, which comes last. Its methods run in a thread beside the main thread's loop.

    Args:
        setup: the run; `peers` counts the newcomer.
        node: the network.
        loop: its loop.
    """

    def __init__(self, setup: MemberSetup, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self._setup, self._node, self._loop = setup, node, loop
        self._members = setup.peers - 1
        self._memory = SharedState(create_descriptor(), setup.numel, 1)
        for vector in (self._memory.anchor, self._memory.snapshot, *self._memory.buffers):
            vector.fill_(0.0)  # written, so that all of its memory is there
        self.state = OuterState(
            self._memory.anchor, self._memory.buffers, Nesterov(lr=0.7, momentum=0.6),
            ReduceFormat(setup.numel, compressor(setup.codec)),
        )
        self.state.lineage_id = self._genesis = self.state.digest()
        self.store = self._new_keeper("0", setup.folder)
        rounds, rule = RoundSpec(max_group=max(2, self._members)), WeightRule(nominal_tokens=TOKENS)
        self.rosters = RosterAuthority(node.identity, RUN, rounds, rule)
        strategies = strategies_of(RECIPE, self.state.fragments, node.identity, lambda: self.store.history.chain)
        self.exchange = Exchange(node, self.rosters, setup.timeout_s, strategies)
        self.group: Group | None = None
        self.phases: list[dict[str, float]] = []  # seconds of each round
        self._sequence = self._fetches = 0
        self._donors: list[str] = []

    async def start(self) -> None:
        """Serve."""
        self.store.restore([])
        await self.exchange.start()
        snapshot_cache = self.store.snapshot_cache
        await HistoryServer(self._node, RUN, self.store.history, snapshot_cache, snapshot_cache.priority).start()

    def prepare(self) -> dict[str, str]:
        """Local parameters to average, and a signed join of the first round."""
        fill(self._memory.snapshot, self._setup.index, self._setup.seed)
        self._memory.snapshot.mul_(-SCALE)
        _, sealed = self.rosters.join(self.store.position, TOKENS)
        return {"peer_id": self._node.peer_id, "sealed": sealed.hex()}

    def meet(self, gathered: Sequence[dict[str, str]]) -> None:
        """Form the first group; it stays for all rounds."""
        members = gathered[: self._members]
        self._donors = [one["peer_id"] for one in members]
        if self._setup.index == self._members:
            return
        sealed = {one["peer_id"]: bytes.fromhex(one["sealed"]) for one in members}
        joins = {id: (blob, self.rosters.open_join(blob, id, self.store.position)) for id, blob in sealed.items()}
        _, self.group = self.rosters.write(joins)

    def work(self, given: dict[str, Any]) -> Any:
        """One part of the measurement.

        Args:
            given: a donor makes `rounds`, with `pause_s` before each; -> (began, ended) of each, and when each of its
                snapshot files was finished. The newcomer takes `fetches` snapshots from the first `donors`, and more
                until `fetch_s` have passed, into `folder`, or its own if there is none; -> what `_fetch` says of each.
        """
        if self._setup.index < self._members:
            rounds = self._wait(self._rounds(given["rounds"], given["pause_s"]))
            return {"rounds": rounds, "written": [file.written_at for file in self.store.snapshot_cache.files]}
        until, folder = time.monotonic() + given["fetch_s"], given["folder"] or self._setup.folder
        fetched: list[dict[str, Any]] = []
        while len(fetched) < given["fetches"] or time.monotonic() < until:
            fetched.append(self._wait(self._fetch(self._donors[: given["donors"]], folder)))
        return fetched

    async def _rounds(self, count: int, pause_s: float) -> list[tuple[float, float]]:
        times = []
        for _ in range(count):
            await asyncio.sleep(pause_s)
            self._sequence += 1
            began = time.monotonic()
            record = await run_round(Due(self._sequence, TOKENS, self._memory.snapshot), self.state, _Port(self))
            self.store.snapshot_cache.priority.round_ends(self.store.hashing)
            if record.status != "committed":
                raise RuntimeError(f"a round ended in {record.phase}: {record.reason}")
            times.append((began, time.monotonic()))
            self.phases.append(record.seconds)
        return times

    async def _fetch(self, donors: list[str], folder: str) -> dict[str, Any]:
        self._fetches += 1
        store = self._new_keeper(str(self._fetches), folder)
        limits = RosterLimits(1, max(2, self._members), WeightRule(nominal_tokens=TOKENS))
        fetcher = HistoryClient(self._node, RUN, store.history.folder, limits)
        checkpoints = NewestCheckpoint(store.history.folder, RUN, ())
        rules = ChainRules(limits=limits, rule=ForkRule(), checkpoints=checkpoints)
        scout = ChainScout(fetcher.requests, RUN, rules, store.history)
        joiner = _Joiner(store, scout)
        began = time.monotonic()
        local = LocalState(state=self.state, history=store.history, valid=False, digest=store.digest)
        chain = await scout.look(donors[0], self.state.round)
        how = await fetcher.follow(donors[0], chain, local, joiner, donors[1:])
        said = await fetcher.said(store.history.chain[-1].link, donors, self._setup.timeout_s)
        return {
            "began": began, "ended": joiner.verified_at, "adopt_seconds": time.monotonic() - joiner.verified_at,
            "chunks": [how.chunks.get(donor, 0) for donor in donors],
            "right": set(said.values()) == {await store.digest()},
        }  # fmt: skip

    def _new_keeper(self, name: str, folder: str) -> StateStore:
        own = Path(folder) / f"{self._setup.index}-{name}"
        return StateStore(self._memory, self.state, ChainStore(own, self._genesis))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Joiner:
    """Takes a donor's snapshot, and notes when it was verified."""

    def __init__(self, store: StateStore, scout: ChainScout) -> None:
        self._store, self.carried = store, scout.carried
        self.verified_at = 0.0

    async def apply(self, update: AnyUpdate, certificate: Certificate) -> None:
        raise AssertionError(f"nothing to replay, but round {certificate.link.round} with {update.numel} values")

    async def adopt(self, path: Path, chain: Sequence[Certificate]) -> None:
        self.verified_at = time.monotonic()
        await self._store.adopt(path, chain)


class _Port:
    """Implements `SwarmPort` for a persistent group."""

    def __init__(self, peer: StatePeer) -> None:
        self._peer = peer

    async def match(self, due: Due) -> Group:
        peer = self._peer
        first, peer.group = peer.group, None
        return first or await peer.exchange.next_round(due, peer.state, peer.store.position, 60.0)

    async def exchange(self, group: Group, due: Due, state: OuterState) -> Exchanged:
        self._peer.store.snapshot_cache.priority.round_begins()
        return await self._peer.exchange.exchange(group, due, state)

    async def digest(self) -> str:
        return await self._peer.store.digest()

    async def commit(self, group: Group, link: Link) -> Certificate:
        return await self._peer.exchange.commit(group, link)

    async def install(self, group: Group, update: AnyUpdate, certificate: Certificate, due: Due) -> None:  # noqa: ARG002
        await self._peer.store.apply(update, certificate, due.sequence)

    async def release(self, group: Group, abort: RoundAborted | None) -> None:
        await self._peer.exchange.release(group, abort, self._peer.store.position)


async def start(setup: MemberSetup, node: Node, answers: TextIO) -> Callable[[], None]:
    """See `run_peer`."""
    peer = StatePeer(setup, node, asyncio.get_running_loop())
    await peer.start()
    work: dict[str, Callable[[Any], Any]] = {
        "prepare": lambda _: peer.prepare(), "meet": peer.meet, "work": peer.work, "phases": lambda _: peer.phases,
    }  # fmt: skip
    return lambda: respond(node.maddrs[0], work, answers)


if __name__ == "__main__":
    run_peer(start)
