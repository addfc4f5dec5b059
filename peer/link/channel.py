"""The agent's end of the socket pair that joins it to its trainer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Protocol

from peer.link.messages import MAX_LINE_BYTES, Message, Save, Saved, ToTrainer, decode, encode

NOWHERE = "0" * 64


class TrainerLink(Protocol):
    """The receiver of messages for a trainer: a `Channel`, or a wrapper that completes messages before it."""

    def tell(self, message: ToTrainer) -> None: ...


class Channel:
    """The agent's end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, channel: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=channel, limit=MAX_LINE_BYTES))

    def tell(self, message: ToTrainer) -> None:
        self._writer.write(encode(message))

    async def flush(self) -> None:
        """Return when all is sent, or the trainer is gone."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def receive(self) -> Message | None:
        """The next message; None when the trainer is gone."""
        try:
            line = await self._reader.readline()
        except ConnectionError:  # it left messages unread
            return None
        return decode(line) if line.endswith(b"\n") else None

    async def expect(self, wanted: type[Any]) -> Any:
        """Messages until one of the wanted kind; raises EOFError when the trainer is gone.

        Earlier messages are ignored, as there is no state yet; a request to save the state is answered with that.
        """
        while True:
            message = await self.receive()
            if message is None:
                raise EOFError("the trainer is gone")
            if isinstance(message, wanted):
                return message
            if isinstance(message, Save):
                self.tell(Saved(path=message.path, round=0, lineage_id=NOWHERE, problem="the agent is still starting"))
