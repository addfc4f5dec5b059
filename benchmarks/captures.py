"""Pictures of the terminal for README and docs, as SVG: the demo, and what commands print beside a real swarm."""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.join import RunningSwarm
from peer.demo.children import Children
from peer.demo.play import LOOPBACK
from peer.settings import ENV_PREFIX

PLAN = "plan --params 1e9 --gpu 'RTX 4090' --tokens 20B --peers 8:up=100,down=250,price=0.4"
PLAN += " --recipes lagoon diloco streaming-diloco sparseloco ddp"
REDRAWN = re.compile(r"\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)*|\x1b\[H")  # a live table begins again, or a whole screen does
CONTROL = re.compile(r"\x1b\[(?![\d;]*m)[\d;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\r")
EXIT_S = 60.0
WIDTH = 104
ROUNDS = 40  # of the run in the pictures
DEMO_SHOWN = b"round 8 committed"  # one peer has joined by then, and one was killed
DEMO_S = 400.0


class Terminal:
    """A command in a terminal of its own.

    Args:
        folder: where it runs.
        height: of the terminal, in lines of WIDTH characters.
    """

    def __init__(self, command: str, folder: Path, environment: dict[str, str], height: int) -> None:
        self._written = b""
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", height, WIDTH, 0, 0))
        arguments = [sys.executable, "-m", "peer.cli", *shlex.split(command)]
        environment = {**environment, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(WIDTH)}
        self._child = subprocess.Popen(
            arguments, cwd=folder, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._end, 65536)
            except OSError:  # the command has ended
                return

    def wait(self, seconds: float, text: bytes | None = None) -> None:
        """For so long, or until the command ends, or has written the text."""
        until = time.monotonic() + seconds
        while self._child.poll() is None and time.monotonic() < until and not (text and text in self._written):
            time.sleep(0.2)

    def close(self) -> None:
        """Ctrl-C."""
        self._child.send_signal(signal.SIGINT)
        self.wait(EXIT_S)
        self._child.kill()
        self._child.wait()

    def save(self, path: Path, shown: str) -> None:
        """The last whole picture, under the command as a person types it."""
        frames = REDRAWN.split(self._written.decode(errors="replace"))
        frame = max(frames[-2:], key=len) if len(frames) > 1 else frames[0]
        text = Text.from_ansi(CONTROL.sub("", frame).rstrip())
        console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
        console.print(text, soft_wrap=True)
        path.write_text(console.export_svg(title=shown, font_aspect_ratio=0.61))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.captures", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/captures"), metavar="DIR", help="where SVGs go")
    parser.add_argument("--seconds", type=float, default=240.0, metavar="S", help="how long the peer trains first")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    with tempfile.TemporaryDirectory(prefix="atoll-captures-") as folder:
        capture_demo(Path(folder), environment, arguments.output)
        children = Children(environment)
        swarm = RunningSwarm(Path(folder), children, seed=17, rounds=ROUNDS)
        try:
            swarm.start()
            capture(swarm.address, Path(folder), environment, arguments)
        finally:
            children.stop()


def capture_demo(folder: Path, environment: dict[str, str], output: Path) -> None:
    """The demo after a kill."""
    demo = Terminal("demo", folder, environment, 22)
    try:
        demo.wait(DEMO_S, DEMO_SHOWN)
        demo.save(output / "demo.svg", "make demo")
    finally:
        demo.close()


def capture(address: str, folder: Path, environment: dict[str, str], arguments: argparse.Namespace) -> None:
    """All other pictures; a peer joins and trains while they are taken."""
    own = f"--host-maddrs {LOOPBACK} --no-nat-port-map --output-dir runs/"
    join = Terminal(f"join {address} {own}you --nickname you --torch-threads 1", folder, environment, 30)
    watch = Terminal(f"watch {address}", folder, environment, 32)
    try:
        join.wait(arguments.seconds)
        watch.save(arguments.output / "watch.svg", "atoll watch ADDRESS")
        join.save(arguments.output / "join.svg", "atoll join ADDRESS")
        for name, command, shown in (
            ("doctor", f"doctor {address} {own}new", "atoll doctor ADDRESS"), ("plan", PLAN, "atoll plan"),
        ):  # fmt: skip
            taken = Terminal(command, folder, environment, 40)
            taken.wait(arguments.seconds)
            taken.save(arguments.output / f"{name}.svg", shown)
            taken.close()
    finally:
        watch.close()
        join.close()


if __name__ == "__main__":
    main()
