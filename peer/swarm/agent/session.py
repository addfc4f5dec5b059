"""One life of an agent, from the first message of its trainer to the last."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from peer.errors import UserError
from peer.explain.journal import RoundJournal
from peer.link.channel import Channel
from peer.link.memory import Head, SharedState
from peer.link.messages import (
    DataUse,
    Figures,
    LivePeers,
    Mapped,
    Merged,
    Notice,
    Progress,
    Published,
    Save,
    Snapshot,
    Start,
    Stop,
    Stopped,
    TokenizerFetched,
)
from peer.outer.recipe.plan import RunPlan
from peer.protocol.line_limits import LineLimits
from peer.protocol.manifest import RunManifest
from peer.protocol.records import PeerRecord, SealedManifest
from peer.settings import default_nickname
from peer.swarm.agent.lease_book import LeaseBook
from peer.swarm.agent.leases import DataLeases
from peer.swarm.agent.organiser_watch import organiser_left
from peer.swarm.agent.outer_checkpoint import save_outer_state
from peer.swarm.agent.recorder import Recorder
from peer.swarm.agent.reporter import Reporter
from peer.swarm.agent.steering import Steering
from peer.swarm.catchup.history_server import HistoryServer
from peer.swarm.catchup.record_exchange import control_exchange
from peer.swarm.catchup.tokenizer_fetch import fetch_tokenizer
from peer.swarm.gossip.round_loop import GossipRounds
from peer.swarm.gossip.store import LocalStateStore
from peer.swarm.lineage.round_loop import LineageRounds
from peer.swarm.loop import RunContext
from peer.swarm.net.daemon import NodeConfig
from peer.swarm.net.directory import Directory
from peer.swarm.net.entering import enter
from peer.swarm.net.gate import Gate
from peer.swarm.net.identity_work import solved
from peer.swarm.net.line import Line
from peer.swarm.net.manifests import ManifestSearch, publish_manifests
from peer.swarm.net.node import Node
from peer.swarm.net.node_start import start_node
from peer.swarm.net.probe import tell_warnings
from peer.swarm.state.chain import ChainStore
from peer.swarm.state.run_control import RunControl, history_folder
from peer.swarm.state.store import StateStore
from peer.tokenizer_files import TokenizerFiles

log = logging.getLogger(__name__)
NODE_GONE = 3
AnyRounds = LineageRounds | GossipRounds


class AgentSession:
    """Ties node, directory, history and rounds to the trainer's messages."""

    def __init__(self, channel: Channel, memory_descriptor: int, rng: random.Random) -> None:
        self._channel, self._descriptor, self._rng = channel, memory_descriptor, rng
        self._nickname, self._run_id, self._nonce = "", "", 0
        self._leases: DataLeases | None = None
        self._steering: Steering | None = None
        self._stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Serve until the trainer stops the agent, or disappears; -> exit code."""
        start: Start = await self._channel.expect(Start)
        node = await start_node(_node_config(start))
        if start.limits != LineLimits():
            node.line = Line(start.limits, Path(start.directory))
        closed = asyncio.ensure_future(node.closed())
        serving = asyncio.ensure_future(self._serve(node, start))
        done, _ = await asyncio.wait({closed, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving not in done:
            log.error("this agent ends, for its trainer to start another: %s", closed.result())
            return NODE_GONE
        closed.cancel()
        try:
            return serving.result()
        finally:
            await asyncio.wait({asyncio.ensure_future(node.close())}, timeout=node.timing.close_timeout_s)
            if node.line is not None:
                node.line.close()

    async def _serve(self, node: Node, start: Start) -> int:
        found = await ManifestSearch(node, start.run_id, start.run).run()
        organiser, manifest = found.organiser, found.manifest
        if manifest.genesis is None:
            raise UserError(
                f"the manifest of {organiser} names no genesis state", "it was not published by atoll-bootstrap"
            )
        await publish_manifests(node, {found.owner: found.blob}, self._rng)
        self._run_id = manifest.run_id
        self._nickname = start.nickname or default_nickname(socket.gethostname(), node.peer_id)
        control = await self._follow_control(node, manifest, folder := Path(start.directory), organiser)
        directory = Directory.of(node, manifest, await self._enter(node, found, control, start))
        solving = asyncio.ensure_future(solved(directory.work, node.peer_id, Path(start.identity_path), self._note))
        files = await self._tokenizer_files(node, directory, manifest, folder, organiser)
        mapped: Mapped = await self._channel.expect(Mapped)
        directory.work = work = await solving
        self._nonce = work.nonce
        recorder, reporter = self._recorder(node, directory, folder)
        context = RunContext(
            node=node, directory=directory, plan=RunPlan.of(manifest), organiser=organiser, work=work,
            opened_at=found.opened_at, introducers=node.introducers, trainer=recorder, rng=self._rng,
            control=control,
        )  # fmt: skip
        rounds, resumed = self._build(context, mapped, folder)
        await self._serve_others(context, rounds, files)
        node.spawn(reporter.run())
        if directory.gate is not None:
            node.spawn(self._await_expulsion(node, directory.gate))
        await _first_of(self._listen(rounds, reporter), self._work(node, directory, rounds, resumed))
        return 0

    async def _enter(self, node: Node, found: SealedManifest, control: RunControl, start: Start) -> Gate | None:
        """Tell the trainer which run this is; first show the invitation where it asks for one."""
        organiser, manifest = found.organiser, found.manifest
        if (gate := Gate.of(manifest, organiser, control)) is not None:
            node.gates, own_folder = (gate,), history_folder(Path(start.directory), manifest.run_id)
            await enter(node, gate, manifest.run_id, organiser, own_folder, start.invitation)
        self._channel.tell(Published(
            manifest=manifest.model_dump(mode="json"), organiser=organiser, peer_id=node.peer_id,
            nickname=self._nickname, maddrs=node.maddrs, client=node.client,
        ))  # fmt: skip
        node.spawn(self._watch_organiser(node, manifest.run_id, organiser))
        if not start.restarted:
            node.spawn(tell_warnings(node, self._note))
        return gate

    async def _serve_others(self, context: RunContext, rounds: AnyRounds, files: TokenizerFiles) -> None:
        """Take streams of rounds and of those who ask for history, and be seen in the directory."""
        node, directory, run_id = context.node, context.directory, context.plan.manifest.run_id
        await rounds.start()
        store = rounds.store
        directory.known = lambda peer_id: store.history.seen[peer_id] > 0 or peer_id == context.organiser
        priority, on_return = store.snapshot_cache.priority, rounds.on_return
        await HistoryServer(
            node, run_id, store.history, store.snapshot_cache, priority, on_return, files
        ).start()
        directory.follow()
        directory.announce(lambda: self._describe(directory, rounds, node))

    async def _follow_control(
        self, node: Node, manifest: RunManifest, folder: Path, organiser: str
    ) -> RunControl:
        """What the organiser has decided, from now on."""
        control = RunControl.of(history_folder(folder, manifest.run_id), manifest, organiser)
        self._steering = Steering(control, self._channel)
        exchange = control_exchange(node, manifest.run_id, control)
        await exchange.hear(node.introducers)
        await exchange.start()
        return control

    async def _await_expulsion(self, node: Node, gate: Gate) -> None:
        while not (reason := gate.void(node.peer_id)):
            await asyncio.sleep(node.timing.recheck_s)
        assert self._steering is not None
        self._steering.expel(reason)

    def _recorder(self, node: Node, directory: Directory, folder: Path) -> tuple[Recorder, Reporter]:
        """What keeps the records of rounds, and what tells them to those who watch."""
        recorder = Recorder(RoundJournal(folder), node.peer_id, self._nickname, directory, self._channel)
        reporter = Reporter(node, self._run_id)
        recorder.on_record = reporter.add
        return recorder, reporter

    async def _tokenizer_files(
        self, node: Node, directory: Directory, manifest: RunManifest, folder: Path, organiser: str
    ) -> TokenizerFiles:
        """The files of the run's tokenizer, which this peer has now, if it is one of files."""
        files = TokenizerFiles(folder, manifest.tokenizer.files)
        if not manifest.tokenizer.files:
            return files

        async def donors() -> list[str]:
            await directory.refresh()
            return list(dict.fromkeys((*node.introducers, organiser, *directory.reachable)))

        await fetch_tokenizer(node, self._run_id, files, donors)
        self._channel.tell(TokenizerFetched())
        return files

    def _build(self, context: RunContext, mapped: Mapped, folder: Path) -> tuple[AnyRounds, Head | None]:
        plan, manifest = context.plan, context.plan.manifest
        assert manifest.genesis is not None
        sent = max(mapped.fragments, default=mapped.numel)
        memory = SharedState(self._descriptor, mapped.numel, mapped.num_buffers, sent)
        state = plan.outer_state([memory.anchor, *memory.buffers], mapped)
        shared = manifest.data.shared
        shards = shared.shards if shared is not None else ()
        history = ChainStore(history_folder(folder, manifest.run_id), manifest.genesis, shards)
        log.info("run %s, %s", manifest.run_id[:16], plan.in_words())
        if plan.recipe.gossips:
            own = LocalStateStore(memory, state, history, context.node.timing)
            resumed = own.restore()
            return GossipRounds(context, own), resumed
        store = StateStore(memory, state, history, context.node.timing)
        # this agent's own chain first: it may restart long after a resume
        resumed = store.restore([history.chain_path, *([Path(mapped.chain_path)] if mapped.chain_path else [])])
        if shards:
            node = context.node
            books = [LeaseBook(self._run_id, node.peer_id, node.timing.lease_s) for _ in shards]
            self._leases = DataLeases(books, history, context.directory, self._channel)
            node.spawn(self._leases.run(node.timing.refresh_period_s))
        return LineageRounds(context, store), resumed

    async def _work(self, node: Node, directory: Directory, rounds: AnyRounds, resumed: Head | None) -> None:
        await rounds.join(resumed)
        if self._steering is not None:
            self._steering.begin(rounds.steer)
        watching = node.spawn(self._show_swarm(directory, rounds, node))
        running = asyncio.ensure_future(rounds.run())
        ends: list[asyncio.Future[Any]] = [running, self._stop]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # a bug ends the agent, and its trainer starts another; an agent without rounds is useless
            if self._steering is not None:
                self._steering.ended()
        stop = await self._stop
        rounds.leaving = True
        directory.announce_soon()
        running.cancel()
        await asyncio.wait({running}, timeout=node.timing.close_timeout_s)
        await self._linger(node, directory, rounds, stop.linger_s)
        watching.cancel()
        exchanged, served = node.traffic["round"], node.traffic["history"]
        self._channel.tell(
            Stopped(
                round=rounds.store.state.round,
                lineage_id=rounds.store.state.lineage_id,
                state_digest=await rounds.store.digest() if rounds.store.valid else None,
                round_bytes_sent=exchanged.sent,
                round_bytes_received=exchanged.received,
                state_bytes_sent=served.sent,
                state_bytes_received=served.received,
            )
        )
        await self._channel.flush()

    async def _linger(self, node: Node, directory: Directory, rounds: AnyRounds, linger_s: float) -> None:
        """Serve peers that lag behind this one, for a short time."""
        deadline = node.clock() + linger_s
        while node.clock() < deadline:
            await directory.refresh()
            own_weight = rounds.position().weight
            if all(record.lineage_weight >= own_weight for record in directory.peers.values()):
                return
            await asyncio.sleep(node.timing.linger_recheck_s)

    async def _listen(self, rounds: AnyRounds, reporter: Reporter) -> None:
        """The trainer's messages, until it is gone."""
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, Progress):
                rounds.slot.on_progress(message)
            elif isinstance(message, Figures):
                reporter.figures = message.figures
            elif isinstance(message, Snapshot):
                rounds.slot.on_snapshot(message)
            elif isinstance(message, Merged):
                rounds.slot.on_merged()
            elif isinstance(message, DataUse) and self._leases is not None:
                self._leases.hear(message)
            elif isinstance(message, Save):
                self._channel.tell(await save_outer_state(rounds, Path(message.path)))
            elif isinstance(message, Stop) and not self._stop.done():
                self._stop.set_result(message)

    def _note(self, text: str) -> None:
        log.info("%s", text)
        self._channel.tell(Notice(text=text))

    async def _watch_organiser(self, node: Node, run_id: str, organiser: str) -> None:
        self._note(await organiser_left(node, run_id, organiser))

    async def _show_swarm(self, directory: Directory, rounds: AnyRounds, node: Node) -> None:
        while True:
            own = self._describe(directory, rounds, node)
            peers, addresses = {node.peer_id: own, **directory.peers}, await node.addresses()
            self._channel.tell(LivePeers(peers=peers, addresses=addresses))
            await asyncio.sleep(node.timing.swarm_period_s)

    def _describe(self, directory: Directory, rounds: AnyRounds, node: Node) -> PeerRecord:
        progress, traffic = rounds.slot.reports.progress, node.traffic["round"]
        ended, position = rounds.finished or rounds.leaving, rounds.position()
        return PeerRecord(
            run_id=self._run_id,
            nickname=self._nickname,
            state="finished" if ended else rounds.state,
            round=position.round,
            lineage_id=position.lineage_id,
            lineage_weight=position.weight,
            step=progress.step if progress else 0,
            tokens=progress.tokens if progress else 0,
            tokens_per_s=progress.tokens_per_s if progress else 0.0,
            loss=progress.loss if progress else None,
            group_size=rounds.group_size,
            client=node.client,
            relayed=node.relayed,
            addresses=node.host_addresses,
            lines=rounds.lines,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            seconds_waiting=progress.seconds_waiting if progress else 0.0,
            leases="" if ended or self._leases is None else self._leases.text,
            work=self._nonce,
            invitation=directory.gate.own if directory.gate is not None else "",
            expires_at=directory.expiry(),
        )


def _node_config(start: Start) -> NodeConfig:
    return NodeConfig(
        identity_path=Path(start.identity_path),
        host_maddrs=start.host_maddrs,
        announce_maddrs=start.announce_maddrs,
        initial_peers=start.initial_peers,
        nat_port_map=start.nat_port_map,
        client_mode=start.client_mode,
        direct_port=start.direct_port,
        mapped_port=start.mapped_port,
        check_identity=not start.restarted,
    )


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Return when one of them has ended, with its error; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in done:
        task.result()
