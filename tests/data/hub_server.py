"""A stand-in for the hub on loopback: the requests that `datasets` and `huggingface_hub` make for one data set."""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving_hub(name: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """-> (URL, (path, header Authorization) of each request for a file's content)."""
    asked: list[tuple[str, str | None]] = []
    info = {"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": [{"rfilename": f} for f in files]}

    def described(path: str) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(files[path]), "oid": COMMIT}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            if found := re.fullmatch(rf"/datasets/{name}/resolve/[^/]+/(.*)", path):
                self._file(found.group(1))
            elif re.fullmatch(rf"/api/datasets/{name}(/revision/.*)?", path):
                self._json(info)
            elif found := re.fullmatch(rf"/api/datasets/{name}/tree/[^/]+/?(.*)", path):
                self._listing(found.group(1))
            elif re.fullmatch(rf"/api/datasets/{name}/paths-info/.*", path):
                wanted = urllib.parse.parse_qs(body.decode()).get("paths", [])
                self._json([described(file) for file in files if file in wanted])
            else:
                self._nothing()

        do_GET = do_POST = do_HEAD = answer

        def _file(self, file: str) -> None:
            if file not in files:
                self._nothing("EntryNotFound")
                return
            start, wanted = 0, self.headers.get("Range")
            if wanted:
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
            if self.command == "GET":
                asked.append((file, self.headers.get("Authorization")))
            self._send(files[file][start:], 206 if wanted else 200)

        def _listing(self, folder: str) -> None:
            """The files and folders of one folder."""
            prefix = f"{folder}/" if folder else ""
            inside = [file.removeprefix(prefix) for file in files if file.startswith(prefix)]
            if not inside:
                self._nothing("EntryNotFound")
                return
            folders = sorted({file.partition("/")[0] for file in inside if "/" in file})
            entries = [{"type": "directory", "path": prefix + name, "oid": COMMIT, "size": 0} for name in folders]
            self._json([*entries, *(described(prefix + file) for file in inside if "/" not in file)])

        def _json(self, document: Any) -> None:
            self._send(json.dumps(document).encode(), 200, "application/json")

        def _nothing(self, code: str = "RepoNotFound") -> None:
            self._send(b"", 404, error=code)

        def _send(self, body: bytes, status: int, kind: str = "application/octet-stream", error: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"one"')
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command != "HEAD":
                try:
                    self.wfile.write(body)
                except ConnectionError:
                    self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
