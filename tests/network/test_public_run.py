"""`examples/public_run.sh`: a run from `init` to the hub, as a person types it, but for the hub, which is local."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from tests.hub_server import TOKEN, serving_hub
from tests.network.processes import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_public_run_goes_from_init_to_the_hub(tmp_path: Path) -> None:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with serving_hub() as hub:
        env = environment({
            "PATH": programs, "HOME": str(tmp_path),
            "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0",
            "ATOLL_TORCH_THREADS": "1", "ATOLL_NAT_PORT_MAP": "false", "ATOLL_EVAL_SEQUENCES": "4",
        })  # fmt: skip
        script = subprocess.Popen(
            ["bash", str(ROOT / "examples/public_run.sh"), "reef", "me/model"], cwd=tmp_path, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            told, problems = script.communicate(timeout=800)
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
    logs = "\n".join(log.read_text()[-2000:] for log in (tmp_path / "reef").glob("*.log"))
    assert script.returncode == 0, f"{told}\n{problems}\n{logs}"
    assert told.splitlines()[-1] == f"{hub.address}/me/model"
    assert "bits per byte" in told
    published = load(hub.files["model.safetensors"])
    for peer in ("ada", "bea"):
        exported = load_file(tmp_path / "reef" / peer / "export" / "model.safetensors")
        assert exported.keys() == published.keys()
        assert all(torch.equal(exported[name], values) for name, values in published.items())
    card = hub.files["README.md"].decode()
    assert "| run | reef, `" in card
    assert "`lagoon`" in card
    folder = tmp_path / "from-the-hub"
    folder.mkdir()
    for name, content in hub.files.items():
        (folder / name).write_bytes(content)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        assert bool(AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits.isfinite().all())
