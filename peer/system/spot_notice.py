"""Whether the cloud is about to take this machine back: its metadata service, or a file, is asked every few seconds."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)
METADATA = "http://169.254.169.254"  # the same in all three clouds, and only this machine sees it
POLL_S, ANSWER_S = 5.0, 2.0
MAX_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True)
class Cloud:
    """Where a cloud says so.

    Attributes:
        notice_s: seconds from the notice to the end.
        says_so: whether an answer is a notice.
        token: path that gives a token first; empty: none is needed.
    """

    path: str
    notice_s: float
    says_so: Callable[[bytes], bool] = lambda _: True
    headers: Mapping[str, str] | None = None
    token: str = ""


def _preempted(answer: bytes) -> bool:
    """Whether Azure's scheduled events name the end of this machine."""
    try:
        document = json.loads(answer)
        return any(event.get("EventType") == "Preempt" for event in document.get("Events", ()))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return False


CLOUDS = {
    "aws": Cloud("/latest/meta-data/spot/instance-action", 120.0, token="/latest/api/token"),
    "gcp": Cloud("/computeMetadata/v1/instance/preempted", 30.0, lambda answer: b"TRUE" in answer,
                 {"Metadata-Flavor": "Google"}),
    "azure": Cloud("/metadata/scheduledevents?api-version=2020-07-01", 30.0, _preempted, {"Metadata": "true"}),
}


class SpotNotice:
    """Looks for a notice, in a thread of its own.

    Args:
        source: a name of CLOUDS, or the path of a file that appears with the notice.
        metadata: address of the metadata service.
        on_notice: called in that thread.

    Attributes:
        notice_s: seconds from a notice to the end, as the source promises.
    """

    def __init__(
        self, source: str, metadata: str = METADATA, poll_s: float = POLL_S,
        on_notice: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._source, self._metadata, self._poll_s, self._on_notice = source, metadata, poll_s, on_notice
        self._cloud = CLOUDS.get(source)
        self.notice_s = self._cloud.notice_s if self._cloud is not None else 30.0
        self._noticed, self._closed = threading.Event(), threading.Event()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy sees this service

    @property
    def noticed(self) -> bool:
        """The machine will be taken back."""
        return self._noticed.is_set()

    def start(self) -> None:
        """Look every few seconds, until `close` or a notice."""
        threading.Thread(target=self._watch, name="spot-notice", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            if self.look():
                log.warning("%s takes this machine back within %.0f s", self._source, self.notice_s)
                self._noticed.set()
                self._on_notice()
                return
            self._closed.wait(self._poll_s)

    def look(self) -> bool:
        """Whether there is a notice now; a service that does not answer gives none."""
        if self._cloud is None:
            with contextlib.suppress(OSError):
                return Path(self._source).exists()
            return False
        headers = dict(self._cloud.headers or {})
        if self._cloud.token:
            token = self._ask(self._cloud.token, {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, "PUT")
            headers["X-aws-ec2-metadata-token"] = (token or b"").decode("ascii", "replace").strip()
        answer = self._ask(self._cloud.path, headers)
        return answer is not None and self._cloud.says_so(answer)

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> bytes | None:
        request = urllib.request.Request(self._metadata + path, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=ANSWER_S) as answer:
                content: bytes = answer.read(MAX_ANSWER_BYTES)
                return content
        except (OSError, ValueError, http.client.HTTPException):  # 404: no notice; or this is another cloud
            return None
