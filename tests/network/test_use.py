"""The model of a running swarm, taken without training."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from peer import cli
from peer.checkpoint.store import look_up
from peer.outer.state.flat_layout import FlatLayout
from peer.outer.state.outer_state import digest_of
from peer.protocol.identity import Identity
from peer.protocol.manifest import RunManifest
from peer.use.generate import Sampling, generate
from peer.use.measure import measure
from peer.use.trained import After, Trained, of_state, open_trained
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.forked import ForkedAgent, run_forked
from tests.network.harness import TestSwarm
from tests.network.processes import JoinedPeer, environment
from tests.use.test_tasks import TASK


@pytest.mark.timeout(240)
def test_a_reader_takes_a_certified_state_and_is_no_member(
    make_swarm: Callable[..., TestSwarm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    bootstrap = make_swarm(steps=5, wait=2.0).bootstrap()
    one, two = (JoinedPeer(tmp_path / name, bootstrap.address) for name in ("one", "two"))
    try:
        one.wait_for(lambda: one.round >= 2 and two.round >= 2)
        taken = tmp_path / "taken"
        command = ["export", bootstrap.address, "--to", str(taken)]
        code, said = run_forked(cli.main, command, tmp_path / "export.log", environment())
        assert (code, re.findall("warning|error|traceback", said, re.IGNORECASE)) == (0, []), said
        card = (taken / "README.md").read_text()
        (round,) = map(int, re.findall(r"^\| round \| ([0-9]+) \|$", card, re.MULTILINE))
        assert round >= 2
        one.wait_for(lambda: one.round > round)
        certified = {event["round"]: event["lineage_id"] for event in one.committed}
        assert f"| lineage | `{certified[round]}` |" in card
        model = AutoModelForCausalLM.from_pretrained(taken)
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
        check_generation(bootstrap.address, one, monkeypatch, capsys)
        members = {member for event in one.committed for member in event["members"]}
        assert members == {Identity.from_bytes(peer.identity.read_bytes()).peer_id for peer in (one, two)}
    finally:
        one.close()
        two.close()


def check_generation(address: str, member: JoinedPeer, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """`atoll generate ADDRESS` while the run goes on: the digest of its state is that of the members in that round."""
    taken: list[tuple[Trained, str]] = []

    def recorded(manifest: RunManifest, vectors: Sequence[Tensor], after: After, home: Path) -> Trained:
        taken.append((of_state(manifest, vectors, after, home), digest_of(vectors, None)))
        return taken[-1][0]

    monkeypatch.setattr("peer.use.fetch.of_state", recorded)
    monkeypatch.setattr("peer.use.fetch.AgentProcess", ForkedAgent)
    argv = ["generate", address, "--prompt", "the quick", "--temperature", "0", "--max-new-tokens", "12"]
    with pytest.raises(SystemExit) as caught:
        cli.main([*argv, "--device", "cpu"])
    assert caught.value.code in (0, None)
    ((trained, digest),) = taken
    assert trained.after is not None
    following = trained.after.round + 1
    member.wait_for(lambda: member.round > following)
    (event,) = [event for event in member.committed if event["round"] == following]
    assert event["state_digest"] == digest  # a round names the state that it starts from
    said = generate(trained, "the quick", Sampling(max_new_tokens=12, temperature=0.0))
    assert capsys.readouterr().out == f"the quick{said}\n"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_continues_the_export_of_another(make_swarm: Callable[..., TestSwarm], tmp_path: Path) -> None:
    """Its first peer begins with the exported values, at their loss, and has never seen the folder."""
    first = make_swarm(steps=5, wait=2.0).bootstrap()
    peers = [JoinedPeer(tmp_path / name, first.address, "--max-rounds", "2") for name in ("one", "two")]
    try:
        assert [peer.process.wait(150) for peer in peers] == [0, 0], peers[0].log_text()
    finally:
        for peer in peers:
            peer.close()
    exported = open_trained(peers[0].folder / "export")
    text = MANIFEST.format(hidden=32, recipe=DILOCO, steps=1000, wait=2.0, total="")  # hidden: not the export's
    flags = ("--from", str(peers[0].folder / "export"))
    with closing(BootstrapProcess(tmp_path / "again", text, flags=flags)) as bootstrap:
        third = JoinedPeer(tmp_path / "third", bootstrap.address, "--eval-every-rounds", "1", "--save-steps", "20")
        try:
            third.wait_for(lambda: bool(third.events("validation") and look_up(third.folder / "checkpoints")), 200)
        finally:
            third.close()
        layout = FlatLayout.of(exported.model)
        values = torch.empty(layout.numel)
        layout.copy_to_flat(exported.model, values)
        assert torch.equal(bootstrap.genesis()[: layout.numel], values)
    began = open_trained(third.folder)
    assert began.after is not None
    assert (began.after.round, began.manifest.genesis if began.manifest else "") == (0, began.after.lineage_id)
    assert all(torch.equal(one, other) for one, other in zip(
        began.model.parameters(), exported.model.parameters(), strict=True))  # fmt: skip
    expected = measure(replace(exported, manifest=began.manifest, tokenizer=began.tokenizer), (), 32).loss
    assert third.events("validation")[0]["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_peer_scores_tasks_while_it_trains(make_swarm: Callable[..., TestSwarm], tmp_path: Path) -> None:
    bootstrap = make_swarm(steps=5, wait=2.0).bootstrap()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "rows.json").write_text('{"q": "1 is ", "a": 1}\n' * 4)
    (tmp_path / "tasks" / "colours.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.json")))
    flags = ("--eval-tasks", "colours", "--eval-task-folder", str(tmp_path / "tasks"), "--eval-tasks-every-rounds", "1")
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    one = JoinedPeer(tmp_path / "one", bootstrap.address, *flags, env=cache)
    two = JoinedPeer(tmp_path / "two", bootstrap.address)
    try:
        one.wait_for(lambda: len(one.events("tasks")) >= 2, 180.0)
        scored = one.events("tasks")
        assert all(event["colours/acc"] in (0.0, 1.0) for event in scored)
        assert scored[0]["round"] < scored[1]["round"]
        for event in scored:  # steps were made between the copy and its scores
            assert sum(event["step"] < step["step"] and step["time"] < event["time"] for step in one.events("step")) > 5
    finally:
        one.close()
        two.close()
