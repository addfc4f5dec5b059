"""What the campaign of hostile bytes knows of one parser."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from peer.errors import ProtocolError


@dataclass(frozen=True)
class Parser:
    """One parser.

    Attributes:
        name: in the report.
        parse: bytes -> what was understood (not None), or raises one of `refuses`.
        valid: inputs that it accepts.
        signed: nothing but the meaning of a valid input may ever be accepted.
        share: of all inputs, relative to the others: the slow ones get fewer.
        meanings: of the valid inputs.
    """

    name: str
    parse: Callable[[bytes], Any]
    valid: tuple[bytes, ...]
    signed: bool = False
    share: float = 1.0
    refuses: tuple[type[Exception], ...] = (ProtocolError,)
    meanings: frozenset[Hashable] = field(init=False)

    def __post_init__(self) -> None:
        meanings = frozenset(self.parse(valid) for valid in self.valid) if self.signed else frozenset()
        object.__setattr__(self, "meanings", meanings)
