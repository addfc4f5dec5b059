from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peer.errors import ProtocolError, UserError
from peer.protocol.manifest import (
    ALONE,
    MAX_MANIFEST_BYTES,
    PROTOCOL_VERSION,
    RunManifest,
    check_protocol,
    parse_manifest,
)
from peer.protocol.records import parse_json

RUNS = Path(__file__).parents[2] / "configs/runs"
SMALL = {"name": "a", "model": {"architecture": "llama", "config": {"hidden_size": 8}}}
HEAD = "name: a\nmodel: {architecture: llama}\n"


def small(**changes):
    return parse_manifest(json.dumps({**SMALL, **changes}), "test")


@pytest.mark.parametrize("file", sorted(RUNS.glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_manifest_is_valid_and_survives_its_canonical_form(file):
    manifest = parse_manifest(file.read_text(), file.name)
    again = parse_manifest(manifest.canonical(), "canonical")
    assert again == manifest
    assert again.canonical() == manifest.canonical()
    assert again.run_id == manifest.run_id


def test_the_run_id_is_the_same_on_every_machine_and_version():
    assert small().canonical() == (
        b'{"data":{"assignment":"leases","document_mask":false,"sequence_length":128,"shard_sequences":null,'
        b'"shared":null,"sources":[{"files":[],"kind":"python-stdlib","name":null,"revision":"main",'
        b'"split":"train","subset":null,"text_column":"text","weight":1.0}],"train_on":"assistant","validation_fraction":0.05,'
        b'"validation_tokens":1000000},"genesis":null,"inner":{"batch_sequences":8,'
        b'"betas":[0.9,0.95],"decay_fraction":0.2,"eps":1e-08,"learning_rate":0.001,"max_grad_norm":1.0,'
        b'"min_learning_rate_ratio":0.1,"muon_learning_rate_ratio":1.0,"muon_momentum":0.95,"optimizer":null,'
        b'"router_loss":null,"schedule":"cosine","warmup_steps":50,"weight_decay":0.1},"model":{"adapter":null,"architecture":"llama","base":null,"config":{"hidden_size":8},'
        b'"layout":null,"pretrained":null,"revision":"main","weights":null},"name":"a","protocol":11,"recipe":{"aggregator":null,'
        b'"allocator":null,"average":null,"compressor":null,"exchange":null,"feedback":null,"interpolation":null,"local":null,'
        b'"merge":null,"moments":null,"name":"lagoon","outer":null,"outer_learning_rate":null,"outer_momentum":null,'
        b'"outer_schedule":null,'
        b'"payload":null,"schedule":null,"steps_per_round":null,"straggler":null,"topology":null},'
        b'"rounds":{"max_group":16,"min_group":2,"straggler_wait_s":30.0,"timeout_s":120.0,"tokens_total":null,"total":null},'
        b'"seed":0,"tokenizer":{"digest":null,"files":[],"kind":"bytes","name":null,"revision":"main"},"trust":{"checkpoint_keys":[],"identity_work":null,"invited":false,"largest_weight":3,'
        b'"mode":"open","newcomers_share":0.2,"probation_rounds":10}}'
    )


def test_the_order_of_keys_does_not_matter_and_every_value_does():
    assert parse_manifest("model: {config: {hidden_size: 8}, architecture: llama}\nname: a", "x") == small()
    variants = [
        small(), small(name="b"), small(seed=1), small(genesis="0" * 64), small(rounds={"total": 5}),
        small(inner={"learning_rate": 0.002}), small(recipe={"compressor": "int8"}),
        small(model={"architecture": "llama", "config": {"hidden_size": 8, "tie_word_embeddings": True}}),
    ]
    assert len({manifest.run_id for manifest in variants}) == len(variants)


def test_a_manifest_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        small().seed = 1


def test_unknown_and_bad_keys_are_all_named_with_their_remedy():
    with pytest.raises(UserError) as caught:
        small(sed=1, inner={"learning_rat": 1, "eps": 2.0}, rounds={"min_group": 1})
    assert caught.value.what == "manifest test is not valid"
    assert sorted(caught.value.hint.splitlines()) == [
        "inner.eps=2.0: Input should be less than or equal to 0.01",
        "rounds.min_group=1: Input should be greater than or equal to 2",
        "unknown key 'inner.learning_rat': did you mean 'learning_rate'?",
        "unknown key 'sed': did you mean 'seed'?",
    ]


FILE = {"name": "tokenizer.json", "size": 9, "digest": "a" * 64}
CUT = {"digest": "a" * 64, "shards": [4], "shard_tokens": 100}
CONFIG = {**FILE, "name": "tokenizer_config.json"}


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": {}}, "give exactly one of 'architecture' (with 'config'), 'pretrained' and 'weights'"),
    ({"model": {"architecture": "llama", "pretrained": "a/b"}}, "give exactly one of"),
    ({"tokenizer": {"kind": "hub"}}, "'name' goes with kind 'hub' or 'folder', which need one"),
    ({"tokenizer": {"kind": "folder"}}, "'name' goes with kind 'hub' or 'folder', which need one"),
    ({"tokenizer": {"name": "a/b"}}, "'name' goes with kind 'hub' or 'folder', which need one"),
    ({"tokenizer": {"kind": "folder", "name": "./words"}}, "other peers cannot read a folder of its machine"),
    ({"tokenizer": {"kind": "folder", "name": "owner/words"}}, "other peers cannot read a folder of its machine"),
    ({"tokenizer": {"kind": "hub", "name": "/srv/words"}}, "a folder goes with kind 'folder'"),
    ({"tokenizer": {"kind": "hub", "name": "a/b", "files": [FILE]}}, "'files' is written by atoll-bootstrap"),
    ({"tokenizer": {"kind": "folder", "files": [FILE, FILE]}}, "'files' must hold tokenizer.json, and no name twice"),
    ({"tokenizer": {"kind": "folder", "files": [CONFIG]}}, "'files' must hold tokenizer.json, and no name twice"),
    ({"tokenizer": {"kind": "folder", "files": [FILE, {**CONFIG, "size": 2**25}]}}, "are larger than 33554432 bytes"),
    ({"tokenizer": {"kind": "folder", "files": [{**FILE, "size": 2**25 + 1}]}}, "less than or equal to 33554432"),
    ({"tokenizer": {"kind": "folder", "files": [{**FILE, "name": "../identity.key"}]}}, "Input should be 'tokenizer."),
    ({"tokenizer": {"kind": "folder", "files": [{**FILE, "digest": "../x"}]}}, "must be 64 hex digits"),
    ({"data": {"sources": [{"name": "a/b"}]}}, "'name' goes with kind 'hub', and only with it"),
    ({"data": {"sources": [{"kind": "web"}]}}, "'files' goes with kind 'web', and only with it"),
    ({"data": {"shared": {**CUT, "shards": [1, 2]}}}, "shared.shards: 2 of 1 sources"),
    ({"inner": {"betas": [0.9, 1.0]}}, "betas=(0.9, 1.0): each must be in [0, 1)"),
    ({"model": {"pretrained": "a/b", "revision": 1234567}}, "Input should be a valid string: write it in quotes"),
    ({"rounds": {"min_group": 8, "max_group": 4}}, "min_group=8 is above max_group=4"),
])
def test_values_that_do_not_fit_together_are_told(changes, message):
    with pytest.raises(UserError) as caught:
        small(**changes)
    assert message in caught.value.hint


