"""The mathematics of a round over simulated peers: the production codecs, aggregators and outer optimizers.

Nothing here knows of time. What travels is encoded and decoded as it would be, so that every error of a codec and every
refusal of a malformed contribution is part of the result; dense codecs are run slice by slice, which gives the same
values as the butterfly's shards because blocks never straddle a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from peer.outer.compress.base import Compressor, NonFiniteError
from peer.outer.compress.registry import compressor
from peer.outer.compress.residual import Residual
from peer.outer.math.aggregation import Aggregation
from peer.outer.math.ranges import Ranges, length_of, put, take
from peer.outer.math.source import Source
from peer.outer.math.step import Aggregate, Decoded, Scaled, clip_factor, step_
from peer.outer.optim.optimizers import Vectors
from peer.outer.recipe.recipe import Recipe
from peer.outer.state.flat_layout import FlatLayout
from peer.outer.state.gathered_update import round_seed
from peer.outer.state.gossip_mixing import centre_of, drift
from peer.outer.state.reduced_update import Update
from peer.sim.learner.replica import Learner, OuterCopy, SimReplica, clip_
from peer.sim.round.attacks import with_lies
from peer.sim.round.contribution import CommittedRound, Contribution, ReadFragment, is_usable, reader, source_of
from peer.sim.round.mixing import SecondIterates, average_moments, move_to, put_off

FP32_BYTES = 4.0


class Synchroniser:
    """Contributions, commits and merges of one recipe on one model.

    Args:
        fragments: ranges of the flat vector per fragment.
        seed: of everything random that all peers share.
        nominal_tokens: the most that one contribution weighs.
        device: of large products.
    """

    def __init__(
        self, recipe: Recipe, layout: FlatLayout, fragments: Sequence[Ranges], seed: int, nominal_tokens: int,
        num_peers: int, device: torch.device,
    ) -> None:
        self.recipe, self.seed, self.nominal_tokens = recipe, seed, nominal_tokens
        self.fragments = list(fragments)
        self.lengths = [length_of(ranges) for ranges in self.fragments]
        self.shapes = [layout.shapes_within(ranges) for ranges in self.fragments]
        self.codecs = [recipe.codec().bind(shapes) for shapes in self.shapes]
        self._aggregators = [recipe.aggregator.shaped(shapes) for shapes in self.shapes]
        self._optimizer = recipe.optimizer.shaped(layout.shapes, layout.hidden).computing_on(device)
        self._residuals: dict[int, Residual] = {}
        self._acceleration = SecondIterates(*recipe.acceleration(num_peers))

    # contributions ------------------------------------------------------------------------------------------------

    def wire_bytes(self, fragment: int) -> float:
        """Of one payload; the most, where its size depends on the values. On average, where moments come with some."""
        return self.codecs[fragment].wire_bytes(self.lengths[fragment]) + self._moments_bytes(fragment)

    def _moments_bytes(self, fragment: int) -> float:
        moments = self.recipe.moments
        often = 0.0 if moments is None else sum(1.0 / every for every in (moments.first, moments.second) if every)
        return often * FP32_BYTES * self.lengths[fragment]

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
        if overlapped and self.recipe.merge.reads_snapshot:
            base = take(learner.parameters, self.fragments[fragment]).clone()
        payload_bytes, read = self._encode(learner, fragment, round, lr, overlapped=overlapped)
        payload_bytes += self._moments_bytes(fragment)
        return Contribution(replica.index, weight, payload_bytes, read, replica.profile, base)

    def _encode(
        self, learner: Learner, fragment: int, round: int, lr: float, *, overlapped: bool
    ) -> tuple[float, ReadFragment]:
        codec = self.codecs[fragment].seeded(self._seed(fragment, round))
        lazy = self.recipe.dense and self.recipe.feedback is None and not (overlapped or self.recipe.accumulates)
        source = source_of(self.recipe, learner, self.fragments[fragment])
        if lazy:
            return codec.wire_bytes(source.numel), partial(_received, source, compressor(self.recipe.compressor))
        vector = source.read(0, source.numel)
        if self.recipe.payload == "gradient" and not self.recipe.clips_mean:
            clip_(vector, learner.inner.max_grad_norm)
        if self.recipe.accumulates:
            vector.mul_(lr)
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
        outcome = CommittedRound(round=round)
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
                gossip = partial(self._gossip, [learners[i] for i in good], reads, len(learners), fragment, round)
                if self.recipe.overlap_steps:
                    moves = put_off([learners[i] for i in good], gossip)
                    outcome.moves = {sent[i].member: own for i, own in zip(good, moves, strict=True)}
                else:
                    gossip()
            elif self.recipe.payload == "gradient":
                self._gradient(learners, reads, kept, fragment, round, lr)
            else:
                self._outer_step(learners, reads, kept, fragment, round, outcome)
        except ValueError:  # a robust aggregator dropped all, or the mean left fp32's range
            outcome.dropped = [c.member for c in sent]
        return outcome

    def _weight(self, contribution: Contribution, replica: SimReplica, round: int, contributors: int) -> float:
        if self.recipe.alike:
            return 1.0
        staleness = max(0, round - 1 - replica.base_round)
        return contribution.weight * self.recipe.straggler.weight(staleness, contributors)

    def _aggregate(
        self, reads: Sequence[ReadFragment], weights: Sequence[float], fragment: int, members: int, round: int
    ) -> Aggregate:
        """What every member makes of these contributions; see `WireFormat.update`."""
        length = self.lengths[fragment]
        aggregation = Aggregation(self._aggregators[fragment], weights, members=max(members, len(reads)), stride=0)
        contributions = [partial(_values, read) for read in reads]
        if self.recipe.exchange == "gather" or not self.recipe.dense:
            vector = aggregation.aggregate(contributions, length)
            if self.recipe.exchange == "gather":
                return Decoded(vector)
            codec = self.codecs[fragment].seeded(self._seed(fragment, round))
            return Decoded(codec.decode(codec.encode(vector), length))
        dense, lost = compressor(self.recipe.compressor), self._lost_in_reducing(fragment)
        if lost is None:
            return Update((aggregation.reduce(contributions, length, dense.encode_ranges),), length, dense, length)
        payload = aggregation.reduce(contributions, length, lambda n, read: lost.encode(dense, 0, n, read))
        lost.commit()
        return Update((payload,), length, dense, length)

    def _lost_in_reducing(self, fragment: int) -> Residual | None:
        """What the reducers' encoding of the mean loses is fed back too (Tang et al. 2019, arXiv 1905.05957).

        Each holds the residual of its own shard; together they are one vector.
        """
        if self.recipe.feedback is None or self.recipe.gossips:  # a group has no member that reduced its shard before
            return None
        if fragment not in self._residuals:
            self._residuals[fragment] = Residual(self.recipe.feedback.on_return, self.lengths[fragment])
        return self._residuals[fragment]

    def _outer_step(
        self, learners: Sequence[Learner], reads: Sequence[ReadFragment], weights: Sequence[float],
        fragment: int, round: int, outcome: CommittedRound,
    ) -> None:
        ranges = self.fragments[fragment]
        aggregate = self._aggregate(reads, weights, fragment, len(learners), round)
        outers = list({id(learner.outer): learner.outer for learner in learners}.values())
        anchors = [take(outer.anchor, ranges) for outer in outers] if len(outers) > 1 else []
        if self.recipe.merge.reads_old_anchor or learners[0].shadow is not None:
            outcome.anchor_before = take(outers[0].anchor, ranges).clone()
        directions = [aggregate]
        if anchors:  # in gossip each member has its own, and drifts towards the group's mean (arXiv 2506.10911, eq. 5)
            mean, centre = aggregate.decode_range(0, aggregate.numel), centre_of(anchors)
            directions = [Decoded(drift(mean, anchor, centre)) for anchor in anchors]
        for outer, direction in zip(outers, directions, strict=True):
            self._step(outer, ranges, direction, round - 1)
            outer.rounds += 1
        if self.recipe.moments is not None:
            average_moments(learners, self.recipe.moments.due(round))

    def _step(self, outer: OuterCopy, ranges: Ranges, aggregate: Aggregate, round: int, lr_scale: float = 1.0) -> None:
        vectors, limit = Vectors(outer.anchor, outer.buffers), self._optimizer.max_norm
        clipped = aggregate if limit is None else Scaled(aggregate, clip_factor(aggregate, limit))
        step_(self._optimizer, vectors, ranges, clipped, round=round, lr_scale=lr_scale)

    def _gradient(
        self, learners: Sequence[Learner], reads: Sequence[ReadFragment], weights: Sequence[float],
        fragment: int, round: int, lr: float,
    ) -> None:
        gradient = self._whole(reads, weights, fragment, len(learners), round)
        for outer in {id(learner.outer): learner.outer for learner in learners}.values():
            self._step(outer, self.fragments[fragment], Decoded(gradient), round - 1, lr)
            outer.rounds += 1

    def _whole(
        self, reads: Sequence[ReadFragment], weights: Sequence[float], fragment: int, members: int, round: int
    ) -> Tensor:
        aggregate = self._aggregate(reads, weights, fragment, members, round)
        return aggregate.decode_range(0, aggregate.numel)

    def _gossip(
        self, present: Sequence[Learner], reads: Sequence[ReadFragment], members: int, fragment: int, round: int
    ) -> None:
        """Parameters move towards the group's; a peer without a usable contribution keeps its own."""
        if len(present) < 2:
            return
        sent = [read(0, self.lengths[fragment]).clone() for read in reads]
        replaces = self.recipe.compressor == "fp32" and not self.recipe.overlap_steps
        if self.recipe.merge.second_iterate:
            self._acceleration.pair(present, sent, replaces=replaces)
            return
        mixed = self._whole(reads, [1.0] * len(sent), fragment, members, round)
        move_to(mixed, present, sent, self.fragments[fragment], replaces=replaces)

    # merges -------------------------------------------------------------------------------------------------------

    def merge(self, replica: SimReplica, outcome: CommittedRound, contribution: Contribution, fragment: int) -> None:
        """Bring what the round decided into this peer's own parameters."""
        learner, recipe = replica.learner, self.recipe
        replica.base_round = outcome.round
        if learner is None:
            return
        if recipe.payload == "parameters":
            if moves := outcome.moves.pop(replica.index, None):
                for vector, change in zip(learner.iterates, moves, strict=True):
                    vector.add_(change)
            return
        if recipe.payload == "gradient":
            learner.parameters.copy_(learner.outer.anchor)
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
        if learner.own is not None:
            learner.own.counted()
        if learner.shadow is not None:
            assert outcome.anchor_before is not None
            learner.restart_shadow(outcome.anchor_before)

    def begin_early(self, replica: SimReplica, peers: int) -> None:
        """Start from the anchor and this peer's share of what it has just sent, where the recipe says so."""
        if (learner := replica.learner) is None or learner.own is None:
            return
        anchor, sent = learner.outer.anchor if learner.base is None else learner.base, learner.parameters.clone()
        learner.own.subtract(sent)
        learner.own.renew(anchor, sent, peers)
        torch.add(anchor, learner.own.offset, out=learner.parameters)

    def _seed(self, fragment: int, round: int) -> int:
        return round_seed(self.seed, fragment, round)


def _received(source: Source, codec: Compressor, start: int, stop: int) -> Tensor:
    """What the receivers of a contribution hold; encoded and decoded when it is read."""
    if codec.name == "fp32":
        return source.read(start, stop)
    return codec.decode(source.encode(codec, start, stop), stop - start)


def _values(read: ReadFragment, start: int, stop: int, room: Tensor | None) -> Tensor:  # noqa: ARG001
    return read(start, stop)
