"""Rows of a benchmark that is measured in several sittings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peer.errors import UserError

RESUME = "keep each row in FILE as soon as it is measured, and take over those that are there, if {same} are the same"
Row = dict[str, Any]


class KeptRows:
    """Rows on disk, a line of JSON each, so that a long grid can be measured in several sittings.

    Args:
        path: of the file; None keeps nothing.
        under: what must be equal for a row to be taken over.
    """

    def __init__(self, path: Path | None, under: dict[str, Any]) -> None:
        self._path, self._under = path, under
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        try:
            self._rows: list[Row] = [one["row"] for one in map(json.loads, lines) if one["under"] == under]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--resume={path}: not a file that this benchmark wrote", "give a new one") from None

    def of(self, run: Mapping[str, Any]) -> Row | None:
        """The row with these values, if it was measured."""
        return next((row for row in self._rows if all(row.get(name) == run[name] for name in run)), None)

    def keep(self, row: Row) -> Row:
        """The same row, once it is on disk."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"under": self._under, "row": row}) + "\n")
        return row


def of_earlier(count: int) -> str:
    """What a report says of so many rows that were taken over."""
    return f"Rows measured in an earlier session (`--resume`): {count}."
