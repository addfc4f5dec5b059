"""The bootstrap's page under load: many peers that report, many browsers that listen; CPU, memory, latency."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks.figures import BenchReport, Figure, Say, benchmark_parser, check_count, median, run_benchmark

NAME = "page"
ABOUT = "Simulated peers report to the server of the page; browsers listen to its updates over loopback"
WARM_UP_S = 20.0
SAMPLE_S = 5.0
MAX_CORE, MAX_LATENCY_S, MAX_GROWTH = 0.5, 0.5, 0.05


@dataclass
class Heard:
    """What all browsers have received.

    Attributes:
        latencies: seconds from the board's look to a browser that has the update, as a whole and decoded.
        missed: updates that a browser did not get.
    """

    latencies: list[float] = field(default_factory=list)
    bytes: int = 0
    updates: int = 0
    missed: int = 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = benchmark_parser(
        NAME,
        "Serves the page of a simulated run from a process of its own, whose CPU and memory are measured; browsers\n"
        "are connections that read and unpack every update. A real node also reads the records from the DHT.",
    )
    parser.add_argument("--peers", type=int, default=1000, metavar="N", help="that report (default: 1000)")
    parser.add_argument("--period", type=float, default=10.0, metavar="S", help="between two reports (default: 10)")
    parser.add_argument("--browsers", type=int, default=200, metavar="N", help="that listen (default: 200)")
    parser.add_argument("--minutes", type=float, default=3.0, metavar="M", help="how long (default: 3)")
    return parser


def measure(arguments: argparse.Namespace, say: Say) -> BenchReport:
    """Serve and listen for so long."""
    check_count("--peers", arguments.peers, 1)
    check_count("--browsers", arguments.browsers, 1)
    command = [sys.executable, "-m", "benchmarks.page_server", "--peers", str(arguments.peers)]
    command += ["--period", str(arguments.period), "--parent", str(os.getpid()), "--seed", str(arguments.seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = json.loads(server.stdout.readline())["port"]
            say(f"{arguments.peers} peers, {arguments.browsers} browsers at port {port}")
            return asyncio.run(_measure(arguments, say, server.pid, port))
        finally:
            server.kill()


async def _measure(arguments: argparse.Namespace, say: Say, pid: int, port: int) -> BenchReport:
    heard, process = Heard(), psutil.Process(pid)
    browsers = [asyncio.create_task(listen_to(port, heard)) for _ in range(arguments.browsers)]
    await asyncio.sleep(WARM_UP_S)
    heard.latencies.clear()
    began, before, received = time.monotonic(), process.cpu_times(), heard.bytes
    memory, first, refused = [], [], 0
    while time.monotonic() < began + 60 * arguments.minutes:
        await asyncio.sleep(SAMPLE_S)
        memory.append(process.memory_info().rss / 1e6)
        try:
            first.append(await first_state(port))
        except (OSError, asyncio.IncompleteReadError):  # of a machine so busy that 10 s pass without a request
            refused += 1
        for browser in browsers:
            if browser.done():
                browser.result()
        if len(memory) % 24 == 0:
            say(f"{(time.monotonic() - began) / 60:.0f} min, {memory[-1]:.0f} MB")
    wall, after = time.monotonic() - began, process.cpu_times()
    for browser in browsers:
        browser.cancel()
    cpu = (after.user + after.system - before.user - before.system) / wall
    rate = (heard.bytes - received) / wall / arguments.browsers
    names = ("peers", "period", "browsers", "minutes")
    return BenchReport(
        name=NAME, about=ABOUT, seed=arguments.seed, figures=_figures(heard, memory, first, cpu, rate),
        samples={"memory_mb": memory, "first_state_s": first, "updates": heard.updates, "refused": refused},
        options=tuple(word for name in names for word in (f"--{name}", f"{getattr(arguments, name):g}")),
        notes=f"{arguments.peers} peers, {arguments.browsers} browsers, {arguments.minutes:g} minutes. Browsers share "
        f"the machine with the server and with other work: a load of {os.getloadavg()[2]:.0f} on "
        f"{os.cpu_count()} cores (server and browsers at priority {os.getpriority(os.PRIO_PROCESS, 0)}). "
        "Growth is between the second and the last sixth of the time.",
    )  # fmt: skip


def _figures(
    heard: Heard, memory: Sequence[float], first: Sequence[float], cpu: float, bytes_per_s: float
) -> tuple[Figure, ...]:
    part = max(1, len(memory) // 6)
    settled = memory[part:]  # the first sixth is what history and caches fill
    growth = median(settled[-part:]) / median(settled[:part]) - 1
    latencies = sorted(heard.latencies)
    return (
        Figure(name="CPU of the server", value=cpu, unit="cores", limit=MAX_CORE),
        Figure(name="update at a browser, median", value=median(latencies), unit="s", limit=MAX_LATENCY_S),
        Figure(name="the same, 99th percentile", value=latencies[int(0.99 * len(latencies))], unit="s"),
        Figure(name="whole state for a new browser, median", value=median(first), unit="s"),
        Figure(name="memory of the server at the end", value=memory[-1], unit="MB"),
        Figure(name="growth of memory", value=100 * growth, unit="%", limit=100 * MAX_GROWTH),
        Figure(name="traffic of a browser", value=bytes_per_s / 1e3, unit="kB/s"),
        Figure(name="updates that a browser missed", value=heard.missed, unit="", limit=0),
    )  # fmt: skip


async def listen_to(port: int, heard: Heard) -> None:
    """One browser: reads every update until it is cancelled."""
    reader, writer = await _ask(port, "/api/v1/updates")
    unpacker, text, version = zlib.decompressobj(16 + zlib.MAX_WBITS), b"", None
    with contextlib.closing(writer):
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size + 2)
            heard.bytes += size
            text += unpacker.decompress(chunk[:-2])
            *messages, text = text.split(b"\n\n")
            for message in messages:
                if not message.startswith(b"event: update"):
                    continue
                document = json.loads(message.partition(b"data: ")[2])
                heard.latencies.append(time.time() - document["now"]["time"])
                heard.updates += 1
                heard.missed += version is not None and document["version"] != version + 1
                version = document["version"]


async def first_state(port: int) -> float:
    """Seconds for the whole state."""
    began = time.monotonic()
    reader, writer = await _ask(port, "/api/v1/state")
    with contextlib.closing(writer):
        await reader.read()
    return time.monotonic() - began


async def _ask(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    connection = "close" if path.endswith("state") else "keep-alive"
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nConnection: {connection}\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    return reader, writer


if __name__ == "__main__":
    run_benchmark(build_parser(), measure)
