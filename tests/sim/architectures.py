"""Every causal architecture of transformers at tiny size through `atoll simulate`: trained, or refused with the reason.

    python -m tests.sim.architectures                        # all, into docs/results/architectures.json, docs/models.md
    python -m tests.sim.architectures --sample 24 --seed 3   # some, printed as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import NoReturn

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import peer.sim.cli.simulate  # noqa: F401, once, before the children are forked
from peer.cli import main as atoll
from tests.train.architectures import tiny_config

ROOT = Path(__file__).parents[2]
REPORT, PAGE = ROOT / "docs/results/architectures.json", ROOT / "docs/models.md"
STEPS, SEQUENCE, PEERS = 3, 32, 2
MEMORY_BYTES, CPU_S = 8 << 30, 120
FORKING = Lock()  # the hub's client refuses a fork while another one is prepared
OUTCOMES = re.compile(r"(<!-- outcomes -->\n)(.*?)(<!-- end -->)", re.DOTALL)  # in the page: written by this program


def outcome_of(architecture: str, folder: Path) -> dict[str, str]:
    """`status` is trained, refused or failed; `reason` is what was said.

    Args:
        architecture: its name in transformers.
        folder: an existing one; the manifest, the text and what the command prints go to a folder of its own in it.
    """
    place = folder / architecture
    place.mkdir()
    with FORKING:
        child = os.fork()
    if child == 0:
        _simulate(architecture, place)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = (place / "stderr").read_text(errors="replace")
    if code == 0:
        (row,) = json.loads((place / "report.json").read_text())["rows"]
        trained = row["tokens"] == PEERS * STEPS * SEQUENCE and row["val_loss"] is not None
        return {"status": "trained" if trained else "failed", "reason": "" if trained else json.dumps(row)[:400]}
    refusal = re.search(r"^atoll: (.*)", said, re.MULTILINE)
    if code == 2 and refusal and "Traceback" not in said:
        return {"status": "refused", "reason": refusal[1]}
    return {"status": "failed", "reason": f"exit code {code}: {said[-400:]}"}


def sweep(architectures: list[str]) -> dict[str, dict[str, str]]:
    """The outcome of each, two at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda name: outcome_of(name, Path(folder)), architectures)
        return dict(zip(architectures, outcomes, strict=True))


def described(version: object, outcomes: dict[str, dict[str, str]]) -> str:
    """The counts, and a table of the refused ones, as Markdown."""
    statuses = [outcome["status"] for outcome in outcomes.values()]
    counts = (f"Of the {len(statuses)} causal architectures of transformers {version}, {statuses.count('trained')} "
              f"train and {statuses.count('refused')} are refused:\n")
    rows = [
        f"| `{name}` | {outcome['reason'].replace('|', '/')} |"
        for name, outcome in sorted(outcomes.items()) if outcome["status"] == "refused"
    ]
    return "\n".join([counts, "| architecture | refused with |", "|---|---|", *rows]) + "\n"


def _simulate(architecture: str, place: Path) -> NoReturn:
    """The main of a child: `atoll simulate` as it is typed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    os.chdir(place)
    os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT), 1)
    try:
        Path("text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(200)))
        Path("run.yaml").write_text(json.dumps({
            "name": "tiny", "model": {"architecture": architecture, "config": tiny_config(architecture)},
            "data": {"sequence_length": SEQUENCE, "validation_fraction": 0.2},
            "inner": {"batch_sequences": 1, "warmup_steps": 0},
            "recipe": {"name": "diloco", "steps_per_round": 2},
        }))
        atoll(["simulate", "./run.yaml", "--train-files", "text.txt", "--peers", str(PEERS), "--evaluations", "1",
               "--tokens", str(PEERS * STEPS * SEQUENCE), "--report", "report.json"])
        os._exit(1)  # it exits
    except SystemExit as end:
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    """All, into the documents; or a sample, printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, metavar="N", help="that many, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if arguments.sample is not None:
        print(json.dumps(sweep(random.Random(arguments.seed).sample(names, arguments.sample))))
        return
    outcomes = sweep(names)
    report: dict[str, object] = {"transformers": transformers.__version__, "torch": torch.__version__}
    REPORT.write_text(json.dumps({**report, "architectures": outcomes}, indent=1, sort_keys=True) + "\n")
    text = described(transformers.__version__, outcomes)
    PAGE.write_text(OUTCOMES.sub(lambda found: found[1] + text + found[3], PAGE.read_text(), count=1))
    failed = {name: outcome["reason"] for name, outcome in outcomes.items() if outcome["status"] == "failed"}
    print(text.splitlines()[0], json.dumps(failed, indent=1) if failed else "")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
