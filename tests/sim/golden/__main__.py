"""Regenerate the golden trajectories after an intended change of the mathematics: `python -m tests.sim.golden`.

Say in the commit why the numbers changed.
"""

from __future__ import annotations

import json

import torch

from tests.sim.golden.trajectory import GOLDEN_FILE, trajectories

if __name__ == "__main__":
    torch.set_num_threads(1)
    GOLDEN_FILE.write_text(json.dumps(trajectories(), indent=1) + "\n")
    print(f"wrote {GOLDEN_FILE}")
