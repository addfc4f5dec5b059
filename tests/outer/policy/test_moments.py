from __future__ import annotations

import itertools

import pytest
import torch

from peer.outer.compress.registry import compressor
from peer.outer.math.step import Decoded
from peer.outer.optim.averaged import Averaged
from peer.outer.optim.optimizers import Nesterov, Sgd, Vectors
from peer.outer.policy.moments import BesideMoments, Desynced, WithMoments
from peer.outer.policy.schedules import Every
from peer.outer.state.fragments import Fragments, Turn
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import ReduceFormat

PACES = [(3, 6), (2, 3), (1, 1), (0, 4), (5, 0), (0, 0), (7, 2), (1000, 999)]


def expected_turns(first: int, second: int, rounds: int) -> list[Turn]:
    """One after the other, as the paper's algorithm has it."""
    turns = []
    for round in range(1, rounds + 1):
        turns.append(Turn(0, round - 1, 0))
        if first and round % first == 0:
            turns.append(Turn(0, round // first - 1, 1))
        if second and round % second == 0:
            turns.append(Turn(0, round // second - 1, 2))
    return turns


@pytest.mark.parametrize(("first", "second"), PACES)
def test_moments_follow_the_rounds_after_which_they_are_due(first: int, second: int) -> None:
    moments, turns = Desynced(first=first, second=second), expected_turns(first, second, 1200)
    assert [moments.turn(links) for links in range(len(turns))] == turns
    assert moments.links(1200) == len(turns)
    counted = list(itertools.accumulate((turn.moments == 0 for turn in turns), initial=0))
    assert [moments.rounds(links) for links in range(len(turns))] == counted[:-1]


@pytest.mark.parametrize(("first", "second"), PACES)
def test_rounds_of_moments_have_no_steps(first: int, second: int) -> None:
    base = Every(steps=4, growth=2.0, growth_every_rounds=3, max_steps=64)
    schedule = WithMoments(base=base, moments=Desynced(first=first, second=second))
    round = 0
    for number, turn in enumerate(expected_turns(first, second, 20), 1):
        round += turn.moments == 0
        assert schedule.begins(number) == base.begins(round + (turn.moments > 0))
        assert schedule.length(number) == (0 if turn.moments else base.length(round))
        event = schedule.event(number)
        assert (event.moments, event.send_step) == (turn.moments, base.begins(round + 1))
        assert event in schedule.events(event.send_step)
    assert schedule.within(base.begins(7)) == schedule.moments.links(6)
    assert schedule.shortest == 4


def test_a_round_of_moments_moves_its_mean_and_nothing_else() -> None:
    numel, moments = 6, Desynced(first=1, second=2)
    optimizer = BesideMoments(base=Nesterov(lr=0.7, momentum=0.9), moments=moments)
    assert optimizer.initial_values == (0.0, 0.0, 0.0)
    wires = Fragments([ReduceFormat(numel, compressor("int8"))], moments.turn, ReduceFormat(numel, compressor("fp32")))
    anchor, buffers = torch.arange(6.0), [torch.zeros(numel) for _ in range(3)]
    state = OuterState(anchor, buffers, optimizer, wires)
    plain, momentum = anchor.clone(), torch.zeros(numel)
    turns = [moments.turn(links).moments for links in range(5)]
    assert turns == [0, 1, 0, 1, 2]
    held = [torch.zeros(numel), torch.zeros(numel)]
    for number, kind in enumerate(turns):
        local = torch.full((numel,), 0.25 * (number + 1))
        delta = state.source(local).read(0, numel).clone()
        assert state.wire is (wires.exact if kind else wires.wires[0])
        state.carry_on(Vectors(state.anchor, state.buffers), Decoded(delta), 0, numel, state.round)
        state.round += 1
        if kind:
            held[kind - 1] = local
        else:
            optimizer.base.step_(plain, [momentum], plain - local)
        assert torch.equal(state.anchor, plain)
        assert torch.equal(state.buffers[0], momentum)
        assert torch.equal(state.moments[0], held[0])
        assert torch.equal(state.moments[1], held[1])


def test_the_average_of_anchors_counts_rounds_of_parameters_alone() -> None:
    moments = Desynced(first=1, second=0)
    optimizer = BesideMoments(base=Averaged(base=Sgd(lr=1.0), decay=0.5), moments=moments)
    buffers = [torch.full((2,), 0.75), torch.zeros(2), torch.zeros(2)]
    assert torch.equal(optimizer.result(torch.ones(2), buffers, 4), torch.ones(2))  # two rounds, two of moments
