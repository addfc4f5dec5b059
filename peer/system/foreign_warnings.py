"""Warnings of libraries about themselves, which no user of this program can act on."""

from __future__ import annotations

import warnings


def hush_deprecations() -> None:
    """To be called before torch and hivemind are imported: newer versions of torch warn at that of hivemind's code."""
    warnings.filterwarnings("ignore", r"`torch\.jit\.script`", FutureWarning)
