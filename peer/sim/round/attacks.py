"""Attacks: what a Byzantine peer sends instead of its contribution. Pure; the peer's profile names the attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor

from peer.sim.round.contribution import Contribution, reader
from peer.sim.world.scenario import Attack

SCALE = 1000.0
INNER_PRODUCT = 0.5


def with_lies(contributions: Sequence[Contribution], length: int, seed: int) -> Sequence[Contribution]:
    """The contributions that arrive, those of Byzantine members replaced.

    Args:
        contributions: as honest peers would send them.
        length: elements of the fragment.
    """
    attackers = [c for c in contributions if c.profile.attack != "none"]
    if not attackers:
        return contributions
    honest = [c.read(0, length) for c in contributions if c not in attackers and c.read is not None]
    arrived = []
    for c in contributions:
        if c in attackers and c.read is not None:
            generator = torch.Generator().manual_seed(seed + c.member)
            lie = corrupt(
                c.profile.attack, c.read(0, length), honest, num_attackers=len(attackers), scale=c.profile.attack_scale,
                generator=generator,
            )
            arrived.append(replace(c, read=reader(lie)))
        else:
            arrived.append(c)
    return arrived


def corrupt(
    kind: Attack,
    own: Tensor,
    honest: Sequence[Tensor] = (),
    *,
    num_attackers: int = 1,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The contribution that a peer sends in place of its own.

    - `none`: its own.
    - `sign-flip`: -own, training backwards (Li et al. 2019, "RSA", arXiv 1811.03761).
    - `scale`: own x `scale` (1000 unless told): the mean becomes whatever this peer wants (Blanchard et al. 2017,
      arXiv 1703.02757, lemma 1).
    - `nan`: not-a-number everywhere; one is enough to make a mean useless.
    - `little`: mean - z std of the honest, see `a_little_is_enough`; `scale` is z.
    - `copy`: an honest peer's contribution, drawn in each call: a free rider that saves the work (Lin et al. 2019,
      arXiv 1911.12560) and moves the mean towards that peer (the "mimic" of Karimireddy et al. 2022, arXiv 2006.09365).
    - `inner-product`: -`scale` x the mean of the honest (0.5 unless told): small enough to pass a gate on norms, and
      turns the mean's direction if it is large (Xie et al. 2020, arXiv 1903.03936).
    - `noise`: Gaussian, `scale` (1 unless told) times as long as its own.
    - `zero`: nothing, a free rider.
    - `constant`: one value everywhere, `scale` (1 unless told) times as long as its own.

    Args:
        own: fp32 [n], what an honest peer in its place would send; left unchanged.
        honest: fp32 [n] each, the honest contributions of this round; without them, `little`, `copy` and
            `inner-product` fall back to `own`.
        num_attackers: how many lie in this round, this one included; `little` derives z from it.
        scale: see above; None for the attack's default.
        generator: of `copy` and `noise`; None for torch's own.

    Returns:
        A new fp32 [n].

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "none" or (kind in ("little", "copy", "inner-product") and not honest):
        return own.clone()
    if kind == "sign-flip":
        return -own
    if kind == "scale":
        return own * (SCALE if scale is None else scale)
    if kind == "nan":
        return torch.full_like(own, torch.nan)
    if kind == "little":
        return a_little_is_enough(honest, num_attackers, scale)
    if kind == "copy":
        return honest[int(torch.randint(len(honest), (), generator=generator))].clone()
    if kind == "inner-product":
        return torch.stack(list(honest)).mean(dim=0) * -(INNER_PRODUCT if scale is None else scale)
    if kind in ("noise", "zero", "constant"):
        return _of_length(kind, own, 1.0 if scale is None else scale, generator)
    raise ValueError(f"attack {kind!r}: no such attack")


def _of_length(kind: Attack, own: Tensor, scale: float, generator: torch.Generator | None) -> Tensor:
    """What has nothing to do with `own` but its length."""
    if kind == "zero":
        return torch.zeros_like(own)
    shape = torch.ones_like(own) if kind == "constant" else torch.randn(own.shape, generator=generator)
    return shape * (scale * float(own.norm()) / max(1e-30, float(shape.norm())))


def a_little_is_enough(honest: Sequence[Tensor], num_attackers: int, z: float | None = None) -> Tensor:
    """mean - z std per coordinate, std over the honest without Bessel's correction (Baruch et al. 2019, 1902.06635).

    All Byzantine members of a round send the same vector, so one call serves them all.

    Args:
        honest: fp32 [n] each, at least one.
        num_attackers: at least 1.
        z: None for `largest_hidden_z` of this round.

    Returns:
        A new fp32 [n].
    """
    if z is None:
        z = largest_hidden_z(len(honest) + num_attackers, num_attackers)
    mean = torch.zeros_like(honest[0])
    squares = torch.zeros_like(honest[0])
    for count, contribution in enumerate(honest, start=1):      # Welford: one pass, no stack of all peers in memory
        change = contribution - mean
        mean += change / count
        squares += change * (contribution - mean)
    return mean - z * (squares / len(honest)).sqrt()


def largest_hidden_z(num_peers: int, num_attackers: int) -> float:
    """The z up to which enough honest peers deviate more than the attackers (Baruch et al. 2019, algorithm 3).

    s = floor(n / 2 + 1) - m honest peers complete a majority, and z = Phi^-1((n - m - s) / (n - m)). At a quarter of
    attackers that is near 0: 0.21 for 4 of 16. Below 0 the attack would help, so 0 is the minimum; a majority of
    attackers (s < 1) is treated as lacking one.

    Raises:
        ValueError: no attackers, or no honest peer.
    """
    num_honest = num_peers - num_attackers
    if num_attackers < 1 or num_honest < 1:
        raise ValueError(f"{num_attackers} attackers of {num_peers} peers: must be from 1 to all but one")
    supporters = max(1, num_peers // 2 + 1 - num_attackers)
    quantile = (num_honest - supporters) / num_honest
    return NormalDist().inv_cdf(quantile) if quantile > 0.5 else 0.0
