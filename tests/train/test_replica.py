"""The copies of a device, on the CPU: everything but streams and pinned memory."""

from __future__ import annotations

import threading

import pytest
import torch

from peer.outer.state.carry import carry_progress_
from peer.outer.state.flat_layout import FlatLayout
from peer.train import replica as module
from peer.train.replica import DeviceCopies, ModelReplica
from tests.train.tiny import tiny_model


@pytest.fixture
def replica():
    model = tiny_model()
    return ModelReplica(FlatLayout.of(model), model)


CPU = torch.device("cpu")


def numel(replica: ModelReplica) -> int:
    return replica._layout.numel


def flat_of(replica: ModelReplica) -> torch.Tensor:
    out = torch.empty(numel(replica))
    replica.read(out)
    return out


@pytest.mark.parametrize("piece", [2**24, 1000, 7777])
def test_a_snapshot_is_of_the_moment_it_was_asked_for(replica, monkeypatch, piece):
    monkeypatch.setattr(module, "PIECE", piece)
    copies, expected = DeviceCopies(replica, CPU), flat_of(replica)
    gate = threading.Event()
    copies._thread.submit(gate.wait)  # the copy comes late
    out = torch.empty(numel(replica))
    transfer = copies.begin_read(out, 0)
    replica.write(expected + 1.0)  # a step meanwhile
    assert not transfer.done()
    gate.set()
    transfer.result()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("piece", [2**24, 999])
def test_a_merge_keeps_steps_made_meanwhile_to_the_bits_of_the_cpu(replica, monkeypatch, piece):
    monkeypatch.setattr(module, "PIECE", piece)
    generator = torch.Generator().manual_seed(1)
    before, after, step = (torch.randn(numel(replica), generator=generator) for _ in range(3))
    copies = DeviceCopies(replica, CPU)
    copies.begin_carry(before, after, 0).result()
    replica.write(flat_of(replica) + step)
    expected = flat_of(replica)
    carry_progress_(expected, before, after)
    copies.carry()
    assert torch.equal(flat_of(replica), expected)
    assert copies._brought == []


def test_a_fragment_alone_is_read_and_merged(replica):
    """The second half of the parameters, cut where one begins."""
    layout = replica._layout
    start = layout.offsets[len(layout.offsets) // 2]
    copies, whole = DeviceCopies(replica, CPU), flat_of(replica)
    out = torch.empty(layout.numel - start)
    copies.begin_read(out, start).result()
    assert torch.equal(out, whole[start:])
    copies.begin_carry(out, out + 1.0, start).result()
    copies.carry()
    assert torch.equal(flat_of(replica)[:start], whole[:start])
    assert torch.equal(flat_of(replica)[start:], whole[start:] + 1.0)
