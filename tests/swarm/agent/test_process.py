"""An agent whose trainer is gone ends without a traceback."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from peer.link.messages import Start, encode
from peer.link.supervisor import AGENT_COMMAND, create_descriptor

START = Start(initial_peers=(), host_maddrs=("/ip4/127.0.0.1/tcp/0",), identity_path="k", nickname="a", directory=".")


@pytest.mark.parametrize("torn", [b"", encode(START)[:20]], ids=["before a word", "in the middle of a word"])
def test_a_trainer_that_is_gone_before_its_first_message_is_no_error(torn: bytes) -> None:
    ours, theirs = socket.socketpair()
    memory = create_descriptor()
    command = [*AGENT_COMMAND, "--channel", str(theirs.fileno()), "--memory", str(memory), "--parent", str(os.getpid())]
    with theirs:
        agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=(theirs.fileno(), memory))
    ours.sendall(torn)
    ours.close()
    _, said = agent.communicate(timeout=60.0)
    os.close(memory)
    assert agent.returncode == 0, said
    assert "the trainer is gone; so is this agent" in said
    assert "Traceback" not in said
