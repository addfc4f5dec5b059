"""Flags -> the runs of a campaign: which task, which peers, and one job for each recipe and seed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from peer.data.packing import PackedTokens
from peer.data.tokenizer import load_tokenizer
from peer.errors import UserError, did_you_mean
from peer.genesis import build_initial_model
from peer.outer.recipe.recipe import Recipe, describe
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import ALONE, InnerSpec, RunManifest, parse_manifest, read_manifest
from peer.sim.campaign.label import Choice, at_pace, with_room
from peer.sim.learner.language_task import load_windows
from peer.sim.learner.task import CPU
from peer.sim.world.scenario import MAX_PEERS, Scenario, load_scenario
from peer.train.device import pick_device
from peer.train.model import build_skeleton, check_sequence_length, check_trains

DEFAULT_TASK = "demo"
DEFAULT_STEPS_PER_PEER = 300
MAX_TOKENS = 10**15
MAX_SEED = 2**31 - 1
MAX_EVALUATIONS = 1000
_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_COUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)([kKmMgGbB]?)")
WindowPair = tuple[PackedTokens, PackedTokens]


@dataclass(frozen=True, kw_only=True)
class SwarmPlan:
    """What all runs of a campaign have in common beside the text.

    Attributes:
        tokens: that all peers together learn from.
        step_s: seconds of an inner step at speed 1.
        evaluations: points of the loss curve.
        device: where inner steps are made; rounds are always made in RAM.
    """

    manifest: RunManifest
    scenario: Scenario
    peers: int
    tokens: int
    step_s: float
    evaluations: int
    device: torch.device = CPU

    @property
    def tokens_per_step(self) -> int:
        """Of one peer with the manifest's own batch."""
        return self.manifest.inner.batch_sequences * self.manifest.data.sequence_length

    @property
    def steps_per_peer(self) -> int:
        """Inner steps of each peer, if all are equally fast."""
        return -(-self.tokens // (self.tokens_per_step * self.peers))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run."""

    label: str
    recipe: Recipe
    inner: InnerSpec
    seed: int
    swarm: SwarmPlan

    @property
    def digest(self) -> str:
        """Of everything that decides the figures, except what is the same for the whole campaign."""
        parts = {key: value for key, value in describe(self.recipe).items() if key not in ("source", "summary")}
        described = {"recipe": parts, "inner": self.inner.model_dump(mode="json"), "seed": self.seed}
        return _digest(described)


def load_task(name_or_path: str | None) -> RunManifest:
    """A shipped task by its bare name (`demo`, the default), or the manifest at a path.

    Raises:
        UserError: no such task or file, or a manifest that `parse_manifest` refuses.
    """
    text = name_or_path or DEFAULT_TASK
    if "/" not in text and not text.endswith((".yaml", ".yml", ".json")):
        folder = resources.files("peer.sim") / "tasks"
        known = sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".yaml"))
        if text not in known:
            hint = f"shipped: {', '.join(known)}; give your own manifest as a path, such as ./mine.yaml"
            raise UserError(f"no task is named {text!r}: {did_you_mean(text, known)}", hint)
        return parse_manifest((folder / f"{text}.yaml").read_bytes(), text)
    return read_manifest(text, ALONE)


