"""Every published algorithm as one entry: the parts in which it differs from plain averaging, and its numbers.

Where a paper leaves a number open, or had another model in mind, the comment says what was chosen. `docs/recipes.md`
tells what each one sends, when to use it, and what to beware of.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from peer.outer.aggregate.base import Mean
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.optim.adaptive import Adagrad, Adam, Yogi
from peer.outer.optim.optimizers import HeavyBall, Nesterov, Sgd, SignSgd
from peer.outer.policy.backup import Backup
from peer.outer.policy.local_rules import Proximal, Replay
from peer.outer.policy.merge_rules import Accelerated, Carry, Elastic, Mix
from peer.outer.policy.moments import Desynced
from peer.outer.policy.schedules import Every, GradientChange
from peer.outer.policy.straggler import ComputeTimeout
from peer.outer.policy.work_allocation import AdaptiveTopK, TimeBalanced
from peer.outer.recipe.diloco_family import DILOCO
from peer.outer.recipe.recipe import Recipe
from peer.outer.topology.topologies import BandwidthMatching, Groups, Neighbours, RandomPairs

# anchor <- sum_i (n_i / n) local_i = anchor - D with D weighted by n_i, here tokens for the paper's examples.
# H: 5 epochs of 600 examples in batches of 10, as in the paper's MNIST experiments.
_FEDAVG = Every(steps=300)


def _every_step(**parts: Any) -> Recipe:
    """One that averages gradients at every step."""
    return Recipe(payload="gradient", schedule=Every(steps=1), **parts)


_ALL: Final = (
    _every_step(
        name="ddp",
        source="the baseline of every comparison",
        summary="g = mean_i g_i at every step, then the inner optimizer",
    ),
    _every_step(
        name="gpa",
        source="Defazio et al. 2025, arXiv 2512.17131, and its authors' code",
        summary="g at y = .7 x + .3 z; z <- AdamW(z, g); x <- .9967 x + .0033 z: ddp that yields x",
        average=0.9967,
        interpolation=0.7,
    ),
    Recipe(
        # Found by benchmarks/search.py: the shortest round that sends 1000 times fewer bytes than fp32 data
        # parallelism, for any number of peers: 4 H / .2656 bytes per value.
        name="lagoon",
        source="this project, benchmarks/search.py; Muon inside as in arXiv 2505.23725, feedback on both legs as in "
        "arXiv 1905.05957, average of anchors as in arXiv 2209.14981",
        summary="Muon inside; 2 bits both ways, losses fed back; Nesterov .9 / .7; yields an average of anchors",
        schedule=Every(steps=68),
        merge=Carry(),
        outer=Nesterov(lr=0.9, momentum=0.7),
        compressor="int2",
        feedback=ErrorFeedback(decay=1.0),
        inner="muon",
        average=0.75,
    ),
    Recipe(
        name="fedavg",
        source="McMahan et al. 2017, arXiv 1602.05629, algorithm 1",
        summary="anchor <- sum_i (n_i / n) local_i",
        schedule=_FEDAVG,
    ),
    Recipe(
        # The paper's inner optimizer is ADOPT, its second moment's decay .9999; 256 is the longest of its periods.
        name="des-loc",
        source="Iacob et al. 2025, arXiv 2505.22549",
        summary="fedavg every 256 steps; AdamW's m is averaged every third, its v every sixth round",
        schedule=Every(steps=256),
        moments=Desynced(first=3, second=6),
    ),
    Recipe(
        name="fedadagrad",
        source="Reddi et al. 2021, arXiv 2003.00295, algorithm 2",
        summary="v <- v + D^2; anchor <- anchor - lr D / (sqrt v + tau)",
        schedule=_FEDAVG,
        outer=Adagrad(lr=0.1, tau=1e-3),
    ),
    Recipe(
        name="fedadam",
        source="Reddi et al. 2021, arXiv 2003.00295, algorithm 2",
        summary="m, v <- moments of D; anchor <- anchor - lr m / (sqrt v + tau), no bias correction",
        schedule=_FEDAVG,
        outer=Adam(lr=0.1, betas=(0.9, 0.99), tau=1e-3),
    ),
    Recipe(
        name="fedyogi",
        source="Reddi et al. 2021, arXiv 2003.00295, algorithm 2",
        summary="v <- v - (1 - b2) D^2 sign(v - D^2); anchor <- anchor - lr m / (sqrt v + tau)",
        schedule=_FEDAVG,
        outer=Yogi(lr=0.01, betas=(0.9, 0.99), tau=1e-3),
    ),
    Recipe(
        name="fedprox",
        source="Li et al. 2020, arXiv 1812.06127, algorithm 2",
        summary="g <- g + mu (x - anchor) inside; then fedavg",
        schedule=_FEDAVG,
        local=Proximal(mu=0.01),
    ),
    Recipe(
        # alpha = beta / R for the 4 peers of a comparison; set merge: {a: .9 / R} for another R.
        name="easgd",
        source="Zhang et al. 2015, arXiv 1412.6651, section 3",
        summary="d_i = a (x_i - c); x_i <- x_i - d_i; c <- c + sum_i d_i, beta = R a = .9",
        schedule=Every(steps=16),
        merge=Elastic(a=0.225),
        outer=Sgd(lr=0.9),
    ),
    Recipe(
        name="papa",
        source="Jolicoeur-Martineau et al. 2023, arXiv 2304.03094, algorithm 1",
        summary="x_i <- .99 x_i + .01 mean(x) every 10 steps",
        schedule=Every(steps=10),
        merge=Mix(alpha=0.99),
    ),
    Recipe(
        name="fedglomo",
        source="Das et al. 2022, arXiv 2012.04061, algorithms 1 and 2",
        summary="u <- beta D_new + (1 - beta) (u + D_new - D_old), both on the same batches",
        schedule=_FEDAVG,
        local=Replay(beta=0.5),
        outer=HeavyBall(lr=1.0, momentum=0.5),
    ),
    *DILOCO,
    _every_step(
        name="demo",
        source="Peng et al. 2024, arXiv 2411.19870, algorithm 1, and its reference code",
        summary="d <- .999 d + lr g; send the 32 largest of each 64x64 DCT block; x <- x - lr sign(mean)",
        exchange="gather",
        compressor="dct64+top32/4096+fp32",
        feedback=ErrorFeedback(decay=0.999),
        aggregator=Mean(normalise="contributors"),
        outer=SignSgd(lr=1.0),
        inner="none",
    ),
    Recipe(
        name="distro",
        source="Nous Research, Psyche, after DeMo (arXiv 2411.19870)",
        summary="demo with 4 of 64 coefficients, decay .995, 1-bit signs, applied one step late",
        payload="gradient",
        schedule=Every(steps=1, overlap_steps=1),
        exchange="gather",
        compressor="dct64+top4/4096+sign",
        feedback=ErrorFeedback(decay=0.995),
        aggregator=Mean(normalise="contributors"),
        outer=SignSgd(lr=1.0, weight_decay=0.1),
        inner="none",
    ),
    Recipe(
        name="noloco",
        source="Kolehmainen et al. 2025, arXiv 2506.10911, section 3",
        summary="in random pairs: m <- .5 m + lr (mean D + phi - mean phi); phi <- phi - m",
        schedule=Every(steps=50),
        topology=RandomPairs(),
        outer=HeavyBall(lr=0.7, momentum=0.5),
    ),
    Recipe(
        name="selsync",
        source="Tyagi and Swany 2023, arXiv 2307.07950, algorithm 1",
        summary="average the parameters when any peer's gradient norm changed by 30%",
        schedule=GradientChange(delta=0.3, smoothing=25),
    ),
    _every_step(
        name="dropcompute",
        source="Giladi et al. 2023, arXiv 2306.10598, algorithm 1",
        summary="ddp whose peers stop accumulating micro-batches at tau",
        straggler=ComputeTimeout(tau_s=None),
    ),
    Recipe(
        name="a2cid2",
        source="Nabli et al. 2023, arXiv 2306.08289, algorithm 1",
        summary="pair events on a ring of (x, x~), which mix by exp(-2 eta dt) between the events",
        payload="parameters",
        schedule=Every(steps=1),
        merge=Accelerated(),
        topology=Neighbours(graph="ring"),
    ),
    Recipe(
        name="saps",
        source="Tang et al. 2020, arXiv 2002.09692, algorithm 2",
        summary="one partner by bandwidth; half-half on 1% of the coordinates, the same on both sides",
        payload="parameters",
        schedule=Every(steps=1),
        topology=BandwidthMatching(quantile=0.5, refresh=10),
        compressor="random0.01+fp32",
        exchange="gather",
    ),
    Recipe(
        # All peers up to 16; of a larger swarm, groups of 16.
        name="sparta",
        source="Beton et al. 2025, SPARTA (openreview stFPf3gzq1; no arXiv), and its code",
        summary="every 20 steps, the mean of all on 5% of the coordinates, the same for all",
        payload="parameters",
        schedule=Every(steps=20),
        topology=Groups(size=16),
        compressor="random0.05+fp32",
        exchange="gather",
    ),
    Recipe(
        name="dybw",
        source="Xiong et al. 2021, arXiv 2102.06280, algorithm 1",
        summary="average the parameters of the fastest peers, such that a window of rounds connects all",
        payload="parameters",
        schedule=Every(steps=1),
        straggler=Backup(window=4),
    ),
    _every_step(
        name="dct-threshold",
        source="Gupta et al. 2020, arXiv 2010.08899 (dynamic communication thresholding), section 3",
        summary="e <- e + g; send what lies above the k-th magnitude, found again every 32 steps",
        exchange="gather",
        compressor="threshold0.01+fp32",
        feedback=ErrorFeedback(decay=1.0),
    ),
    _every_step(
        name="sparse-block",
        source="Eghlidi and Jaggi 2020, arXiv 2009.09271",
        summary="e <- e + g; send one contiguous block at a seeded random place, no indices",
        exchange="gather",
        compressor="randomblock0.01+fp32",
        feedback=ErrorFeedback(decay=1.0),
    ),
    _every_step(
        # The paper compresses the activations of a pipeline; here its rule for links decides what peers send.
        name="fusionllm-adatopk",
        source="Tang et al. 2024, arXiv 2410.12707, section 5",
        summary="e <- e + g; top-k with a ratio per uplink, so that all links finish together",
        exchange="gather",
        compressor="top41/4096+fp32",
        feedback=ErrorFeedback(decay=1.0),
        allocator=AdaptiveTopK(base_ratio=0.01),
    ),
    Recipe(
        name="paba",
        source="Wen, Bennis and Huang 2020, arXiv 2003.04544",
        summary="fedavg whose steps and reduced shares per peer make all finish together",
        schedule=Every(steps=30),
        allocator=TimeBalanced(),
    ),
)
RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
