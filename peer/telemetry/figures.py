"""Figures as a person reads them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """`1.2 MB`: decimal units, at most three digits before the point and one after it."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_count(count: float) -> str:
    """`12,345`, and from ten million on `12.3M`."""
    return f"{count:,.0f}" if count < 1e7 else f"{count / 1e6:,.1f}M"


def human_duration(seconds: float | None) -> str:
    """`45 s`, `12.3 min`, `5.1 h`, `2.0 d`."""
    if seconds is None:
        return "-"
    for unit, size, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit != "s" or seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 86400:.1f} d"