def parse_tokens(text: str, flag: str = "--tokens", of: str = "tokens") -> int:
    """`1228800`, `1.2M`, `300k` or `1e6`.

    Args:
        flag, of: what the number is given with, and what it counts.

    Raises:
        UserError: not such a number, below 1 or above MAX_TOKENS.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{flag}={text}: is not a number of {of}", "write it as 1228800, 1.2M or 300k")
    count = round(float(match[1].replace("_", "")) * _SUFFIX[match[2].lower()])
    if not 1 <= count <= MAX_TOKENS:
        raise UserError(f"{flag}={text}: must be from 1 to {MAX_TOKENS:.0e}", "write it as 1228800, 1.2M or 300k")
    return count


def build_swarm(
    manifest: RunManifest,
    *,
    network: str,
    peers: int,
    tokens: str | None,
    step_s: float,
    evaluations: int,
    device: str = "cpu",
) -> SwarmPlan:
    """The checked values of flags that `simulate` and `compare` share.

    Raises:
        UserError: a value out of its range, an unknown scenario, or one that needs another number of peers, or a device
            that is not there.
    """
    if not 1 <= peers <= MAX_PEERS:
        raise UserError(f"--peers={peers}: must be from 1 to {MAX_PEERS}", "4 is a good start")
    if not 0.0 < step_s <= 86_400.0:
        raise UserError(f"--step-seconds={step_s:g}: must be above 0 and at most 86400")
    if not 1 <= evaluations <= MAX_EVALUATIONS:
        raise UserError(f"--evaluations={evaluations}: must be from 1 to {MAX_EVALUATIONS}", "10 draws a good curve")
    scenario = load_scenario(network)
    scenario.counts(peers)
    each = manifest.tokens_per_step
    wanted = _default_tokens(manifest, each * peers) if tokens is None else parse_tokens(tokens)
    if wanted < each * peers:
        raise UserError(
            f"--tokens={tokens}: one step of {peers} peers takes {each * peers} tokens "
            f"({manifest.inner.batch_sequences} sequences of {manifest.data.sequence_length} each)",
            f"use at least {each * peers}, better {100 * each * peers} for 100 steps of each peer; or fewer peers",
        )
    return SwarmPlan(
        manifest=manifest, scenario=scenario, peers=peers, tokens=wanted, step_s=step_s, evaluations=evaluations,
        device=pick_device(device),
    )


def plan_jobs(
    swarm: SwarmPlan, choices: Sequence[Choice], seeds: Sequence[int], limit_steps: int, layout: FlatLayout
) -> list[Job]:
    """One job for each recipe and seed: all recipes with the first seed, then with the next.

    Raises:
        UserError: a recipe whose rounds cannot be as short as `limit_steps`, or with more fragments than the model.
    """
    recipes = [with_room(choice, at_pace(choice, limit_steps), layout) for choice in choices]
    return [
        Job(label=choice.label, recipe=recipe, inner=choice.apply_to(swarm.manifest.inner), seed=seed, swarm=swarm)
        for seed in seeds
        for choice, recipe in zip(choices, recipes, strict=True)
    ]


def windows_for(swarm: SwarmPlan, jobs: Sequence[Job], train_files: Sequence[str]) -> WindowPair:
    """The text of a campaign.

    Raises:
        UserError: no such files, or less text than a batch needs.
    """
    largest = max(job.inner.batch_sequences for job in jobs)
    inner = swarm.manifest.inner.model_copy(update={"batch_sequences": largest})
    return load_windows(swarm.manifest.model_copy(update={"inner": inner}), tuple(train_files))


def meta_layout(manifest: RunManifest) -> FlatLayout:
    """The layout of the manifest's model, without allocating it.

    Raises:
        UserError: the model cannot be built, or has too few positions for the sequences.
    """
    skeleton = build_skeleton(manifest.model, load_tokenizer(manifest.tokenizer).vocab_size)
    check_sequence_length(skeleton, manifest.data.sequence_length)
    return FlatLayout.of(skeleton)


def check_learns(manifest: RunManifest) -> None:
    """Try the manifest's model before any run of a campaign starts.

    Raises:
        UserError: what its first step would fail of.
    """
    model = build_initial_model(manifest, load_tokenizer(manifest.tokenizer))
    check_trains(manifest.model, model, manifest.data.sequence_length)


def task_summary(
    manifest: RunManifest, windows: WindowPair | None, parameters: int, train_files: Sequence[str]
) -> dict[str, Any]:
    """What was learned, for a report; files by name, not by the folder they lie in."""
    files = ", ".join(Path(file).name for file in train_files)
    return {
        "name": manifest.name,
        "parameters": parameters,
        "sequence_length": manifest.data.sequence_length,
        "batch_sequences": manifest.inner.batch_sequences,
        "data": files or ", ".join(source.name or source.kind for source in manifest.data.sources),
        "train_tokens": None if windows is None else len(windows[0].tokens),
        "validation_tokens": None if windows is None else len(windows[1].tokens),
    }


def common_settings(swarm: SwarmPlan, windows: WindowPair | None) -> dict[str, Any]:
    """What must be equal for two rows to stand in one table, as JSON types."""
    manifest = swarm.manifest.model_dump(mode="json", exclude={"recipe", "rounds", "seed", "genesis", "name"})
    text = hashlib.sha256()
    for part in windows or ():
        text.update(part.tokens.tobytes())
    return {
        "peers": swarm.peers,
        "tokens": swarm.tokens,
        "step_seconds": swarm.step_s,
        "evaluations": swarm.evaluations,
        "network": {"name": swarm.scenario.name, "digest": _digest(swarm.scenario.model_dump(mode="json"))},
        "model": _digest(manifest["model"]),
        "inner": manifest["inner"],
        "data": text.hexdigest()[:16] if windows is not None else None,
    }


def _default_tokens(manifest: RunManifest, tokens_of_all: int) -> int:
    """As long as the manifest's run, or DEFAULT_STEPS_PER_PEER."""
    rounds, steps = manifest.rounds.total, manifest.recipe.steps_per_round
    return tokens_of_all * (rounds * steps if rounds is not None and steps is not None else DEFAULT_STEPS_PER_PEER)


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
