"""DiLoCo and what was made of it: rounds of many steps, whose difference an outer optimizer with a memory takes up.

As `peer.outer.recipe.published`, of which these are entries.
"""

from __future__ import annotations

from typing import Final

from peer.outer.aggregate.base import Mean
from peer.outer.aggregate.penalised import Penalised
from peer.outer.aggregate.robust import ClippedMean
from peer.outer.compress.feedback import ErrorFeedback
from peer.outer.optim.optimizers import Nesterov
from peer.outer.optim.scheduled import Stages
from peer.outer.optim.turned import Turned
from peer.outer.policy.local_rules import PseudoSync
from peer.outer.policy.merge_rules import Carry, Eager, Mix
from peer.outer.policy.schedules import Every, Strided
from peer.outer.policy.straggler import Quorum
from peer.outer.recipe.recipe import Recipe

_PUBLISHED = Nesterov(lr=0.7, momentum=0.9)

DILOCO: Final = (
    Recipe(
        # m <- .9 m + D, anchor <- anchor - .7 (D + .9 m), D = mean over peers of (anchor - local); AdamW state is kept.
        name="diloco",
        source="Douillard et al. 2023, arXiv 2311.08105, algorithm 1 and section 3.1",
        summary="m <- .9 m + D; anchor <- anchor - .7 (D + .9 m) every 500 steps",
        schedule=Every(steps=500),
        merge=Carry(),
        outer=_PUBLISHED,
    ),
    Recipe(
        name="snoo",
        source="Kallusky et al. 2025, arXiv 2510.15830",
        summary="diloco of one peer: m <- .75 m + D; anchor <- anchor - .8 (D + .75 m) every 100 steps",
        schedule=Every(steps=100),
        merge=Carry(),
        outer=Nesterov(lr=0.8, momentum=0.75),
    ),
    Recipe(
        # The same equations; D and its mean travel as 8-bit integers (the paper's own all-reduce was fp16).
        name="opendiloco",
        source="Jaghouar et al. 2024, arXiv 2407.07852",
        summary="diloco with 8-bit integers both ways",
        schedule=Every(steps=500),
        merge=Carry(),
        outer=_PUBLISHED,
        compressor="int8",
    ),
    Recipe(
        name="intellect1",
        source="Jaghouar et al. 2024, arXiv 2412.01152, section 2",
        summary="diloco every 100 steps with 8-bit integers",
        schedule=Every(steps=100),
        merge=Carry(),
        outer=_PUBLISHED,
        compressor="int8",
    ),
    Recipe(
        name="streaming-diloco",
        source="Douillard et al. 2025, arXiv 2501.18512, algorithm 2",
        summary="fragment p at steps t = t_p mod H; local <- .5 local + .5 anchor, tau steps later; 4 bits both ways",
        schedule=Strided(period=100, num_fragments=3, overlap_steps=1, blocks_per_fragment=3),
        merge=Mix(alpha=0.5),
        outer=Nesterov(lr=0.4, momentum=0.9),
        compressor="fp4",
    ),
    Recipe(
        name="eager-diloco",
        source="Kale et al. 2025, arXiv 2502.12996, algorithm 2",
        summary="D~_m = D(t - H) + (D_m(t) - D_m(t - H)) / R: the round before, with one's own share renewed",
        schedule=Every(steps=30, overlap_steps=30),
        merge=Eager(),
        outer=_PUBLISHED,
    ),
    Recipe(
        # lr a tenth of diloco's: updates of part of the swarm come more often. Half of the peers start a round.
        name="async-diloco",
        source="Liu et al. 2024, arXiv 2401.09135; Douillard et al. 2026, arXiv 2604.21428",
        summary="a round starts with K contributions, each weighing (1 + staleness)^-1/2",
        schedule=Every(steps=30),
        merge=Carry(),
        outer=Nesterov(lr=0.07, momentum=0.9),
        straggler=Quorum(fraction=0.5, slack=0.5),
    ),
    Recipe(
        # The paper turns each contribution by itself; here the mean of those that a round begins with.
        name="heloco",
        source="Al Asif et al. 2026, arXiv 2606.00271, by two programs after it",
        summary="async-diloco; per tensor D is turned towards m where they disagree; peers start ahead by lr beta m",
        schedule=Every(steps=30),
        merge=Carry(),
        outer=Turned(lr=0.7, momentum=0.9),
        straggler=Quorum(fraction=0.5, slack=0.5),
    ),
    Recipe(
        name="muloco",
        source="Thérien et al. 2025, arXiv 2505.23725",
        summary="Muon inside; e <- .9 e + .8 D, send 2 bits of e; Nesterov .8 / .9 outside",
        schedule=Every(steps=30),
        merge=Carry(),
        outer=Nesterov(lr=0.8, momentum=0.9),
        compressor="int2",
        feedback=ErrorFeedback(decay=0.9, gain=0.8),
        inner="muon",
    ),
    Recipe(
        name="sparseloco",
        source="Sarfi et al. 2025, arXiv 2508.15706, algorithm 1",
        summary="e <- .95 e + D; send the 64 largest of 4096 in 2 bits; anchor <- anchor - sum_i / R",
        schedule=Every(steps=30),
        merge=Carry(),
        exchange="gather",
        compressor="top64/64x64+int2",
        feedback=ErrorFeedback(decay=0.95),
        aggregator=Mean(normalise="members"),
    ),
    Recipe(
        # The run's rate fell by hand, in six steps between its rounds 900 and 3,100 of 6,250.
        name="covenant",
        source="Lidin et al. 2026, arXiv 2603.08163 (Covenant-72B), and the settings in its code's history",
        summary="sparseloco, norms cut to their median; the outer rate falls from 1 to .4",
        schedule=Every(steps=30),
        merge=Carry(),
        exchange="gather",
        compressor="top64/64x64+int2",
        feedback=ErrorFeedback(decay=0.95),
        aggregator=ClippedMean(factor=1.0),
        outer_schedule=Stages(decay_from=0.15, decay_until=0.5, final_lr=0.4),
    ),
    Recipe(
        name="pier",
        source="Fan and Zhang 2025, arXiv 2511.17849, and its authors' code",
        summary="a tenth of plain means, while m gathers; then momentum .99, .95, .9 and a rate up to 1.1, then .9",
        schedule=Every(steps=50),
        merge=Carry(),
        outer=Nesterov(lr=1.1, momentum=0.9),
        outer_schedule=Stages(
            lazy=0.1, warmup=0.1, momenta=(0.99, 0.95), momenta_for=0.1, decay_from=0.8, decay_until=0.8, final_lr=0.9
        ),
    ),
    Recipe(
        # The paper's m <- .7 m + .3 D, anchor <- anchor - .9 (1.7 m - .7 m_before) is this with lr .9 (1 - .7).
        name="restarted-diloco",
        source="Topollai et al. 2026, arXiv 2605.28585",
        summary="diloco that forgets its momentum every 3 rounds",
        schedule=Every(steps=128),
        merge=Carry(),
        outer=Nesterov(lr=0.27, momentum=0.7),
        outer_schedule=Stages(restart=3),
    ),
    Recipe(
        # The paper finds anomalies by a worker's own past, of which an aggregator knows nothing.
        name="edit",
        source="Cheng et al. 2024, arXiv 2412.07210, and its authors' code",
        summary="per tensor, weights exp(-|D_i|) without what is 3 times the median; the mean clipped to 10",
        schedule=Every(steps=32),
        merge=Carry(),
        aggregator=Penalised(),
        outer=Nesterov(lr=0.7, momentum=0.8),
    ),
    Recipe(
        # The authors' code draws the same on all workers; its numbers are the defaults there.
        name="palsgd",
        source="Naganuma et al. 2025, arXiv 2504.18454, and its authors' code",
        summary="diloco; at random steps x <- x - (lr eta / p) (x - anchor) in place of a gradient's",
        schedule=Every(steps=100),
        local=PseudoSync(p=0.2, eta=0.5),
        merge=Carry(),
        outer=Nesterov(lr=0.25, momentum=0.9),
    ),
)
