"""What the loss of a large vocabulary takes, measured in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOKENS, VOCAB = 2 * 256, 128 * 1024
CHILD = f"""
import sys
import torch
from peer.protocol.manifest import ModelSpec
from peer.train.batch import Batch
from peer.train.loss import LanguageLoss
from peer.train.model import build_model

torch.set_num_threads(1)
model = build_model(ModelSpec(architecture="llama", config={{
    "vocab_size": {VOCAB}, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
}}), 259, 0)
batch = Batch.of(torch.randint({VOCAB}, (2, {TOKENS // 2 + 1}), generator=torch.Generator().manual_seed(0)))
# of this program alone: ru_maxrss includes the process that it was forked from
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
loss = LanguageLoss(model, logit_bytes=int(sys.argv[1]) or None).backward(batch, batch.tokens)
print(loss.item(), 1024 * (peak() - before))
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_peak_of_a_large_vocabulary_is_less_than_a_quarter_of_that_of_all_logits():
    found = {}
    for limit in (0, 2**40):
        command = [sys.executable, "-c", CHILD, str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
        loss, peak = done.stdout.split()
        found[limit] = float(loss), int(peak)
    assert found[0][0] == pytest.approx(found[2**40][0], abs=1e-5)
    assert found[2**40][1] > 3 * 4 * TOKENS * VOCAB, "logits, a copy, and their gradient"
    assert found[0][1] < found[2**40][1] / 4
