from __future__ import annotations

import logging
import os
import signal
import sys
import time

import pytest

from peer.errors import UserError
from peer.link import supervisor
from peer.link.messages import Anchor, Merged, Published, Save, Stop, Stopped, WantSnapshot
from peer.link.supervisor import AGENT_COMMAND, AgentGoneError, AgentProcess

# A child that speaks the protocol by hand: one JSON object a line.
PRELUDE = """
import argparse, json, os, signal, socket, sys, time
parser = argparse.ArgumentParser()
for name in ("channel", "memory", "parent"):
    parser.add_argument("--" + name, type=int)
arguments = parser.parse_args()
channel = socket.socket(fileno=arguments.channel)
lines = channel.makefile("rb")
def tell(**message):
    channel.sendall(json.dumps(message).encode() + b"\\n")
def hear():
    return json.loads(lines.readline() or "null")
"""
ECHO = "while (m := hear()): tell(kind='want_snapshot', after=m['round'])"
FATAL = "tell(kind='want_snapshot', after=1); tell(kind='fatal', what='no bootstrap', hint='start it'); hear()"
PIECES = """
channel.sendall(b'{"kind":"want_')
hear()
channel.sendall(b'snapshot","after":5}\\n')
hear()
"""
HALF_A_LINE = """
tell(kind='want_snapshot', after=os.fstat(arguments.memory).st_ino)
channel.sendall(b'{"ki')
hear()
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell(kind='want_snapshot', after=1)
while True: signal.pause()
"""
FAMILY = "pid = os.fork()\nif pid: tell(kind='want_snapshot', after=pid)\nwhile True: signal.pause()"


@pytest.fixture
def launch(tmp_path):
    agents = []

    def start(body, **arguments):
        agent = AgentProcess(tmp_path / "agent.log", (sys.executable, "-S", "-c", PRELUDE + body), **arguments)
        agents.append(agent)
        agent.start()
        return agent

    yield start
    for agent in agents:
        agent.close()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_agent_is_a_module_of_this_interpreter():
    assert (sys.executable, "-m", "peer.swarm.agent.process") == AGENT_COMMAND


def test_messages_go_both_ways_in_order(launch):
    agent = launch(ECHO)
    for number in range(50):
        agent.send(Merged(round=number))
    assert [agent.receive(10.0) for _ in range(50)] == [WantSnapshot(after=number) for number in range(50)]
    assert agent.receive() is None
    assert agent.running


def test_a_message_may_come_in_pieces(launch):
    agent = launch(PIECES)
    assert agent.receive(0.2) is None
    agent.send(Merged(round=0))
    assert agent.receive(10.0) == WantSnapshot(after=5)


def test_what_was_said_before_the_end_is_heard(launch):
    agent = launch("tell(kind='want_snapshot', after=1); tell(kind='want_snapshot', after=2)")
    assert agent.receive(10.0) == WantSnapshot(after=1)
    assert agent.receive(10.0) == WantSnapshot(after=2)
    with pytest.raises(AgentGoneError):
        agent.receive(10.0)


def test_what_was_said_before_the_end_is_heard_if_the_agent_leaves_messages_unread(launch):
    """The connection is then reset, which must not hide what has arrived before."""
    agent = launch("channel.recv(1, socket.MSG_PEEK); tell(kind='want_snapshot', after=1); sys.exit(0)")
    agent.send(Merged(round=0))
    agent._process.wait(10.0)
    assert agent.receive(10.0) == WantSnapshot(after=1)
    with pytest.raises(AgentGoneError):
        agent.receive(10.0)


def test_a_dead_agent_is_gone_for_both_directions(launch):
    agent = launch("sys.exit(3)")
    with pytest.raises(AgentGoneError):
        agent.receive(10.0)
    with pytest.raises(AgentGoneError):
        agent.send(Merged(round=0))


def test_an_agent_that_was_never_started_is_gone(tmp_path):
    agent = AgentProcess(tmp_path / "agent.log")
    assert not agent.running
    assert agent.pid is None
    with pytest.raises(AgentGoneError, match="not started"):
        agent.send(Stop())
    with pytest.raises(AgentGoneError, match="not started"):
        agent.receive()
    agent.close()


