"""Who is let into an invited run: each stream of it begins with the pass of the peer that has opened it."""

from __future__ import annotations

import time
from typing import Protocol

from peer.errors import ProtocolError
from peer.protocol.invitation import MAX_PASS_CHARS, Pass
from peer.protocol.manifest import RunManifest
from peer.protocol.wire import Kind
from peer.swarm.net.stream import FrameStream
from peer.swarm.runtime.expiring import BoundedMap
from peer.system.clock import Clock

_REMEMBERED = 4096
OPEN_TO_ALL = ("control", "invitation")  # what strangers and the expelled may ask


class Revocations(Protocol):
    """The control record of a run."""

    def revokes(self, number: int) -> bool: ...


class Gate:
    """Knows the passes of the run's peers.

    Args:
        organiser: needs no pass.
        control: says which invitations are void; None: all that are signed hold.
        clock: wall-clock seconds.

    Attributes:
        own: the pass that this peer shows.
    """

    def __init__(
        self, run_id: str, organiser: str, control: Revocations | None = None, clock: Clock = time.time
    ) -> None:
        self._run_id, self._organiser, self._control, self._clock = run_id, organiser, control, clock
        self._prefix = f"atoll/{run_id[:16]}/"
        self._held: BoundedMap[str, Pass] = BoundedMap(_REMEMBERED)
        self._texts: BoundedMap[str, str] = BoundedMap(_REMEMBERED)
        self.own = ""

    @classmethod
    def of(cls, manifest: RunManifest, organiser: str, control: Revocations) -> Gate | None:
        """That of a run; None where it is for all."""
        return cls(manifest.run_id, organiser, control) if manifest.trust.invited else None

    def guards(self, name: str) -> bool:
        """Whether streams of this name are of the run, and not open to all."""
        return name.startswith(self._prefix) and name.removeprefix(self._prefix) not in OPEN_TO_ALL

    async def show(self, stream: FrameStream) -> None:
        """Begin a stream that this peer has opened."""
        await stream.send(Kind.PASS, self.own.encode())

    async def check(self, stream: FrameStream, timeout_s: float) -> None:
        """Begin a stream that another peer has opened. Raises ProtocolError if it is not let in."""
        _, text = await stream.receive({Kind.PASS: MAX_PASS_CHARS}, timeout_s=timeout_s)
        self.admit(stream.remote, text.decode("ascii", errors="replace"))

    def admit(self, peer_id: str, text: str) -> None:
        """Let a peer in by the pass that it shows.

        Raises:
            ProtocolError: it is not the organiser's for this peer, has expired, or is revoked.
        """
        if peer_id == self._organiser:
            return
        if self._texts.get(peer_id) != text:
            shown = Pass.read(text, self._run_id, peer_id, self._organiser)
            self._held[peer_id], self._texts[peer_id] = shown, text
        if reason := self.void(peer_id):
            raise ProtocolError(f"{peer_id} {reason}")

    def void(self, peer_id: str) -> str:
        """Why a peer that had been let in is not any more; empty if it is, or never was."""
        held = self._held.get(peer_id)
        if held is None:
            return ""
        if held.expires_at <= self._clock():
            return f"is out: its invitation {held.number} has expired"
        revoked = self._control is not None and self._control.revokes(held.number)
        return f"is out: its invitation {held.number} is revoked" if revoked else ""
