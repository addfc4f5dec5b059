"""A peer that is wired from a manifest and settings trains as its recipe says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from peer.data.tokenizer import ByteTokenizer
from peer.link.messages import Anchor, Published
from peer.link.supervisor import AgentProcess, create_descriptor
from peer.protocol.manifest import parse_manifest
from peer.run.assemble import FoundRun, Peer, assemble
from peer.run.hooks import PeerHooks
from peer.settings import PeerSettings
from peer.telemetry.console import LiveSwarm
from peer.telemetry.metrics import MetricsFile
from peer.train.ranks import ALONE, Ranks
from tests.link.fakes import LINEAGE, START, FakeAgent
from tests.network.bootstraps import MANIFEST
from tests.network.processes import TEXT

RATE = 1e-2
INNER = f"inner: {{warmup_steps: 0, learning_rate: {RATE}, batch_sequences: 4}}"


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = create_descriptor()
    yield descriptor
    os.close(descriptor)


def wired(
    folder: Path, descriptor: int, recipe: str, *, documents: bool = False, steps: int = 5, ranks: Ranks = ALONE
) -> Peer:
    """At the anchor of round 0, before its first step."""
    text = folder / "text.txt"
    text.write_text(TEXT * 40)
    written = MANIFEST.format(hidden=16, recipe=recipe, steps=steps, wait=5.0, total="")
    written = written.replace("inner: {batch_sequences: 4}", INNER).replace("hidden_layers: 1", "hidden_layers: 3")
    if documents:
        written = written.replace("sequence_length: 8", "sequence_length: 8, document_mask: true")
    manifest = parse_manifest(written.encode(), "test")
    agent: Any = FakeAgent()
    agent.memory_descriptor = descriptor
    published = Published(
        manifest=manifest.model_dump(mode="json"), organiser="o", peer_id="alice", nickname="alice", maddrs=()
    )
    settings = PeerSettings(output_dir=folder, train_files=(str(text),), device="cpu")
    peer = assemble(
        settings, START, FoundRun.of(published), cast(AgentProcess, agent), lambda _: None, lambda: False, ranks
    )
    peer.sync.begin(Anchor(round=0, lineage_id=LINEAGE, contributed=None))
    return peer


def moved(peer: Peer) -> float:
    """How far its first step takes the parameters from the anchor."""
    batch, _ = next(iter(peer.batches))
    peer.trainer.step(batch)
    local = torch.empty_like(peer.sync.anchor)
    peer.replica.read(local)
    return float((local - peer.sync.anchor).abs().max())


def test_the_local_rule_acts_on_the_steps(tmp_path: Path, descriptor: int) -> None:
    plain = moved(wired(tmp_path, descriptor, "name: fedavg"))
    assert plain == pytest.approx(0.1 * RATE, rel=0.1)  # a joiner's first step of ten
    half = f"{{name: proximal, mu: {5 / RATE}, decoupled: true}}"
    streaming = "name: streaming-diloco, schedule: {num_fragments: 3}"  # whose vector has an order of its own
    for recipe in ("name: fedprox", streaming):
        pulled = moved(wired(tmp_path, descriptor, f"{recipe}, local: {half}"))
        assert pulled == pytest.approx(0.5 * plain, rel=0.01)


def test_the_second_trajectory_makes_the_same_steps(tmp_path: Path, descriptor: int) -> None:
    peer = wired(tmp_path, descriptor, "name: fedglomo")
    assert moved(peer) > 0.0
    second, local = peer.sync.tensors()["parameters"], torch.empty_like(peer.sync.anchor)
    peer.replica.read(local)
    assert torch.equal(second, local)  # both began at one anchor


@pytest.mark.parametrize("masked", [True, False])
def test_the_steps_of_a_peer_know_its_documents_where_the_manifest_says_so(tmp_path, descriptor, masked):
    peer = wired(tmp_path, descriptor, "name: diloco", documents=masked)
    live = LiveSwarm(Console(quiet=True), title="", own_id="")
    hooks = PeerHooks(peer, MetricsFile(tmp_path / "metrics.jsonl"), live, lambda: False)
    batches = [batch for batch, _ in islice(hooks.batches, 10)]
    assert all((batch.positions_bt is not None) is masked for batch in batches)
    assert peer.text.validation.document_end == (ByteTokenizer.eos_id if masked else None)


def test_a_step_stops_at_the_time_limit_of_its_recipe(tmp_path: Path, descriptor: int) -> None:
    recipe = "name: dropcompute, aggregator: mean, straggler: {tau_s: 1.0e-9}"  # one micro-batch is in time
    peer = wired(tmp_path, descriptor, recipe, steps=1)
    batch, _ = next(iter(peer.batches))
    assert peer.trainer.micro_batch == 1
    assert peer.trainer.step(batch).tokens == peer.manifest.tokens_per_step // 4
