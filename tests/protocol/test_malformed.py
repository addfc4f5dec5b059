"""A stranger's malformed message is refused at its first mistake: to find and describe all of them takes seconds."""

from __future__ import annotations

import json
from typing import get_args, get_origin

import pytest
from pydantic import ValidationError

from peer.errors import ProtocolError
from peer.protocol import evidence, lineage, records, statements, wire, word
from peer.protocol.manifest import Spec
from peer.protocol.records import MAX_ERRORS, parse_json
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


@pytest.mark.parametrize("count", [MAX_ERRORS + 1, 50_000])
def test_many_mistakes_are_counted_and_not_described(count):
    with pytest.raises(ProtocolError) as caught:
        parse_json(HelloMessage, json.dumps({f"k{number}": 0 for number in range(count)}).encode())
    assert str(caught.value) == f"malformed HelloMessage: {count + 1} errors"  # and no group


def test_a_few_mistakes_are_described():
    with pytest.raises(ProtocolError, match=r"2 validation errors for HelloMessage group_id +Field required"):
        parse_json(HelloMessage, b'{"k": 0}')
