"""Network namespaces of a test: machines of their own on an internet of their own, without names and without traces.

A namespace lives as long as a process runs in it or a descriptor of it is open, so nothing is left when the test's
process ends, however it ends. The host's own network is never touched: every device is made inside a namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.network.chaos.relay import Link, Relay

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_TSO_ECN = 1, 2, 4, 8
BIG_PACKETS = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN
_LIBC = ctypes.CDLL(None, use_errno=True)


class NoNamespacesError(RuntimeError):
    """This machine does not let the test make network namespaces; the message says what it needs."""


class Namespace:
    """One network namespace with its loopback up; processes are started in it from within `entered()`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._descriptor = _new_namespace()
        self.run("link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """How `ip` finds it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts meanwhile, is inside."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _set_namespace(self._descriptor)
        try:
            yield
        finally:
            _set_namespace(before)
            os.close(before)

    def run(self, *arguments: str) -> str:
        """`ip` with these arguments, inside; -> what it prints."""
        with self.entered():
            done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise NoNamespacesError(f"ip {' '.join(arguments)} in {self.name}: {done.stderr.strip()}")
        return done.stdout

    def sysctl(self, key: str, value: str) -> None:
        """Set `net.<key>` of this namespace alone."""
        with self.entered():
            Path("/proc/sys/net", *key.split(".")).write_text(value)

    def tun(self, device: str, big_packets: bool = False) -> int:
        """Make a TUN device; -> its descriptor, which whole IP packets are read from and written to.

        Args:
            big_packets: the kernel hands over segments of up to 64 KiB, each behind a virtio header of 10 bytes.
        """
        with self.entered():
            try:
                descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                raise NoNamespacesError(f"/dev/net/tun: {error.strerror}; this test needs TUN devices") from None
            flags = IFF_TUN | IFF_NO_PI | (IFF_VNET_HDR if big_packets else 0)
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
            fcntl.ioctl(descriptor, TUNSETOFFLOAD, BIG_PACKETS if big_packets else 0)
        self.run("link", "set", device, "txqueuelen", "1000", "up")
        return descriptor

    def close(self) -> None:
        """Let go; it ends with its last process."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Internet:
    """Hosts with public addresses around one router, and machines behind relays. A context manager.

    Args:
        block: the addresses are <block>.<n>.2. 20.0 is outside every reserved range, so that libp2p takes them for
            public ones.
    """

    def __init__(self, block: str = "20.0") -> None:
        self.block = block
        self.hub = Namespace("hub")
        self.hosts: dict[str, Namespace] = {}
        self.addresses: dict[str, str] = {}
        self.relays: dict[str, Relay] = {}
        self.hub.sysctl("ipv4.ip_forward", "1")

    def __enter__(self) -> Internet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def host(self, name: str) -> Namespace:
        """A machine with a public address, connected directly."""
        namespace, number = self._new(name)
        inside, outside = "eth0", f"v{number}"
        self.hub.run("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", namespace.path)
        self.hub.run("addr", "add", f"{self.block}.{number}.1/24", "dev", outside)
        self.hub.run("link", "set", outside, "up")
        namespace.run("addr", "add", f"{self.block}.{number}.2/24", "dev", inside)
        namespace.run("link", "set", inside, "up")
        namespace.run("route", "add", "default", "via", f"{self.block}.{number}.1")
        self.addresses[name] = f"{self.block}.{number}.2"
        return namespace

    def behind(self, name: str, link: Link, nat: bool = False, big_packets: bool = False) -> Namespace:
        """A machine behind a relay that shapes its link and, if asked, translates its private address.

        Args:
            link: both directions of it.
            nat: it is 10.0.0.2 behind a router that lets in only answers to what it sent.
        """
        assert not (nat and big_packets), "the relay translates whole packets only"
        namespace, number = self._new(name)
        public = f"{self.block}.{number}.2"
        private = "10.0.0.2" if nat else public
        inside, outside = namespace.tun("eth0", big_packets), self.hub.tun(f"t{number}", big_packets)
        namespace.run("addr", "add", f"{private}/32", "dev", "eth0")
        namespace.run("route", "add", "default", "dev", "eth0")
        self.hub.run("route", "add", f"{public}/32", "dev", f"t{number}")
        self.addresses[name] = public
        self.relays[name] = Relay(inside, outside, link, (private, public) if nat else None, big_packets)
        return namespace

    def split(self, *groups: tuple[str, ...]) -> None:
        """Until `heal`, nothing passes between hosts of different groups."""
        for group in groups:
            for other in groups:
                if group is not other:
                    for name in group:
                        for far in other:
                            self.cut(name, far)

    def cut(self, sender: str, receiver: str) -> None:
        """Until `heal`, nothing passes from one host to the other; what goes the other way still does."""
        source, target = self.addresses[sender], self.addresses[receiver]
        self.hub.run("rule", "add", "from", source, "to", target, "priority", "100", "blackhole")

    def heal(self) -> None:
        """Undo every `split` and `cut`."""
        for _ in self.hub.run("rule", "show", "priority", "100").splitlines():
            self.hub.run("rule", "del", "priority", "100")

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()
        for namespace in (self.hub, *self.hosts.values()):
            namespace.close()

    def _new(self, name: str) -> tuple[Namespace, int]:
        assert name not in self.hosts, name
        self.hosts[name] = Namespace(name)
        return self.hosts[name], len(self.hosts)


def _new_namespace() -> int:
    """The descriptor of a namespace that a thread of its own has made; raises NoNamespacesError."""
    if shutil.which("ip") is None:
        raise NoNamespacesError("this test needs the command `ip` (package iproute2)")
    made: list[int] = []

    def make() -> None:
        if _LIBC.unshare(CLONE_NEWNET) == 0:
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise NoNamespacesError(
            "this machine refuses network namespaces: run the test as root (in a container: with --cap-add=NET_ADMIN, "
            "--cap-add=SYS_ADMIN and --device=/dev/net/tun)"
        )
    return made[0]


def _set_namespace(descriptor: int) -> None:
    if _LIBC.setns(descriptor, CLONE_NEWNET):
        raise NoNamespacesError(f"setns: {os.strerror(ctypes.get_errno())}")
