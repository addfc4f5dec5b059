"""The report of a campaign: rows, their gaps to data parallelism, means over the seeds; written after every run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peer.errors import UserError
from peer.sim.campaign.job import Row
from peer.system.output_files import replace_file

AVERAGED = (
    "val_loss", "gap", "bytes_sent_per_peer", "reduction_vs_ddp", "virtual_seconds", "utilization",
    "wall_seconds",
)


class CampaignReport:
    """Rows by (label, seed), in the order of `labels` and then of `seeds`.

    Args:
        settings: what all rows have in common, see `plan.common_settings`.
        baselines: those of the labels whose best one, by its mean loss, the gaps are to.
    """

    def __init__(
        self, *, command: str, task: Mapping[str, Any], settings: Mapping[str, Any], labels: Sequence[str],
        seeds: Sequence[int], baselines: Sequence[str],
    ) -> None:
        self.command, self.task, self.settings = command, task, settings
        self.labels, self.seeds, self.baselines = list(labels), list(seeds), list(baselines)
        self._rows: dict[tuple[str, int], Row] = {}

    def add(self, row: Row) -> None:
        """One finished run; an earlier one of the same label and seed gives way."""
        self._rows[row["label"], row["seed"]] = row

    def has(self, label: str, seed: int, settings: str) -> bool:
        """Whether that run is there, made with the same recipe, and need not be made again."""
        row = self._rows.get((label, seed))
        return row is not None and row["settings"] == settings and row["status"] != "failed"

    def rows(self) -> list[Row]:
        """All rows, each with its gap to the best baseline with the same seed, as a fraction."""
        best = self.best_baseline()
        losses = {seed: row["val_loss"] for (label, seed), row in self._rows.items() if label == best}
        place = {label: index for index, label in enumerate(self.all_labels())}
        ordered = sorted(self._rows.values(), key=lambda row: (place[row["label"]], row["seed"]))
        return [{**row, "gap": _gap(row["val_loss"], losses.get(row["seed"]))} for row in ordered]

    def best_baseline(self) -> str | None:
        """The baseline with the lowest mean loss over the seeds that all of them have; None before they have one."""
        losses: dict[str, dict[int, float]] = {label: {} for label in self.baselines}
        for (label, seed), row in self._rows.items():
            if label in losses and row["val_loss"] is not None:
                losses[label][seed] = row["val_loss"]
        learned = {label: own for label, own in losses.items() if own}
        seeds = set[int].intersection(*map(set, learned.values())) if learned else set()
        return min(learned, key=lambda label: sum(learned[label][seed] for seed in seeds)) if seeds else None

    def all_labels(self) -> list[str]:
        """Those asked for, then those that a resumed report had beside them."""
        return list(dict.fromkeys([*self.labels, *(label for label, _ in self._rows)]))

    def summary(self) -> list[dict[str, Any]]:
        """Means and sample standard deviations over the seeds, one entry per label that has rows."""
        rows = self.rows()
        return [
            _summary_of(label, own)
            for label in self.all_labels()
            if (own := [row for row in rows if row["label"] == label])
        ]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        wanted = {(label, seed) for label in self.labels for seed in self.seeds}
        return {
            "command": self.command,
            "task": dict(self.task),
            "peers": self.settings["peers"],
            "tokens": self.settings["tokens"],
            "seeds": self.seeds,
            "labels": self.labels,
            "baselines": self.baselines,
            "best_baseline": self.best_baseline(),
            "settings": dict(self.settings),
            "complete": wanted <= set(self._rows),
            "rows": self.rows(),
            "summary": self.summary(),
        }

    def write(self, path: Path) -> None:
        """Replace `path` atomically; a concurrent reader sees the earlier one.

        Raises:
            UserError: the disk refuses.
        """
        content = json.dumps(self.document(), indent=1, allow_nan=False) + "\n"
        try:
            replace_file(path, content.encode())
        except OSError as error:
            raise UserError(f"report {path}: cannot be written: {error.strerror}", "check the disk") from error

    def take_over(self, path: Path) -> int:
        """The rows of an earlier report; returns how many.

        Raises:
            UserError: not a report, or one made with other settings, naming the first that differs.
        """
        document = read_report(path)
        theirs = document["settings"]
        for key, value in self.settings.items():
            if theirs.get(key) != value:
                shown = f"{key} {_brief(theirs.get(key))} there, {_brief(value)} now"
                raise UserError(
                    f"--report={path}: was made with other settings: {shown}",
                    "its rows cannot stand beside new ones; choose another file, or leave --resume out",
                )
        for row in document["rows"]:
            self.add({key: value for key, value in row.items() if key != "gap"})
        return len(document["rows"])


def read_report(path: Path) -> dict[str, Any]:
    """A report that `CampaignReport.write` made.

    Raises:
        UserError: it cannot be read, or is something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"report {path}: cannot be read: {error}", "choose another file") from None
    needed = ("settings", "rows", "labels")
    if not isinstance(document, dict) or any(key not in document for key in needed):
        raise UserError(f"report {path}: is not a report of 'atoll compare'", "choose another file")
    return document


def _gap(loss: float | None, reference: float | None) -> float | None:
    return None if loss is None or not reference else loss / reference - 1.0


def _summary_of(label: str, rows: Sequence[Row]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "label": label,
        "recipe": rows[0]["recipe"],
        "steps_per_round": rows[0]["steps_per_round"],
        "seeds": [row["seed"] for row in rows],
        "failures": sum(row["val_loss"] is None for row in rows),
        "notes": sorted({row["note"] for row in rows if row["note"]}),
    }
    for key in AVERAGED:
        values = [row[key] for row in rows if row[key] is not None]
        summary[key] = statistics.fmean(values) if values else None
        summary[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else None
    return summary


def _brief(value: Any) -> str:
    return str(value.get("name", value)) if isinstance(value, dict) else str(value)
