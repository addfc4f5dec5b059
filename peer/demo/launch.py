"""`python -m peer.demo.launch PARENT_PID COMMAND...`: become COMMAND, but never outlive the process PARENT_PID (Linux).

The death signal is set before the command is executed and survives that, so there is no moment without it.
"""

from __future__ import annotations

import os
import sys

from peer.system.death_signal import die_with_parent


def main() -> None:
    """Replace this process by the command, or exit if the parent has died already."""
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
