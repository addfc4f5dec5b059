"""The model of a running swarm, taken without training."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peer.protocol.identity import Identity
from tests.network.harness import TestSwarm
from tests.network.processes import JoinedPeer


@pytest.mark.timeout(240)
def test_a_reader_takes_a_certified_state_and_is_no_member(
    make_swarm: Callable[..., TestSwarm], tmp_path: Path
) -> None:
    bootstrap = make_swarm(steps=5, wait=2.0).bootstrap()
    one, two = (JoinedPeer(tmp_path / name, bootstrap.address) for name in ("one", "two"))
    try:
        one.wait_for(lambda: one.round >= 2 and two.round >= 2)
        taken = tmp_path / "taken"
        command = [sys.executable, "-m", "peer.cli", "export", bootstrap.address, "--to", str(taken)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        card = (taken / "README.md").read_text()
        (round,) = map(int, re.findall(r"^\| round \| ([0-9]+) \|$", card, re.MULTILINE))
        assert round >= 2
        one.wait_for(lambda: one.round > round)
        certified = {event["round"]: event["lineage_id"] for event in one.committed}
        assert f"| lineage | `{certified[round]}` |" in card
        model = AutoModelForCausalLM.from_pretrained(taken)
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
        members = {member for event in one.committed for member in event["members"]}
        assert members == {Identity.from_bytes(peer.identity.read_bytes()).peer_id for peer in (one, two)}
    finally:
        one.close()
        two.close()
