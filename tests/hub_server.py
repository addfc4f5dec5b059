"""A server on this machine that stands for the hub, as far as uploads go."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """One that answers until the context ends."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
