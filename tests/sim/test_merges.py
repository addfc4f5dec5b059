"""Invariants of the recipes whose peers merge by halves, in fragments or early; the list is in `test_invariants.py`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from peer.outer.optim.optimizers import Nesterov, Sgd
from peer.outer.state.own_part import OwnPart
from peer.sim.campaign.simulation import Simulation
from tests.sim.tiny import SGD, alone, close, commits_of, scatter, simulate, spread
from tests.sim.tiny_task import BATCH, StillTask, TinyTask

Overrides = dict[str, Any]

# easgd, papa --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "overrides"), [
    ("papa", {"merge": {"alpha": 1.0}}),
    ("easgd", {"merge": {"a": 0.0}}),
    ("streaming-diloco", {"merge": {"alpha": 1.0}, "steps_per_round": 10}),
])
def test_settings_that_mean_no_communication(name: str, overrides: Overrides) -> None:
    run = simulate(name, steps=40, **overrides)
    for peer, local in enumerate(run.locals):
        assert torch.equal(local, alone(peer, 40))


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_easgd_conserves_the_sum_and_meets_in_the_mean(overlap_steps: int) -> None:
    schedule = {"name": "every", "steps": 4, "overlap_steps": overlap_steps}
    run, commits = commits_of(
        "easgd", steps=18, schedule=schedule, merge={"a": 0.25}, outer_learning_rate=1.0, inner=SGD
    )
    for commit, after in itertools.pairwise(commits):
        close(after.anchors[0], torch.stack(commit.locals).mean(0), 2e-6)
    still, commits = commits_of("easgd", steps=42, schedule=schedule, task=StillTask(), inner=SGD, prepare=scatter)
    first, last = commits[0], commits[-1]  # the last one closes the run: nobody merges it any more
    total = torch.stack([*first.locals, first.anchors[0]]).sum(0)
    close(torch.stack([*last.locals, last.anchors[0]]).sum(0), total, 1e-5)
    assert spread([*last.locals, last.anchors[0]]) < 0.1 * spread([*first.locals, first.anchors[0]])
    assert still.result.tally.committed == 11
    assert run.loss < 2.8


def test_papa_keeps_the_mean() -> None:
    run, commits = commits_of("papa", steps=40, task=StillTask(), inner=SGD, prepare=scatter)
    close(torch.stack(run.locals).mean(0), torch.stack(commits[0].locals).mean(0), 1e-5)
    # Four merges that shrink the distance to the mean by .99; the closing round only measures.
    assert spread(run.locals) / spread(commits[0].locals) == pytest.approx(0.99**4, rel=1e-4)


# streaming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_streaming_as_a_whole_is_diloco(codec: str) -> None:
    schedule = {"period": 6, "num_fragments": 1, "overlap_steps": 0}
    run = simulate("streaming-diloco", schedule=schedule, merge={"alpha": 0.0}, compressor=codec)
    diloco = simulate("diloco", steps_per_round=6, outer_learning_rate=0.4, compressor=codec)
    assert torch.equal(run.consensus, diloco.consensus)
    assert run.result.bytes_sent_per_peer == diloco.result.bytes_sent_per_peer


@pytest.mark.parametrize("num_fragments", [1, 2, 3])
@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_every_fragment_once_in_h_steps(num_fragments: int, overlap_steps: int) -> None:
    sent: list[list[int]] = [[] for _ in range(num_fragments)]
    schedule = {"period": 9, "num_fragments": num_fragments, "overlap_steps": overlap_steps}

    def watch(simulation: Simulation) -> None:
        replica = simulation.replicas[0]
        for fragment, tokens in enumerate(replica.unsent_tokens):
            steps = tokens // BATCH
            if steps == 1 and replica.steps > 1 and (not sent[fragment] or sent[fragment][-1] < replica.steps - 1):
                sent[fragment].append(replica.steps - 1)

    run = simulate("streaming-diloco", steps=54, schedule=schedule, compressor="fp32", watch=watch)
    for fragment, steps in enumerate(sent):
        offset = fragment * 9 // num_fragments
        assert steps == [step for step in range(1, 54) if step % 9 == offset]
    # Over whole periods the bytes are diloco's; the closing round sends what has come since once more.
    diloco = simulate("diloco", steps=54, steps_per_round=9).result.bytes_sent_per_peer
    closing = sum(run.simulation.sync.lengths[1:]) * 4 * 2 * 3 / 4
    assert run.result.bytes_sent_per_peer == pytest.approx(diloco + closing)


# eager --------------------------------------------------------------------------------------------------------------


def test_an_own_part_is_what_the_shared_anchor_lacks_of_an_anchor_of_ones_own() -> None:
    """The paper's anchors step with D(t - H) + (D_m(t) - D_m(t - H)) / R."""
    generator = torch.Generator().manual_seed(0)
    deltas = torch.randn(4, 3, 50, generator=generator)
    outer = Nesterov(lr=0.7, momentum=0.9)
    shared, momentum = torch.zeros(50), torch.zeros(50)
    anchors, momenta = torch.zeros(3, 50), torch.zeros(3, 50)
    parts = [OwnPart(outer, 50) for _ in range(3)]
    for now, before in zip(deltas, [torch.zeros(3, 50), *deltas], strict=False):
        for m, part in enumerate(parts):
            outer.step_(anchors[m], [momenta[m]], before.mean(0) + (now[m] - before[m]) / 3)
            sent = shared + part.offset - now[m]
            part.subtract(sent)
            part.renew(shared, sent, 3)
            close(shared + part.offset, anchors[m], 1e-5)
        outer.step_(shared, [momentum], now.mean(0))
        for part in parts:
            part.counted()


