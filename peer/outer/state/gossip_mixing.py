"""The mathematics of gossip: what a group's mean does to each member, mixing weights, how well a graph mixes, and the
pair events of A2CiD2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from peer.errors import UserError
from peer.outer.aggregate.base import weighted_mean
from peer.outer.state.outer_state import CHUNK, chunks
from peer.outer.topology.members import Edge


def centre_of(anchors: Sequence[Tensor]) -> Tensor:
    """The mean of the members' anchors, all alike, added in the given order; a new fp32 [n]."""
    return weighted_mean(anchors, [1.0] * len(anchors))


def drift(mean: Tensor, anchor: Tensor, centre: Tensor) -> Tensor:
    """The direction of one member's outer step: mean D + phi - mean phi (arXiv 2506.10911, eq. 5); a new fp32 [n]."""
    return mean + (anchor - centre)


def move_(local: Tensor, mixed: Tensor, sent: Tensor, *, replaces: bool) -> None:
    """Parameters move by the difference between the group's and what this member sent, in place; all fp32 [n].

    Args:
        local: what the member has now.
        sent: what the member sent, as the others decoded it.
        replaces: nothing was left out and nothing learned since, so that `mixed` takes their place.
    """
    if replaces:
        local.copy_(mixed)
    else:  # what a codec leaves out stays as it is, and so does what was learned since
        local.add_(mixed - sent)


def chi(edges: Sequence[Edge], rates: Mapping[Edge, float] | None = None) -> tuple[float, float]:
    """(chi1, chi2) of a connected graph (A2CiD2, arXiv 2306.08289, section 3).

    With L = sum_ij lambda_ij (e_i - e_j)(e_i - e_j)^T: chi1 = 1 / (smallest positive eigenvalue of L), and
    chi2 = 1/2 max over edges of (e_i - e_j)^T L^+ (e_i - e_j), half the largest effective resistance; chi2 <= chi1.

    Args:
        edges: (i, j) each once, i != j.
        rates: lambda_ij, pair events of each edge expected per unit of time (`dt` of `mix_` is in the same unit);
            by default equal, and one event per member on average: R / (2 |E|).

    Raises:
        UserError: no edges, or a graph that is not connected.
    """
    names = sorted(set(itertools.chain(*edges)))
    index = {name: at for at, name in enumerate(names)}
    laplacian = np.zeros((len(names), len(names)))
    differences = np.zeros((len(edges), len(names)))
    for row, edge in enumerate(edges):
        differences[row, index[edge[0]]], differences[row, index[edge[1]]] = 1.0, -1.0
        rate = rates[edge] if rates is not None else len(names) / (2 * len(edges))
        laplacian += rate * np.outer(differences[row], differences[row])
    eigenvalues = np.linalg.eigvalsh(laplacian) if edges else np.zeros(2)
    if eigenvalues[1] <= 1e-9 * max(eigenvalues[-1], 1e-300):
        raise UserError(f"a graph of {len(names)} members and {len(edges)} edges is not connected", "add edges")
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    resistances = np.einsum("en,nm,em->e", differences, inverse, differences)
    return 1.0 / float(eigenvalues[1]), 0.5 * float(resistances.max())


def a2cid2_coefficients(chi1: float, chi2: float) -> tuple[float, float]:
    """(eta, alpha_tilde) = (1 / (2 sqrt(chi1 chi2)), sqrt(chi1 / chi2) / 2) (arXiv 2306.08289)."""
    for name, value in (("chi1", chi1), ("chi2", chi2)):
        if not (math.isfinite(value) and value > 0.0):
            raise UserError(f"{name}={value}: must be finite and above 0", "take both from a connected graph")
    return 1.0 / (2.0 * math.sqrt(chi1 * chi2)), 0.5 * math.sqrt(chi1 / chi2)


def mix_(x: Tensor, x_tilde: Tensor, eta: float, dt: float) -> None:
    """Let (x, x~) flow together for `dt` since the last event, in place; their sum is kept (arXiv 2306.08289).

    With e = exp(-2 eta dt), a = (1 + e) / 2, b = (1 - e) / 2: x <- a x + b x~ and x~ <- b x + a x~. Both fp32 [n].
    """
    assert eta >= 0.0, f"eta={eta}"
    assert dt >= 0.0, f"dt={dt}"
    decay = math.exp(-2.0 * eta * dt)
    a, b = (1.0 + decay) / 2.0, (1.0 - decay) / 2.0
    if b == 0.0:
        return
    for start, stop in chunks(x.numel(), CHUNK):
        left, right = x[start:stop], x_tilde[start:stop]
        mixed = (left * a).add_(right * b)
        right.mul_(a).add_(left * b)
        left.copy_(mixed)


def pair_(x: Tensor, x_tilde: Tensor, other: Tensor, alpha_tilde: float, sent: Tensor | None = None) -> None:
    """A pair event, in place, after `mix_`: x~ -= alpha_tilde (x - x_j), then x <- (x + x_j) / 2 (arXiv 2306.08289).

    Args:
        x, x_tilde: fp32 [n].
        other: fp32 [n], the partner's x before the event, as it was decoded; the only thing that is sent.
        sent: fp32 [n], x as the partner decoded it, where that is not x itself: x_j is then x + other - sent, so that
            what a codec leaves out stays as it is, and the sum of both x is kept.
    """
    for start, stop in chunks(x.numel(), CHUNK):
        mine, partner = x[start:stop], other[start:stop]
        if sent is not None:
            partner = mine + (partner - sent[start:stop])
        x_tilde[start:stop].sub_((mine - partner).mul_(alpha_tilde))
        mine.add_(partner).mul_(0.5)