@pytest.mark.parametrize(("version", "remedy"), [
    (PROTOCOL_VERSION + 1, "upgrade atoll on this machine"), (0, "ask the organiser"), ("2", "ask the organiser"),
    (True, "ask the organiser"), ([1], "ask the organiser"), (None, "ask the organiser"),
])
def test_another_protocol_version_is_refused_before_anything_else(version, remedy):
    with pytest.raises(UserError, match=f"this atoll speaks {PROTOCOL_VERSION}") as caught:
        parse_manifest(json.dumps({"protocol": version, "unknown": 1}), "test")
    assert remedy in caught.value.hint
    check_protocol(PROTOCOL_VERSION, "test")


def bomb(link):
    """A chain of 40 aliases, each nine times its predecessor: 9^40 values in less than 2 KiB."""
    return "k0: &k0 {a: 1}\n" + "".join(link(i, ",".join([f"*k{i - 1}"] * 9)) for i in range(1, 41)) + HEAD


HOSTILE: dict[str, str | bytes] = {
    "empty": "",
    "a list": "- a",
    "a number": "17",
    "not YAML": "a: [",
    "a tab": "a:\n\t- b",
    "a zero byte": "name: a\0b",
    "not UTF-8": b"\xff\xfe\x00\xd8",
    "half a surrogate": HEAD.replace("a\n", '"\ud800"\n', 1),
    "too large": "#" * (MAX_MANIFEST_BYTES + 1),
    "too large in bytes, not in characters": "# " + "\u5c9b" * (MAX_MANIFEST_BYTES // 3) + "\n" + HEAD,
    "deep lists": "[" * 8000,
    "deep mappings": "{a: " * 4000,
    "deep blocks": "".join(" " * i + "a:\n" for i in range(170)),
    "a number of 5000 digits": HEAD + "seed: " + "1" * 5000,
    "hexadecimal without digits": HEAD + "seed: 0x_",
    "a date that never was": "name: 2001-99-99",
    "an hour that never was": HEAD + "seed: 2001-01-01T00:00:00+99:99",
    "python object": "!!python/object/apply:os.system ['true']",
    "python name": HEAD + "seed: !!python/name:os.system",
    "an unknown tag": HEAD + "seed: !x 1",
    "a set": "name: a\nmodel: !!set {architecture}",
    "a key that is a list": "? [a]\n: b",
    "a key that is a number": HEAD + "1: 2",
    "a key that is nothing": HEAD + "~: 2",
    "a merge of nothing": HEAD + "<<: 3",
    "a value that holds itself": "name: a\nmodel: &m {architecture: llama, config: {x: *m}}",
    "an alias bomb of lists": bomb(lambda i, many: f"k{i}: &k{i} [{many}]\n"),
    "an alias bomb of merges": bomb(lambda i, many: f"k{i}: &k{i} {{<<: [{many}]}}\n"),
    "two documents": HEAD + "---\n" + HEAD,
    "thousands of unknown keys": HEAD + "".join(f"k{i}: 1\n" for i in range(1800)),
    "an unknown key of 10 kB": HEAD + f"? {'k' * 10_000}\n: 1",
    "an unknown key that moves the cursor": HEAD + '"\\e[2J\\e[H": 1',
    "a config key that moves the cursor": 'name: a\nmodel: {architecture: llama, config: {"\\e[2J": .inf}}',
    "a value that moves the cursor": 'name: "\\e]0;owned\\a"\nmodel: {architecture: llama}',
    "a name with markup": "name: <script>alert(1)</script>\nmodel: {architecture: llama}",
    "a name above its folder": 'name: ".."\nmodel: {architecture: llama}',
    "a name that is a path": "name: a/b\nmodel: {architecture: llama}",
    "a name that is a flag": 'name: "--help"\nmodel: {architecture: llama}',
    "a name with a line end": 'name: "a\\n"\nmodel: {architecture: llama}',
    "a name of 65 characters": f"name: {'a' * 65}\nmodel: {{architecture: llama}}",
    "a model above its folder": "name: a\nmodel: {pretrained: ../..}",
    "a model at an absolute path": "name: a\nmodel: {pretrained: /etc/passwd}",
    "a model three folders deep": "name: a\nmodel: {pretrained: a/b/c}",
    "a model that is a URL": "name: a\nmodel: {pretrained: 'http://a/b'}",
    "a revision above its folder": "name: a\nmodel: {pretrained: a/b, revision: ../../x}",
    "a subset with a line end": HEAD + 'data: {sources: [{kind: hub, name: a/b, subset: "x\\ny"}]}',
    "a deep config": "name: a\nmodel: {architecture: llama, config: {x: [[[[1]]]]}}",
    "a config of 5000 numbers": f"name: a\nmodel: {{architecture: llama, config: {{x: [{'1,' * 5000}]}}}}",
    "a config of 300 keys": "name: a\nmodel: {architecture: llama, config: {" + ",".join(map(str, range(300))) + "}}",
    "long text in the config": f"name: a\nmodel: {{architecture: llama, config: {{x: [{'y' * 129}]}}}}",
    "a nested key that moves the cursor": 'name: a\nmodel: {architecture: llama, config: {x: {"\\e[2J": 1}}}',
    "nested infinity": "name: a\nmodel: {architecture: llama, config: {x: [{y: .inf}]}}",
    "a nested number of 40 digits": f"name: a\nmodel: {{architecture: llama, config: {{x: [{'9' * 40}]}}}}",
    "infinity in the config": "name: a\nmodel: {architecture: llama, config: {x: .inf}}",
    "not a number in the config": "name: a\nmodel: {architecture: llama, config: {x: .nan}}",
    "a config number of 6000 digits": f"name: a\nmodel: {{architecture: llama, config: {{x: 0x{'f' * 5000}}}}}",
    "a seed of 6000 digits": HEAD + f"seed: 0x{'f' * 5000}",
    "infinite learning rate": HEAD + "inner: {learning_rate: .inf}",
    "negative weight decay": HEAD + "inner: {weight_decay: -1}",
    "unlimited gradient norm": HEAD + "inner: {max_grad_norm: .inf}",
    "three betas": HEAD + "inner: {betas: [.1, .2, .3]}",
    "a group of a million": HEAD + "rounds: {max_group: 1000000}",
    "a round that never ends": HEAD + "rounds: {timeout_s: 1e308}",
    "an endless sequence": HEAD + "data: {sequence_length: 1e9}",
    "a genesis in capitals": HEAD + f"genesis: {'A' * 64}",
    "a negative seed": HEAD + "seed: -1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused_in_a_short_printable_message(name):
    with pytest.raises(UserError) as caught:
        parse_manifest(HOSTILE[name], "from the network")
    message = caught.value.render()
    assert len(message) < 8000
    assert message.replace("\n", "").isprintable()


@given(st.dictionaries(st.text(max_size=8), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8,
)))
def test_any_document_is_either_a_manifest_or_a_user_error(document):
    try:
        parse_manifest(yaml.safe_dump({**SMALL, **document}), "test")
    except UserError:
        return
    assert set(document) <= set(RunManifest.model_fields)


@given(st.binary(max_size=200))
def test_any_bytes_after_a_good_beginning_are_either_a_manifest_or_a_user_error(tail):
    with contextlib.suppress(UserError):
        assert parse_manifest(HEAD.encode() + tail, "test").name == "a"


def test_a_config_takes_any_json_value_and_keeps_it_over_the_wire():
    config = {"a": {"b": [1, 2.5, None, True, "x"], "c": {"d": []}}, "e": [[1], [2]], "f": None, "g": 1e-5}
    manifest = small(model={"architecture": "llama", "config": config})
    assert manifest.model.config == config
    assert parse_json(RunManifest, manifest.canonical()) == manifest
    assert parse_json(RunManifest, manifest.canonical()).run_id == manifest.run_id


def test_what_the_wire_brings_is_bounded_as_what_a_file_brings():
    document = json.loads(small().canonical())
    for config, message in [({"x": [[[[1]]]]}, "nested more than 4 deep"), ({"x": "y" * 129}, "at most 128"),
                            ({"x": {"a b": 1}}, "a key must be"), ({"x": [0] * 4096}, "more than 4096 values")]:
        document["model"]["config"] = config
        with pytest.raises(ProtocolError, match=message):
            parse_json(RunManifest, json.dumps(document).encode())
    document["model"] = {"pretrained": "/srv/model"}
    with pytest.raises(ProtocolError, match="must be a name on the hub"):
        parse_json(RunManifest, json.dumps(document).encode())


def test_a_manifest_that_peers_would_refuse_as_too_large_is_refused_here():
    names = ",".join(f"k{i:02}: [{'1e15,' * 38}1]" for i in range(80))
    text = f"name: a\nmodel: {{architecture: llama, config: {{{names}}}}}"
    assert len(text) < MAX_MANIFEST_BYTES
    with pytest.raises(UserError, match=r"is \d+ bytes with its defaults; the limit is 16384"):
        parse_manifest(text, "test")


def test_a_folder_of_this_machine_is_for_runs_of_this_machine_alone():
    text = "name: a\nmodel: {pretrained: ./tiny}\ntokenizer: {kind: folder, name: /srv/tiny}"
    manifest = parse_manifest(text, "test", ALONE)
    assert (manifest.model.pretrained, manifest.tokenizer.name) == (str(Path("tiny").absolute()), "/srv/tiny")
    with pytest.raises(UserError) as caught:
        parse_manifest(text, "test")
    assert caught.value.hint.count("other peers cannot read a folder of") == 2
    with pytest.raises(UserError) as caught:
        parse_manifest(text.replace("/srv/tiny", "~no-such-user/tiny"), "test", ALONE)
    assert "names the home folder of a user that this machine does not have" in caught.value.hint
