"""What a process does while it starts: imports, mostly, of which nothing is ever given back."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """Pause the garbage collector, and exclude all objects that exist at the end from later collections.

    A peer imports some 200,000 objects that live as long as it does. Looking through them again and again is a fifth of
    the time of starting; and later each full collection would stop everything for a tenth of a second, in a round too.

    Warnings are not shown: what libraries hold against each other while they are imported is for their authors.
    """
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.freeze()
        gc.enable()
