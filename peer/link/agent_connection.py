"""The trainer's connection to its agent, and to the next agent when that one is gone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from peer.link.messages import Fatal, LivePeers, Mapped, Message, Published, Start, ToAgent
from peer.link.supervisor import AgentGoneError, AgentProcess

log = logging.getLogger(__name__)


class AgentConnection:
    """Talks to one agent after the other.

    Args:
        start, mapped: messages to repeat to a restarted agent.
    """

    def __init__(self, agent: AgentProcess, start: Start, mapped: Mapped) -> None:
        self._agent, self._start, self._mapped = agent, start, mapped
        self._known_addresses: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The first at which this peer found the run."""
        return self._start.initial_peers[0]

    @property
    def running(self) -> bool:
        return self._agent.running

    def send(self, message: ToAgent) -> None:
        """Raises AgentGoneError."""
        self._agent.send(message)

    def messages(self, timeout_s: float) -> Iterator[Message]:
        """Every message that has arrived, after waiting at most `timeout_s` for the first; but for those that only
        concern the connection. Raises AgentGoneError.
        """
        while (message := self._agent.receive(timeout_s)) is not None:
            timeout_s = 0.0
            if isinstance(message, Fatal):
                log.error("agent: %s %s", message.what, message.hint)
            elif isinstance(message, Published):
                self._agent.send(self._mapped)
            else:
                if isinstance(message, LivePeers) and message.addresses:
                    self._known_addresses = message.addresses
                yield message

    def revive(self, gone: AgentGoneError) -> None:
        """Train on without an agent; start the next one when the back-off allows."""
        if self._agent.running:
            log.warning("agent: %s; ending it", gone)
            self._agent.end(0.0)
        if not self._agent.may_restart:
            return
        log.warning("agent ended (%s); restarting it, training continues", gone)
        initial_peers = dict.fromkeys((*self._start.initial_peers, *self._known_addresses))
        again = self._start.model_copy(update={"initial_peers": tuple(initial_peers), "restarted": True})
        with contextlib.suppress(AgentGoneError):  # gone again already: the next step sees it
            self._agent.start()
            self._agent.send(again)
