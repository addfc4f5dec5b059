from __future__ import annotations

import json
import random
import struct

import pytest

from peer.errors import ProtocolError
from peer.protocol import wire
from peer.protocol.records import dump_json, parse_json
from peer.protocol.wire import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    JoinMessage,
    Kind,
    group_id,
    pack_header,
    unpack_header,
)

DIGEST = "a" * 64
PEER = "12D3KooWQK1wnefoLrcVHbbnf5tLzbopUd3K3bFAoJpA7YJgL5pV"
JOIN = JoinMessage(run_id=DIGEST, round=3, parent="b" * 64, tokens=1000)
MESSAGES = [
    JOIN,
    wire.RejectMessage(reason="follow", leader=PEER, round=3, lineage_id=DIGEST),
    wire.InviteMessage(run_id=DIGEST, round=3, parent=DIGEST, wait_s=2.5, weight=7),
    wire.StatusMessage(coming=True, round=3, lineage_id=DIGEST, weight=7, leader=PEER),
    wire.HelloMessage(group_id=DIGEST),
    wire.VoteMessage(link_id=DIGEST, signature="0" * 128),
    wire.AbortMessage(reason="deadline passed", culprit=PEER),
    wire.HistoryRequest(what="update", run_id=DIGEST, digest=DIGEST),
    wire.HistoryRequest(what="chunks", run_id=DIGEST, digest=DIGEST, indexes=(0, 7, 2**24 - 1)),
    wire.SnapshotMeta(round=3, lineage_id=DIGEST, fragments=(100,), num_buffers=1, num_chunks=2),
]


def mutate(rng, data):
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        where = rng.randrange(len(data))
        action = rng.randrange(4)
        if action == 0:
            data[where] ^= 1 << rng.randrange(8)
        elif action == 1:
            data[where] = rng.randrange(256)
        elif action == 2:
            data[where : where + rng.randint(1, 8)] = b""
        else:
            data[where:where] = rng.choice([b"1" * 30, b"NaN", b"null", b"[[", b'"', b"-", b"e999", b"\xff", b"{}"])
        data = data or bytearray(b" ")
    return bytes(data)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("length", [0, 1, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES])
def test_a_header_survives(kind, length):
    header = pack_header(kind, length)
    assert header == b"ATL1" + bytes([kind, 0, 0, 0]) + struct.pack(">I", length)
    assert len(header) == HEADER_BYTES == 12
    assert unpack_header(header) == (kind, length)


