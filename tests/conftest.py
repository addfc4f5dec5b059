"""What every test needs: one torch thread, no network, and the same hypothesis examples on every machine."""

from __future__ import annotations

import os

# The hub client reads this when it is imported, so it is set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("atoll", derandomize=True, deadline=None, database=None, max_examples=100)
hypothesis.settings.load_profile("atoll")