def test_an_agent_that_does_not_read_is_gone_in_bounded_time(launch, monkeypatch):
    monkeypatch.setattr(supervisor, "SEND_TIMEOUT_S", 0.2)
    agent = launch("signal.pause()")
    large = Save(path="x" * 1_000_000)
    began = time.monotonic()
    with pytest.raises(AgentGoneError, match="does not read"):
        agent.send(large)
    assert 0.2 <= time.monotonic() - began < 2.0


def test_expect_drops_others_and_returns_the_wanted_kind(launch):
    agent = launch(
        "tell(kind='want_snapshot', after=1)\n"
        "tell(kind='stopped', round=4, lineage_id=None, state_digest=None, round_bytes_sent=1,"
        " round_bytes_received=2, state_bytes_sent=3, state_bytes_received=4); hear()"
    )
    assert agent.expect(Stopped, 10.0).round == 4


def test_a_fatal_condition_is_the_users(launch):
    with pytest.raises(UserError, match="no bootstrap") as caught:
        launch(FATAL).expect(Published, 10.0)
    assert caught.value.hint == "start it"


def test_an_end_while_expecting_names_the_log(launch, tmp_path):
    with pytest.raises(UserError, match="ended unexpectedly") as caught:
        launch("print('why', flush=True); print('oh', file=sys.stderr)").expect(Published, 10.0)
    assert str(tmp_path / "agent.log") in caught.value.hint
    assert (tmp_path / "agent.log").read_text() == "why\noh\n"


def test_a_long_wait_is_told_with_what_the_agent_does(launch, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "QUIET_S", 0.0)
    agent = launch("print('chunk 3 of 9', flush=True); tell(kind='want_snapshot', after=1); hear()")
    agent.expect(WantSnapshot, 10.0)
    with pytest.raises(UserError, match="sent no anchor"):
        agent.expect(Anchor, 1.2)  # looks three times: a line that the agent writes takes a moment to the log
    assert "waiting for the swarm's state for 0 s: chunk 3 of 9" in caplog.text
    said = [record for record in caplog.records if "waiting for" in record.message]
    assert {record.levelno for record in said} == {logging.WARNING}  # a script without logging shows these


def test_silence_while_expecting_names_the_message_and_the_limit(launch):
    with pytest.raises(UserError, match=r"sent no published within 0\.2 s"):
        launch("hear()").expect(Published, 0.2)


def test_end_waits_for_an_agent_that_leaves_by_itself(launch):
    agent = launch("hear()")
    agent.send(Stop())
    agent.end(10.0)
    assert not agent.running
    with pytest.raises(AgentGoneError):
        agent.receive()


def test_end_kills_an_agent_that_ignores_sigterm(launch):
    agent = launch(STUBBORN)
    assert agent.receive(10.0) == WantSnapshot(after=1)
    os.kill(agent.pid, signal.SIGTERM)
    began = time.monotonic()
    agent.end(0.2)
    assert 0.2 <= time.monotonic() - began < 2.0
    assert not agent.running


def test_end_kills_the_agents_own_children(launch):
    agent = launch(FAMILY)
    grandchild = agent.receive(10.0).after
    assert alive(grandchild)
    agent.end(0.0)
    deadline = time.monotonic() + 5.0
    while alive(grandchild) and time.monotonic() < deadline:
        os.sched_yield()
    assert not alive(grandchild)


def test_restarts_back_off_up_to_half_a_minute(launch):
    now = [100.0]
    agent = launch("hear()", clock=lambda: now[0])
    for delay in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        agent.end(0.0)
        now[0] += delay - 0.001
        assert not agent.may_restart
        now[0] += 0.001
        assert agent.may_restart
        agent.start()
    assert agent.starts == 8


def test_a_restarted_agent_shares_nothing_with_the_last_but_the_memory(launch):
    agent = launch(HALF_A_LINE)
    first = agent.receive(10.0)
    assert agent.receive(0.1) is None  # half a line is in the buffer
    agent.end(0.0)
    agent.start()
    assert agent.receive(10.0) == first
    assert first.after == os.fstat(agent.memory_descriptor).st_ino
