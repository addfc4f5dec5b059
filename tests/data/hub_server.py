"""A stand-in for the hub on loopback: the requests that `datasets` and `huggingface_hub` make for one data set."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.data.loopback import QuietHandler, on_loopback

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """One data set; `asked`: (path, header Authorization) of each request for a file's content."""

    name: str
    files: Mapping[str, bytes]
    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def described(self, path: str) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": COMMIT}

    def listing(self, folder: str) -> list[dict[str, Any]]:
        """The folders and files of one folder."""
        prefix = f"{folder}/" if folder else ""
        inside = [file.removeprefix(prefix) for file in self.files if file.startswith(prefix)]
        folders = sorted({file.partition("/")[0] for file in inside if "/" in file})
        entries = [{"type": "directory", "path": prefix + name, "oid": COMMIT, "size": 0} for name in folders]
        return [*entries, *(self.described(prefix + file) for file in inside if "/" not in file)]


class _Handler(QuietHandler):
    server: Any

    def answer(self) -> None:
        hub, body = self.server.world, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if found := re.fullmatch(rf"/datasets/{hub.name}/resolve/[^/]+/(.*)", path):
            self._file(hub, found.group(1))
        elif re.fullmatch(rf"/api/datasets/{hub.name}(/revision/.*)?", path):
            siblings = [{"rfilename": file} for file in hub.files]
            self._json({"id": hub.name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
        elif found := re.fullmatch(rf"/api/datasets/{hub.name}/tree/[^/]+/?(.*)", path):
            entries = hub.listing(found.group(1))
            self._json(entries) if entries else self._nothing("EntryNotFound")
        elif re.fullmatch(rf"/api/datasets/{hub.name}/paths-info/.*", path):
            wanted = urllib.parse.parse_qs(body.decode()).get("paths", [])
            self._json([hub.described(file) for file in hub.files if file in wanted])
        else:
            self._nothing("RepoNotFound")

    do_GET = do_POST = do_HEAD = answer

    def _file(self, hub: HubServer, file: str) -> None:
        if file not in hub.files:
            self._nothing("EntryNotFound")
            return
        if self.command == "GET":
            hub.asked.append((file, self.headers.get("Authorization")))
        start = self.first_byte()
        self.send(hub.files[file][start or 0 :], 200 if start is None else 206, ETag='"one"', X_Repo_Commit=COMMIT)

    def _json(self, document: Any) -> None:
        self.send(json.dumps(document).encode(), 200, Content_Type="application/json")

    def _nothing(self, code: str) -> None:
        self.send(b"", 404, X_Error_Code=code, X_Repo_Commit=COMMIT)


@contextmanager
def serving_hub(name: str, files: Mapping[str, bytes]) -> Iterator[HubServer]:
    hub = HubServer(name, files)
    with on_loopback(_Handler, hub) as hub.url:
        yield hub
