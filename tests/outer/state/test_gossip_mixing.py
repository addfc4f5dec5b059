"""The weights and clocks of gossip."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from peer.errors import UserError
from peer.outer.state.gossip_mixing import a2cid2_coefficients, chi, mix_, pair_
from peer.outer.topology.topologies import Neighbours


def test_chi_of_known_graphs() -> None:
    # Complete, rate 1 / (R - 1) an edge: L = R / (R - 1) (I - J / R), so both are (R - 1) / R.
    assert chi(list(itertools.combinations(range(5), 2))) == pytest.approx((0.8, 0.8))
    # A ring at rate 1/2: eigenvalues 1 - cos(2 pi k / R); an edge's resistance is 2 (R - 1) / R.
    ring = Neighbours(graph="ring").edges(range(16))
    assert chi(ring) == pytest.approx((1.0 / (1.0 - math.cos(2.0 * math.pi / 16)), 15 / 16))
    # Twice the events, half of each.
    assert chi(ring, dict.fromkeys(ring, 1.0)) == pytest.approx([0.5 * value for value in chi(ring)])
    assert chi([(3, 8)], {(3, 8): 2.0}) == pytest.approx((0.25, 0.25))


def test_a_graph_in_two_parts_has_no_chi() -> None:
    with pytest.raises(UserError, match="4 members and 2 edges is not connected"):
        chi([(0, 1), (2, 3)])
    with pytest.raises(UserError, match="not connected"):
        chi([])


def test_a2cid2_coefficients() -> None:
    assert a2cid2_coefficients(4.0, 1.0) == (0.25, 1.0)
    assert a2cid2_coefficients(0.8, 0.8) == pytest.approx((0.625, 0.5))
    with pytest.raises(UserError, match=r"chi2=0.0: must be finite and above 0"):
        a2cid2_coefficients(1.0, 0.0)


def test_mixing_in_continuous_time() -> None:
    x, x_tilde = torch.tensor([4.0, 1.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    mix_(x, x_tilde, eta=0.25, dt=2.0 * math.log(2.0))  # e = 1/2
    assert x.tolist() == pytest.approx([3.0, 1.0])
    assert x_tilde.tolist() == pytest.approx([1.0, 1.0])
    # Two short spells are one long one.
    whole, parts = (torch.tensor([[5.0], [-2.0]], dtype=torch.float64) for _ in range(2))
    mix_(whole[0], whole[1], 0.3, 3.0)
    mix_(parts[0], parts[1], 0.3, 1.0)
    mix_(parts[0], parts[1], 0.3, 2.0)
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=0.0)
    before = whole.clone()
    mix_(whole[0], whole[1], 0.0, 3.0)
    mix_(whole[0], whole[1], 0.3, 0.0)
    assert torch.equal(whole, before)


def gossip(eta: float, alpha_tilde: float, rounds: int) -> torch.Tensor:
    x = torch.sin(torch.arange(16 * 3, dtype=torch.float64)).view(16, 3)
    x_tilde = x.clone()
    for round in range(rounds):
        for member in range(16):
            mix_(x[member], x_tilde[member], eta, 1.0)
        for group in Neighbours(graph="ring").groups(round, range(16), 0, None):
            if len(group) == 2:
                sent = x[list(group)].clone()
                pair_(x[group[0]], x_tilde[group[0]], sent[1], alpha_tilde)
                pair_(x[group[1]], x_tilde[group[1]], sent[0], alpha_tilde)
    return x


def test_a2cid2_keeps_the_mean_is_gossip_at_eta_0_and_faster_on_a_ring() -> None:
    start, plain = gossip(0.0, 0.0, 0), gossip(0.0, 0.0, 40)
    assert torch.equal(plain, gossip(0.0, 7.0, 40))
    edges = Neighbours(graph="ring").edges(range(16))
    rounds = [Neighbours(graph="ring").groups(round, range(16), 0, None) for round in range(200)]
    drawn = sum(len(group) == 2 for groups in rounds for group in groups) / len(rounds) / len(edges)
    fast = gossip(*a2cid2_coefficients(*chi(edges, dict.fromkeys(edges, drawn))), 40)
    for after in (plain, fast):
        torch.testing.assert_close(after.mean(0), start.mean(0), rtol=0.0, atol=1e-12)
    assert fast.std(0).norm() < 0.5 * plain.std(0).norm()
