"""A folder over HTTP, with ranges of bytes: `python -m benchmarks.file_server FOLDER`; prints its port."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class RangedHandler(SimpleHTTPRequestHandler):
    """Serves files from any byte on."""

    def do_GET(self) -> None:
        """One file, from the first byte of the header `Range` to its end."""
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        size, wanted = path.stat().st_size, self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0] or 0)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(size - start))
        self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            try:
                shutil.copyfileobj(file, self.wfile)
            except ConnectionError:
                self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the benchmark reads standard output."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(RangedHandler, directory=sys.argv[1]))
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
