"""Pictures of the terminal for README and docs: what the commands print beside a real swarm of two peers, as SVG."""

from __future__ import annotations

import argparse
import contextlib
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
ROUNDS = 40  # of the run in the pictures


class Terminal:
    """A command in a terminal of its own.

    Args:
        width, height: of the terminal, in characters.
    """

    def __init__(self, command: str, environment: dict[str, str], width: int, height: int) -> None:
        self.command, self.width, self._written = command, width, b""
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        arguments = [sys.executable, "-m", "peer.cli", *shlex.split(command)]
        environment = {**environment, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(width)}
        self._child = subprocess.Popen(
            arguments, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)

        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._end, 65536)
            except OSError:  # the command has ended
                return

    def wait(self, seconds: float) -> None:
        """For so long, or until the command ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)

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
        console = Console(record=True, width=self.width, file=StringIO(), force_terminal=True, color_system="truecolor")
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
    children = Children(environment)
    with tempfile.TemporaryDirectory(prefix="atoll-captures-") as folder:
        swarm = RunningSwarm(Path(folder), children, seed=17, rounds=ROUNDS)
        try:
            swarm.start()
            capture(swarm.address, Path(folder), environment, arguments)
        finally:
            children.stop()


def capture(address: str, folder: Path, environment: dict[str, str], arguments: argparse.Namespace) -> None:
    """All pictures; the peer of `join` trains while the others are taken."""
    own = f"--host-maddrs {LOOPBACK} --no-nat-port-map --output-dir {folder / 'you'}"
    join = Terminal(f"join {address} {own} --nickname you --torch-threads 1", environment, 100, 30)
    try:
        join.wait(arguments.seconds)
        watch = Terminal(f"watch {address}", environment, 100, 32)
        watch.wait(arguments.seconds / 2)
        watch.save(arguments.output / "watch.svg", "atoll watch ADDRESS")
        watch.close()
        join.save(arguments.output / "join.svg", "atoll join ADDRESS")
        for name, command, shown in (
            ("doctor", f"doctor {address} {own}".replace("/you", "/new"), "atoll doctor ADDRESS"),
            ("plan", PLAN, "atoll plan"),
        ):
            taken = Terminal(command, environment, 100, 40)
            taken.wait(arguments.seconds)
            taken.save(arguments.output / f"{name}.svg", shown)
            taken.close()
    finally:
        join.close()


if __name__ == "__main__":
    main()
