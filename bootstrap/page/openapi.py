"""The description of the JSON API, as OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

MAX_POINTS = 1500
MAX_ROUNDS = 200
MAX_CREDIT = 1000
STATUSES = ("committed", "aborted", "caught_up", "banned")


def _integer(name: str, least: int, most: int, meaning: str) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return {"name": name, "in": "query", "description": meaning, "schema": schema}


_NUMBER, _TEXT, _COUNT = {"type": "number"}, {"type": "string"}, {"type": "integer"}
_MAYBE = {"type": ["number", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


SCHEMAS: dict[str, Any] = {
    "Now": _object(
        time=_NUMBER, round=_COUNT, tokens=_COUNT, peers=_COUNT, tokens_per_s=_NUMBER, loss=_MAYBE, validation=_MAYBE,
        validated=_MAYBE, utilisation=_MAYBE, done=_MAYBE, eta_s=_MAYBE, committed_tokens_per_s=_NUMBER,
        goal=_object(rounds=_MAYBE, tokens=_MAYBE),
        states={"type": "object", "additionalProperties": _COUNT}, lineage_id=_TEXT, bytes_sent=_COUNT,
        bytes_received=_COUNT, served={"type": "object", "additionalProperties": _list(_COUNT)},
    ),
    "Peer": _object(
        peer_id=_TEXT, nickname=_TEXT,
        state={"enum": ["joining", "training", "paused", "finished", "gone"]}, device=_TEXT,
        reached={"enum": ["open", "relay", "no"]}, round=_COUNT, step=_COUNT, tokens=_COUNT, tokens_per_s=_NUMBER,
        loss=_MAYBE, validation=_MAYBE, utilisation=_MAYBE, mfu=_MAYBE, group_size=_COUNT, bytes_sent=_COUNT,
        bytes_received=_COUNT, seconds_waiting=_NUMBER, since=_MAYBE, heard=_NUMBER, rounds=_COUNT,
    ),
    "Round": _object(
        id=_COUNT, key=_TEXT, round=_COUNT, at=_MAYBE, status={"enum": list(STATUSES)},
        tone={"enum": ["good", "bad", "quiet", "news"]}, headline=_TEXT, details=_list(_TEXT), teller=_TEXT,
        members=_list(_TEXT), tokens=_COUNT, lineage_id=_TEXT,
        seconds={"type": "object", "additionalProperties": _NUMBER}, lineage={"enum": ["certified", "other", ""]},
    ),
    "Curve": _object(
        time=_list(_NUMBER), round=_list(_COUNT), tokens=_list(_COUNT), peers=_list(_COUNT),
        tokens_per_s=_list(_NUMBER), loss=_list(_MAYBE), validation=_list(_MAYBE), validated=_list(_MAYBE),
        utilisation=_list(_MAYBE),
    ),
    "Run": _object(
        name=_TEXT, run_id=_TEXT, genesis=_TEXT, organiser=_TEXT, addresses=_list(_TEXT), join=_list(_TEXT),
        trust=_TEXT, recipe={"type": "object"}, manifest={"type": "object"},
    ),
    "Credit": _object(peer_id=_TEXT, nickname=_TEXT, tokens=_COUNT, rounds=_COUNT),
    "Sample": _object(peer=_TEXT, round=_COUNT, text=_TEXT),
    "State": _object(
        version=_COUNT, run={"$ref": "#/components/schemas/Run"}, now={"$ref": "#/components/schemas/Now"},
        peers=_list({"$ref": "#/components/schemas/Peer"}), rounds=_list({"$ref": "#/components/schemas/Round"}),
        samples=_list({"$ref": "#/components/schemas/Sample"}),
    ),
}  # fmt: skip


def _answer(schema: Any, media_type: str = "application/json") -> dict[str, Any]:
    return {"200": {"description": "as asked for", "content": {media_type: {"schema": schema}}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


API: dict[str, dict[str, Any]] = {
    "/api/v1/run": {"summary": "What does not change: manifest, recipe, addresses", "answer": _answer(_ref("Run"))},
    "/api/v1/now": {"summary": "The figures of this moment", "answer": _answer(_ref("Now"))},
    "/api/v1/peers": {"summary": "Peers heard of in the last hour", "answer": _answer(_list(_ref("Peer")))},
    "/api/v1/rounds": {
        "summary": "Rounds and other events, the newest first",
        "parameters": [
            _integer("limit", 1, MAX_ROUNDS, "how many; 50 if left out"),
            _integer("before", 1, 2**53, "only those with a smaller id, for the next page"),
            {"name": "status", "in": "query", "description": "only these", "schema": {"enum": list(STATUSES)}},
        ],
        "answer": _answer(_list(_ref("Round"))),
    },
    "/api/v1/curve": {
        "summary": "Figures over time, as columns",
        "parameters": [
            _integer("points", 2, MAX_POINTS, "at most so many, evenly chosen"),
            _integer("since", 0, 2**53, "unix seconds: only what is newer"),
        ],
        "answer": _answer(_ref("Curve")),
    },
    "/api/v1/credit": {
        "summary": "Who has contributed most, by the certified chain",
        "parameters": [_integer("limit", 1, MAX_CREDIT, "how many; 50 if left out")],
        "answer": _answer(_list(_ref("Credit"))),
    },
    "/api/v1/state": {"summary": "All of it but the curves", "answer": _answer(_ref("State"))},
    "/api/v1/updates": {
        "summary": "Server-sent events of the kind `update`: what has changed, every two seconds",
        "answer": _answer(_TEXT, "text/event-stream"),
    },
    "/metrics": {"summary": "Prometheus metrics", "answer": _answer(_TEXT, "text/plain")},
}


def openapi_document() -> dict[str, Any]:
    """The whole description."""
    paths = {
        path: {"get": {"summary": one["summary"], "parameters": one.get("parameters", []), "responses": one["answer"]}}
        for path, one in API.items()
    }
    info = {"title": "Atoll: a run as its bootstrap sees it", "version": "1", "description": "Read-only."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": SCHEMAS}}
