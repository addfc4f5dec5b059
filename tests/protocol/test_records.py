from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolError, UserError
from peer.protocol.identity import Identity
from peer.protocol.manifest import MAX_MANIFEST_BYTES, RunManifest, parse_manifest
from peer.protocol.records import (
    MAX_RECORD_BYTES,
    PeerRecord,
    dump_json,
    open_manifest,
    open_sealed,
    parse_json,
    peers_key,
    seal,
    seal_manifest,
)

QUICKSTART = Path(__file__).parents[2] / "configs/runs/quickstart.yaml"
ORGANISER = Identity.generate()
OVERHEAD = 1 + len(ORGANISER.peer_id) + 64
RECORD = PeerRecord(
    run_id="1" * 64, nickname="alice", state="training", round=3, lineage_id="2" * 64, lineage_weight=5, loss=2.5,
    expires_at=1.8e9,
)  # fmt: skip
FIELDS = json.loads(dump_json(RECORD))


def manifest(**changes):
    return parse_manifest(QUICKSTART.read_text(), "quickstart").model_copy(update={"genesis": "3" * 64, **changes})


def sealed_text(text):
    return seal(ORGANISER, "manifest", bytes(8) + zlib.compress(text, 9))


def test_a_record_opens_to_what_was_sealed():
    for payload in (b"", b"x", bytes(range(256))):
        blob = seal(ORGANISER, "peer", payload)
        assert len(blob) == OVERHEAD + len(payload)
        assert open_sealed("peer", blob) == (ORGANISER.peer_id, payload)


def test_a_record_opens_only_in_its_own_domain():
    with pytest.raises(ProtocolError, match="no valid signature"):
        open_sealed("manifest", seal(ORGANISER, "peer", b"payload"))


def test_the_limit_counts_the_whole_record():
    exact = seal(ORGANISER, "peer", bytes(MAX_RECORD_BYTES - OVERHEAD))
    assert len(open_sealed("peer", exact)[1]) == MAX_RECORD_BYTES - OVERHEAD
    with pytest.raises(ProtocolError, match="record of 4097 bytes; the limit is 4096"):
        open_sealed("peer", seal(ORGANISER, "peer", bytes(MAX_RECORD_BYTES - OVERHEAD + 1)))
    with pytest.raises(ProtocolError, match="the limit is 100"):
        open_sealed("peer", exact, limit=100)


def test_a_truncated_record_is_refused_at_every_offset():
    blob = seal(ORGANISER, "peer", b"payload")
    for length in range(len(blob)):
        with pytest.raises(ProtocolError):
            open_sealed("peer", blob[:length])


def test_no_flipped_bit_verifies():
    blob = seal(ORGANISER, "peer", b"payload")
    for bit in range(8 * len(blob)):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            open_sealed("peer", bytes(flipped))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(blob):
    with pytest.raises(ProtocolError):
        open_sealed("peer", blob)


def test_json_round_trip_is_canonical():
    assert parse_json(PeerRecord, dump_json(RECORD)) == RECORD
    shuffled = json.dumps(dict(reversed(FIELDS.items())), indent=1).encode()
    assert dump_json(parse_json(PeerRecord, shuffled)) == dump_json(RECORD)
    assert peers_key("1" * 64) == f"atoll/{'1' * 64}/peers"


BAD_VALUES = {
    "nan": ("loss", "NaN"),
    "infinity": ("tokens_per_s", "Infinity"),
    "overflowing float": ("tokens_per_s", "1e999"),
    "negative": ("tokens_per_s", "-1.0"),
    "string for int": ("round", '"3"'),
    "bool for int": ("round", "true"),
    "float for int": ("round", "3.0"),
    "null for int": ("round", "null"),
    "2^53": ("tokens", str(2**53)),
    "10,000 digits": ("tokens", "9" * 10_000),
    "another protocol": ("protocol", "1"),
    "upper-case digest": ("lineage_id", '"' + "A" * 64 + '"'),
    "digest with a newline": ("lineage_id", '"' + "a" * 64 + '\\n"'),
    "markup": ("nickname", '"<script>"'),
    "path": ("nickname", '"../../etc"'),
    "state": ("state", '"leading"'),
    "lone surrogate": ("nickname", '"\\ud800"'),
    "far expiry": ("expires_at", "1e18"),
    "list": ("nickname", '["a"]'),
    "address with an id": ("addresses", '["/ip4/1.2.3.4/tcp/1/p2p/12D3"]'),
    "address without a port": ("addresses", '["/ip4/1.2.3.4"]'),
    "address with a newline": ("addresses", '["/ip4/1.2.3.4/tcp/1\\n"]'),
    "four addresses": ("addresses", json.dumps(["/ip4/1.2.3.4/tcp/1"] * 4)),
    "nested": ("nickname", "[" * 3000 + "]" * 3000),
}


@pytest.mark.parametrize(("name", "value"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_bad_value_is_a_protocol_error(name, value):
    text = ",".join(f'"{key}":{value if key == name else json.dumps(FIELDS[key])}' for key in FIELDS)
    with pytest.raises(ProtocolError, match="malformed PeerRecord") as caught:
        parse_json(PeerRecord, f"{{{text}}}".encode())
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"null", b"[]", b"3", b"\xff\xfe", b'{"nickname":"\xff"}', b"[" * 100_000, b'{"a":' * 50_000],
    ids=["empty", "open", "null", "list", "number", "not utf-8", "bad string", "deep list", "deep object"],
)
def test_what_is_no_record_is_a_protocol_error(payload):
    with pytest.raises(ProtocolError):
        parse_json(PeerRecord, payload)


