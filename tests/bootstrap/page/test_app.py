"""The web application: headers, documents that match their description, refusals, updates."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import zlib
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from bootstrap.page import app
from bootstrap.page.app import STATIC, Page
from bootstrap.page.openapi import API, SCHEMAS
from tests.bootstrap.page.boards import ADDRESS, Watching
from tests.explain.samples import aborted

ROOT = Path(__file__).parents[3]
HOSTILE = "<img src=x onerror=alert(1)>\u202e{{7*7}}"


@pytest.fixture
async def watching(tmp_path):
    watching = Watching(tmp_path, rounds=2)
    watching.join(loss=2.5)
    watching.watched.report(
        watching.members[0], aborted(3, 104.0, "exchange", HOSTILE), device=HOSTILE, sample=HOSTILE, utilisation=0.5
    )
    await watching.look()
    return watching


@pytest.fixture
def page(watching):
    return Page(watching.board)


@pytest.fixture
def client(page):
    return TestClient(page.app())


def fits(document: Any, schema: dict[str, Any], where: str) -> None:
    """Whether a document has what its description says, and nothing else at the top."""
    if "$ref" in schema:
        return fits(document, SCHEMAS[schema["$ref"].rsplit("/", 1)[1]], where)
    if "enum" in schema:
        assert document in schema["enum"], where
        return None
    names = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    assert any(isinstance(document, names[kind]) for kind in kinds), f"{where}: {document!r} is no {kinds}"
    if isinstance(document, list):
        for place, item in enumerate(document):
            fits(item, schema["items"], f"{where}[{place}]")
    for name in schema.get("required", ()):
        fits(document[name], schema["properties"][name], f"{where}.{name}")
    return None


@pytest.mark.parametrize("path", [path for path in API if path.startswith("/api") and not path.endswith("updates")])
def test_each_document_fits_its_description(client, path):
    answer = client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    content = client.get("/openapi.json").json()["paths"][path]["get"]["responses"]["200"]["content"]
    fits(answer.json(), content["application/json"]["schema"], path)


def test_the_state_has_peers_rounds_and_the_command_to_join(client, watching):
    state = client.get("/api/v1/state").json()
    assert {peer["nickname"] for peer in state["peers"]} == {"alpha", "bravo", "charlie"}
    assert {(row["round"], row["status"]) for row in state["rounds"]} == {
        (1, "committed"), (2, "committed"), (3, "aborted"),
    }  # fmt: skip
    assert state["run"]["join"] == [f"atoll join {ADDRESS}"]
    assert state["run"]["recipe"]["compressor"] == "int8"
    assert state["now"]["lineage_id"] == watching.run.history.lineage_id(2)


def test_words_of_strangers_pass_as_one_line_of_text(client):
    state = client.get("/api/v1/state").json()
    (failed,) = [row for row in state["rounds"] if row["status"] == "aborted"]
    assert failed["details"][0] == "reason: <img src=x onerror=alert(1)>?{{7*7}}"
    assert state["samples"][0]["text"] == "<img src=x onerror=alert(1)>?{{7*7}}"


def test_every_answer_forbids_what_the_page_does_not_need(client):
    for path in ("/", "/main.js", "/api/v1/state", "/metrics", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_the_page_has_no_script_or_style_of_its_own_and_no_foreign_address():
    text = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", text) == []
    assert re.findall(r"<style|\son[a-z]+=|\sstyle=|javascript:", text) == []
    for path in STATIC.glob("*.*"):
        found = re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"']+", path.read_text())
        assert found == [], path.name


def test_no_module_makes_markup_of_text():
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|setHTML|srcdoc"
    for path in STATIC.glob("*.js"):
        assert not re.search(makers, path.read_text())


def test_uplot_comes_with_its_licence(client):
    licence = client.get("/vendor/uplot/LICENSE")
    assert licence.status_code == 200
    assert "The MIT License" in licence.text
    assert client.get("/vendor/uplot/uPlot.iife.min.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_only_reads(client, method):
    for path in ("/", "/api/v1/state", "/metrics"):
        assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "path", ["/../genesis.bin", "/vendor/../../app.py", "/%2e%2e/app.py", "/identity.key", "/api/v1/"]
)
def test_it_serves_nothing_else(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/api/v1/rounds?limit=1000", "limit must be a whole number from 1 to 200"),
        ("/api/v1/rounds?limit=-1", "limit must be"),
        ("/api/v1/rounds?limit=9e9", "limit must be"),
        ("/api/v1/rounds?before=x", "before must be"),
        ("/api/v1/rounds?status=%27%20OR%201", "status must be one of"),
        ("/api/v1/curve?points=1", "points must be a whole number from 2 to 1500"),
        ("/api/v1/state?x=1", "unknown parameter 'x'"),
        ("/api/v1/peers?limit=3", "unknown parameter 'limit'"),
    ],
)
def test_wrong_parameters_are_refused_in_words(client, path, problem):
    answer = client.get(path)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]


def test_answers_are_compressed_and_not_sent_twice(client):
    first = client.get("/api/v1/state")
    assert first.headers["content-encoding"] == "gzip"
    again = client.get("/api/v1/state", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "content-encoding" not in client.get("/api/v1/state", headers={"accept-encoding": "identity"}).headers


def test_metrics_follow_the_conventions(client):
    text = client.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines["atoll_rounds_total"] == "2.0"
    assert lines['atoll_peers{state="training"}'] == "3.0"
    assert lines["atoll_training_loss"] == "2.5"
    assert lines['atoll_events_total{status="aborted"}'] == "1.0"
    assert lines['atoll_bootstrap_traffic_bytes_total{direction="sent",purpose="history"}'] == "5.0"
    assert lines["atoll_utilisation_ratio"] == "0.5"
    assert sum(name.startswith("atoll_peer_training_loss{") for name in lines) == 3
    for name in re.findall(r"# TYPE (\S+) (?:counter|gauge)", text):
        assert re.fullmatch(r"atoll_[a-z_]+", name)
        assert not re.search(r"_(ms|kb|mb|percent|min)$", name)
    assert all(f"# HELP {name}" in text for name in re.findall(r"# TYPE (\S+)", text))


SCOPE = {
    "type": "http", "method": "GET", "path": "/api/v1/updates", "query_string": b"", "headers": [], "root_path": "",
    "http_version": "1.1", "scheme": "http",
}  # fmt: skip


def test_the_dashboard_asks_for_nothing_that_is_not_there(client):
    text = client.get("/metrics").text
    dashboard = json.loads((ROOT / "deploy/grafana/atoll-run.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(r"atoll_[a-z_]+", target["expr"])}  # fmt: skip
    assert len(asked) >= 12
    optional = {"atoll_remaining_seconds", "atoll_validation_loss"}  # of a run with a pace and a validation
    assert {name for name in asked - optional if not re.search(rf"^{name}\b", text, re.MULTILINE)} == set()


class Browser:
    """Listens to updates until so many have come."""

    def __init__(self, page, updates, encoding="identity"):
        self.text, self._updates, self._done = "", updates, asyncio.Event()
        self.received, self._unpacker = 0, zlib.decompressobj(16 + zlib.MAX_WBITS) if encoding == "gzip" else None
        scope = {**SCOPE, "headers": [(b"accept-encoding", encoding.encode())]}
        self.listening = asyncio.ensure_future(page.app()(scope, self._receive, self._send))

    async def _receive(self):
        await self._done.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        part = message.get("body", b"")
        self.received += len(part)
        self.text += (self._unpacker.decompress(part) if self._unpacker else part).decode()
        if self.text.count(": update") + self.text.count(": ping") >= self._updates:
            self._done.set()

    async def heard(self, updates):
        async with asyncio.timeout(10.0):
            while self.text.count("event: update") < updates:
                await asyncio.sleep(0)


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_updates_arrive_as_they_come(page, watching, encoding):
    browser, before = Browser(page, 2, encoding), watching.board.version
    while "retry" not in browser.text:
        await asyncio.sleep(0)
    await watching.look(1.0)
    await browser.heard(1)
    assert page.listeners == 1
    watching.watched.peer(watching.members[0], "alpha", loss=1.25)
    await watching.look(1.0)
    await browser.listening
    documents = [json.loads(line[6:]) for line in browser.text.splitlines() if line.startswith("data: ")]
    assert [document["version"] for document in documents] == [before + 1, before + 2]
    assert documents[1]["peers"] == [{"peer_id": watching.members[0], "loss": 1.25}]
    assert (browser.received < len(browser.text)) == (encoding == "gzip")
    assert browser.text.startswith("retry: 3000\n\n")
    assert page.listeners == 0


async def test_no_document_is_made_in_the_event_loop(page, watching, monkeypatch):
    made = []

    def noting(make):
        return lambda *given: made.append(threading.current_thread()) or make(*given)

    for name in ("state", "now", "peers", "rounds"):
        monkeypatch.setattr(watching.board, name, noting(getattr(watching.board, name)))
    transport = httpx2.ASGITransport(app=page.app())
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        paths = ("/api/v1/state", "/api/v1/now", "/api/v1/peers", "/api/v1/rounds", "/metrics")
        answers = await asyncio.gather(*(client.get(path) for path in paths for _ in range(3)))
    assert {answer.status_code for answer in answers} == {200}
    assert threading.main_thread() not in made
    assert len(made) <= 3 + len(paths)  # each once for three who ask; some are part of others


async def test_a_silent_board_sends_signs_of_life(page, monkeypatch):
    monkeypatch.setattr(app, "PING_S", 0.01)
    browser = Browser(page, 1)
    async with asyncio.timeout(10.0):
        await browser.listening
    assert browser.text.endswith(": ping\n\n")


def test_listeners_are_bounded(page, client):
    page.listeners = app.MAX_LISTENERS
    answer = client.get("/api/v1/updates")
    assert answer.status_code == 503
    assert "ask /api/v1/state instead" in answer.json()["error"]


async def test_a_browser_that_does_not_read_is_given_up(page, monkeypatch):
    monkeypatch.setattr(app, "SEND_S", 0.01)

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    async with asyncio.timeout(10.0):
        await page.app()(dict(SCOPE), receive, send)
    assert page.listeners == 0


def test_a_bug_in_one_answer_is_logged_and_ends_no_other(client, watching, monkeypatch, caplog):
    monkeypatch.setattr(watching.board, "now", lambda: 1 / 0)
    assert client.get("/api/v1/now").status_code == 500
    assert "a request failed: /api/v1/now" in caplog.text
    assert client.get("/api/v1/run").status_code == 200
