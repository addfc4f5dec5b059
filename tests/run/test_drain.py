"""Leaving in order: a round that is near is made first, and a notice of the cloud is seen in its own words."""

from __future__ import annotations

import http.server
import signal
import threading
from types import SimpleNamespace

import pytest

from peer.run.drain import SAVING_S, Drain
from peer.run.lifecycle import StopSignal
from peer.system.exit_signals import ending_signals
from peer.system.spot_notice import SpotNotice


class Leaving:
    """A peer that is asked to stop at a time that the test sets."""

    def __init__(self, seconds, notice_s=None):
        self.now, self.requested, self.draining = 100.0, False, True
        self.notice = None if notice_s is None else SimpleNamespace(noticed=False, notice_s=notice_s)
        self.drain = Drain(self, seconds, self.notice, lambda: self.now)
        self.sync = self.drain.sync = SimpleNamespace(rounds_contributed=4, round_in_s=8.0)


def test_without_a_drain_a_peer_leaves_at_once_and_never_unasked():
    peer = Leaving(0.0)
    assert not peer.drain.leaves()
    peer.requested = True
    assert peer.drain.leaves()


def test_a_round_within_the_drain_is_made_first():
    peer = Leaving(10.0)
    peer.requested = True
    assert not peer.drain.leaves()
    peer.now, peer.sync.round_in_s = 107.0, 0.0
    assert not peer.drain.leaves()
    peer.sync.rounds_contributed = 5
    assert peer.drain.leaves()


def test_a_round_that_is_too_far_or_does_not_come_is_not_waited_for():
    peer = Leaving(10.0)
    peer.requested, peer.sync.round_in_s = True, 11.0
    assert peer.drain.leaves()
    peer = Leaving(10.0)
    peer.requested = True
    assert not peer.drain.leaves()
    peer.now, peer.sync.round_in_s = 110.0, 0.0
    assert peer.drain.leaves()


def test_a_notice_leaves_time_to_save():
    peer = Leaving(0.0, notice_s=SAVING_S + 20.0)
    peer.notice.noticed = True
    assert not peer.drain.leaves()
    peer.now += 19.0
    peer.sync.round_in_s = 0.5
    assert not peer.drain.leaves()
    peer.now += 1.0
    assert peer.drain.leaves()


@pytest.fixture
def metadata():
    """A metadata service; `answers` has the body for a method and path, others are 404."""
    asked, answers = [], {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            asked.append((self.command, self.path, dict(self.headers)))
            body = answers.get((self.command, self.path))
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        do_GET = do_PUT = answer

        def log_message(self, *_):
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked, answers
    server.shutdown()
    server.server_close()
    thread.join()


AZURE = "/metadata/scheduledevents?api-version=2020-07-01"


@pytest.mark.parametrize(
    ("cloud", "path", "quiet", "notice", "header"),
    [
        ("aws", "/latest/meta-data/spot/instance-action", None, b'{"action":"terminate"}', "X-Aws-Ec2-Metadata-Token"),
        ("gcp", "/computeMetadata/v1/instance/preempted", b"FALSE", b"TRUE", "Metadata-Flavor"),
        ("azure", AZURE, b'{"Events":[{"EventType":"Reboot"}]}', b'{"Events":[{"EventType":"Preempt"}]}', "Metadata"),
        ("azure", AZURE, b'["Preempt"]', b'{"Events":[{"EventType":"Preempt"}]}', "Metadata"),
    ],
)
def test_each_cloud_is_asked_in_its_own_words(metadata, cloud, path, quiet, notice, header):
    address, asked, answers = metadata
    answers["PUT", "/latest/api/token"] = b"secret"
    if quiet is not None:
        answers["GET", path] = quiet
    watch = SpotNotice(cloud, address, poll_s=0.01)
    assert not watch.look()
    assert header in {name.title() for name in asked[-1][2]}
    watch.start()
    answers["GET", path] = notice
    assert watch._noticed.wait(10.0)
    assert watch.noticed


def test_a_file_is_a_notice_and_a_service_that_is_not_there_is_none(tmp_path):
    watch = SpotNotice(str(tmp_path / "notice"))
    assert not watch.look()
    (tmp_path / "notice").touch()
    assert watch.look()
    assert not SpotNotice("aws", "http://127.0.0.1:1").look()


def notice(stop):
    """As the thread that watches for one."""
    watch = threading.Thread(target=stop.on_notice)
    watch.start()
    watch.join(10.0)


def test_a_notice_before_training_interrupts_what_is_under_way():
    before = {number: signal.getsignal(number) for number in ending_signals()}
    stop = StopSignal()
    try:
        with pytest.raises(KeyboardInterrupt):
            notice(stop)
        stop.draining = True
        notice(stop)
        assert not stop.requested, "a drain hears of it itself, and has the time of the notice"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
