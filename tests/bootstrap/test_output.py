"""What a bootstrap node prints, once whoever read it has gone."""

from __future__ import annotations

import os
import sys

import pytest

from bootstrap.serve import say


def test_a_node_whose_output_nobody_reads_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        say("join")
        assert os.read(reading, 100) == b"join\n"
        os.close(reading)
        say("1 peers, round 1")
        say("2 peers, round 2")
    (warning,) = caplog.messages
    assert warning.startswith("standard output is closed; this node continues")
