"""The mathematics of a round over simulated peers: the production codecs, aggregators and outer optimizers.

Nothing here knows of time. What travels is encoded and decoded as it would be, so that every error of a codec and every
refusal of a malformed contribution is part of the result; dense codecs are run slice by slice, which gives the same
values as the butterfly's shards because blocks never straddle a cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from peer.outer.aggregate.base import DirectionAverage, Mean
from peer.outer.compress.base import Codec, NonFiniteError
from peer.outer.compress.feedback import Encoder
from peer.outer.math.ranges import Ranges, length_of, put, take
from peer.outer.policy.merge_rules import Accelerated, Carry, Eager, Elastic
from peer.outer.policy.straggler import ComputeTimeout, staleness_weight
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.outer.state.gathered_update import round_seed
from peer.outer.state.gossip_mixing import centre_of, drift
from peer.outer.topology.topologies import AllPeers
from peer.sim.learner.replica import Learner, SimReplica, clip_
from peer.sim.round.attacks import with_lies
from peer.sim.round.contribution import (
    SLICE,
    CommittedRound,
    Contribution,
    ReadFragment,
    is_usable,
    reader,
    values_to_send,
)
from peer.sim.round.mixing import acceleration_of, move_to


class Synchroniser:
    """Contributions, commits and merges of one recipe on one model.

    Args:
        fragments: ranges of the flat vector per fragment.
        seed: of everything random that all peers share.
        nominal_tokens: the most that one contribution weighs.
    """

    def __init__(
        self, recipe: Recipe, layout: FlatLayout, fragments: Sequence[Ranges], seed: int, nominal_tokens: int,
        num_peers: int,
    ) -> None:
        self.recipe, self.seed, self.nominal_tokens = recipe, seed, nominal_tokens
        self.fragments = list(fragments)
        self.lengths = [length_of(ranges) for ranges in self.fragments]
        self.shapes = [layout.shapes_within(ranges) for ranges in self.fragments]
        self.codecs = [recipe.codec().bind(shapes) for shapes in self.shapes]
        self._residuals: dict[int, Encoder] = {}
        self._acceleration = acceleration_of(recipe, num_peers)

    # contributions ------------------------------------------------------------------------------------------------

    def wire_bytes(self, fragment: int) -> float:
        """Of one payload; the most, where its size depends on the values."""
        return self.codecs[fragment].wire_bytes(self.lengths[fragment])

    def thinned(self, contribution: Contribution, ratio: float) -> Contribution:
        """The same with a payload scaled to a peer's own ratio, when only time is simulated."""
        return replace(contribution, wire_bytes=contribution.wire_bytes * ratio)

    def give_back(self, replica: SimReplica, contribution: Contribution, fragment: int) -> None:
        """A contribution that no round took: its tokens, and what error feedback took for it, wait for the next."""
        replica.unsent_tokens[fragment] += contribution.weight
        if replica.learner is not None:
            replica.learner.encoders[fragment].revert()

    def contribute(
        self, replica: SimReplica, fragment: int, round: int, lr: float, *, overlapped: bool
    ) -> Contribution:
        """Take this peer's part in a round of one fragment from what it has learned since the last."""
        weight = max(1, min(replica.unsent_tokens[fragment], self.nominal_tokens))
        replica.unsent_tokens[fragment] = 0
        learner = replica.learner
        if learner is None:
            return Contribution(replica.index, weight, self.wire_bytes(fragment), None, replica.profile)
        self._acceleration.mix_to(round, learner)
        base = None
        if overlapped and isinstance(self.recipe.merge, Carry | Elastic):
            base = take(learner.parameters, self.fragments[fragment]).clone()
        payload_bytes, read = self._encode(learner, fragment, round, lr, overlapped=overlapped)
        return Contribution(replica.index, weight, payload_bytes, read, replica.profile, base)

    def _encode(
        self, learner: Learner, fragment: int, round: int, lr: float, *, overlapped: bool
    ) -> tuple[float, ReadFragment]:
        codec = self.codecs[fragment].seeded(self._seed(fragment, round))
        lazy = self.recipe.dense and self.recipe.feedback is None and not (overlapped or self.recipe.accumulates)
        source = values_to_send(self.recipe, learner, self.fragments[fragment], lr)
        if lazy and not isinstance(self.recipe.merge, Eager):
            return codec.wire_bytes(self.lengths[fragment]), lambda a, b: round_trip(codec, source(a, b))
        vector = source(0, self.lengths[fragment])
        if isinstance(self.recipe.merge, Eager):
            vector = vector.clone()
            learner.previous, learner.current = learner.current, vector
        if self.recipe.payload == "gradient":
            clip_(vector, learner.inner.max_grad_norm * (lr if self.recipe.accumulates else 1.0))
        try:
            sent = learner.encoders[fragment].encode_decoded(vector, self._seed(fragment, round))
        except NonFiniteError:  # diverged: it sends a vector that every peer rejects
            return self.wire_bytes(fragment), reader(torch.full_like(vector, torch.nan))
        return float(len(sent.payload)), reader(sent.decoded)

    # commits ------------------------------------------------------------------------------------------------------

    def commit(
        self, members: Sequence[SimReplica], contributions: Sequence[Contribution], fragment: int, round: int, lr: float
    ) -> CommittedRound:
        """Aggregate, and change the outer state (or, in gossip, the members' own) once."""
        outcome = CommittedRound(num_members=len(members), round=round, lr=lr)
        if members[0].learner is None:
            return outcome
        learners = [replica.learner for replica in members if replica.learner is not None]
        for learner in learners:
            learner.encoders[fragment].commit()
        sent = with_lies(contributions, self.lengths[fragment], self._seed(fragment, round))
        weights = [self._weight(c, r, round, len(sent)) for c, r in zip(sent, members, strict=True)]
        good = [i for i, c in enumerate(sent) if c.read is not None and is_usable(c.read, self.lengths[fragment])]
        outcome.dropped = [c.member for i, c in enumerate(sent) if i not in good]
        reads = [read for i in good if (read := sent[i].read) is not None]
        kept = [weights[i] for i in good]
        if not reads:
            return outcome
        try:
            if self.recipe.payload == "parameters":
                self._gossip([learners[i] for i in good], reads, len(learners), fragment, round)
            elif self.recipe.payload == "gradient":
                outcome.update = self._gradient(learners, reads, kept, fragment, round, lr)
            elif isinstance(self.recipe.merge, Eager):
                vectors = [values for _, _, values in self._aggregate(reads, kept, fragment, len(members), round)]
                outcome.update = torch.cat(vectors)
            else:
                self._outer_step(learners, reads, kept, fragment, round, outcome)
        except ValueError:  # a robust aggregator dropped all, or the mean left fp32's range
            outcome.dropped = [c.member for c in sent]
        return outcome

    def _weight(self, contribution: Contribution, replica: SimReplica, round: int, contributors: int) -> float:
        staleness = max(0, round - 1 - replica.base_round)
        return contribution.weight * staleness_weight(self.recipe.straggler, staleness, contributors)

    def _aggregate(
        self, reads: Sequence[ReadFragment], weights: Sequence[float], fragment: int, members: int,
        round: int,
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, the aggregate as every member decodes it), range by range."""
        length, aggregator = self.lengths[fragment], self.recipe.aggregator
        if isinstance(aggregator, Mean) and aggregator.normalise == "members":
            aggregator = aggregator.bind(max(members, len(reads)))
        elif isinstance(aggregator, DirectionAverage):
            aggregator = aggregator.shaped(self.shapes[fragment])
        codec = self.codecs[fragment].seeded(self._seed(fragment, round))
        reducers = self._reducers(fragment)
        size = SLICE if aggregator.separable and reducers is None else max(length, 1)
        for start in range(0, length, size):
            stop = min(start + size, length)
            mean = aggregator.aggregate([read(start, stop) for read in reads], weights)
            if reducers is not None:
                mean = reducers.encode_decoded(mean, self._seed(fragment, round)).decoded
            elif self.recipe.exchange == "reduce":
                mean = round_trip(codec, mean)
            yield start, stop, mean

    def _reducers(self, fragment: int) -> Encoder | None:
        """What the reducers' encoding of the mean loses is fed back too (Tang et al. 2019, arXiv 1905.05957).

        Each holds the residual of its own shard; together they are one vector.
        """
        if self.recipe.feedback is None or self.recipe.exchange != "reduce":
            return None
        if not isinstance(self.recipe.topology, AllPeers):  # a group has no member that reduced its shard before
            return None
        if fragment not in self._residuals:
            self._residuals[fragment] = Encoder(
                self.codecs[fragment], self.recipe.feedback.on_return, self.lengths[fragment], revertible=False
            )
        return self._residuals[fragment]

    def _outer_step(
        self, learners: Sequence[Learner], reads: Sequence[ReadFragment], weights: Sequence[float],
        fragment: int, round: int, outcome: CommittedRound,
    ) -> None:
        ranges = self.fragments[fragment]
        outers = list({id(learner.outer): learner.outer for learner in learners}.values())
        anchors = [take(outer.anchor, ranges) for outer in outers]
        buffers = [[take(buffer, ranges) for buffer in outer.buffers] for outer in outers]
        if isinstance(self.recipe.merge, Elastic) or learners[0].shadow is not None:
            outcome.anchor_before = anchors[0].clone()
        for start, stop, mean in self._aggregate(reads, weights, fragment, len(learners), round):
            # In gossip each member has its own anchor, and drifts towards the group's mean (arXiv 2506.10911, eq. 5).
            centre = centre_of([a[start:stop] for a in anchors]) if len(outers) > 1 else None
            for anchor, own in zip(anchors, buffers, strict=True):
                direction = mean if centre is None else drift(mean, anchor[start:stop], centre)
                vectors = [buffer[start:stop] for buffer in own]
                self.recipe.optimizer.step_(anchor[start:stop], vectors, direction, round=round - 1)
        for outer in outers:
            outer.rounds += 1
        if len(ranges) > 1:
            for outer, anchor, own in zip(outers, anchors, buffers, strict=True):
                put(outer.anchor, ranges, anchor)
                for buffer, values in zip(outer.buffers, own, strict=True):
                    put(buffer, ranges, values)

    def _gradient(
        self, learners: Sequence[Learner], reads: Sequence[ReadFragment], weights: Sequence[float],
        fragment: int, round: int, lr: float,
    ) -> Tensor | None:
        vectors = [values for _, _, values in self._aggregate(reads, weights, fragment, len(learners), round)]
        gradient = torch.cat(vectors)
        if isinstance(self.recipe.straggler, ComputeTimeout):
            tokens = [int(weight) for weight in weights]
            gradient.mul_(sum(tokens) / self.recipe.straggler.divisor(tokens, self.nominal_tokens // 2))
        if not self.recipe.accumulates:
            if self.recipe.feedback is None:  # the batch of all is one batch; with feedback each clipped its own
                clip_(gradient, learners[0].inner.max_grad_norm)
            return gradient
        for outer in {id(learner.outer): learner.outer for learner in learners}.values():
            self.recipe.optimizer.step_(outer.anchor, outer.buffers, gradient, round=round - 1, lr_scale=lr)
        return None

    def _gossip(
        self, present: Sequence[Learner], reads: Sequence[ReadFragment], members: int, fragment: int, round: int
    ) -> None:
        """Parameters move towards the group's; a peer without a usable contribution keeps its own."""
        if len(present) < 2:
            return
        sent = [read(0, self.lengths[fragment]).clone() for read in reads]
        if isinstance(self.recipe.merge, Accelerated):
            self._acceleration.pair(present, sent)
            return
        alike = [1.0] * len(sent)
        mixed = torch.cat([values for *_, values in self._aggregate(reads, alike, fragment, members, round)])
        replaces = self.recipe.compressor == "fp32" and not self.recipe.overlap_steps
        move_to(mixed, present, sent, self.fragments[fragment], replaces=replaces)

    # merges -------------------------------------------------------------------------------------------------------

    def merge(self, replica: SimReplica, outcome: CommittedRound, contribution: Contribution, fragment: int) -> None:
        """Bring what the round decided into this peer's own parameters."""
        learner, recipe = replica.learner, self.recipe
        replica.base_round = outcome.round
        if learner is None or recipe.payload == "parameters":
            return
        if recipe.payload == "gradient":
            if outcome.update is not None:
                learner.optimizer.step(outcome.update, outcome.lr)
            elif recipe.accumulates:
                learner.parameters.copy_(learner.outer.anchor)
            return
        if isinstance(recipe.merge, Eager):
            steps_taken = outcome.round if recipe.overlap_steps else outcome.round - 1
            self.eager_step(learner, outcome.update, outcome.num_members, steps_taken)
            return
        ranges = self.fragments[fragment]
        local, anchor = take(learner.parameters, ranges), take(learner.outer.anchor, ranges)
        before = anchor if outcome.anchor_before is None else outcome.anchor_before
        recipe.merge.merge_(local, contribution.base, before, anchor)
        if len(ranges) > 1:
            put(learner.parameters, ranges, local)
        if learner.base is not None:
            for start, stop in ranges:
                learner.base[start:stop] = learner.outer.anchor[start:stop]
        if learner.shadow is not None:
            assert outcome.anchor_before is not None
            learner.restart_shadow(outcome.anchor_before)

    def eager_step(self, learner: Learner, update: Tensor | None, members: int, steps_taken: int) -> None:
        """The peer's own outer step, with what it knows of the round before and of this one."""
        assert isinstance(self.recipe.merge, Eager)
        assert learner.current is not None
        before = learner.previous if self.recipe.overlap_steps else learner.current
        direction = self.recipe.merge.estimate(update, learner.current, before, members)
        self.recipe.optimizer.step_(learner.outer.anchor, learner.outer.buffers, direction, round=steps_taken)
        learner.parameters.copy_(learner.outer.anchor)

    def _seed(self, fragment: int, round: int) -> int:
        return round_seed(self.seed, fragment, round)


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    """What the receivers of `x` hold."""
    return x.clone() if codec.name == "fp32" else codec.decode(codec.encode(x), x.numel())
