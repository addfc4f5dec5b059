"""Files and folders of this process are its owner's alone, whatever the shell's umask says."""

from __future__ import annotations

import os

UMASK = 0o077


def make_files_private() -> None:
    """Make files with 0600 and folders with 0700 from here on; children do the same."""
    os.umask(UMASK)
