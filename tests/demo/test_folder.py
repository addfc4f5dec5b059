"""The demo's folder and manifest."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from peer.demo.folder import fresh_folder, manifest_text
from peer.errors import UserError
from peer.protocol.manifest import parse_manifest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_packaged_manifest_is_the_quickstart() -> None:
    packaged = files("peer.demo").joinpath("quickstart.yaml").read_bytes()
    assert packaged == (REPOSITORY / "configs/runs/quickstart.yaml").read_bytes()


def test_the_manifest_differs_from_the_quickstart_in_rounds_and_seed_alone() -> None:
    quickstart = yaml.safe_load((REPOSITORY / "configs/runs/quickstart.yaml").read_text())
    demo = yaml.safe_load(manifest_text(9, 5))
    assert parse_manifest(manifest_text(9, None), "test").rounds.total == 9
    assert demo["rounds"].pop("total") == 9
    assert (demo.pop("seed"), quickstart.pop("seed")) == (5, 17)
    quickstart["rounds"].pop("total", None)
    assert demo == quickstart


def test_an_earlier_demo_is_moved_and_kept(tmp_path: Path) -> None:
    for number in range(3):
        with fresh_folder(tmp_path / "demo") as folder:
            assert [file.name for file in folder.iterdir()] == ["demo.lock"]
            (folder / "report.json").write_text(str(number))
    reports = {path.parent.name: path.read_text() for path in tmp_path.glob("*/report.json")}
    assert reports == {"demo-1": "0", "demo-2": "1", "demo": "2"}


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="not of an earlier demo"), fresh_folder(tmp_path):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_running_demo_is_not_disturbed(tmp_path: Path) -> None:
    with fresh_folder(tmp_path / "demo"):
        with pytest.raises(UserError, match="is in use by process"), fresh_folder(tmp_path / "demo"):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]
