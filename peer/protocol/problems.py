"""What pydantic found wrong with a document, in words for a person."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from peer.errors import did_you_mean

MAX_PROBLEMS = 20
NAME_PATTERN = r"^[a-z0-9_][a-z0-9._-]{0,63}$"
DIGEST_PATTERN, DEVICE_PATTERN = r"^[0-9a-f]{64}$", r"^[a-z]+(:[0-9]{1,2})?$"
_IN_WORDS = {
    NAME_PATTERN: "must be 1 to 64 of a-z, 0-9, '_', '.' and '-', the first one neither '.' nor '-'",
    DIGEST_PATTERN: "must be 64 hex digits, lower case",
    DEVICE_PATTERN: "must be auto, or a name such as cuda or cuda:1",
}


def explain_validation(error: ValidationError, schema: type[BaseModel]) -> str:
    """One line for each problem that pydantic found: the key, the value, the limit or the nearest known key."""
    problems = error.errors(include_url=False)
    lines = []
    for problem in problems[:MAX_PROBLEMS]:
        path = ".".join(_show_key(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = _known_keys(schema, problem["loc"][:-1])
            lines.append(f"unknown key '{path}': {did_you_mean(str(problem['loc'][-1])[:64], known)}")
        elif problem["type"] == "missing":
            lines.append(f"missing key '{path}'")
        else:
            message = validation_message(problem)
            lines.append(f"{path}={show_value(problem['input'])}: {message}" if path else message)
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return "\n".join(lines)


def validation_message(problem: Mapping[str, Any]) -> str:
    """What pydantic says of one problem, with the remedy where YAML read text as something else."""
    pattern = problem.get("ctx", {}).get("pattern")
    message = _IN_WORDS.get(pattern) or str(problem["msg"]).removeprefix("Value error, ")
    is_scalar = isinstance(problem["input"], bool | int | float)
    return f"{message}: write it in quotes" if problem["type"] == "string_type" and is_scalar else message


def show_value(value: Any) -> str:
    """A repr of at most a few hundred characters."""
    short = reprlib.Repr()
    short.maxlevel = 2
    short.maxstring = short.maxother = short.maxlong = 80
    try:
        return short.repr(value)
    except ValueError:      # Python does not write integers of more than 4300 digits
        return "<too long>"


def _show_key(part: int | str) -> str:
    """A key as it is when it is harmless to print, else quoted and shortened."""
    text = str(part)
    return text if text.isprintable() and text.isascii() and len(text) <= 64 else show_value(text)


def _known_keys(schema: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = schema.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        schema = annotation
    return list(schema.model_fields)