def test_unknown_and_missing_keys_are_refused():
    with pytest.raises(ProtocolError, match="extra"):
        parse_json(PeerRecord, json.dumps({**FIELDS, "extra": 1}).encode())
    for key in ("run_id", "nickname", "round", "expires_at"):
        with pytest.raises(ProtocolError, match=key):
            parse_json(PeerRecord, json.dumps({k: v for k, v in FIELDS.items() if k != key}).encode())


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.recursive(JSON, lambda values: st.lists(values, max_size=3)))
def test_any_json_in_any_field_is_accepted_or_a_protocol_error(value):
    for key in FIELDS:
        try:
            record = parse_json(PeerRecord, json.dumps({**FIELDS, key: value}).encode())
        except ProtocolError:
            continue
        found = getattr(record, key)
        assert (list(found) if isinstance(found, tuple) else found) == value


def test_the_quickstart_manifest_fits_a_record():
    blob = seal_manifest(ORGANISER, manifest(), 7)
    assert len(blob) < MAX_RECORD_BYTES
    assert open_manifest(blob) == (ORGANISER.peer_id, manifest(), 7, blob)
    assert open_manifest(blob)[1].run_id == manifest().run_id


def test_the_serial_is_signed_and_changes_no_run_id():
    old, new = (open_manifest(seal_manifest(ORGANISER, manifest(), serial)) for serial in (1, 2**53))
    assert (old.serial, new.serial) == (1, 2**53)
    assert old.manifest.run_id == new.manifest.run_id
    start = 1 + len(ORGANISER.peer_id) + 64
    raised = old.blob[:start] + (9).to_bytes(8, "big") + old.blob[start + 8 :]
    with pytest.raises(ProtocolError, match="no valid signature"):
        open_manifest(raised)


def test_a_manifest_that_does_not_fit_a_record_is_not_sealed():
    digits = "".join(Identity.generate().peer_id for _ in range(100))
    config = {f"key_{start}": digits[start : start + 50] for start in range(0, len(digits), 50)}
    large = manifest(model=manifest().model.model_copy(update={"config": config}))
    with pytest.raises(ProtocolError, match="a record holds 4096"):
        seal_manifest(ORGANISER, large, 7)


@pytest.mark.parametrize("size", [MAX_MANIFEST_BYTES + 1, 3_000_000])
def test_a_manifest_that_unpacks_to_too_much_is_refused(size):
    with pytest.raises(ProtocolError, match=f"more than {MAX_MANIFEST_BYTES} bytes"):
        open_manifest(sealed_text(b" " * size))


def test_a_damaged_or_cut_stream_is_refused():
    packed = zlib.compress(manifest().canonical(), 9)
    for payload in (b"", b"no zlib", packed[:-1], packed[:20], packed[:50] + b"\xff\xff" + packed[52:]):
        with pytest.raises(ProtocolError, match="unpack"):
            open_manifest(seal(ORGANISER, "manifest", bytes(8) + payload))


@pytest.mark.parametrize("version", [1, 2, 3, 99, 0, -1, "3", True, None])
def test_another_protocol_version_tells_the_person_what_to_do(version):
    document = {**manifest().model_dump(mode="json"), "protocol": version, "unheard_of": 1}
    with pytest.raises(UserError, match=f"protocol version {version!r}; this atoll speaks 11"):
        open_manifest(sealed_text(json.dumps(document).encode()))


HOSTILE = {
    "yaml": b"name: a\nmodel: {architecture: llama}\nprotocol: 11",
    "yaml aliases": b"a: &a [x,x]\nb: &b [*a,*a]\nseed: *b",
    "deep": b"[" * 16_000,
    "deep object": b'{"a":' * 3_000,
    "a string": b'"manifest"',
    "5,000 digits": b'{"protocol":' + b"1" * 5_000 + b"}",
    "not utf-8": b"\xff\xfe\xfd",
    "extra key": json.dumps({**manifest().model_dump(mode="json"), "x": 1}).encode(),
    "float seed": manifest().canonical().replace(b'"seed":17', b'"seed":17.0'),
    "float version": manifest().canonical().replace(b'"protocol":11', b'"protocol":11.0'),
    "nan": manifest().canonical().replace(b'"weight_decay":0.1', b'"weight_decay":NaN'),
    "path": manifest().canonical().replace(b'"name":"quickstart"', b'"name":"../x"'),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_a_protocol_error(text):
    with pytest.raises(ProtocolError):
        open_manifest(sealed_text(text))


@given(st.binary(max_size=200))
def test_a_signed_manifest_of_random_bytes_is_a_protocol_error(text):
    with pytest.raises(ProtocolError):
        open_manifest(sealed_text(text))


def test_another_signers_manifest_is_told_apart():
    other = Identity.generate()
    assert open_manifest(seal_manifest(other, manifest(), 7))[0] == other.peer_id
    assert isinstance(open_manifest(seal_manifest(other, manifest(), 7))[1], RunManifest)
