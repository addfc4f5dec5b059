from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from peer.errors import UserError
from peer.protocol.records import PeerRecord
from peer.run.rented import detect_announce_maddrs, detect_direct_port
from peer.settings import (
    PeerSettings,
    add_setting_flags,
    default_nickname,
    known_settings,
    load_settings,
    setting_overrides,
)

ROOT = Path(__file__).parents[1]


def parse(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_setting_flags(parser)
    return parser.parse_args(arguments)


def load(*arguments, environ=None):
    namespace = parse(*arguments)
    return load_settings(setting_overrides(namespace), namespace.config, environ or {})


def write(path, **values):
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_the_last_of_file_environment_and_flag_wins(tmp_path):
    file = write(tmp_path / "peer.yaml", save_steps=1, logging_steps=1, eval_sequences=1)
    environ = {"ATOLL_LOGGING_STEPS": "2", "ATOLL_EVAL_SEQUENCES": "2", "HOME": "/root"}
    settings = load("--config", file, "--eval-sequences", "3", environ=environ)
    assert (settings.save_steps, settings.logging_steps, settings.eval_sequences) == (1, 2, 3)
    assert settings.save_total_limit == 3


def test_without_any_source_the_settings_are_the_defaults():
    assert load() == PeerSettings()
    assert PeerSettings().output_dir == Path("runs/peer")
    assert PeerSettings().host_maddrs == ("/ip4/0.0.0.0/tcp/0",)


def test_both_spellings_of_a_flag_set_the_same_setting():
    assert load("--per-device-train-batch-size", "4") == load("--per_device_train_batch_size", "4")
    assert load("--no-nat-port-map").nat_port_map is load("--no-nat_port_map").nat_port_map is False
    assert load("--bf16").bf16 is load("--json").json_lines is True


@pytest.mark.parametrize(("arguments", "expected"), [
    ([], None), (["--resume-from-checkpoint"], "latest"), (["--resume-from-checkpoint", "runs/a"], "runs/a"),
])
def test_resume_without_a_value_means_latest(arguments, expected):
    assert load(*arguments).resume_from_checkpoint == expected


@pytest.mark.parametrize("text", ["a.txt,b c.txt", " a.txt , b c.txt,", '["a.txt", "b c.txt"]'])
def test_a_list_in_the_environment_is_separated_by_commas_or_json(text):
    assert load(environ={"ATOLL_TRAIN_FILES": text}).train_files == ("a.txt", "b c.txt")


def test_lists_and_single_strings_from_flags_and_files(tmp_path):
    assert load("--train-files", "a,b", "c").train_files == ("a,b", "c")
    assert load("--config", write(tmp_path / "a.yaml", train_files="one.txt")).train_files == ("one.txt",)
    assert load("--config", write(tmp_path / "b.yaml", train_files=["a", "b"])).train_files == ("a", "b")


def test_an_empty_variable_counts_as_unset_and_booleans_have_words():
    assert load(environ={"ATOLL_NICKNAME": "", "ATOLL_BF16": "true", "ATOLL_NAT_PORT_MAP": "0"}) == PeerSettings(
        bf16=True, nat_port_map=False
    )


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert load("--output-dir", "~/runs").output_dir == Path("/home/ada/runs")


def test_all_problems_of_all_sources_are_told_at_once(tmp_path):
    file = write(tmp_path / "peer.yaml", save_step=5, eval_sequences=True)
    environ = {"ATOLL_LOG_LEVEL": "loud", "ATOLL_NICK_NAME": "x"}
    with pytest.raises(UserError) as caught:
        load("--config", file, "--save-total-limit", "0", environ=environ)
    assert caught.value.what == "5 settings are not valid"
    assert caught.value.hint.splitlines() == [
        f"unknown setting save_step in {file}: did you mean 'save_steps'?",
        "unknown setting ATOLL_NICK_NAME: did you mean 'nickname'?",
        "--save-total-limit='0': Input should be greater than or equal to 1",
        f"eval_sequences=True in {file}: must be a whole number, not true or false",
        "ATOLL_LOG_LEVEL='loud': Input should be 'debug', 'info', 'warning' or 'error'",
    ]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--save-steps", "-1"], "--save-steps='-1': Input should be greater than or equal to 0"),
    (["--save-steps", "many"], "--save-steps='many': Input should be a valid integer"),
    (["--data-seed", str(2**31)], "Input should be less than 2147483648"),
    (["--device", "cuda:x"], "--device='cuda:x': must be auto, or a name such as cuda"),
    (["--nickname", "Ada <b>"], "--nickname='Ada <b>': must be 1 to 64 of a-z, 0-9, '_', '.' and '-', the first"),
    (["--nickname", "a\n"], r"--nickname='a\n': must be 1 to 64"),
    (["--run-id", "abc"], "--run-id='abc': must be 64 hex digits"),
    (["--host-maddrs", "/ip4/1.2.3/tcp/0"], "'1.2.3' is not an IPv4 address"),
    (["--host-maddrs", "/ip4/0.0.0.0/tcp/0/p2p/Qm"], "it must end after the port"),
    (["--announce-maddrs", "/ip4/1.2.3.4/tcp/0"], "announce the port that others reach"),
])
def test_a_bad_value_is_told_with_its_limit(arguments, message):
    with pytest.raises(UserError) as caught:
        load(*arguments)
    assert message in caught.value.what


