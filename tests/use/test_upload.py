"""`--push-to-hub` against a server on this machine that stands for the hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from peer import cli
from tests.use.test_trained import Saved, manifest_of

TOKEN = "hf_of_this_test"


class Hub(ThreadingHTTPServer):
    """Keeps what is committed to it, of those who show the token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Request(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        place = f"{self.server.address}/me/model"
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self._answer(200, {"url": place, "name": "me/model"})
        if "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for file in json.loads(body)["files"]]  # fmt: skip
            return self._answer(200, {"files": files})
        if self.path == "/api/validate-yaml":  # of the model card
            return self._answer(200, {"errors": [], "warnings": []})
        assert "/commit/" in self.path, self.path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._answer(200, {"commitUrl": f"{place}/commit/0", "commitOid": "0" * 40, "hookOutput": ""})

    def _answer(self, code: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)  # what HF_ENDPOINT sets, read at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


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
