"""One reducer's rounds without a network: real payloads, signatures and certificates of groups that come and go."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from peer.outer.compress.registry import compressor
from peer.outer.math.aggregation import Aggregation
from peer.outer.recipe.resolve import swarm_recipe
from peer.outer.state.fragments import Fragments
from peer.outer.state.reduced_update import ReduceFormat
from peer.protocol.evidence import Evidence
from peer.protocol.identity import Identity
from peer.protocol.lineage import Certificate, Link, Member
from peer.protocol.manifest import RecipeSpec
from peer.protocol.statements import Leaves, Sitting, root_of, seal_sent
from peer.swarm.round.reducer_residual import ReducerResidual
from peer.swarm.round.signatures import close_reduction
from peer.swarm.trust.judge import Judge, reduction_of
from peer.swarm.trust.recompute import Recomputer
from tests.swarm.runs import RUN

LAGOON = swarm_recipe(RecipeSpec(name="lagoon"))


class Lying:
    """A reducer's residual that encodes another mean than the one it reads."""

    def __init__(self, residual, lie):
        self._residual, self._lie = residual, lie

    def encode(self, codec, start, stop, read):
        return self._residual.encode(codec, start, stop, lambda a, b: self._lie(read(a, b)))


class Workshop:
    """A reducer, `me`, and up to seven others.

    Attributes:
        chain: what is committed on the lineage that all are on.
        residual: the reducer's.
    """

    def __init__(self, seed=0, numel=6000, elements=1024, recipe=LAGOON):
        self.rng = random.Random(seed)
        self.recipe, self.chain = recipe, []
        self.people = [Identity.generate() for _ in range(8)]
        self.me = self.people[0]
        self.wire = ReduceFormat(numel, compressor(recipe.compressor), elements)
        self.restart()
        self.judge = Judge(RUN, Recomputer(Fragments.of(self.wire), recipe, lambda: self.chain))

    def restart(self):
        """The reducer loses its memory."""
        feedback = self.recipe.feedback.on_return
        self.residual = ReducerResidual(feedback, self.wire, self.me.peer_id, lambda: self.chain)

    @property
    def tip(self):
        return self.chain[-1].link.id if self.chain else "0" * 64

    def gather(self, with_me=True, others=None):
        """The people of a round, in the order of a roster."""
        others = self.rng.randint(1, 7) if others is None else others
        roster = [*([self.me] if with_me else []), *self.rng.sample(self.people[1:], others)]
        self.rng.shuffle(roster)
        return roster

    def reduce(self, roster, lie=None):
        """What the reducer makes of its shard, signed; `lie` changes the mean of its first slice.

        Whether it counts is open: see `commit`; `residual.revert` takes it back.
        """
        members = tuple(Member(peer_id=one.peer_id, tokens=self.rng.randint(1, 99)) for one in roster)
        group = hashlib.sha256(self.rng.randbytes(8)).hexdigest()
        sitting = Sitting(run_id=RUN, round=len(self.chain), parent=self.tip, group=group, members=members)
        place, weights = roster.index(self.me), [member.tokens for member in members]
        codec, aggregation = self.wire.codec, Aggregation(self.recipe.aggregator, weights)
        leaves, outputs = {one.peer_id: Leaves() for one in roster}, Leaves()
        pieces = [[] for _ in roster]
        attempt = self.residual.begin(*self.wire.bounds(len(roster))[place], keep=True)
        for index, (start, stop) in enumerate(self.wire.slices(len(roster), place)):
            rng = np.random.default_rng(self.rng.randrange(2**32))
            payloads = [codec.encode(torch.from_numpy(rng.standard_normal(stop - start, np.float32))) for _ in roster]
            for one, payload, own in zip(roster, payloads, pieces, strict=True):
                leaves[one.peer_id].add(payload)
                own.append(payload)

            lost = Lying(self.residual, lie) if lie is not None and index == 0 else self.residual
            outputs.add(self.wire.reduce(aggregation, payloads, start, stop, lost))
        seals = {
            one.peer_id: seal_sent(one, sitting, self.me.peer_id, root_of(leaves[one.peer_id].digests))
            for one in roster if one is not self.me
        }
        return close_reduction(self.me, sitting, leaves, seals, outputs, pieces, attempt)

    def link(self, roster, kept=None):
        """A committed round; `kept` is what the reducer signed in it."""
        own = {self.me.peer_id: kept.seal.residual.hex()} if kept is not None else {}
        members = kept.sitting.members if kept else tuple(Member(peer_id=one.peer_id, tokens=5) for one in roster)
        residuals = tuple(own.get(member.peer_id, self.rng.randbytes(32).hex()) for member in members)
        link = Link(
            run_id=RUN, round=len(self.chain), parent=self.tip, roster=members, update_digest="1" * 64,
            state_digest="2" * 64, residuals=residuals,
        )  # fmt: skip
        self.chain.append(Certificate(link=link, signatures={}))

    def commit(self, roster, kept):
        """All commit the round, the reducer too."""
        self.residual.commit()
        self.link(roster, kept)

    def evidence(self, kept, index):
        """What an auditor has of one slice: the document and the payloads."""
        return Evidence(finding=reduction_of(kept, index)), kept.payloads_of(index)

    def slices(self, kept):
        return range(len(kept.outputs))
