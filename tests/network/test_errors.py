"""Whatever a person can mend is said in their words: exit code 2, no traceback, the value, the remedy."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import bootstrap.cli
import bootstrap.serve
from peer import cli, genesis
from peer.system.file_lock import lock_folder
from tests.network.bootstraps import DILOCO, MANIFEST
from tests.network.forked import run_forked
from tests.network.processes import LOOPBACK, environment, run
from tests.network.publisher import GIANT

SMALL = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total="")
WIDE = SMALL
for key, old in (("hidden_size", 16), ("intermediate_size", 16), ("num_hidden_layers", 1)):
    WIDE = WIDE.replace(f"{key}: {old}", f"{key}: {GIANT[key]}")
PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command that a person typed wrongly: `<dead>`, `<busy>` (a port), `<here>` (a folder) are filled in."""

    line: str
    says: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


BEFORE_THE_NETWORK = {
    "unknown key in the settings file": Case(
        line="join <dead> --config <here>/s.yaml", files={"s.yaml": "save_step: 5\n"},
        says=("unknown setting save_step in <here>/s.yaml", "did you mean 'save_steps'?")),
    "key twice in the settings file": Case(
        line="join <dead> --config <here>/s.yaml", files={"s.yaml": "save_steps: 5\nbf16: no\nsave_steps: 6\n"},
        says=("settings file <here>/s.yaml", "line 3: the key 'save_steps' is there twice, first in line 1")),
    "bad value in the settings file": Case(
        line="join <dead> --config <here>/s.yaml", files={"s.yaml": "save_total_limit: 0\n"},
        says=("save_total_limit=0 in <here>/s.yaml", "greater than or equal to 1")),
    "settings file that is absent": Case(
        line="join <dead> --config <here>/s.yaml", says=("settings file <here>/s.yaml cannot be read", "--config")),
    "unknown variable": Case(
        line="join <dead>", env={"ATOLL_SAVE_STEP": "5"}, says=("ATOLL_SAVE_STEP", "did you mean 'save_steps'?")),
    "bad value in a variable": Case(
        line="join <dead>", env={"ATOLL_SAVE_STEPS": "-1"}, says=("ATOLL_SAVE_STEPS='-1'", "or equal to 0")),
    "bad value of a flag": Case(
        line="join <dead> --max-rounds 0", says=("--max-rounds='0'", "greater than or equal to 1")),
    "nickname that no record can hold": Case(
        line="join <dead> --nickname=.gpu1", says=("--nickname='.gpu1': must be 1 to 64",)),
    "malformed address": Case(
        line="join /ip4/127.0.0.1/tcp/1", says=("/ip4/127.0.0.1/tcp/1", "/p2p/")),
    "address that is no address": Case(
        line="join localhost:31337", says=("localhost:31337", "/ip4/203.0.113.7/tcp/31337/p2p/")),
    "unreachable address": Case(
        line="join <dead> --output-dir <here>/out",
        says=("cannot join", "<dead>", "connection refused", "Check that the port is open", "(tried 3 times)")),
    "port in use": Case(
        line="join <dead> --output-dir <here>/out --host-maddrs /ip4/127.0.0.1/tcp/<busy>",
        says=("port <busy> is in use", "--host-maddrs")),
    "file in place of the output folder": Case(
        line="join <dead> --output-dir <here>/out", files={"out": ""},
        says=("output_dir=<here>/out: is a file", "--output-dir")),
    "output folder below a file": Case(
        line="join <dead> --output-dir <here>/file/out", files={"file": ""},
        says=("output_dir=<here>/file/out: cannot be written to", "--output-dir")),
    "output folder where nothing can be made": Case(
        line="join <dead> --output-dir /proc/atoll", says=("output_dir=/proc/atoll", "--output-dir")),
    "damaged identity": Case(
        line="join <dead> --output-dir <here>", files={"identity.key": "not a key"},
        says=("identity file <here>/identity.key is damaged", "move it away")),
    "identity for everybody to read": Case(
        line="join <dead> --output-dir <here> --identity-path <here>/open.key", files={"open.key": "0644"},
        says=("<here>/open.key has mode 0644", "chmod 600")),
    "checkpoint that is absent": Case(
        line="join <dead> --output-dir <here> --resume-from-checkpoint <here>/old",
        says=("resume_from_checkpoint=<here>/old: no such folder", "--resume-from-checkpoint alone")),
    "no command": Case(line="", says=("COMMAND",)),
    "unknown flag": Case(line="join <dead> --save-stepz 1", says=("--save-stepz",)),
}  # fmt: skip

