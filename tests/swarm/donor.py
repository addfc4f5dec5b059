"""Both ends of catching up: a donor that serves whatever a test tells it to, and a peer that must not believe it."""

from __future__ import annotations

import asyncio

import pytest

from peer.errors import ProtocolError
from peer.outer.state import outer_state as state_module
from peer.outer.state.outer_state import state_digest
from peer.protocol import hashing
from peer.protocol.fork_choice import ForkRule, ForkVerdict
from peer.protocol.lineage import RosterLimits
from peer.protocol.records import dump_json
from peer.protocol.wire import HistoryRequest, Kind, SnapshotMeta
from peer.swarm.catchup.chain_scout import ChainRules, ChainScout
from peer.swarm.catchup.chunk_download import CatchUpError
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.history_client import HistoryClient
from peer.swarm.catchup.history_server import history_name
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.snapshot_file import load_snapshot
from tests.swarm.runs import NUMEL, RUN, Run, make_state

SERVED_NUMEL = 8 * 1024
CHUNKS = 16  # of a state of so many parameters, where chunks are small


def committed_run(folder):
    """A donor's run of SERVED_NUMEL parameters and two rounds."""
    return Run(folder / "donor", numel=SERVED_NUMEL).commit(2)


def newcomer(network, folder):
    """Who has nothing of that run yet."""
    joiner = Joiner(network, folder / "joiner", numel=SERVED_NUMEL)
    joiner.valid = False
    return joiner


async def scripted_donors(network, run, count):
    """So many that serve it."""
    return [await ScriptedDonor(network.node(), run).start() for _ in range(count)]


def flip(piece):
    """The same bytes but for one bit."""
    return bytes([piece[0] ^ 1]) + piece[1:]


class ScriptedDonor:
    """Serves a run honestly until a test changes `chain`, `updates`, `meta`, `digests` or `pieces`, or `poison`s it.

    Attributes:
        asked: what was requested, in order.
        writing: how often it says so before it offers its snapshot.
        chunks_asked: the chunks that were, in order.
    """

    def __init__(self, node, run):
        state, history = run.state, run.history
        self.node, self.asked, self.chunks_asked, self.writing = node, [], [], 0
        self.chain = list(history.chain)
        digests = [certificate.link.update_digest for certificate in history.chain]
        self.updates = {digest: history.update(digest).read_bytes() for digest in digests}
        self.digests = state.chunk_digests()
        self.meta = SnapshotMeta(
            round=state.round,
            lineage_id=state.lineage_id,
            fragments=state.fragments.sizes,
            num_buffers=len(state.buffers),
            num_chunks=len(self.digests),
        )
        self.pieces = [
            tensor[start:stop].numpy().tobytes()
            for tensor in (state.anchor, *state.buffers)
            for start, stop in state_module.columns(state.fragments.sizes)
        ]

    @property
    def peer_id(self):
        return self.node.peer_id

    async def start(self):
        await self.node.serve(history_name(RUN), "history", self._answer)
        return self

    async def _answer(self, stream):
        request = await stream.receive_message(Kind.REQUEST, HistoryRequest)
        self.asked.append(request.what)
        if request.what == "chunks":
            await self._send_chunks(stream, request)
        elif request.what == "chain":
            for certificate in self.chain[request.from_round :]:
                await stream.send(Kind.DATA, dump_json(certificate))
        elif request.what == "update":
            payload = self.updates.get(request.digest, b"")
            for start in range(0, len(payload), 400):
                await stream.send(Kind.DATA, payload[start : start + 400])
        elif request.what == "state":
            if self.meta is not None and request.digest == self.meta.lineage_id:
                digest = state_digest(self.digests, self.meta.fragments, self.meta.num_buffers)
                await stream.send(Kind.DATA, bytes.fromhex(digest))
        elif self.meta is not None:
            for _ in range(self.writing):
                await stream.send(Kind.BUSY)
            await stream.send_message(Kind.META, self.meta)
            await stream.send(Kind.DATA, b"".join(self.digests))
        await stream.send(Kind.END)
        await stream.closed()

    def poison(self, index=0):
        """Another state, with digests that fit."""
        self.pieces[index] = flip(self.pieces[index])
        self.digests[index] = hashing.digest(self.pieces[index])

    async def _send_chunks(self, stream, request):
        """Until the other end has enough; a piece that is None is the end, one that is `Kind.BUSY` says so."""
        while True:
            for index in request.indexes:
                self.chunks_asked.append(index)
                piece = self.pieces[index]
                if piece is None:
                    return
                if callable(piece):
                    piece = await piece()
                await (stream.send(piece) if isinstance(piece, Kind) else stream.send(Kind.DATA, piece))
            request = await stream.receive_message(Kind.REQUEST, HistoryRequest)


