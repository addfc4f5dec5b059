"""How a run goes: its loss as a curve in a terminal, how far it is, and when it will be done."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from peer.system.clock import Clock
from peer.telemetry.figures import human_duration

MAX_POINTS = 512
PACE_WINDOW_S = 900.0
LEAST_WINDOW_S = 10.0
LABEL_CHARS = 8
LEAST_CHART_COLUMNS = 30
CHART_LINES = 8
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
_BLANK = 0x2800


@dataclass(frozen=True, kw_only=True)
class CoursePoint:
    """One moment: rounds and tokens of the whole run, losses in nats per token."""

    time: float
    round: int
    tokens: int
    loss: float | None = None
    validation: float | None = None


class Course:
    """The points of a run, thinned out so that they never are more than MAX_POINTS, and its pace.

    Args:
        rounds_total, tokens_total: where the run ends, if it does.
        clock: unix seconds.

    Attributes:
        utilisation: share of the time that goes into steps.
    """

    def __init__(
        self, rounds_total: int | None = None, tokens_total: int | None = None, clock: Clock = time.time
    ) -> None:
        self.rounds_total, self.tokens_total = rounds_total, tokens_total
        self._clock = clock
        self.points: list[CoursePoint] = []
        self._paces: deque[tuple[float, float]] = deque()
        self.utilisation: float | None = None

    def move_end(self, rounds_total: int | None, tokens_total: int | None) -> None:
        """The organiser may have decided on another one."""
        self.rounds_total, self.tokens_total = rounds_total, tokens_total

    def add(self, round: int, tokens: int, loss: float | None, validation: float | None = None) -> None:
        """The figures of now."""
        now = self._clock()
        self.points.append(CoursePoint(time=now, round=round, tokens=tokens, loss=loss, validation=validation))
        if len(self.points) > MAX_POINTS:
            self.points = [*self.points[:-1:2], self.points[-1]]
        self._paces.append((now, self._done(round, tokens)))
        while self._paces[0][0] < now - PACE_WINDOW_S:
            self._paces.popleft()

    @property
    def share(self) -> float | None:
        """How much of the run is done; None where it has no end."""
        if not self.points or not (self.rounds_total or self.tokens_total):
            return None
        return min(1.0, self._done(self.points[-1].round, self.points[-1].tokens))

    @property
    def eta_s(self) -> float | None:
        """Seconds until the end at the pace of the last minutes; None where that is not known."""
        share = self.share
        if share is None or not self._paces:
            return None
        (began, first), (ended, last) = self._paces[0], self._paces[-1]
        if share >= 1.0:
            return 0.0
        if ended - began < LEAST_WINDOW_S or last <= first:
            return None
        return (1.0 - last) * (ended - began) / (last - first)

    def in_words(self) -> str:
        """`round 12 of 200 (6%), done in 3.4 h, 97% of the time training`."""
        if not self.points:
            return ""
        newest, share, eta_s = self.points[-1], self.share, self.eta_s
        words = f"round {newest.round:,}"
        words += f" of {self.rounds_total:,}" if self.rounds_total else ""
        words += f" ({share:.0%})" if share is not None else ""
        if share is not None:
            words += ", done" if share >= 1.0 else f", done in {human_duration(eta_s)}" if eta_s is not None else ""
        return words + (f", {self.utilisation:.0%} of the time training" if self.utilisation is not None else "")

    def _done(self, round: int, tokens: int) -> float:
        """Share of the run; without an end, its rounds."""
        shares = [round / self.rounds_total] if self.rounds_total else []
        shares += [tokens / self.tokens_total] if self.tokens_total else []
        return max(shares, default=float(round))


class LossChart:
    """The loss of a run over time, drawn in braille; two dots of width and four of height for each character.

    Args:
        lines: of the whole chart, with the axis below.
    """

    def __init__(self, points: Sequence[CoursePoint], lines: int = CHART_LINES) -> None:
        self._points, self._lines = list(points), max(3, lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        training = [(p.time, p.loss) for p in self._points if p.loss is not None and math.isfinite(p.loss)]
        validation = [
            (p.time, p.validation)
            for p in self._points
            if p.validation is not None and math.isfinite(p.validation)
        ]
        columns = options.max_width - LABEL_CHARS - 2
        known = training + validation
        if len({x for x, _ in known}) < 2 or columns < LEAST_CHART_COLUMNS:
            return
        grid = _Grid(columns, self._lines - 1, known)
        grid.draw(training, "cyan")
        grid.draw(validation, "bold yellow")
        for row, line in enumerate(grid.lines()):
            level = grid.level(row) if row in (0, (self._lines - 2) // 2, self._lines - 2) else None
            label = f"{level:.3f}" if level is not None else ""
            yield Text.assemble((f"{label:>{LABEL_CHARS}} ", "dim"), ("|", "dim"), *line)
        legend = [("training ", "cyan")] if training else []
        legend += [("validation ", "bold yellow")] if validation else []
        lasts = human_duration(max(x for x, _ in known) - min(x for x, _ in known))
        yield Text.assemble(" " * (LABEL_CHARS + 2), ("loss: ", "dim"), *legend, (f"over the last {lasts}", "dim"))


class _Grid:
    """Dots of a chart, and the colour of each character."""

    def __init__(self, columns: int, rows: int, known: Sequence[tuple[float, float]]) -> None:
        self._columns, self._rows = columns, rows
        xs, ys = [x for x, _ in known], sorted(y for _, y in known)
        self._left, self._right = min(xs), max(xs)
        self._low = ys[0]
        self._high = max(ys[min(len(ys) - 1, int(0.98 * len(ys)))], self._low + 1e-3)  # one spike scales nothing
        self._dots = [[0] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]

    def level(self, row: int) -> float:
        """The loss at the middle of a line."""
        return self._high - (self._high - self._low) * (row + 0.5) / self._rows

    def draw(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """A line through the mean of each column of dots."""
        means: dict[int, list[float]] = {}
        for x, y in points:
            at = (x - self._left) / (self._right - self._left)
            means.setdefault(min(2 * self._columns - 1, int(at * 2 * self._columns)), []).append(y)
        before: tuple[int, float] | None = None
        for column in sorted(means):
            y = sum(means[column]) / len(means[column])
            start, level = before if before is not None else (column, y)
            for between in range(start, column + 1):
                share = 1.0 if column == start else (between - start) / (column - start)
                self._dot(between, level + share * (y - level), style)
            before = column, y

    def _dot(self, column: int, y: float, style: str) -> None:
        height = 4 * self._rows
        place = int((self._high - min(self._high, max(self._low, y))) / (self._high - self._low) * (height - 1) + 0.5)
        self._dots[place // 4][column // 2] |= _DOTS[place % 4][column % 2]
        self._styles[place // 4][column // 2] = style

    def lines(self) -> list[list[tuple[str, str]]]:
        """Characters with their styles, line by line."""
        return [
            [(chr(_BLANK | dots) if dots else " ", style) for dots, style in zip(row, styles, strict=True)]
            for row, styles in zip(self._dots, self._styles, strict=True)
        ]
