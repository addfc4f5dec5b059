"""JSON values from strangers: plain, finite, and bounded in depth, number and length."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, Field

MAX_DEPTH = 4
MAX_VALUES = 4096

TEXT_PATTERN = r"^[\x20-\x7e]{0,128}$"
KEY_PATTERN = r"^[A-Za-z0-9_]{1,64}$"


def check_plain_json(value: Any) -> Any:
    """The value itself; raises ValueError with the place in it that is not allowed."""
    if sum(1 for _ in _values(value, "", 1)) > MAX_VALUES:
        raise ValueError(f"holds more than {MAX_VALUES} values")
    return value


PlainJson = Annotated[Any, AfterValidator(check_plain_json)]
Key = Annotated[str, Field(pattern=KEY_PATTERN)]


def _values(value: Any, path: str, depth: int) -> Iterator[Any]:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    yield value
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not re.fullmatch(KEY_PATTERN, key):
                raise ValueError(f"{path}a key must be 1 to 64 of A-Z a-z 0-9 _")
            yield from _values(item, f"{path}{key}: ", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _values(item, f"{path}{index}: ", depth + 1)
    elif isinstance(value, str):
        if not re.fullmatch(TEXT_PATTERN, value):
            raise ValueError(f"{path}text must be at most 128 printable ASCII characters")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}a number must be finite")
    elif isinstance(value, int):
        if abs(value) > 2**53:
            raise ValueError(f"{path}a whole number must be within 2^53")
    elif value is not None:
        raise ValueError(f"{path}{type(value).__name__} is no JSON value")