BOOTSTRAP = {
    "unknown key in the manifest": Case(
        line="<here>/run.yaml", files={"run.yaml": SMALL.replace("batch_sequences", "batch_sequence")},
        says=("unknown key 'inner.batch_sequence'", "did you mean 'batch_sequences'?")),
    "bad value in the manifest": Case(
        line="<here>/run.yaml", files={"run.yaml": SMALL.replace("outer_momentum: 0.6", "outer_momentum: 1.5")},
        says=("recipe.outer_momentum=1.5", "less than 1")),
    "manifest of another version": Case(
        line="<here>/run.yaml", files={"run.yaml": "protocol: 999\n" + SMALL},
        says=("uses protocol version 999; this atoll speaks 11", "upgrade atoll")),
    "manifest that is not text": Case(
        line="<here>/run.yaml", files={"run.yaml": "\0\1"}, says=("<here>/run.yaml cannot be read",)),
    "manifest that is empty": Case(
        line="<here>/run.yaml", files={"run.yaml": "# nothing yet"}, says=("run.yaml is empty", "configs/runs/")),
    "manifest that is absent": Case(
        line="<here>/run.yaml", says=("manifest <here>/run.yaml cannot be read: No such file", "configs/runs/")),
    "manifest that is too large": Case(
        line="<here>/run.yaml", files={"run.yaml": SMALL + "#" * 32_000},
        says=(f"manifest <here>/run.yaml is {len(SMALL) + 32_000} bytes; the limit is 16384",)),
    "key twice in the manifest": Case(
        line="<here>/run.yaml", files={"run.yaml": SMALL + "\nseed: 4\n"}, says=("the key 'seed' is there twice",)),
    "folder of this machine as the model": Case(
        line="<here>/run.yaml", files={"run.yaml": "name: a\nmodel: {pretrained: ./tiny}"},
        says=("/tiny: holds no model: config.json and weights in safetensors are needed", "save_pretrained")),
    "folder of a tokenizer that is absent": Case(
        line="<here>/run.yaml", files={"run.yaml": SMALL + "tokenizer: {kind: folder, name: /proc/words}"},
        says=("tokenizer.name=/proc/words: no such folder", "atoll tokenizer train")),
    "folder of a tokenizer under another kind": Case(
        line="<here>/run.yaml", files={"run.yaml": SMALL + "tokenizer: {kind: hub, name: ./words}"},
        says=("tokenizer.name='./words'", "a folder goes with kind 'folder'")),
    "model that does not fit": Case(
        line="<here>/run.yaml", files={"run.yaml": WIDE},
        says=("a model of 1340050.3M parameters needs 14976.23 GiB", "GiB free", "smaller model")),
    "port in use": Case(
        line="<here>/run.yaml --host-maddrs /ip4/127.0.0.1/tcp/<busy>", files={"run.yaml": SMALL},
        says=("port <busy> is in use", "--host-maddrs")),
    "malformed address": Case(
        line="<here>/run.yaml --initial-peers nowhere", files={"run.yaml": SMALL}, says=("nowhere", "/p2p/")),
    "file in place of the state folder": Case(
        line="<here>/run.yaml --state-dir <here>/file", files={"run.yaml": SMALL, "file": ""},
        says=("state_dir=<here>/file: is a file", "--state-dir")),
    "damaged identity": Case(
        line="<here>/run.yaml --identity-path <here>/key", files={"run.yaml": SMALL, "key": "not a key"},
        says=("identity file <here>/key is damaged", "move it away")),
    "unreachable address": Case(
        line="<here>/run.yaml --initial-peers <dead>", files={"run.yaml": SMALL},
        says=("cannot join", "<dead>", "connection refused", "Check that the port is open")),
}  # fmt: skip

BUILD = "<here>/run.yaml --out <here>/genesis.bin"
MODELS = {  # said by the child that builds the first state of a run
    "architecture of several models": Case(
        line=BUILD, files={"run.yaml": "name: a\nmodel: {architecture: musicgen}"},
        says=("musicgen cannot be trained", "choose another architecture")),
    "architecture that looks ahead": Case(
        line=BUILD, files={"run.yaml": "name: a\nmodel: {architecture: bert, config: {hidden_size: 12}}"},
        says=("bert cannot be trained: what it predicts depends on later tokens", "is_decoder")),
    "code from elsewhere": Case(
        line=BUILD, files={"run.yaml": "name: a\nmodel: {architecture: llama, config: {auto_map: {a: b}}}"},
        says=("'auto_map' cannot be set: code from elsewhere is never run", "remove 'auto_map'")),
    "special token beyond the vocabulary": Case(
        line=BUILD, files={"run.yaml": SMALL.replace("pad_token_id: 0", "pad_token_id: 264")},
        says=("pad_token_id=264: must be from 0 to 263", "vocab_size to at least 265")),
}  # fmt: skip

