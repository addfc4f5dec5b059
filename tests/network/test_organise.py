"""The organiser's hand on real peers: pause, resume, extend, announce, finish, while the bootstrap runs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from bootstrap.organise import organise
from peer.outer.optim.inner_lr import SETTLED_STEPS, learning_rate
from peer.protocol.manifest import parse_manifest
from peer.run.runs import look
from peer.telemetry.metrics import read_metrics
from tests.chain_files import read_chain
from tests.hub_server import TOKEN, Hub, serving_hub
from tests.network.bootstraps import BootstrapProcess
from tests.network.chaos.namespaces import Namespace
from tests.network.chaos.shim import library
from tests.network.harness import TestSwarm
from tests.network.processes import LAUNCH, LOOPBACK, PAUSE, JoinedPeer, environment, run, until

MakeSwarm = Callable[..., TestSwarm]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub() as hub:
        yield hub


def command(folder: Path, *words: str) -> str:
    """What one of the organiser's commands prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert organise([words[0], "--state-dir", str(folder), *words[1:]]) == 0
    return said.getvalue()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_is_paused_joined_resumed_extended_and_ended(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    bootstrap = make_swarm(steps=5, wait=2.0, total=100_000).bootstrap()
    peers = [JoinedPeer(tmp_path / name, bootstrap.address) for name in ("one", "two")]
    try:
        for peer in peers:
            peer.wait_for(lambda peer=peer: peer.round >= 2)
        command(bootstrap.folder, "announce", "a pause at noon")
        assert "is paused" in command(bootstrap.folder, "pause")
        for peer in peers:
            peer.wait_for(lambda peer=peer: any("has paused the run" in line for line in peer.said("warning")))
            assert sum("the organiser says: a pause at noon" in line for line in peer.said("warning")) == 1
        late = JoinedPeer(tmp_path / "late", bootstrap.address)
        peers.append(late)
        late.wait_for(lambda: any("has paused the run" in line for line in late.said("info")))
        late.wait_for(lambda: any("training from round" in line for line in late.said("info")))
        stood = [(peer.step, peer.round) for peer in peers]
        PAUSE.wait(2.0)  # in which dozens of steps would be made
        assert [(peer.step, peer.round) for peer in peers] == stood
        assert "continues" in command(bootstrap.folder, "resume")
        for peer, (step, round) in zip(peers, stood, strict=True):
            peer.wait_for(lambda peer=peer, step=step, round=round: peer.step > step and peer.round >= round + 2)
        assert "20,000 rounds" in command(bootstrap.folder, "extend", "--rounds", "20000")
        command(bootstrap.folder, "finish")
        for peer in peers:
            until(lambda peer=peer: peer.process.poll() is not None, 100.0, peer.log_text)
            assert peer.process.returncode == 0, peer.log_text()
            (end,) = [event for event in read_metrics(peer.folder / "metrics.jsonl") if event["event"] == "end"]
            assert end["reason"] in ("the run is complete", "the organiser has ended the run")
            assert (peer.folder / "export" / "model.safetensors").exists()
        assert len({peer.round for peer in peers}) == 1
    finally:
        for peer in peers:
            peer.close()


class StartedNode:
    """`atoll-bootstrap` with these manifests, started as a user starts it."""

    def __init__(
        self, folder: Path, *texts: str, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        paths = [folder / f"run{number}.yaml" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        flags = [*flags, "--json", "--state-dir", str(folder), "--no-nat-port-map", "--host-maddrs", LOOPBACK]
        self.process = subprocess.Popen(
            [*LAUNCH, sys.executable, "-m", "bootstrap.cli", *map(str, paths), *flags], env=environment(env),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address: str = json.loads(self.process.stdout.readline())["addresses"][0]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_runs_at_one_bootstrap_do_not_mix(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    text = make_swarm(steps=5, wait=2.0).manifest_text
    small, large = (text.replace("name: test", f"name: {name}").replace("seed: 3", f"seed: {seed}")
                    for name, seed in (("small", 3), ("large", 4)))  # fmt: skip
    bootstrap = StartedNode(tmp_path / "bootstrap", small, large)
    peers = {(run, name): JoinedPeer(tmp_path / f"{run}-{name}", bootstrap.address, "--run", run)
             for run in ("small", "large") for name in ("one", "two")}  # fmt: skip
    try:
        for peer in peers.values():
            peer.wait_for(lambda peer=peer: any(len(event["members"]) == 2 for event in peer.committed))
        rows = {row["run"]: row for row in asyncio.run(look(bootstrap.address, tmp_path))}
        assert {name: (row["peers"], row["entry"]) for name, row in rows.items()} == {
            "small": (2, "open"), "large": (2, "open"),
        }  # fmt: skip
        assert rows["small"]["run_id"] != rows["large"]["run_id"]
        peers["any", "any"] = undecided = JoinedPeer(tmp_path / "any", bootstrap.address)
        assert undecided.process.wait(100) == 2
        said = (tmp_path / "any" / "console.log").read_text()
        assert "the swarm holds 2 runs; say which one" in said
        assert "--run large" in said
        del peers["any", "any"]
        assert "is paused" in command(bootstrap.folder, "pause", "--run", "small")
        for (name, _), peer in peers.items():
            ids = {other.events("start")[0]["peer_id"] for (of, _), other in peers.items() if of == name}
            assert {member for event in peer.committed for member in event["members"]} == ids
            assert peer.events("start")[0]["run_id"] == rows[name]["run_id"]
            if name == "small":
                peer.wait_for(lambda peer=peer: any("has paused the run" in line for line in peer.said("warning")))
        for (name, _), peer in peers.items():
            if name == "large":
                before = peer.round
                peer.wait_for(lambda peer=peer, before=before: peer.round >= before + 3)
                assert not peer.said("warning") or "paused" not in " ".join(peer.said("warning"))
    finally:
        for peer in peers.values():
            peer.close()
        bootstrap.close()


def look_in_vain(address: str, folder: Path) -> None:
    """Commands of an outsider, who has no invitation, end with what to do."""
    for words in (["data", "coverage"], ["export", "--to", str(folder / "model")]):
        code, said = run("peer.cli", [*words, address])
        assert (code, "for invited peers" in said, "Traceback" in said) == (2, True, False), said
        assert "the output folder of a peer" in said


def shown_address(peer: JoinedPeer) -> str:
    """The address at which this peer says that others can join."""
    said = " ".join(line for line in peer.said("info") if "others can join" in line)
    (address,) = {word for word in said.split() if "/p2p/" in word}
    return address


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_of_invited_peers_lets_no_other_in_and_puts_a_revoked_one_out(
    make_swarm: MakeSwarm, tmp_path: Path
) -> None:
    swarm = make_swarm(steps=5, wait=2.0)
    swarm.manifest_text = swarm.manifest_text.replace("identity_work: 0", "invited: true")
    bootstrap = swarm.bootstrap()
    tokens = {name: command(bootstrap.folder, "invite", name).strip() for name in ("one", "two", "three", "carol")}
    (tmp_path / "token").write_text(tokens["two"] + "\n")
    given = {"one": tokens["one"], "two": f"@{tmp_path / 'token'}", "three": tokens["three"]}
    peers = [JoinedPeer(tmp_path / n, bootstrap.address, "--invitation", token) for n, token in given.items()]
    one, two, three = peers
    try:
        for peer in peers:
            peer.wait_for(lambda peer=peer: any(len(event["members"]) == 3 for event in peer.committed))
        command(bootstrap.folder, "revoke", "three")
        command(bootstrap.folder, "revoke", "carol")
        refused = {
            "stranger": ((), "this run is for invited peers: you gave no invitation"),
            "thief": (("--invitation", tokens["one"]), "is used by another key"),
            "carol": (("--invitation", tokens["carol"]), "carol's invitation has been revoked"),
            "damaged": (("--invitation", tokens["one"][:-9]), "the invitation is damaged"),
        }
        outside = {n: JoinedPeer(tmp_path / n, bootstrap.address, *flags) for n, (flags, _) in refused.items()}
        peers += outside.values()
        until(lambda: three.process.poll() is not None, 60.0, three.log_text)
        assert three.process.returncode == 2
        assert any("invitation 3 is revoked" in line for line in three.said("error"))
        look_in_vain(bootstrap.address, tmp_path)
        last, three_id = three.committed[-1]["round"], three.events("start")[0]["peer_id"]
        for peer in (one, two):
            peer.wait_for(lambda peer=peer: peer.round >= last + 5)
            with_three = [event["round"] for event in peer.committed if three_id in event["members"]]
            assert max(with_three) <= last + 1
        for name, (_, reason) in refused.items():
            until(lambda name=name: outside[name].process.poll() is not None, 60.0, outside[name].log_text)
            assert outside[name].process.returncode == 2
            assert reason in (tmp_path / name / "console.log").read_text()
            assert outside[name].step == 0
        two.signal(signal.SIGINT)
        assert two.process.wait(60) == 0
        bootstrap.close()  # a peer that has entered once needs it no more
        left_at = two.round
        peers.append(again := JoinedPeer(tmp_path / "two", shown_address(one)))
        again.wait_for(lambda: again.round > left_at)
    finally:
        for peer in peers:
            peer.close()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_rounds_go_on_past_the_end_of_the_manifest_once_it_is_moved(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    old, new, steps = 80, 160, 5
    text = make_swarm(steps=steps, wait=2.0, total=old).manifest_text
    text = text.replace("batch_sequences: 4", "batch_sequences: 4, warmup_steps: 0, schedule: cosine")
    bootstrap = BootstrapProcess(tmp_path / "bootstrap", text, flags=["--http", "127.0.0.1:0"])
    (notice := tmp_path / "notice").touch()
    taken = JoinedPeer(tmp_path / "taken", bootstrap.address, "--spot-notice", str(notice))  # while it arrives
    peers = [JoinedPeer(tmp_path / name, bootstrap.address) for name in ("one", "two")]
    try:
        assert (taken.process.wait(60), taken.step) == (130, 0), taken.log_text()
        assert any("takes this machine back" in line for line in taken.said("warning"))
        peers[0].wait_for(lambda: peers[0].round >= 1)
        assert f"{new} rounds" in command(bootstrap.folder, "extend", "--rounds", str(new))
        peers[0].wait_for(lambda: peers[0].round > old)
        command(bootstrap.folder, "pause")
        with urllib.request.urlopen(f"{bootstrap.page}api/v1/now", timeout=10.0) as answer:
            now = json.load(answer)
        assert (now["goal"], now["done"]) == ({"rounds": new, "tokens": None}, now["round"] / new)
        code, said = run("peer.cli", ["watch", bootstrap.address, "--once"])
        assert (code, f" of {new} (" in said) == (0, True), said
        command(bootstrap.folder, "resume")
        for peer in peers:
            until(lambda peer=peer: peer.process.poll() is not None, 100.0, peer.log_text)
            assert peer.process.returncode == 0, peer.log_text()
            assert [peer.round, len({event["round"] for event in peer.committed})] == [new, new]
            rates = {event["round"]: event["learning_rate"] for event in peer.events("step")}
            inner = parse_manifest(text, "test").inner
            for round in (old + 1, new - 1):  # the last step of each
                expected = learning_rate(inner, (round + 1) * steps - 1, new * steps, SETTLED_STEPS)
                assert rates[round] == pytest.approx(expected, rel=0.2)
            assert rates[old + 1] > 2 * rates[new - 1]
    finally:
        for peer in (*peers, taken):
            peer.close()
        bootstrap.close()


def check_receipt(bootstrap: BootstrapProcess, peer: JoinedPeer, rounds: int, home: Path) -> None:
    """One is verified on a machine without any network, by a user who has nothing; one changed digit fails."""
    home.mkdir()
    ada, organiser = peer.events("start")[0]["peer_id"], bootstrap.address.rsplit("/", 1)[-1]
    code, said = run("peer.cli", ["receipts", "write", str(bootstrap.folder), "--peer", ada, "--to", str(home / "ada")])
    assert (code, f"in {len(peer.committed)} of {rounds} rounds" in said) == (0, True), said
    content = (home / "ada").read_bytes()
    place = content.index(b'"tokens":') + len(b'"tokens":')
    digit = b"1" if content[place : place + 1] != b"1" else b"2"
    (home / "changed").write_bytes(content[:place] + digit + content[place + 1 :])
    words = [sys.executable, "-I", "-m", "peer.cli", "receipts", "verify", "--signer", organiser]
    with Namespace("offline").entered():
        for name, code, heading in (("ada", 0, f"valid   {ada}"), ("changed", 2, "changed is no valid receipt: ")):
            done = subprocess.run([*words, name], env={"HOME": str(home)}, cwd=home, capture_output=True, text=True,
                                  timeout=60)  # fmt: skip
            assert (done.returncode, heading in done.stdout + done.stderr) == (code, True), done
            assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_whose_peers_all_leave_goes_on_a_day_later_from_the_archive(
    make_swarm: MakeSwarm, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, flags = make_swarm(steps=5, wait=2.0).manifest_text, ["--archive", str(tmp_path / "archive")]
    for name, value in (("HF_ENDPOINT", hub.address), ("HF_TOKEN", TOKEN), ("HF_HUB_OFFLINE", "0")):
        monkeypatch.setenv(name, value)
    uploading = [*flags, "--push-to-hub", "me/model", "--push-every", "2"]
    bootstrap: BootstrapProcess | StartedNode = BootstrapProcess(tmp_path / "bootstrap", text, flags=uploading)
    peers = [JoinedPeer(tmp_path / name, bootstrap.address, "--report", str(tmp_path / f"{name}.json"))
             for name in ("one", "two")]  # fmt: skip
    try:
        for peer in peers:
            peer.wait_for(lambda peer=peer: peer.round >= 4)
        chain = next((tmp_path / "bootstrap" / "history").glob("*/chain.jsonl"))
        until(lambda: len(read_chain(chain)) > 0, 60.0, chain.read_text)
        until(lambda: "model.safetensors" in hub.files, 60.0, (tmp_path / "bootstrap" / "node.log").read_text)
        command(bootstrap.folder, "finish")
        for peer in peers:
            until(lambda peer=peer: peer.process.poll() is not None, 240.0, peer.log_text)
            assert peer.process.returncode == 0
        ends = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two")]
        assert ends[0]["state_digest"] == ends[1]["state_digest"]
        last, kept = max(peer.round for peer in peers), next((tmp_path / "archive").glob("*/chain.jsonl"))
        until(lambda: len(read_chain(kept)) >= last, 30.0, kept.read_text)
        exported = (tmp_path / "one" / "export" / "model.safetensors").read_bytes()
        until(lambda: hub.files["model.safetensors"] == exported, 60.0,
              (tmp_path / "bootstrap" / "node.log").read_text)  # fmt: skip
        assert f"| round | {last} |" in hub.files["README.md"].decode()
        chain = next((tmp_path / "bootstrap" / "history").glob("*/chain.jsonl"))
        until(lambda: len(read_chain(chain)) >= last, 30.0, chain.read_text)
        check_receipt(bootstrap, peers[0], last, tmp_path / "home")
        bootstrap.kill()
        later = {"LD_PRELOAD": str(library()), "CHAOS_CLOCK_S": "86400"}  # nothing is left but the folders
        bootstrap = StartedNode(tmp_path / "bootstrap", text, flags=flags, env=later)
        code, said = run("bootstrap.cli", ["resume", "--state-dir", str(bootstrap.folder)], later)
        assert (code, "continues" in said) == (0, True), said
        peers += [JoinedPeer(tmp_path / name, bootstrap.address, env=later) for name in ("three", "four")]
        for peer in peers[2:]:
            peer.wait_for(lambda peer=peer: peer.round >= last + 2)
            assert any(f"training from round {last}" in line for line in peer.said("info"))
        day = peers[2].events("start")[0]["time"] - peers[0].events("start")[0]["time"]
        assert 86400 < day < 86400 + 400
        link = read_chain(next((tmp_path / "three" / "history").glob("*/chain.jsonl")))[last].link
        assert (link.round, link.state_digest) == (last, ends[0]["state_digest"])
        assert kept.stat().st_size > 0
    finally:
        for peer in peers:
            peer.close()
        bootstrap.close()
