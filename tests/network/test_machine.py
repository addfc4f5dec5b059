"""What a machine may deny the two commands, and how a terminal, a service manager or a container ends them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.network.bootstraps import DILOCO, MANIFEST
from tests.network.chaos.namespaces import Internet, Namespace
from tests.network.processes import JoinedPeer, environment, run
from tests.network.test_errors import PEER_ID

SMALL = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total="")
ALONE = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
ANYWHERE = "/ip4/0.0.0.0/tcp/0"


class BootstrapCommand:
    """`atoll-bootstrap` as a shell starts it: a process group of its own, its lines as they come."""

    def __init__(
        self, folder: Path, *flags: str, env: Mapping[str, str] | None = None, manifest_text: str = SMALL
    ) -> None:
        manifest = folder / "run.yaml"
        manifest.write_text(manifest_text)
        command = [sys.executable, "-m", "bootstrap.cli", str(manifest), "--state-dir", str(folder / "state"), *flags]
        self.process = subprocess.Popen(
            command, env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip

    def until_open(self) -> list[str]:
        """What it prints until others can join."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.rstrip())
            if line.startswith("Ctrl-C"):
                return lines
        raise AssertionError("\n".join(lines))

    def end(self, number: signal.Signals) -> tuple[int, str, float]:
        """Signal the whole group; -> (exit code, what it still says, seconds)."""
        began = time.monotonic()
        os.killpg(self.process.pid, number)
        said, _ = self.process.communicate(timeout=30)
        return self.process.returncode, said, time.monotonic() - began

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[BootstrapCommand]:
    bootstrap = BootstrapCommand(tmp_path, "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    yield bootstrap
    bootstrap.close()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_a_signal_to_the_group_of_a_bootstrap_is_quiet(opened: BootstrapCommand, number: signal.Signals) -> None:
    lines = opened.until_open()
    assert [line for line in lines if line.startswith("reaches")] == [
        "reaches  peers on this machine alone; for others, give --host-maddrs /ip4/0.0.0.0/tcp/31337"
    ]
    code, said, seconds = opened.end(number)
    assert code == 0
    assert [line for line in said.splitlines() if line and " peers, round " not in line] == []
    assert seconds < 3.0  # .4 s on a machine that does nothing else


@pytest.mark.long
def test_the_address_to_join_is_the_public_one_then_that_of_the_network(tmp_path: Path) -> None:
    joins = {}
    with Internet() as internet:
        lan = Namespace("lan")
        lan.run("link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        lan.run("addr", "add", "10.1.2.3/24", "dev", "eth0")
        for device in ("eth0", "eth1"):
            lan.run("link", "set", device, "up")
        for name, namespace in {"public": internet.host("public"), "lan": lan}.items():
            folder = tmp_path / name
            folder.mkdir()
            with namespace.entered():
                bootstrap = BootstrapCommand(folder, "--host-maddrs", ANYWHERE, "--no-nat-port-map")
            try:
                joins[name] = [line for line in bootstrap.until_open() if " atoll join " in line or "reaches" in line]
            finally:
                bootstrap.close()
        public = internet.addresses["public"]
        lan.close()
    assert [line.split("/")[2] for line in joins["public"]] == [public, "127.0.0.1"]
    assert [line.split("/")[2] for line in joins["lan"][:2]] == ["10.1.2.3", "127.0.0.1"]
    assert joins["lan"][2:] == [
        "reaches  peers of this network alone; for others, forward the port and give "
        "--announce-maddrs /ip4/PUBLIC_IP/tcp/PORT"
    ]


@pytest.mark.parametrize("after_s", [0.0, 1.5])
@pytest.mark.parametrize("command", ["bootstrap", "join", "simulate"])
def test_the_first_process_of_a_container_ends_while_it_starts(tmp_path: Path, command: str, after_s: float) -> None:
    """Without a handler the kernel drops a signal to process 1."""
    (tmp_path / "run.yaml").write_text(SMALL)
    arguments = {
        "bootstrap": ["bootstrap.cli", str(tmp_path / "run.yaml"), "--state-dir", str(tmp_path / "state"),
                      "--host-maddrs", "/ip4/127.0.0.1/tcp/0"],
        "join": ["peer.cli", "join", f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{PEER_ID}", "--output-dir", str(tmp_path)],
        "simulate": ["peer.cli", "simulate", "--tokens", "100M"],
    }[command]  # fmt: skip
    # process 1 writes its own start, and its parent's child is the one to be signalled
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", *arguments], env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        first = _first_child(process.pid)
        while not _handles(first, signal.SIGTERM):  # until then the kernel drops it
            assert process.poll() is None
            time.sleep(0.01)
        assert "libtorch" not in Path(f"/proc/{first}/maps").read_text()  # whose import takes seconds
        time.sleep(after_s)  # a moment in its start is what is tested
        os.kill(first, signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == (0 if command == "bootstrap" else 130)
        assert "Traceback" not in said
    finally:
        process.kill()
        process.wait()


def _handles(pid: int, number: signal.Signals) -> bool:
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def _first_child(pid: int) -> int:
    """The child of `unshare`, once Python has begun: what it is before cannot handle anything."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for child in children.read_text().split():
            if b"-m\0" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("it has not started")


def _denied(command: str, folder: Path) -> list[str]:
    (folder / "run.yaml").write_text(SMALL)
    if command == "bootstrap":
        return ["bootstrap.cli", str(folder / "run.yaml"), "--state-dir", str(folder / "state")]
    if command == "demo":
        return ["peer.cli", "demo", "--output-dir", str(folder / "out")]
    return ["peer.cli", "join", f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{PEER_ID}", "--output-dir", str(folder / "out")]


@pytest.mark.parametrize("command", ["bootstrap", "join", "demo"])
@pytest.mark.parametrize(("prepare", "reason"), [
    ("mount -t tmpfs -o ro none /dev/shm", "Read-only file system"),
    ("mount -t tmpfs -o size=16k none /dev/shm", "No space left on device"),
    ("mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9", ""),
], ids=["read-only", "full", "missing"])  # fmt: skip
def test_shared_memory_that_cannot_be_used_is_told_first(
    tmp_path: Path, command: str, prepare: str, reason: str
) -> None:
    line = " ".join([sys.executable, "-m", *_denied(command, tmp_path)])
    done = subprocess.run(
        [*ALONE, f"{prepare} && exec {line}"], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert f"shared memory (/dev/shm) cannot be used: {reason}" in done.stderr
    assert "docker run --shm-size 64m" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_sockets_are_in_a_private_folder_below_tmpdir(tmp_path: Path, opened: BootstrapCommand) -> None:
    # A socket's path has at most 107 characters, and pytest's own folders leave too few of them.
    other = tmp_path / "other"
    other.mkdir()
    with tempfile.TemporaryDirectory(prefix="atoll-") as place:
        bootstrap = BootstrapCommand(other, "--host-maddrs", "/ip4/127.0.0.1/tcp/0", env={"TMPDIR": place})
        try:
            bootstrap.until_open()
            folder = Path(place, f"atoll-{os.getuid()}")
            assert folder.stat().st_mode & 0o777 == 0o700
            assert sorted(path.name.split("-")[0] for path in folder.glob("*.sock")) == ["p2pclient", "p2pd"]
            assert bootstrap.end(signal.SIGTERM)[0] == 0
            assert list(folder.iterdir()) == []
        finally:
            bootstrap.close()
    opened.until_open()


@pytest.mark.parametrize("command", ["bootstrap", "join", pytest.param("demo", marks=pytest.mark.long)])
def test_without_any_place_for_sockets_the_remedy_is_told(tmp_path: Path, command: str) -> None:
    line = " ".join([sys.executable, "-m", *_denied(command, tmp_path)])
    place = tmp_path / ("x" * 90)
    place.mkdir()
    prepare = "mount -t tmpfs -o ro none /var/tmp && mount -o bind,ro /tmp /tmp"
    done = subprocess.run(
        [*ALONE, f"{prepare} && exec {line}"], env=environment({"TMPDIR": str(place)}), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "cannot hold sockets: its path has" in done.stderr
    assert "set TMPDIR" in done.stderr
    assert "--host-maddrs" not in done.stderr


@pytest.mark.long
def test_an_edited_manifest_in_the_old_folder_is_another_run(tmp_path: Path, opened: BootstrapCommand) -> None:
    opened.until_open()
    opened.end(signal.SIGTERM)
    edited = tmp_path / "edited.yaml"
    edited.write_text(SMALL.replace("outer_momentum: 0.6", "outer_momentum: 0.5"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "state").glob("genesis.*")}
    code, said = run("bootstrap.cli", [str(edited), "--state-dir", str(tmp_path / "state")])
    assert code == 2
    assert "holds the run test, which was opened with another manifest" in said
    assert "recipe.outer_momentum: 0.6 there, 0.5 in the manifest" in said
    assert "--new-run" in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "state").glob("genesis.*")} == before


@pytest.mark.long
@pytest.mark.timeout(240)
def test_members_are_told_that_their_bootstrap_serves_another_run(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        flags = ["--host-maddrs", f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}"]
    first = BootstrapCommand(tmp_path, *flags)
    try:
        lines = first.until_open()
        address = next(line.split()[-1] for line in lines if line.startswith("join"))
        member = JoinedPeer(tmp_path / "member", address)
        member.wait_for(lambda: member.step > 0)
        first.end(signal.SIGTERM)
        edited = SMALL.replace("outer_momentum: 0.6", "outer_momentum: 0.5")
        second = BootstrapCommand(tmp_path, *flags, "--new-run", manifest_text=edited)
        try:
            second.until_open()
            member.wait_for(lambda: "now serves another run" in (tmp_path / "member" / "console.log").read_text())
            step = member.step
            member.wait_for(lambda: member.step > step)
        finally:
            second.close()
            member.close()
    finally:
        first.close()