def test_a_body_beyond_the_limit_is_refused_on_its_header():
    header = b"ATL1" + bytes([Kind.DATA, 0, 0, 0]) + struct.pack(">I", MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(ProtocolError, match=f"announces {MAX_PAYLOAD_BYTES + 1} bytes; the limit is"):
        unpack_header(header)
    with pytest.raises(ValueError, match="the limit is"):
        pack_header(Kind.DATA, MAX_PAYLOAD_BYTES + 1)


@pytest.mark.parametrize(
    "header",
    [b"ATL2\x01" + bytes(7), b"HTTP/1.1 200", b"ATL1\x01\0\0\1" + bytes(4), b"ATL1" + bytes(8), b"ATL1\x10" + bytes(7)],
    ids=["magic", "http", "padding", "kind 0", "kind 16"],
)
def test_other_headers_are_refused(header):
    with pytest.raises(ProtocolError):
        unpack_header(header)


def test_twenty_thousand_hostile_headers_raise_nothing_but_protocol_errors():
    rng, accepted = random.Random(1), 0
    for _ in range(20_000):
        header = bytearray(pack_header(rng.choice(list(Kind)), rng.randrange(2**31)))
        if rng.random() < 0.3:
            header[:] = rng.randbytes(HEADER_BYTES)
        for _ in range(rng.randint(0, 2)):
            header[rng.randrange(HEADER_BYTES)] = rng.randrange(256)
        try:
            kind, length = unpack_header(bytes(header))
        except ProtocolError:
            continue
        assert pack_header(kind, length) == header  # whatever is accepted has one spelling
        accepted += 1
    assert 2_000 < accepted < 10_000


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_and_is_small(message):
    assert parse_json(type(message), dump_json(message)) == message
    assert len(dump_json(message)) < 1024


def test_twenty_thousand_mutated_messages_raise_nothing_but_protocol_errors():
    rng, accepted = random.Random(2), 0
    texts = [(type(message), dump_json(message)) for message in MESSAGES]
    for _ in range(20_000):
        schema, text = rng.choice(texts)
        mutated = rng.randbytes(rng.randint(0, 40)) if rng.random() < 0.05 else mutate(rng, text)
        try:
            parsed = parse_json(schema, mutated)
        except ProtocolError:
            continue
        assert parse_json(schema, dump_json(parsed)) == parsed
        accepted += 1
    assert 100 < accepted < 10_000


CHUNKS = {"what": "chunks", "run_id": DIGEST, "digest": DIGEST, "indexes": [1]}
OUT_OF_RANGE = {
    "no tokens": (JoinMessage, {**JOIN.model_dump(), "tokens": 0}),
    "too many tokens": (JoinMessage, {**JOIN.model_dump(), "tokens": 2**40}),
    "fragment": (JoinMessage, {**JOIN.model_dump(), "fragment": 65536}),
    "reason": (wire.RejectMessage, {"reason": "dislike"}),
    "long reason": (wire.AbortMessage, {"reason": "x" * 301}),
    "long culprit": (wire.AbortMessage, {"reason": "x", "culprit": "x" * 65}),
    "short signature": (wire.VoteMessage, {"link_id": DIGEST, "signature": "0" * 127}),
    "no parameters": (wire.SnapshotMeta, {**MESSAGES[-1].model_dump(), "fragments": (0,)}),
    "2^40 parameters": (wire.SnapshotMeta, {**MESSAGES[-1].model_dump(), "fragments": (2**40,)}),
    "2^24 chunks": (wire.SnapshotMeta, {**MESSAGES[-1].model_dump(), "num_chunks": 2**24}),
    "five buffers": (wire.SnapshotMeta, {**MESSAGES[-1].model_dump(), "num_buffers": 5}),
    "what": (wire.HistoryRequest, {"what": "../key", "run_id": DIGEST}),
    "chunk 2^24": (wire.HistoryRequest, {**CHUNKS, "indexes": [2**24]}),
    "chunk -1": (wire.HistoryRequest, {**CHUNKS, "indexes": [-1]}),
    "chunk 1.5": (wire.HistoryRequest, {**CHUNKS, "indexes": [1.5]}),
    "65 chunks": (wire.HistoryRequest, {**CHUNKS, "indexes": list(range(65))}),
    "no chunks": (wire.HistoryRequest, {**CHUNKS, "indexes": []}),
    "chunks of nothing": (wire.HistoryRequest, {**CHUNKS, "digest": None}),
    "an update by chunks": (wire.HistoryRequest, {**CHUNKS, "what": "update"}),
    "digest as a path": (wire.HistoryRequest, {"what": "update", "run_id": DIGEST, "digest": "../" + "a" * 61}),
}


@pytest.mark.parametrize(("schema", "values"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE.keys())
def test_values_out_of_range_are_refused(schema, values):
    with pytest.raises(ProtocolError, match=f"malformed {schema.__name__}"):
        parse_json(schema, json.dumps(values).encode())


def test_the_group_id_depends_on_every_join_and_on_the_order():
    other = JOIN.model_copy(update={"tokens": 999})
    ids = {
        group_id([JOIN, JOIN], ["a", "b"]),
        group_id([JOIN, JOIN], ["b", "a"]),
        group_id([JOIN, other], ["a", "b"]),
        group_id([other, JOIN], ["a", "b"]),
        group_id([JOIN], ["a"]),
        group_id([JOIN, JOIN, JOIN], ["a", "b", "c"]),
    }
    assert len(ids) == 6
    assert group_id([JOIN, other], ["a", "b"]) in ids