def test_a_peer_must_listen_somewhere(tmp_path):
    with pytest.raises(UserError, match="needs at least one address"):
        load("--config", write(tmp_path / "peer.yaml", host_maddrs=[]))


def test_a_long_bad_value_is_shortened():
    with pytest.raises(UserError) as caught:
        load("--device", "x" * 100_000 + "!")
    assert len(caught.value.what) < 400


@pytest.mark.parametrize(("text", "message"), [
    (b"- a\n", "must be a mapping of names to values, not list"),
    (b"a: [", "is not valid YAML"),
    (b"save_steps: 3\nsave_steps: 4", "line 2: the key 'save_steps' is there twice, first in line 1"),
    (b"[" * 9000, "is not valid YAML"),
    (b"\xff\xfe\xfa", "is not valid YAML"),
    (b"#" * 70_000, "is 70000 bytes; the limit is 65536"),
    (b"!!python/object/apply:os.system ['true']", "is not valid YAML"),
])
def test_a_bad_settings_file_is_refused(tmp_path, text, message):
    (tmp_path / "peer.yaml").write_bytes(text)
    with pytest.raises(UserError) as caught:
        load("--config", str(tmp_path / "peer.yaml"))
    assert message in caught.value.what


def test_a_missing_settings_file_is_told_and_an_empty_one_is_fine(tmp_path):
    with pytest.raises(UserError, match=r"settings file .* cannot be read: No such file"):
        load("--config", str(tmp_path / "nowhere.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert load("--config", str(tmp_path / "empty.yaml")) == PeerSettings()


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        PeerSettings().save_steps = 1


@pytest.mark.parametrize(("hostname", "nickname"), [
    ("Ada's MacBook.local", "ada-s-macbook.local-xyz12"), ("gpu_07", "gpu_07-xyz12"), ("\u5c9b", "peer-xyz12"),
    ("", "peer-xyz12"), ("x" * 90, "x" * 58 + "-xyz12"), ("---", "peer-xyz12"), (".hidden", "hidden-xyz12"),
])
def test_a_default_nickname_is_legal_and_tells_machines_of_one_name_apart(hostname, nickname):
    assert default_nickname(hostname, "12D3KooWabcXyZ12") == nickname
    assert PeerSettings(nickname=nickname).nickname == nickname
    assert default_nickname(hostname, "12D3KooWabcXyZ13") != nickname


@pytest.mark.parametrize("nickname", [".gpu1", "-gpu1", "", "x" * 65, "Ada", "a b", "a\n"])
def test_settings_refuse_every_nickname_that_the_record_of_a_peer_would(nickname):
    with pytest.raises(UserError, match=r"--nickname=.*must be 1 to 64"):
        load_settings({"nickname": nickname}, None, {})
    record = {"run_id": "0" * 64, "state": "joining", "round": 0, "lineage_id": "0" * 64, "lineage_weight": 0}
    PeerRecord(nickname="gpu1", expires_at=0.0, **record)
    with pytest.raises(ValidationError, match="nickname"):
        PeerRecord(nickname=nickname, expires_at=0.0, **record)


LISTEN = ("/ip4/0.0.0.0/tcp/31337", "/ip4/0.0.0.0/udp/31337/quic-v1", "/ip4/0.0.0.0/tcp/0")


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ()),
    ({"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_31337": "40123"}, ("/ip4/203.0.113.7/tcp/40123",)),
    ({"RUNPOD_PUBLIC_IP": "203.0.113.8", "RUNPOD_TCP_PORT_31337": "10001"}, ("/ip4/203.0.113.8/tcp/10001",)),
    ({"PUBLIC_IPADDR": "2001:db8::7", "VAST_TCP_PORT_31337": "40123"}, ("/ip6/2001:db8::7/tcp/40123",)),
    ({"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_22": "40122"}, ()),
    ({"PUBLIC_IPADDR": "203.0.113.7", "RUNPOD_TCP_PORT_31337": "10001"}, ()),
    ({"VAST_TCP_PORT_31337": "40123"}, ()),
])
def test_mapped_ports_of_rented_machines_are_found(environ, expected):
    assert detect_announce_maddrs(LISTEN, environ) == expected


