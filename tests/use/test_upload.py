"""`--push-to-hub` against a server on this machine that stands for the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from peer import cli
from tests.hub_server import TOKEN, Hub, serving_hub
from tests.use.test_trained import Saved, manifest_of


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)  # what HF_ENDPOINT sets, read at import
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield hub


def export(folder: Path) -> tuple[object, Path]:
    saved, to = Saved(folder / "peer", manifest_of()), folder / "model"
    with pytest.raises(SystemExit) as caught:
        cli.main(["export", str(saved.output), "--to", str(to), "--push-to-hub", "me/model", "--device", "cpu"])
    return caught.value.code, to


def test_an_export_goes_to_the_hub_as_it_is_on_disk(hub: Hub, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, to = export(tmp_path)
    assert code == 0
    assert hub.created[0]["name"] == "model"
    assert hub.created[0]["organization"] == "me"
    assert hub.files == {path.name: path.read_bytes() for path in to.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= hub.files.keys()
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.address}/me/model"


def test_a_hub_that_refuses_leaves_the_folder_and_a_remedy(hub: Hub, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_stranger")
    code, to = export(tmp_path)
    assert code == 2
    said = capsys.readouterr().err
    assert "me/model could not be uploaded: " in said
    assert f"the model is in {to}" in said
    assert (to / "model.safetensors").exists()
    assert not hub.files
