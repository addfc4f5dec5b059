"""`--resume-from-checkpoint` on folders that others made: each ends in a clear error, and no other file is read."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peer.errors import UserError
from peer.protocol.manifest import RunManifest, parse_manifest
from peer.run.resume import read_resumed
from peer.settings import PeerSettings
from tests.network.bootstraps import DILOCO, MANIFEST
from tests.run.saved import NUMEL, save

INVENTORY = "manifest.json"
Change = Callable[[Path], None]
_opened: list[str] = []
_watching = False


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(arguments[0], str | bytes):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note)


def _seal(folder: Path, change: Callable[[dict[str, Any]], None] = lambda _: None, relist: bool = True) -> None:
    """An inventory that fits whatever is in the folder now, as whoever made it would write it."""
    path = folder / INVENTORY
    listed = json.loads(path.read_bytes())
    del listed["sha256"]
    if relist:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file() and entry.name != INVENTORY]
        listed["files"] = {name: _entry(folder / name) for name in sorted(names)}
    change(listed)
    canonical = _canonical(listed)
    path.write_bytes(_canonical({**listed, "sha256": hashlib.sha256(canonical).hexdigest()}))


def _entry(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _linked(name: str, target: str | None = None) -> Change:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / "secret")
        (folder / name).symlink_to(target or folder.parent / "secret")

    return change


def _pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _folder(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def _huge(name: str) -> Change:
    def change(folder: Path) -> None:
        os.truncate(folder / name, 2**42)
        if name != INVENTORY:
            _seal(folder, lambda listed: listed["files"][name].update(bytes=2**42), relist=False)

    return change


def _content(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)
        if name != INVENTORY:
            _seal(folder)

    return change


def _listed(**changes: Any) -> Change:
    return lambda folder: _seal(folder, lambda listed: listed.update(changes))


def _file_listed(name: str, **entry: Any) -> Change:
    def change(folder: Path) -> None:
        document = {**_entry(folder / "state.json"), **entry}
        _seal(folder, lambda listed: listed["files"].update({name: document}))

    return change


def _state(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))
        _seal(folder)

    return change


def _progress(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        progress = json.loads((folder / "state.json").read_bytes())["progress"]
        _state(progress={**progress, **changes})(folder)

    return change


def _tensors(stem: str, **named: torch.Tensor) -> Change:
    from peer.checkpoint.inventory import tensor_digest

    def change(folder: Path) -> None:
        save_file(named, folder / f"{stem}.safetensors")

        def digests(listed: dict[str, Any]) -> None:
            if stem in listed["tensors"]:
                listed["tensors"][stem] = {name: tensor_digest(tensor) for name, tensor in named.items()}

        _seal(folder, digests)

    return change


def _header(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def _removed(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        _seal(folder)

    return change


def _without_optimizer(folder: Path) -> None:
    (folder / "optimizer.safetensors").unlink()
    _seal(folder, lambda listed: listed["tensors"].pop("optimizer"))


def _added_link(folder: Path) -> None:
    (folder / "chain.jsonl").unlink()
    _seal(folder)
    (folder / "chain.jsonl").symlink_to("/dev/zero")


def _cut(folder: Path) -> None:
    path = folder / "inner.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    _seal(folder)


FULL = torch.zeros(NUMEL)
NAN = torch.tensor([0.0, float("nan")])
UNKNOWN_TYPE = b'{"parameters":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}}'
OUTSIDE = b'{"parameters":{"dtype":"F32","shape":[2],"data_offsets":[0,99999999]}}'
OVERFLOW = b'{"parameters":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}}'

FOLDERS: dict[str, Change] = {
    "the inventory is a link to an equal file": _linked(INVENTORY),
    "the inventory is /dev/zero": _linked(INVENTORY, "/dev/zero"),
    "the inventory is a pipe": _pipe(INVENTORY),
    "the inventory is a folder": _folder(INVENTORY),
    "the inventory is huge": _huge(INVENTORY),
    "the inventory is empty": _content(INVENTORY, b""),
    "the inventory is nested deep": _content(INVENTORY, b"[" * 100_000 + b"]" * 100_000),
    "the inventory is a list": _content(INVENTORY, b"[1]"),
    "the inventory has a number of 5,000 digits": _content(INVENTORY, b'{"step":' + b"9" * 5000 + b"}"),
    "the inventory is not UTF-8": _content(INVENTORY, b'{"\xff":1}'),
    "another format": _listed(format=[2]),
    "no format": lambda folder: _seal(folder, lambda listed: listed.pop("format") and None),
    "files is a list": _listed(files=["state.json"]),
    "tensors is a word": _listed(tensors="inner"),
    "a step below zero": _listed(step=-1),
    "a run of 1,000 characters": _listed(run_id="x" * 1000),
    "an absolute path": _file_listed("/etc/passwd"),
    "a path upwards": _file_listed("../secret"),
    "a path below": _file_listed("inner/parameters"),
    "a device as a path": _file_listed("/dev/zero"),
    "a name with an escape sequence": _file_listed("\x1b[2J"),
    "a file of a size in words": _file_listed("state.json", bytes="many"),
    "a stem upwards": lambda folder: _seal(folder, lambda listed: listed["tensors"].update({"../secret": {}})),
    "a stem without a file": lambda folder: _seal(folder, lambda listed: listed["tensors"].update({"more": {}})),
    "the tensors are a link to an equal file": _linked("inner.safetensors"),
    "the outer state is a link to an equal file": _linked("outer.safetensors"),
    "the state is a link to an equal file": _linked("state.json"),
    "the state is /dev/zero": _linked("state.json", "/dev/zero"),
    "the tensors are a pipe": _pipe("inner.safetensors"),
    "the state is a pipe": _pipe("state.json"),
    "the chain is a pipe": _pipe("chain.jsonl"),
    "the chain is huge": _huge("chain.jsonl"),
    "an unlisted chain that is /dev/zero": _added_link,
    "the tensors are huge": _huge("inner.safetensors"),
    "the outer state is huge": _huge("outer.safetensors"),
    "the state is a folder": _folder("state.json"),
    "no tensors": _removed("inner.safetensors"),
    "no optimizer": _without_optimizer,
    "no outer state": _removed("outer.safetensors"),
    "no state": _removed("state.json"),
    "the tensors are cut short": _cut,
    "the tensors are empty": _content("inner.safetensors", b""),
    "a header of 2^63 bytes": _content("inner.safetensors", _header(b"{}", length=2**63 - 1)),
    "a header that is no JSON": _content("inner.safetensors", _header(b"[[[[")),
    "a header nested deep": _content("inner.safetensors", _header(b"[" * 100_000)),
    "an unknown type": _content("inner.safetensors", _header(UNKNOWN_TYPE, b"\0" * 8)),
    "an unknown type outside": _content("outer.safetensors", _header(UNKNOWN_TYPE, b"\0" * 8)),
    "offsets outside of the file": _content("inner.safetensors", _header(OUTSIDE, b"\0" * 8)),
    "a shape that overflows": _content("outer.safetensors", _header(OVERFLOW, b"\0" * 8)),
    "a pickle": _content("inner.safetensors", b"\x80\x04cos\nsystem\n"),
    "parameters of another shape": _tensors("inner", parameters=torch.zeros(NUMEL + 1)),
    "parameters of two dimensions": _tensors("inner", parameters=torch.zeros(NUMEL, 1)),
    "parameters as integers": _tensors("inner", parameters=torch.zeros(NUMEL, dtype=torch.int64)),
    "parameters in half precision": _tensors("inner", parameters=FULL.half()),
    "parameters that are NaN": _tensors("inner", parameters=NAN),
    "one tensor too many": _tensors("inner", parameters=FULL, more=FULL.clone()),
    "parameters by another name": _tensors("inner", values=FULL),
    "an anchor of another shape": _tensors("outer", anchor=torch.zeros(1)),
    "an anchor that is infinite": _tensors("outer", anchor=NAN.nan_to_num(0.0) / 0.0),
    "a buffer that the recipe has not": _tensors("outer", anchor=FULL, buffer0=FULL.clone()),
    "an optimizer that is NaN": _tensors("optimizer", **{"layer.exp_avg": NAN}),
    "an optimizer of complex numbers": _tensors("optimizer", **{"layer.exp_avg": FULL.to(torch.complex64)}),
    "the state is a list": _content("state.json", b"[]"),
    "the state is nested deep": _content("state.json", b'{"run_id":' + b"[" * 100_000),
    "the state has a huge number": _content("state.json", b'{"round":' + b"1" * 5000 + b"}"),
    "no progress": _state(progress=None),
    "a round below zero": _progress(round=-1),
    "a round as a fraction": _progress(round=1.5),
    "more rounds than a run may have": _progress(round=2**40),
    "infinitely many tokens": _progress(tokens=float("inf")),
    "a position that is a word": _state(data={"seed": 1, "epoch": 0, "position": "x"}),
    "an origin of objects": _state(origin={"text": {"a": 1}}),
    "a lineage that is a path": _state(lineage_id="../../etc/passwd"),
    "another run, with an escape sequence": _state(run_id="\x1b]0;owned\x07"),
}  # fmt: skip


@pytest.fixture
def manifest() -> RunManifest:
    return parse_manifest(MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total="").encode(), "test")


def _resume(folder: Path, manifest: RunManifest) -> Any:
    settings = PeerSettings(output_dir=folder.parent.parent, resume_from_checkpoint=str(folder))
    return read_resumed(settings, manifest, NUMEL, 0)


def test_the_folder_that_all_are_made_of_is_resumed(tmp_path, manifest):
    folder = save(tmp_path / "made", manifest.run_id, 5, 3)
    _seal(folder)
    assert _resume(folder, manifest).state["progress"]["round"] == 3


@pytest.mark.timeout(30)
@pytest.mark.parametrize("change", FOLDERS.values(), ids=FOLDERS.keys())
def test_a_hostile_folder_ends_in_a_clear_error(tmp_path, manifest, change):
    global _watching
    folder = save(tmp_path / "made", manifest.run_id, 5, 3)
    change(folder)
    _opened.clear()
    _watching = True
    try:
        with pytest.raises(UserError) as caught:
            _resume(folder, manifest)
    finally:
        _watching = False
    outside = [path for path in _opened if path.startswith("/dev") or path.startswith("/etc") or "secret" in path]
    assert outside == []
    words = caught.value.render()
    assert len(words) < 2000
    assert all(character.isprintable() or character == "\n" for character in words)


def test_a_run_folder_that_is_a_link_is_not_searched(tmp_path, manifest):
    save(tmp_path / "elsewhere", manifest.run_id, 5, 3)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "checkpoint-5").symlink_to(tmp_path / "elsewhere" / "checkpoint-5")
    (tmp_path / "made" / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no valid checkpoint of run"):
        _resume(tmp_path / "made", manifest)