@pytest.mark.parametrize(("environ", "port"), [
    ({}, 31338),
    ({"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_31338": "40124"}, 40124),
    ({"RUNPOD_PUBLIC_IP": "203.0.113.8", "RUNPOD_TCP_PORT_31338": "10002"}, 10002),
    ({"VAST_TCP_PORT_31338": "99999"}, 31338),
    ({"VAST_TCP_PORT_31338": "none"}, 31338),
])
def test_the_mapped_port_of_direct_connections_is_found(environ, port):
    assert detect_direct_port(31338, environ) == port
    assert detect_direct_port(0, {"VAST_TCP_PORT_0": "7", **environ}) == 0


@pytest.mark.parametrize("environ", [
    {"PUBLIC_IPADDR": "somewhere", "VAST_TCP_PORT_31337": "40123"},
    {"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_31337": "99999"},
])
def test_a_mapping_that_makes_no_address_is_told(environ):
    with pytest.raises(UserError, match="do not make an address") as caught:
        detect_announce_maddrs(LISTEN, environ)
    assert "--announce-maddrs" in caught.value.hint


def test_the_example_of_default_settings_says_the_defaults():
    file = ROOT / "configs/peers/default.yaml"
    assert load("--config", str(file)) == PeerSettings()
    text = file.read_text()
    assert [name for name in known_settings() if f"{name}:" not in text] == []


@pytest.mark.parametrize("file", sorted((ROOT / "configs/peers").glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_settings_file_is_valid(file):
    load("--config", str(file))


def test_every_setting_has_a_description_that_help_shows():
    parser = argparse.ArgumentParser()
    add_setting_flags(parser)
    shown = " ".join(parser.format_help().split())
    for name, field in known_settings().items():
        assert field.description, name
        assert field.description.replace(" ", "") in shown.replace(" ", ""), name
        assert f"ATOLL_{name.upper()}" in shown


def test_every_setting_is_read_by_somebody():
    """`settings.<name>` occurs outside settings.py, so no option is accepted and then forgotten."""
    read = set()
    for file in sorted((ROOT / "peer").rglob("*.py")):
        if file == ROOT / "peer/settings.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                owner_name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
                if owner_name in ("settings", "_settings"):
                    read.add(node.attr)
    assert sorted(set(PeerSettings.model_fields) - read) == []
