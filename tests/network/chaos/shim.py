"""Compiles `shim.c`: a library that is preloaded into the processes of a campaign, for a clock or a disk that fails."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

SOURCE = Path(__file__).with_name("shim.c")


@lru_cache(maxsize=1)
def library() -> Path:
    """Where the compiled library is; it lasts as long as the folder of temporary files."""
    target = Path(mkdtemp(prefix="atoll-shim-")) / "shim.so"
    compiler = shlex.split(os.environ.get("CC", sysconfig.get_config_var("CC") or "cc"))
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-o", target, SOURCE, "-ldl"], check=True)
    return target


def preloaded(**settings: str) -> Mapping[str, str]:
    """The environment of a process that has the library."""
    return {**os.environ, **settings, "LD_PRELOAD": str(library())}
