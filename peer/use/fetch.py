"""The current model of a running swarm, verified like any newcomer's state, without training."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peer.data.tokenizer import load_tokenizer
from peer.errors import UserError
from peer.genesis import build_initial_model
from peer.link.memory import SharedState
from peer.link.messages import Anchor, Mapped, Published, Start, Stop, Stopped, TokenizerFetched
from peer.link.supervisor import AgentGoneError, AgentProcess
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.address import PeerAddress
from peer.protocol.invitation import ASK
from peer.run.assemble import FoundRun
from peer.run.lifecycle import PUBLISHED_TIMEOUT_S, STATE_TIMEOUT_S
from peer.use.trained import After, Trained, check_architecture, of_state

log = logging.getLogger(__name__)
LEAVE_S = 5.0


def fetch(addresses: Sequence[PeerAddress], run: str | None = None) -> Trained:
    """Join as a client with an identity of the moment, take the state, and leave.

    Args:
        run: its name, where there are several.

    Raises:
        UserError: no run there, or no peer serves a state that its chain confirms.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-use-") as name:
        agent = AgentProcess(Path(name) / "agent.log")
        try:
            agent.start()
            return _taken(agent, addresses, run, Path(name))
        except AgentGoneError as gone:
            raise UserError(f"the agent process ended unexpectedly: {gone}", "try again") from None
        finally:
            agent.close()


def _taken(agent: AgentProcess, addresses: Sequence[PeerAddress], run: str | None, home: Path) -> Trained:
    agent.send(Start(
        initial_peers=tuple(str(address) for address in addresses), host_maddrs=("/ip4/0.0.0.0/tcp/0",),
        identity_path=str(home / "identity.key"), nickname="reader", directory=str(home), nat_port_map=False,
        client_mode=True, run=run,
    ))  # fmt: skip
    plan = FoundRun.of(_published(agent)).plan
    manifest, optimizer = plan.manifest, plan.recipe.optimizer
    check_architecture(manifest)
    if manifest.tokenizer.files:
        agent.expect(TokenizerFetched, STATE_TIMEOUT_S)
    model = build_initial_model(manifest, load_tokenizer(manifest.tokenizer, home))
    layout = FlatLayout.of(model, plan.recipe.cut)
    memory = SharedState(
        agent.memory_descriptor, layout.numel, optimizer.num_buffers, max(layout.sizes, default=layout.numel)
    )
    layout.copy_to_flat(model, memory.anchor)
    for buffer, value in zip(memory.buffers, optimizer.initial_values, strict=True):
        buffer.fill_(value)
    log.info("fetching the state of run %s (%s)", manifest.name, manifest.run_id[:16])
    agent.send(Mapped(
        numel=layout.numel, num_buffers=optimizer.num_buffers, shapes=layout.shapes, fragments=layout.sizes,
        hidden=layout.hidden,
    ))  # fmt: skip
    anchor: Anchor = agent.expect(Anchor, STATE_TIMEOUT_S)
    vectors = [memory.anchor.clone(), *(buffer.clone() for buffer in memory.buffers)]
    with contextlib.suppress(AgentGoneError, UserError):  # the state is here, however the agent leaves
        agent.send(Stop())
        agent.expect(Stopped, LEAVE_S)
    after = After(round=anchor.round, lineage_id=anchor.lineage_id, origin=str(addresses[0]), address=str(addresses[0]))
    return of_state(plan, vectors, after, home)


def _published(agent: AgentProcess) -> Published:
    """What the agent has found. One that visits an invited run has no invitation: those are for peers that train."""
    try:
        published: Published = agent.expect(Published, PUBLISHED_TIMEOUT_S)
    except UserError as error:
        if error.hint == ASK:
            raise UserError(error.what, "take the model from the output folder of a peer that was invited") from None
        raise
    return published
