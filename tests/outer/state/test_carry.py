"""Merging a new anchor into parameters that have moved on."""

from __future__ import annotations

import pytest
import torch

from peer.outer.state import carry
from peer.outer.state.carry import carry_progress_


def test_without_progress_the_result_is_the_anchor_bit_for_bit() -> None:
    local = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    anchor = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    anchor[:3] = torch.tensor([-0.0, 0.0, 1e-45])
    carry_progress_(local, local.clone(), anchor)
    assert torch.equal(local.view(torch.int32), anchor.view(torch.int32))


def test_progress_since_the_snapshot_is_kept() -> None:
    base, anchor = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    local = base + torch.tensor([0.5, -0.25, 0.0])
    carry_progress_(local, base, anchor)
    assert local.tolist() == [10.5, 19.75, 30.0]
    assert base.tolist() == [1.0, 2.0, 3.0]
    assert anchor.tolist() == [10.0, 20.0, 30.0]


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    base, local, anchor = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0)).unbind()
    whole, chunked = local.clone(), local.clone()
    carry_progress_(whole, base, anchor)
    monkeypatch.setattr(carry, "CHUNK", 100)
    carry_progress_(chunked, base, anchor)
    assert torch.equal(whole, chunked)
    torch.testing.assert_close(whole, anchor + (local - base), rtol=0.0, atol=0.0)
