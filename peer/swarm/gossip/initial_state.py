"""How a peer gets its first state in a gossip run: another peer's, as that peer has signed it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from statistics import median_low

import numpy as np

from peer.errors import ProtocolError, in_words
from peer.link.messages import RoundEnded
from peer.outer.record import RoundRecord
from peer.protocol.lineage import Certificate, RosterLimits
from peer.protocol.manifest import MAX_ROUNDS
from peer.protocol.records import MAX_RECORD_BYTES, dump_json, open_sealed, parse_json, seal
from peer.protocol.wire import GossipState, Kind
from peer.swarm.catchup.donors import LocalState
from peer.swarm.catchup.genesis import fetch_genesis
from peer.swarm.catchup.history_client import HistoryClient
from peer.swarm.gossip.store import LocalStateStore
from peer.swarm.loop import RunContext, read_directory
from peer.swarm.net.stream import FrameStream, StreamClosedError
from peer.swarm.state.run_control import RunControl

log = logging.getLogger(__name__)
MOST_AHEAD = 16  # rounds by which a donor may be ahead of most records: those lag, and rounds may be short
FAR_BEHIND = 64  # rounds after which what a peer has learned alone counts for less than what the others have
READ_VALUES = 1 << 20
STATE_DOMAIN = "gossip-state"


class InitialState:
    """Gives this peer its first state, and signs its own for others."""

    def __init__(self, context: RunContext, store: LocalStateStore, control: RunControl) -> None:
        node, run_id = context.node, context.plan.manifest.run_id
        self._node, self._directory, self._run_id, self._store = node, context.directory, run_id, store
        self._control = control
        self._organiser, self._rng, self._trainer = context.organiser, context.rng, context.trainer
        self._fetcher = HistoryClient(node, run_id, store.history.folder, RosterLimits())
        self._name = f"atoll/{run_id[:16]}/gossip-state"

    async def serve(self) -> None:
        """Sign this peer's state for a newcomer."""
        await self._node.serve(self._name, "history", self._on_stream)

    async def start(self, resumes: bool) -> None:
        """Return with a valid state: the resumed one, a live peer's, or genesis when no peer has made a round yet."""
        patience = self._node.clock() + self._node.timing.join_patience_s
        while True:
            await read_directory(self._node, self._directory, patience)
            donors, usual = self._donors()
            own = self._store.valid and resumes
            if own and usual <= self._store.position.round + FAR_BEHIND:
                return
            if await self._from_one_of(donors, usual) or own:
                return
            if not donors and (self._store.valid or await self._from_genesis()):
                return
            await asyncio.sleep(self._node.timing.state_retry_s)

    def _donors(self) -> tuple[list[str], int]:
        """Peers that have made as many rounds as most, in any order; then the others that have made any. And how many
        rounds most have made.
        """
        reachable = self._directory.reachable
        rounds = {p: r.round for p, r in reachable.items() if r.state != "joining" and r.round > 0}
        if not rounds:
            return [], 0
        usual, peers = median_low(rounds.values()), sorted(rounds)
        self._rng.shuffle(peers)
        return sorted(peers, key=lambda peer_id: abs(rounds[peer_id] - usual) > 1), usual

    async def _from_one_of(self, donors: list[str], usual: int) -> bool:
        for donor in donors:
            try:
                signed = await self._signed_by(donor)
                if signed.round > min(usual + MOST_AHEAD, self._control.rounds_total or MAX_ROUNDS):
                    raise ProtocolError(f"it says that it is at round {signed.round}; most are at {usual}")
                path = await self._fetcher.state_of(donor, self._local_state(), signed)
                await asyncio.to_thread(check_finite, path)
                await self._store.adopt(path, signed.round)
            except (ProtocolError, StreamClosedError) as error:
                log.warning("no state from %s: %s", donor, in_words(error))
                continue
            name = self._directory.peers[donor].nickname if donor in self._directory.peers else donor
            reason = f"took the state of {donor} ({name}): in gossip a state rests on its signer's word alone"
            log.warning("%s", reason)
            record = RoundRecord(
                status="caught_up", round=signed.round, lineage_id=signed.state_digest, donor=donor, reason=reason,
                snapshot_round=signed.round,
            )  # fmt: skip
            self._trainer.tell(RoundEnded(record=record))
            return True
        return False

    async def _from_genesis(self) -> bool:
        donors = (self._organiser, *self._directory.peers)
        return await fetch_genesis(self._fetcher, donors, self._local_state(), self._adopt_genesis)

    async def _adopt_genesis(self, path: Path, _: list[Certificate]) -> None:
        await self._store.adopt(path, 0)

    def _local_state(self) -> LocalState:
        store = self._store
        return LocalState(state=store.state, history=store.history, valid=False, digest=store.digest)

    async def _signed_by(self, donor: str) -> GossipState:
        """What the donor signs as its state now. Raises ProtocolError, StreamClosedError."""
        stream = await self._node.open(donor, self._name, "history")
        try:
            limits = {Kind.META: MAX_RECORD_BYTES, Kind.END: 0}
            kind, sealed = await stream.receive(limits, timeout_s=self._node.timing.signed_timeout_s)
        finally:
            stream.close()
        if kind is Kind.END:
            raise ProtocolError(f"{donor} has no state")
        signer, payload = open_sealed(STATE_DOMAIN, sealed)
        signed = parse_json(GossipState, payload)
        if signer != donor or signed.run_id != self._run_id:
            raise ProtocolError(f"{donor} sent what {signer} signed for round {signed.round} of {signed.run_id[:12]}")
        return signed

    async def _on_stream(self, stream: FrameStream) -> None:
        file = await self._store.snapshot_cache.newest()
        if file is None or file.meta.round < 1:
            await stream.send(Kind.END)
            return
        signed = GossipState(run_id=self._run_id, round=file.meta.round, state_digest=file.meta.lineage_id)
        await stream.send(Kind.META, seal(self._node.identity, STATE_DOMAIN, dump_json(signed)))


def check_finite(path: Path) -> None:
    """Raises ProtocolError, and removes the file, if a state in it holds NaN or infinity."""
    values = np.memmap(path, dtype="<f4", mode="r")
    for start in range(0, len(values), READ_VALUES):
        if not np.isfinite(values[start : start + READ_VALUES]).all():
            path.unlink()
            raise ProtocolError("its state holds NaN or infinity")
