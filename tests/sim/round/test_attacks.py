from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from peer.sim.round.attacks import a_little_is_enough, corrupt, largest_hidden_z
from peer.sim.world.scenario import Attack

OWN = torch.tensor([1.0, -2.0, 0.0])
HONEST = [torch.tensor([1.0, 0.0, 5.0]), torch.tensor([3.0, 0.0, 5.0]), torch.tensor([5.0, 6.0, 5.0])]
# mean 3, 2, 5; std sqrt(8/3), sqrt(8), 0


def test_simple_lies():
    assert corrupt("none", OWN, HONEST).tolist() == [1.0, -2.0, 0.0]
    assert corrupt("sign-flip", OWN, HONEST).tolist() == [-1.0, 2.0, 0.0]
    assert corrupt("scale", OWN, HONEST).tolist() == [1000.0, -2000.0, 0.0]
    assert corrupt("scale", OWN, HONEST, scale=-0.5).tolist() == [-0.5, 1.0, 0.0]
    assert corrupt("nan", OWN, HONEST).isnan().all()


def test_lies_of_their_own_length():
    length = OWN.norm()
    assert corrupt("zero", OWN, HONEST).tolist() == [0.0] * 3
    assert corrupt("constant", OWN, HONEST, scale=2.0).tolist() == pytest.approx([float(2 * length) / 3**0.5] * 3)
    noise = corrupt("noise", OWN, HONEST, scale=10.0, generator=torch.Generator().manual_seed(1))
    assert noise.norm() == pytest.approx(10 * length)
    assert corrupt("inner-product", OWN, HONEST).tolist() == [-1.5, -1.0, -2.5]
    assert corrupt("inner-product", OWN, HONEST, scale=10.0).tolist() == [-30.0, -20.0, -50.0]
    assert corrupt("inner-product", OWN, []).tolist() == OWN.tolist()


@pytest.mark.parametrize("kind", get_args(Attack))
def test_every_kind_gives_a_new_tensor_of_the_same_shape_and_changes_no_input(kind):
    own, honest = OWN.clone(), [vector.clone() for vector in HONEST]
    for others in (honest, []):
        lie = corrupt(kind, own, others)
        assert (lie.shape, lie.dtype) == (own.shape, own.dtype)
        lie.fill_(7.0)
        assert torch.equal(own, OWN)
        assert all(torch.equal(one, other) for one, other in zip(honest, HONEST, strict=True))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="attack 'shout': no such attack"):
        corrupt("shout", OWN)


def test_a_little_is_the_mean_less_z_standard_deviations():
    expected = [3 - 2 * math.sqrt(8 / 3), 2 - 2 * math.sqrt(8), 5.0]
    assert a_little_is_enough(HONEST, 1, z=2.0).tolist() == pytest.approx(expected)
    assert corrupt("little", OWN, HONEST, scale=2.0).tolist() == pytest.approx(expected)
    assert corrupt("little", OWN, HONEST, scale=0.0).tolist() == pytest.approx([3.0, 2.0, 5.0])


def test_a_little_without_a_scale_takes_z_from_the_numbers():
    # 3 honest and 2 Byzantine: s = 3 - 2 = 1, quantile 2/3, z = 0.430727.
    lie = corrupt("little", OWN, HONEST, num_attackers=2)
    assert lie.tolist() == pytest.approx([3 - 0.430727 * math.sqrt(8 / 3), 2 - 0.430727 * math.sqrt(8), 5.0], abs=1e-5)


def test_a_little_agrees_with_a_stack_of_many():
    honest = list(torch.randn(50, 100, generator=torch.Generator().manual_seed(1)))
    stacked = torch.stack(honest)
    expected = stacked.mean(0) - 1.5 * stacked.std(0, correction=0)
    torch.testing.assert_close(a_little_is_enough(honest, 10, z=1.5), expected)


@pytest.mark.parametrize(("num_peers", "num_attackers", "z"), [
    (50, 24, 1.426077),     # s = 26 - 24 = 2, Phi^-1(24/26)
    (16, 4, 0.210428),      # s = 9 - 4 = 5, Phi^-1(7/12)
    (20, 5, 0.253347),      # s = 11 - 5 = 6, Phi^-1(9/15 = 0.6)
    (8, 2, 0.0),            # s = 5 - 2 = 3, Phi^-1(3/6)
    (4, 1, 0.0),            # s = 3 - 1 = 2, Phi^-1(1/3) is below 0
    (10, 6, 0.674490),      # a Byzantine majority: s = 1, Phi^-1(3/4)
    (2, 1, 0.0),
])
def test_z_follows_from_the_numbers_of_peers_and_attackers(num_peers, num_attackers, z):
    assert largest_hidden_z(num_peers, num_attackers) == pytest.approx(z, abs=1e-6)


@pytest.mark.parametrize(("num_peers", "num_attackers"), [(4, 0), (4, 4), (1, 2)])
def test_z_needs_attackers_and_honest_peers(num_peers, num_attackers):
    with pytest.raises(ValueError, match="must be from 1 to all but one"):
        largest_hidden_z(num_peers, num_attackers)


def test_a_copy_is_bit_for_bit_one_of_the_others_and_every_one_gets_its_turn():
    generator = torch.Generator().manual_seed(0)
    copies = [corrupt("copy", OWN, HONEST, generator=generator) for _ in range(60)]
    picks = [[torch.equal(copy, other) for other in HONEST].index(True) for copy in copies]
    assert set(picks) == {0, 1, 2}
    generator.manual_seed(0)
    again = [corrupt("copy", OWN, HONEST, generator=generator) for _ in range(60)]
    assert all(torch.equal(one, other) for one, other in zip(copies, again, strict=True))
