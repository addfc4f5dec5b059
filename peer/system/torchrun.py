"""What `torchrun` tells the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping


def under_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether `torchrun` started several processes for this peer."""
    return "RANK" in environ and int(environ.get("WORLD_SIZE", "1")) > 1
