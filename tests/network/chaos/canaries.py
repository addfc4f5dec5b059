"""G14: secrets that must stay on a peer's machine and in its files for them, and strings that must not be obeyed.

Whole peers train with every log of every process at its most talkative, with tokens in their environment and a marked
sentence in their texts. Then every file that they, and the bootstrap, have written is searched for these, and for
their keys in the ways that a key can be written. `strings` has the other half.
"""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.network.chaos.crowds import Child
from tests.network.chaos.strings import try_strings
from tests.network.harness import TestSwarm
from tests.network.processes import JoinedPeer

ENVIRONMENT = {
    "HF_TOKEN": "hf_" + "CanaryOfTheHub" * 3,
    "HUGGING_FACE_HUB_TOKEN": "hf_" + "CanaryOfTheOldHub" * 2,
    "AWS_SECRET_ACCESS_KEY": "canary/of/the/cloud/0123456789abcdef",
    "DATABASE_PASSWORD": "canary-of-the-database",
}
SENTENCE = "the canary of the texts sings at midnight only"
# Imported by every Python process whose path has its folder first: all loggers at their most talkative.
TALKATIVE = """
import logging
configure = logging.basicConfig
def basicConfig(**options):
    configure(**{**options, "level": logging.DEBUG})
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.DEBUG)
logging.basicConfig = basicConfig
"""
OPEN_WITHIN_S = 300.0
OWN = {"identity.key"}  # where a key belongs


def forms(key: bytes) -> Iterator[tuple[str, bytes]]:
    """A key's file, and the 32 bytes of its seed, as they could be written: raw, escaped, hex, base64 of any offset."""
    for name, secret in (("key", key), ("seed", key[4:36])):
        yield name, secret
        yield f"{name}, escaped", repr(secret)[2:-1].encode()
        yield f"{name}, hex", secret.hex().encode()
        yield f"{name}, list", str(list(secret))[1:-1].encode()
        for offset in range(3):
            text = base64.b64encode(secret[offset:])[: 4 * ((len(secret) - offset) // 3)]
            yield f"{name}, base64", text
            yield f"{name}, base64 for addresses", text.replace(b"+", b"-").replace(b"/", b"_")


def found_in(content: bytes, secrets: Mapping[str, bytes]) -> list[str]:
    """The names of the secrets that it holds."""
    return [name for name, secret in secrets.items() if secret in content or secret.upper() in content]


def search(folders: list[Path], secrets: Mapping[str, bytes]) -> tuple[int, list[str]]:
    """-> (files read, which holds what)."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name not in OWN]
    found = [f"{path.name}: {name}" for path in files for name in found_in(path.read_bytes(), secrets)]
    return len(files), found


def train(folder: Path, peers: int, rounds: int) -> tuple[int, list[str]]:
    """Whole peers, until each has made so many rounds, or some steps if it is alone; -> as `search`."""
    talkative = folder / "talkative"
    talkative.mkdir(parents=True)
    (talkative / "sitecustomize.py").write_text(TALKATIVE)
    env = {**ENVIRONMENT, "PYTHONPATH": str(talkative), "GOLOG_LOG_LEVEL": "debug"}
    swarm = TestSwarm(folder / "swarm", steps=5, wait=2.0)
    with contextlib.closing(swarm), contextlib.ExitStack() as stack:
        bootstrap = swarm.bootstrap()
        joined = []
        for number in range(peers):
            texts = folder / f"peer{number}-text"
            texts.mkdir()
            (texts / "canary.txt").write_text(f"{SENTENCE}\n" * 40)
            flags = ("--log-level", "debug", "--save-steps", "5")
            peer = JoinedPeer(folder / f"peer{number}", bootstrap.address, *flags, env=env)
            joined.append(stack.enter_context(contextlib.closing(peer)))
        for peer in joined:
            peer.wait_for(lambda peer=peer: peer.step >= 10 and len(peer.committed) >= rounds, OPEN_WITHIN_S)  # type: ignore[misc]
        shown = _directory(folder, bootstrap.address, bootstrap.run_id)
        for peer in joined:
            peer.process.send_signal(signal.SIGTERM)
            assert peer.process.wait(60.0) == 0, peer.log_text()
        secrets = {name: value.encode() for name, value in ENVIRONMENT.items()}
        secrets["the texts"] = SENTENCE.encode()
        for owner in (bootstrap.folder, *(peer.folder for peer in joined)):
            key = (owner / "identity.key").read_bytes()
            secrets |= {f"{owner.name}'s {name}": form for name, form in forms(key)}
        assert all(" DEBUG " in (peer.folder / "agent.log").read_text() for peer in joined), "no log is at DEBUG"
    files, found = search([bootstrap.folder, *(peer.folder for peer in joined)], secrets)
    private = {**secrets, "a folder": str(folder).encode()}
    return files + 1, [*found, *(f"directory: {name}" for name in found_in(shown, private))]


def _directory(folder: Path, address: str, run_id: str) -> bytes:
    """What a stranger reads of the peers in the directory."""
    reader = Child(folder, "crowds", address, run_id)
    with contextlib.closing(reader):
        reader.ask("records")
        deadline = time.monotonic() + OPEN_WITHIN_S
        while (answer := reader.answer()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert answer["shown"]
        return json.dumps(answer).encode()


def run(
    folder: Path, *, peers: int = 2, rounds: int = 5, tell: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Strings, then secrets; -> counts."""
    counts = try_strings(folder / "strings")
    tell(counts)
    places, found = train(folder / "swarm", peers, rounds)
    return {**counts, "places_searched": places, "secrets_found": len(found), "what_was_found": found}
