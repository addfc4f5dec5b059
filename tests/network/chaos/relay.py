"""A link in user space: a process that carries packets between two TUN devices with delay, loss and a rate.

The kernel at hand need not have `tc netem`. The process is `python -m tests.network.chaos.relay`; it reads new
settings of its link as lines of JSON, and ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.processes import own_cpu_seconds
from tests.network.chaos.nat import Nat

MAX_PACKET_BYTES = 65536 + 64
VIRTIO_BYTES = 10
SEGMENT_BYTES, HEADER_BYTES = 1448, 52  # of TCP with timestamps, in packets of 1500 bytes
BATCH = 64
Translate = Callable[[bytes], "bytes | None"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link; both directions alike but for `deaf` and `mute`.

    Attributes:
        mbit: line rate in each direction, in 10^6 bits a second of IP packets; 0: as fast as it goes.
        delay_ms: one way; jitter_ms: up to this much more or less, packets stay in order.
        loss: share of packets dropped, each on its own.
        queue_ms: a packet that would wait longer than this for the line is dropped.
        deaf: nothing comes in. mute: nothing goes out.
    """

    mbit: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_ms: float = 100.0
    seed: int = 0
    deaf: bool = False
    mute: bool = False


class Relay:
    """The process of one link.

    Args:
        inside, outside: descriptors of TUN devices; the relay owns them.
        nat: the private and the public address to translate between.
    """

    def __init__(
        self, inside: int, outside: int, link: Link, nat: tuple[str, str] | None = None, big_packets: bool = False
    ) -> None:
        setup = {"nat": nat, "header": VIRTIO_BYTES if big_packets else 0}
        command = [sys.executable, "-m", "tests.network.chaos.relay", str(inside), str(outside), json.dumps(setup)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(inside, outside))
        for descriptor in (inside, outside):
            os.close(descriptor)
        self.set(link)

    def set(self, link: Link) -> None:
        """Change the link; packets that are on their way arrive as they would have."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(link)).encode() + b"\n")
        self.process.stdin.flush()

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        return own_cpu_seconds(self.process.pid)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        finally:
            self.process.kill()


def wire_bytes(length: int) -> int:
    """Bytes on the line of an IP packet; one that the kernel has not cut up yet counts with the headers of each."""
    return length + HEADER_BYTES * max(0, (length - HEADER_BYTES - 1) // SEGMENT_BYTES)


class Direction:
    """One way through a link: what comes out of `source` goes to `target` when its time has come."""

    def __init__(self, source: int, target: int, translate: Translate | None, header: int) -> None:
        self.source, self._target, self._translate, self._header = source, target, translate, header
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._line_free = 0.0
        self._last = 0.0

    @property
    def next_at(self) -> float | None:
        """When the next packet is due; None when none waits."""
        return self._waiting[0][0] if self._waiting else None

    def take(self, now: float, link: Link, dark: bool, rng: random.Random) -> None:
        """Read what is there."""
        for _ in range(BATCH):
            try:
                packet = os.read(self.source, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if not dark and not (link.loss and rng.random() < link.loss):
                self._queue(packet, now, link, rng)

    def _queue(self, packet: bytes, now: float, link: Link, rng: random.Random) -> None:
        through: bytes | None = self._translate(packet) if self._translate else packet
        if through is None:
            return
        free = max(now, self._line_free)
        if link.mbit:
            if free - now > link.queue_ms / 1e3:
                return
            free += 8 * wire_bytes(len(packet) - self._header) / (1e6 * link.mbit)
            self._line_free = free
        jitter_ms = rng.uniform(-link.jitter_ms, link.jitter_ms) if link.jitter_ms else 0.0
        self._last = max(self._last, free + max(0.0, link.delay_ms + jitter_ms) / 1e3)
        self._waiting.append((self._last, through))

    def give(self, now: float) -> None:
        """Write what is due."""
        while self._waiting and self._waiting[0][0] <= now:
            packet = self._waiting.popleft()[1]
            try:
                os.write(self._target, packet)
            except OSError:
                continue  # the device's queue is full, or the kernel refuses the packet: lost, as on any line


def carry(inside: int, outside: int, nat: Nat | None, header: int) -> None:
    """Until standard input ends."""
    ways = (
        Direction(inside, outside, nat.outward if nat else None, header),
        Direction(outside, inside, nat.inward if nat else None, header),
    )
    link, rng, settings = Link(), random.Random(0), bytearray()
    poll = select.epoll()
    for descriptor in (0, inside, outside):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        due = [way.next_at for way in ways if way.next_at is not None]
        ready = poll.poll(max(0.0, min(due) - time.monotonic()) if due else -1)
        now = time.monotonic()
        for descriptor, _ in ready:
            if descriptor == 0:
                data = os.read(0, 65536)
                if not data:
                    return
                settings += data
                while b"\n" in settings:
                    line, _, settings = settings.partition(b"\n")
                    link = Link(**json.loads(line))
                    rng = random.Random(link.seed)
        for way, dark in zip(ways, (link.mute, link.deaf), strict=True):
            if any(descriptor == way.source for descriptor, _ in ready):
                way.take(now, link, dark, rng)
            way.give(time.monotonic())


def main() -> None:
    """Process entry."""
    setup = json.loads(sys.argv[3])
    carry(int(sys.argv[1]), int(sys.argv[2]), Nat(*setup["nat"]) if setup["nat"] else None, setup["header"])


if __name__ == "__main__":
    main()