IN_FULL = {"unreachable address", "model that does not fit", "empty data set"}  # as they are typed, imports and all


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def said_by(name: str, main: Callable[[], None], arguments: list[str], folder: Path, env: dict[str, str]) -> str:
    """What a command says before it ends with code 2, in a new process or in a fork of this one."""
    if name in IN_FULL:
        code, said = run(main.__module__, arguments, env)
    else:
        code, said = run_forked(main, arguments, folder.with_name(folder.name + ".log"), environment(env))
    assert code == 2, said
    assert "Traceback" not in said
    return said


def check(name: str, case: Case, main: Callable[[], None], folder: Path, busy: int, extra: list[str]) -> None:
    """Run the case and compare what it says."""
    for file, content in case.files.items():
        (folder / file).write_text(content)
        (folder / file).chmod(0o644 if content == "0644" else 0o600)
    places = {
        "<here>": str(folder), "<busy>": str(busy), "<dead>": f"/ip4/127.0.0.1/tcp/{_free_port()}/p2p/{PEER_ID}",
    }  # fmt: skip

    def filled(text: str) -> str:
        for mark, value in places.items():
            text = text.replace(mark, value)
        return text

    said = said_by(name, main, [*filled(case.line).split(), *extra], folder, case.env)
    for phrase in map(filled, case.says):
        assert phrase in said


@pytest.mark.parametrize("name", BEFORE_THE_NETWORK)
def test_join_says_what_is_wrong_before_it_touches_the_network(
    name: str, tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_CONFIG", raising=False)
    began = time.monotonic()
    check(name, BEFORE_THE_NETWORK[name], cli.main, tmp_path, listener.getsockname()[1], [])
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("name", BOOTSTRAP)
def test_bootstrap_says_what_is_wrong(name: str, tmp_path: Path, listener: socket.socket) -> None:
    case = BOOTSTRAP[name]
    extra = [] if "--state-dir" in case.line else ["--state-dir", str(tmp_path / "state")]
    extra += [] if "--host-maddrs" in case.line else ["--host-maddrs", LOOPBACK]
    check(name, case, bootstrap.cli.main, tmp_path, listener.getsockname()[1], extra)


def test_a_second_bootstrap_in_one_folder_is_refused(tmp_path: Path) -> None:
    state, manifest = tmp_path / "state", tmp_path / "run.yaml"
    state.mkdir()
    manifest.write_text(SMALL)
    flags = {"--state-dir": state, "--identity-path": tmp_path / "key", "--host-maddrs": LOOPBACK}
    line = [str(manifest), *(str(part) for flag in flags.items() for part in flag)]
    with lock_folder(state, "state_dir", bootstrap.serve.LOCK_NAME):
        said = said_by("in use", bootstrap.cli.main, line, tmp_path, {})
    assert f"state_dir={state}: is in use by process {os.getpid()}" in said


@pytest.mark.parametrize("name", MODELS)
def test_what_no_peer_could_train_is_told_before_a_run_is_opened(name: str, tmp_path: Path) -> None:
    check(name, MODELS[name], genesis.main, tmp_path, 0, [])


WRONG_PATHS = {
    "join --report": ("join <dead> --output-dir <here>/out --report <here>/none/r.json", "there is no folder"),
    "join --report, a folder": ("join <dead> --output-dir <here>/out --report <here>", "it is a folder"),
    "join --resume-from-checkpoint": ("join <dead> --output-dir <here>/out --resume-from-checkpoint <long>", "no such"),
    "join --identity-path": ("join <dead> --output-dir <here>/out --identity-path /proc/a/key", "cannot be written"),
    "join --output-dir": ("join <dead> --output-dir <here>/a/b/<name>", "File name too long"),
    "demo --report": ("demo --output-dir <here>/out --report <here>/none/r.json", "there is no folder"),
    "demo --output-dir": ("demo --output-dir <long>", "File name too long"),
    "compare --report": ("compare diloco --report <here>/none/r.json", "there is no folder"),
    "compare --plots": ("compare diloco --plots /proc/pictures", "cannot be written"),
    "simulate --report": ("simulate --report /proc/r.json", "cannot be written"),
    "simulate --plot": ("simulate --plot <long>", "File name too long"),
    "simulate --train-files": ("simulate --train-files <long>", "matches no file"),
    "rounds": ("rounds <long>", "no such folder"),
}


@pytest.mark.parametrize("name", WRONG_PATHS)
def test_a_path_that_cannot_be_used_is_said_at_the_start_and_leaves_no_trace(name: str, tmp_path: Path) -> None:
    line, reason = WRONG_PATHS[name]
    for mark, value in {"<here>": str(tmp_path), "<long>": str(tmp_path / ("x" * 300)), "<name>": "x" * 300,
                        "<dead>": f"/ip4/127.0.0.1/tcp/{_free_port()}/p2p/{PEER_ID}"}.items():
        line = line.replace(mark, value)
    assert reason in said_by(name, cli.main, line.split(), tmp_path, {})
    assert list(tmp_path.iterdir()) == []
