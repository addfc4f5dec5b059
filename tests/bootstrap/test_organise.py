"""The organiser's commands: what they sign, and what they refuse; manifests that `init` writes."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys

import pytest

from bootstrap.cli import main
from bootstrap.control import RETRY_S, ControlSigner
from bootstrap.folders import LOCK_NAME
from bootstrap.init import AUDIENCES, DEFAULTS, SIZES, manifest_text
from peer.errors import UserError
from peer.outer.recipe.plan import RunPlan
from peer.protocol.control import VALID_S
from peer.protocol.identity import Identity
from peer.protocol.invitation import open_invitation
from peer.protocol.manifest import RunManifest, parse_manifest
from peer.run.run_file import keep_manifest
from peer.swarm.state.run_control import RunControl, history_folder
from peer.system.file_lock import lock_folder

NOW = 1_000_000_000.0


@pytest.fixture
def opened(tmp_path):
    """(state folder, organiser, its manifests by name) of a node that has served two runs, one of them invited."""
    organiser = Identity.generate()
    (tmp_path / "identity.key").write_bytes(organiser.to_bytes())
    (tmp_path / "identity.key").chmod(0o600)
    manifests = {}
    for name, trust in (("small", {}), ("large", {"invited": True})):
        manifest = RunManifest.model_validate({
            "name": name, "model": {"architecture": "llama"}, "trust": trust, "rounds": {"total": 40},
            "genesis": "0" * 64,
        })  # fmt: skip
        folder = tmp_path / name
        keep_manifest(history_folder(folder, manifest.run_id), manifest)
        (folder / "manifest-serial.json").write_text(json.dumps({
            "run_id": manifest.run_id, "name": name, "organiser": organiser.peer_id, "serial": 1,
        }))
        manifests[name] = manifest
    return tmp_path, organiser.peer_id, manifests


def command(capsys, folder, name, *words, run="small"):
    with pytest.raises(SystemExit) as ended:
        main([name, "--state-dir", str(folder), *(["--run", run] if run else []), *words])
    said = capsys.readouterr()
    return ended.value.code, said.out + said.err


def control(folder, organiser, manifest):
    return RunControl.of(history_folder(folder / manifest.name, manifest.run_id), manifest, organiser)


def test_each_command_signs_one_newer_record_of_its_run_alone(opened, capsys):
    folder, organiser, manifests = opened
    serials = []
    for words in (("pause",), ("announce", "at noon"), ("resume",), ("extend", "--rounds", "90"), ("finish",)):
        assert command(capsys, folder, *words)[0] == 0
        held = control(folder, organiser, manifests["small"])
        serials.append(held.newest.serial)
    assert serials == sorted(set(serials))
    assert (held.state, held.newest.announcement) == ("finished", "at noon")
    assert held.rounds_total == 40  # no round has been made: peers leave at once
    assert control(folder, organiser, manifests["large"]).newest is None
    assert "state         finished" in command(capsys, folder, "state")[1]
    assert command(capsys, folder, "pause")[1].startswith("atoll-bootstrap: run small has been ended")


def test_the_end_is_not_moved_behind_what_has_been_made(opened, capsys):
    folder, organiser, manifests = opened
    chain = history_folder(folder / "small", manifests["small"].run_id) / "chain.jsonl"
    chain.write_text("{}\n" * 30)
    code, said = command(capsys, folder, "extend", "--rounds", "35")
    assert (code, "node is not running, so the rounds that were made are not known" in said) == (2, True)
    with lock_folder(folder, "state_dir", LOCK_NAME):  # as its node
        code, said = command(capsys, folder, "extend", "--rounds", "30")
    assert (code, "--rounds 30: the run has made 30 rounds" in said) == (2, True)
    assert command(capsys, folder, "extend", "--tokens", "5000")[1].startswith("run small ends with 40 rounds or 5,000")
    assert control(folder, organiser, manifests["small"]).tokens_total == 5000


def test_a_run_that_has_made_all_its_rounds_continues_when_it_is_extended(opened, capsys):
    folder, organiser, manifests = opened
    assert command(capsys, folder, "finish")[0] == 0
    code, said = command(capsys, folder, "extend", "--rounds", "90")
    assert (code, "first `atoll-bootstrap resume`" in said) == (2, True)
    chain = history_folder(folder / "small", manifests["small"].run_id) / "chain.jsonl"
    chain.write_text("{}\n" * 40)
    code, said = command(capsys, folder, "resume")
    assert (code, "has made all of its 40 rounds" in said, "extend --rounds 80" in said) == (2, True, True)
    assert command(capsys, folder, "extend", "--rounds", "80")[0] == 0
    held = control(folder, organiser, manifests["small"])
    assert (held.state, held.rounds_total) == ("running", 80)


def test_another_key_signs_nothing_and_a_damaged_record_is_not_replaced(opened, capsys):
    folder, organiser, manifests = opened
    other = folder / "other.key"
    other.write_bytes(Identity.generate().to_bytes())
    other.chmod(0o600)
    code, said = command(capsys, folder, "pause", "--identity-path", str(other))
    assert (code, f"the organiser of small is {organiser}" in said) == (2, True)
    assert command(capsys, folder, "pause")[0] == 0
    record = control(folder, organiser, manifests["small"]).path
    record.write_bytes(b"damaged")
    code, said = command(capsys, folder, "resume")
    assert (code, "is damaged, or signed by another key" in said) == (2, True)
    assert record.read_bytes() == b"damaged"


def test_commands_at_the_same_time_lose_no_invitation(opened):
    folder, _, manifests = opened
    command = [sys.executable, "-m", "bootstrap.cli", "invite", "--state-dir", str(folder), "--run", "large"]
    both = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in ("ada", "bob")]
    assert [one.wait(60) for one in both] == [0, 0]
    kept = json.loads((history_folder(folder / "large", manifests["large"].run_id) / "invitations.json").read_text())
    assert sorted(one["name"] for one in kept["invitations"]) == ["ada", "bob"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("announce", "two\nlines"), "must be printable"),
        (("announce", "\x1b[31mred"), "must be printable"),
        (("announce", "x" * 401), "at most 400"),
        (("extend",), "extend needs --rounds or --tokens"),
        (("invite", "ada"), "run small is open"),
        (("revoke", "ada"), "ada is not invited"),
    ],
)
def test_what_cannot_be_signed_is_refused(opened, capsys, words, problem):
    folder, organiser, manifests = opened
    code, said = command(capsys, folder, *words)
    assert (code, problem in said, "Traceback" in said) == (2, True, False), said
    assert control(folder, organiser, manifests["small"]).newest is None


def test_invitations_are_made_listed_and_revoked(opened, capsys):
    folder, organiser, manifests = opened
    large = manifests["large"]
    code, token = command(capsys, folder, "invite", "ada", "--expires", "2h", run="large")
    assert code == 0
    invitation = open_invitation(token.strip(), large.run_id, organiser, NOW)
    assert (invitation.name, invitation.number) == ("ada", 1)
    assert "not used yet" in command(capsys, folder, "invited", run="large")[1]
    assert command(capsys, folder, "revoke", "ada", run="large")[0] == 0
    assert control(folder, organiser, large).revokes(1)
    assert "revoked" in command(capsys, folder, "invited", run="large")[1]
    assert "is not a time" in command(capsys, folder, "invite", "bob", "--expires", "soon", run="large")[1]


def test_which_run_is_meant_must_be_clear(opened, capsys, tmp_path):
    folder, *_ = opened
    assert "holds 2 runs" in command(capsys, folder, "pause", run=None)[1]
    assert "holds no run little" in command(capsys, folder, "pause", run="little")[1]
    assert "holds no run" in command(capsys, tmp_path / "nowhere", "pause", run=None)[1]


@pytest.mark.parametrize(("size", "audience"), list(itertools.product(SIZES, AUDIENCES)))
def test_every_manifest_of_init_is_a_run(size, audience):
    for data in ("local", "HuggingFaceFW/fineweb-edu"):
        text = manifest_text({**DEFAULTS, "size": size, "audience": audience, "data": data, "rounds": "500"})
        manifest = parse_manifest(text, "init")
        assert RunPlan.of(manifest).recipe.name == manifest.recipe.name
        assert (manifest.trust.invited, manifest.rounds.total) == (audience == "invited", 500)
        assert text.count("#") >= 3


@pytest.mark.parametrize(("size", "millions"), [("30m", 30), ("125m", 125), ("350m", 350), ("1b", 1000)])
def test_a_size_is_what_it_is_called(size, millions):
    one, vocabulary = SIZES[size], 50257
    attention = one.hidden**2 * (2 + 2 * one.key_value_heads / one.heads)
    parameters = one.layers * (attention + 3 * one.hidden * one.intermediate) + vocabulary * one.hidden
    assert parameters == pytest.approx(1e6 * millions, rel=0.12)


def test_init_asks_for_what_is_not_given_and_overwrites_nothing(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["init", str(path), "--size", "30m", "--name", "ours", "--audience", "invited"])
    assert (ended.value.code, parse_manifest(path.read_text(), "x").name) == (0, "ours")
    with pytest.raises(SystemExit) as ended:
        main(["init", str(path)])
    assert (ended.value.code, "exists" in capsys.readouterr().err) == (2, True)
    with pytest.raises(UserError, match="--size 30mm"):
        manifest_text({**DEFAULTS, "size": "30mm"})


def test_a_command_that_signs_a_file_does_not_wait_for_torch():
    look = "import bootstrap.organise, sys; print({'torch', 'hivemind', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout == "set()\n"


async def test_a_node_renews_its_record_in_time_and_later_while_a_command_writes(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("bootstrap.control.LOOK_S", 0.001)
    now, organiser = [NOW], Identity.generate()
    manifest = RunManifest(name="a", model={"architecture": "llama"}, rounds={"total": 40}, genesis="0" * 64)
    signer = ControlSigner(tmp_path, manifest, organiser, lambda: now[0])
    signer.folder.mkdir(parents=True, exist_ok=True)
    first = signer.decide(announcement="soon")
    watching = asyncio.create_task(signer.watch())

    async def until(holds):
        while not (holds() or watching.done()):
            await asyncio.sleep(0.001)
        assert holds()

    with signer.signing():  # a command
        now[0] += 0.6 * VALID_S
        await until(lambda: caplog.messages)
    assert f"not renewed; next attempt in {RETRY_S:g} s" in caplog.text
    assert "is in use by process" in caplog.text
    assert signer.control.newest == first
    now[0] += RETRY_S
    await until(lambda: signer.control.newest != first)
    watching.cancel()
    renewed = signer.control.newest
    assert (renewed.announcement, renewed.expires_at) == ("soon", now[0] + VALID_S)
    assert len(caplog.messages) == 1
