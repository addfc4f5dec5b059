"""The trajectory of DiLoCo stays what it was; `python -m tests.outer.golden` regenerates it."""

from __future__ import annotations

import json

import torch

from tests.outer.golden.trajectory import GOLDEN_FILE, anchors
from tests.outer.simulation import start


def test_diloco_follows_its_golden_trajectory() -> None:
    golden = torch.tensor(json.loads(GOLDEN_FILE.read_text()))
    assert golden.shape == (10, 16)
    assert (golden[-1] - start(16)).abs().max() > 0.5  # it went somewhere
    torch.testing.assert_close(torch.tensor(anchors()), golden, rtol=0.0, atol=1e-6)