class NotFollowedError(CatchUpError):
    """The rule keeps the joiner on its own chain."""


class Joiner:
    """A peer that catches up; applies and adopts as `peer.swarm.lineage.round_loop` does."""

    def __init__(self, network, folder, numel=NUMEL, sizes=()):
        self.state = make_state(numel, sizes=sizes)
        self.history = ChainStore(folder, self.state.lineage_id)
        self.folder, self.accused = folder, {}
        self._limits = RosterLimits(fragment=lambda round: self.state.fragments.turns(round).fragment)
        self.fetcher = HistoryClient(network.node(), RUN, folder, self._limits, self.accused.__setitem__)
        self.scout = self._scout()
        self.valid, self.applied, self.adopted = True, 0, 0

    def carried(self, chain, judged=0):
        return self.scout.carried(chain, judged)

    async def apply(self, update, certificate):
        self.history.append(certificate)
        self.history.keep_update(update.payload)
        self.state.apply(update, certificate.link.round + 1, certificate.link.id)
        self.applied += 1

    async def adopt(self, path, chain):
        load_snapshot(path, self.state)
        self.state.round = len(chain)
        self.state.lineage_id = chain[-1].link.id if chain else self.history.genesis
        self.history.replace(chain)
        self.adopted += 1

    def stand_on(self, run):
        """Take over where a run is."""
        self.state, self.history = run.state, run.history
        self.scout = self._scout()

    def _scout(self):
        newest = NewestCheckpoint(self.folder, RUN, ())
        rules = ChainRules(limits=self._limits, rule=ForkRule(), checkpoints=newest)
        return ChainScout(self.fetcher.requests, RUN, rules, self.history)

    def local_state(self):
        return LocalState(state=self.state, history=self.history, valid=self.valid, digest=self.digest)

    async def digest(self):
        return self.state.digest()

    async def catch_up(self, donor, *others):
        ids = [other.peer_id for other in others]
        async with asyncio.timeout(20.0):
            chain = self.scout.carried(await self.scout.look(donor.peer_id, 0))
            own = self.history.chain
            if self.scout.judge(chain) is not ForkVerdict.FOLLOW and (self.valid or own != chain):
                raise NotFollowedError(f"the chain of {donor.peer_id} is not followed")
            return await self.fetcher.follow(
                donor.peer_id, chain, self.local_state(), self, ids, ids
            )

    async def refuses(self, donor, error=ProtocolError, match=None):
        """Catching up fails and leaves this peer exactly as it was."""
        before = (self.state.digest(), self.state.round, self.state.lineage_id, list(self.history.chain))
        with pytest.raises(error, match=match):
            await self.catch_up(donor)
        assert (self.state.digest(), self.state.round, self.state.lineage_id, self.history.chain) == before
        assert (self.applied, self.adopted) == (0, 0)


def assert_same(joiner, run):
    """The joiner holds what the donor of `run` holds, bit for bit."""
    assert joiner.state.digest() == run.state.digest()
    assert (joiner.state.round, joiner.state.lineage_id) == (run.state.round, run.state.lineage_id)
    assert joiner.history.chain == run.history.chain


async def two_donors(network, run):
    """One that takes streams, as a machine asleep does, and says nothing; set once it has one; one that answers."""
    sleeping, called = ScriptedDonor(network.node(run.identities[1]), run), asyncio.Event()

    async def hold(stream):
        called.set()
        await stream.closed()

    await sleeping.node.serve(history_name(RUN), "history", hold)
    return sleeping, called, await ScriptedDonor(network.node(run.identities[2]), run).start()
