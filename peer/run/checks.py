"""The checks of this machine that `atoll doctor` shows, and that `atoll join` makes before it starts."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from peer.errors import UserError
from peer.protocol.address import PeerAddress
from peer.run.rented import detect_announce_maddrs
from peer.settings import PeerSettings
from peer.system.clock import Clock
from peer.system.finding import Finding, Level, checked
from peer.system.output_files import check_output_folder
from peer.system.preflight import check_host_ports, check_reachable, check_shared_memory

PYTHONS = SpecifierSet(">=3.11,<3.14")
FEWEST_FILES, GOOD_FILES = 256, 1024  # descriptors: a peer serves up to 512 streams
SLOW_FSYNC_S = 1.0
GB = 1e9
PROVIDERS = (("Vast.ai", "PUBLIC_IPADDR", "VAST_TCP_PORT_"), ("RunPod", "RUNPOD_PUBLIC_IP", "RUNPOD_TCP_PORT_"))


def machine_findings(settings: PeerSettings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What needs neither a device nor a swarm, in the order in which a person would mend it."""
    yield checked("python", _python)
    yield checked("packages", _packages)
    yield checked("shared memory", _shared_memory)
    yield checked("open files", _open_files)
    yield checked("output folder", lambda: output_folder(settings.output_dir))
    yield checked("ports", lambda: _ports(settings.host_maddrs))
    yield checked("provider", lambda: _provider(settings, environ))


def address_finding(addresses: Sequence[PeerAddress]) -> Finding:
    """Whether the swarm's addresses answer at all."""
    return checked("address", lambda: f"{len(check_reachable(addresses))} of {len(addresses)} addresses answer")


def _python() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if version not in PYTHONS:
        raise UserError(f"Python {version}: must be {PYTHONS}", "Make a virtual environment with another Python.")
    return version


def _packages() -> str:
    try:
        needed = [Requirement(text) for text in metadata.requires("atoll") or ()]
    except metadata.PackageNotFoundError:
        raise UserError("the package atoll is not installed here", "pip install . in a clone") from None
    found, wrong = [], []
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        raise UserError("; ".join(wrong), "Install Atoll again: pip install --upgrade . in a clone.")
    shown = [each for each in found if each.split()[0] in ("torch", "hivemind", "transformers")]
    return f"{', '.join(sorted(shown))}, and {len(found) - len(shown)} more as required"


def _shared_memory() -> str:
    check_shared_memory()
    return "processes can share locks (/dev/shm)"


def _open_files() -> str | Finding:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{limit} open files are allowed"
    if limit != resource.RLIM_INFINITY and limit < GOOD_FILES:
        advice = f"ulimit -n {4096 if most == resource.RLIM_INFINITY else min(4096, most)} before the command"
        level: Level = "fail" if limit < FEWEST_FILES else "warn"
        return Finding(check="open files", level=level, text=f"{text}; a peer wants {GOOD_FILES}", advice=advice)
    return text


def output_folder(path: Path, clock: Clock = time.monotonic) -> str | Finding:
    """Whether the folder can be written to, flushed and locked. It need not exist, and is not made."""
    remedy = "Choose a folder of a local disk with --output-dir."
    folder = path
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if not folder.is_dir():
            raise UserError(f"output_dir={path}: {folder} is a file, not a folder", remedy)
        check_output_folder(path)
        with tempfile.TemporaryFile(dir=folder) as file:
            began = clock()
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            seconds = clock() - began
            locked = _locks(file.fileno())
    except OSError as error:
        raise UserError(f"output_dir={path}: cannot be written to: {error.strerror or error}", remedy) from None
    said = f"{path} can be written to, flushed to the disk ({1e3 * seconds:.0f} ms a MiB)"
    if not locked:
        text = f"{path} can be written to, but not locked: two peers could use it at once"
        return Finding(check="output folder", level="warn", text=text, advice=remedy)
    if seconds > SLOW_FSYNC_S:
        return Finding(check="output folder", level="warn", text=f"{said}: a slow disk", advice=remedy)
    return f"{said} and locked"


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def disk_finding(path: Path, needed: float, wanted: float) -> Finding:
    """Free space where the output folder is or will be.

    Args:
        needed: bytes without which nothing can be saved.
        wanted: bytes that the settings ask for in all.
    """
    folder = path
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / GB:.1f} GB free for {path}; {wanted / GB:.1f} GB will be used at most"
    if free >= wanted:
        return Finding(check="disk", level="pass", text=text)
    advice = "Free some, choose another --output-dir, or lower --save-total-limit or --data-cache-gb."
    if free >= needed:
        return Finding(check="disk", level="warn", text=text, advice=advice)
    text = f"{free / GB:.2f} GB free for {path}; one checkpoint alone takes {needed / GB:.2f} GB"
    return Finding(check="disk", level="fail", text=text, advice=advice)


def _ports(host_maddrs: Sequence[str]) -> str:
    check_host_ports(host_maddrs)
    return f"can listen on {', '.join(host_maddrs)}"


def _provider(settings: PeerSettings, environ: Mapping[str, str]) -> str | Finding:
    if settings.announce_maddrs:
        return f"announces {', '.join(settings.announce_maddrs)}"
    found = detect_announce_maddrs(settings.host_maddrs, environ)
    if found:
        return f"announces {', '.join(found)}, as the provider maps it"
    for provider, ip_name, prefix in PROVIDERS:
        if environ.get(ip_name):
            ports = sorted(name.removeprefix(prefix) for name in environ if name.startswith(prefix))
            advice = (
                f"--host-maddrs /ip4/0.0.0.0/tcp/{ports[0]}" if ports else "Rent it with an open TCP port, and listen "
                "there with --host-maddrs /ip4/0.0.0.0/tcp/PORT."
            )  # fmt: skip
            text = f"a machine of {provider}, which maps ports, and none of them is listened on"
            return Finding(check="provider", level="warn", text=text, advice=advice)
    return "no mapping of ports is announced (Vast.ai, RunPod)"
