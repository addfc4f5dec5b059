"""Regenerate the golden trajectory after an intended change of the mathematics: `python -m tests.outer.golden`.

Say in the commit why the numbers changed.
"""

from __future__ import annotations

import json

import torch

from tests.outer.golden.trajectory import GOLDEN_FILE, anchors

if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = ",\n  ".join(json.dumps(row) for row in anchors())
    GOLDEN_FILE.write_text(f"[\n  {rows}\n]\n")
    print(f"wrote {GOLDEN_FILE}")