def test_what_no_round_held_is_sent_again() -> None:
    part = OwnPart(Sgd(lr=1.0), 4)
    anchor = torch.ones(4)
    for moved in (1.0, 2.0):
        local = anchor + part.offset - moved
        part.subtract(local)
        part.renew(anchor, local, 2)
    assert torch.equal(anchor - local, torch.full((4,), 3.0))
    assert torch.equal(part.offset, torch.full((4,), -1.5))
    part.counted()
    local = anchor + part.offset - 2.0
    part.subtract(local)
    assert torch.equal(anchor - local, torch.full((4,), 2.0))
    part.forget()
    assert all(not vector.any() for vector in part.tensors().values())


def test_the_anchors_of_eager_peers_by_hand() -> None:
    """With SGD(1) outside: anchor_m(t) = anchor_m(t - H) - D~_m(t); at the first round D(t - H) is 0."""
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def watch(simulation: Simulation) -> None:
        for replica in simulation.replicas:
            assert replica.learner is not None
            seen.setdefault((replica.index, replica.position), replica.learner.parameters.clone())

    simulate("eager-diloco", peers=2, steps=15, steps_per_round=5, outer="fedavg", inner=SGD, watch=watch)
    task = TinyTask()
    batches, gradient = [task.batches(peer) for peer in range(2)], torch.empty(task.layout.numel)
    anchors, before = [task.initial(), task.initial()], [torch.zeros_like(gradient)] * 2
    for made in (5, 10, 15):
        now = []
        for peer, anchor in enumerate(anchors):
            local = anchor.clone()
            for _ in range(5):
                task.gradient(local, next(batches[peer]), gradient)
                local -= SGD.learning_rate * gradient
            now.append(anchor - local)
            close(seen[peer, made], local, 5e-6)
        delayed = (before[0] + before[1]) / 2
        anchors = [anchors[m] - (delayed + (now[m] - before[m]) / 2) for m in range(2)]
        before = now


def test_eager_without_peers_is_diloco() -> None:
    diloco = simulate("diloco", peers=1, steps=40, steps_per_round=10)
    close(simulate("eager-diloco", peers=1, steps=40, steps_per_round=10).consensus, diloco.consensus, 1e-5)
