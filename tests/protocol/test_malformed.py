"""A stranger's malformed message is refused at its first mistake: to find and describe all of them takes seconds."""

from __future__ import annotations

import json
from typing import get_args, get_origin

import pytest
from pydantic import ValidationError

from peer.errors import ProtocolError
from peer.protocol import evidence, lineage, records, statements, wire, word
from peer.protocol.manifest import Spec
from peer.protocol.records import parse_json
from peer.protocol.spec import Message
from peer.protocol.wire import HeardWords, HelloMessage

MODULES = (evidence, lineage, records, statements, wire, word)


def several(schema):
    """The fields that hold any number of items."""
    return [name for name, field in schema.model_fields.items()
            if get_origin(field.annotation) is tuple and Ellipsis in get_args(field.annotation)]  # fmt: skip


NAMED = [one for module in MODULES for one in vars(module).values() if isinstance(one, type)]
SCHEMAS = {one for one in NAMED if issubclass(one, Spec)}
FIELDS = sorted(((one, name) for one in SCHEMAS for name in several(one)), key=lambda each: (each[0].__name__, each[1]))


@pytest.mark.parametrize(("schema", "name"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
def test_of_many_items_that_are_wrong_one_is_reported(schema, name):
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps({name: [None] * 1000}), strict=True)
    places = [error["loc"] for error in caught.value.errors() if error["loc"][0] == name]
    assert [place for place in places if len(place) > 1] == [(name, 0)]


def test_all_messages_with_items_are_looked_at():
    assert {HeardWords, wire.VoteMessage, evidence.Reduction, lineage.Link} < {schema for schema, _ in FIELDS}


def test_the_first_mistake_is_described_and_the_others_are_counted():
    """Without the input: a missing field would have all of it described."""
    content = json.dumps({f"k{number}": "x" * 1000 for number in range(50)}).encode()
    with pytest.raises(ProtocolError) as caught:
        parse_json(HelloMessage, content)
    assert str(caught.value) == "malformed HelloMessage: group_id: Field required, and 50 errors more"
    with pytest.raises(ProtocolError, match=r"HelloMessage: k: Extra inputs are not permitted$"):
        parse_json(HelloMessage, json.dumps({"group_id": "0" * 64, "k": 0}).encode())


@pytest.mark.parametrize("item", [b"[[[]]],", b"{},", b'0,"k":'])
def test_a_text_of_more_items_than_a_message_has_is_not_parsed(item):
    content = b'{"k":[' + item * (HelloMessage.most_items + 1) + b"0]}"
    with pytest.raises(ProtocolError, match=f"items; at most {HelloMessage.most_items}"):
        parse_json(HelloMessage, content)


def test_what_other_peers_send_is_bounded():
    sent = {one for one in vars(wire).values() if isinstance(one, type) and issubclass(one, Spec)} - {Spec}
    assert all(issubclass(one, Message) for one in sent - {wire.SignedWord, wire.HeardWord})
    assert all(issubclass(one, Message) for one in (evidence.Evidence, lineage.Certificate, records.PeerRecord))
