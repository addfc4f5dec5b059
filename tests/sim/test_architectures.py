"""A sample of the sweep over all causal architectures; `make architectures` tries every one of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.sim.architectures import OUTCOMES, PAGE, REPORT, ROOT, described

SAMPLE, SEED = 8, 31


@pytest.mark.timeout(300)
def test_a_sample_of_all_architectures_is_trained_or_refused_as_the_documents_say():
    argv = [sys.executable, "-m", "tests.sim.architectures", "--sample", str(SAMPLE), "--seed", str(SEED)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=280, check=True)
    outcomes, known = json.loads(done.stdout), json.loads(REPORT.read_text())["architectures"]
    assert len(outcomes) == SAMPLE
    assert {name: outcome["status"] for name, outcome in outcomes.items()} == {
        name: known[name]["status"] for name in outcomes
    }
    assert all(outcome["reason"] for outcome in outcomes.values() if outcome["status"] == "refused")


def test_the_documents_speak_of_every_architecture_and_of_no_failure():
    report = json.loads(REPORT.read_text())
    outcomes = report["architectures"]
    assert outcomes.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert {outcome["status"] for outcome in outcomes.values()} == {"trained", "refused"}
    assert OUTCOMES.search(PAGE.read_text())[2] == described(report["transformers"], outcomes)
