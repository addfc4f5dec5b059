from __future__ import annotations

import io
import os

import pytest

from peer.data import web
from peer.data.problems import FileProblem, SourceBusy
from peer.data.web import WebFile, is_public
from tests.data.web_server import serving

DATA = os.urandom(3_000_000)


def test_a_file_is_read_from_any_place_with_few_connections():
    with serving({"a": DATA}) as server, io.BufferedReader(WebFile(server.of("a")), 1 << 16) as file:
        assert file.seekable()
        assert file.read(1000) == DATA[:1000]
        file.seek(2_000_000)
        assert file.read(10) == DATA[2_000_000:2_000_010]
        file.seek(2_100_000)
        assert file.read() == DATA[2_100_000:]
        file.seek(-8, io.SEEK_END)
        assert file.read() == DATA[-8:]
        assert [request[1] for request in server.requests] == ["bytes=0-", "bytes=2000000-", "bytes=2999992-"]


def test_a_connection_that_breaks_is_made_again_where_it_broke():
    with serving({"a": DATA}) as server:
        server.breaks["a"] = 3
        with WebFile(server.of("a")) as file:
            assert io.BufferedReader(file).read() == DATA
        assert len(server.requests) == 4
        server.breaks["a"] = 100
        with WebFile(server.of("a")) as file, pytest.raises(SourceBusy, match="the connection breaks at byte"):
            io.BufferedReader(file).read()


def test_a_server_without_ranges_is_read_from_the_beginning():
    with serving({"a": DATA}) as server:
        server.ranged = False
        with WebFile(server.of("a")) as file:
            assert not file.seekable()
            assert io.BufferedReader(file).read() == DATA
        server.breaks["a"] = 1
        with WebFile(server.of("a")) as file, pytest.raises(FileProblem, match="from their first byte only"):
            io.BufferedReader(file).read()


@pytest.mark.parametrize(("code", "problem"), [(404, FileProblem), (403, FileProblem), (410, FileProblem),
                                               (429, SourceBusy), (503, SourceBusy), (500, SourceBusy)])  # fmt: skip
def test_what_may_pass_is_told_from_what_will_not(code, problem):
    with serving({"a": DATA}) as server:
        server.answers["a"] = [code]
        with pytest.raises(problem, match=f"{server.of('a')}: {code}"):
            WebFile(server.of("a"))
        assert WebFile(server.of("a")).size == len(DATA)


def test_no_server_is_no_connection():
    with serving({}) as server:
        url = server.of("a")
    with pytest.raises(SourceBusy, match="refused"):
        WebFile(url)
    with pytest.raises(SourceBusy):
        WebFile("http://no-such-host.invalid/a")


@pytest.mark.parametrize("changed", ["tag", "size"])
def test_a_file_that_changes_while_it_is_read_is_not_read_on(changed):
    with serving({"a": DATA}) as server, WebFile(server.of("a")) as file:
        assert file.read(10) == DATA[:10]
        if changed == "tag":
            server.tag = '"two"'
        else:
            server.files["a"] = DATA + b"more"
        file.seek(2_000_000)
        with pytest.raises(FileProblem, match="changed while it was read"):
            file.read(10)


def test_the_users_token_does_not_follow_a_redirect_to_another_server():
    with serving({"a": DATA}) as other, serving({}) as hub:
        hub.redirects["a"] = other.of("a")
        assert WebFile(hub.of("a"), {"Authorization": "Bearer secret"}).read(4) == DATA[:4]
        assert hub.requests[0][2] == "Bearer secret"
        assert other.requests[0][2] is None


@pytest.mark.parametrize(("url", "public"), [
    ("http://127.0.0.1/a", False), ("http://[::1]:80/a", False), ("http://192.168.1.1/a", False),
    ("http://169.254.169.254/latest/meta-data", False), ("http://10.0.0.1:8080/a", False), ("http://0.0.0.0/a", False),
    ("http://localhost/a", False), ("http://8.8.8.8/a", True), ("http://[2606:4700::1111]/a", True),
    ("http://[::ffff:127.0.0.1]/a", False), ("http://2130706433/a", False),
])  # fmt: skip
def test_an_address_of_this_network_is_told_from_the_internet(url, public):
    assert is_public(url) is public


def test_redirects_do_not_lead_into_the_network_of_the_reader(monkeypatch):
    with serving({"a": DATA}) as inside, serving({}) as outside:
        outside.redirects["a"] = inside.of("a")
        monkeypatch.setattr(web, "is_public", lambda url: url.startswith(outside.url))
        with pytest.raises(FileProblem, match=r"leads to .* of this machine or of its network"):
            WebFile(outside.of("a"), public=True)
        assert inside.requests == []
        assert WebFile(outside.of("a")).size == len(DATA)
