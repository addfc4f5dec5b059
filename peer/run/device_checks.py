"""The checks of a peer's device, and of this machine against the model of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from peer.data.tokenizer import load_tokenizer
from peer.outer.recipe.plan import RunPlan
from peer.protocol.manifest import RunManifest
from peer.run.checks import disk_finding
from peer.run.devices import planned_ranks
from peer.run.hardware import check_hardware, compute_of, first_device, fitting, plan_in_words
from peer.run.local_rule import rule_bytes
from peer.settings import PeerSettings
from peer.system.finding import Finding, checked
from peer.system.resources import usable_cores
from peer.train.device import available_memory
from peer.train.memory import ModelSize
from peer.train.model import measure_model

log = logging.getLogger(__name__)
NVIDIA = Path("/dev/nvidiactl")
INNER_BYTES = 12  # of a parameter in a checkpoint: its value and two moments
GB = 1e9


def log_finding(finding: Finding) -> None:
    """At the start of `atoll join`, where only warnings are worth a line."""
    log.log(logging.WARNING if finding.level == "warn" else logging.DEBUG, "%s", finding.in_words)


def device_finding(settings: PeerSettings, nvidia: Path = NVIDIA) -> Finding:
    """Whether the device is there and computes as the settings ask."""

    def look() -> str | Finding:
        check_hardware(settings)
        device = first_device(settings)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{usable_cores()} cores"
        text = f"{device} ({name}), {available_memory(device) / GB:.1f} GB of memory free"
        if device.type == "cpu" and nvidia.exists():
            advice = "Install the build of torch for CUDA: https://pytorch.org/get-started"
            text = f"{text}; this machine has an NVIDIA card, which torch {torch.__version__} does not use"
            return Finding(check="device", level="warn", text=text, advice=advice)
        return text

    return checked("device", look)


def run_findings(settings: PeerSettings, manifest: RunManifest) -> list[Finding]:
    """Memory and disk against the model of the run."""
    plan, sizes = RunPlan.of(manifest), list[ModelSize]()

    def memory() -> str:
        device = first_device(settings)
        vocab = manifest.model.config.get("vocab_size")
        if not isinstance(vocab, int):
            if manifest.tokenizer.files:
                return "not compared: the size of the vocabulary is in the run's tokenizer, which a peer fetches"
            vocab = load_tokenizer(manifest.tokenizer).vocab_size
        sizes.append(measure_model(manifest.model, vocab))
        rule = rule_bytes(plan.recipe, device)
        own = compute_of(settings, plan, planned_ranks(settings))
        compute = fitting(own, sizes[0], manifest.data.sequence_length, device, rule)
        return plan_in_words(manifest, sizes[0], device, compute, rule)

    found = [checked("memory", memory)]
    return [*found, *(run_disk_finding(settings, plan, size.trained) for size in sizes)]


def run_disk_finding(settings: PeerSettings, plan: RunPlan, parameters: int) -> Finding:
    """The disk against what a peer of the run writes: checkpoints, a snapshot for newcomers, text."""
    outer = 4 * parameters * (1 + plan.recipe.optimizer.num_buffers)
    checkpoint = (outer + INNER_BYTES * parameters) if settings.save_steps else 0
    wanted = checkpoint * (settings.save_total_limit + 1) + outer + settings.data_cache_gb * GB
    return disk_finding(settings.output_dir, checkpoint, wanted)
