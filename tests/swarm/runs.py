"""Committed rounds without a network: states, updates and certificates as a real group would make them."""

from __future__ import annotations

import asyncio
import shutil

import torch

from peer.outer.compress.registry import compressor
from peer.outer.optim.optimizers import Nesterov
from peer.outer.policy.schedules import Strided
from peer.outer.state.fragments import Fragments
from peer.outer.state.outer_state import OuterState
from peer.outer.state.reduced_update import SLICE, ReduceFormat
from peer.protocol.identity import Identity
from peer.protocol.lineage import VOTE_DOMAIN, Certificate, Link, Member
from peer.swarm.runtime.timing import STANDARD
from peer.swarm.state.chain import ChainStore
from tests.outer.reference import reduced

RUN = "1" * 64
NUMEL = 1000
TOKENS = 64


def written(sizes, codec="int8", elements=SLICE):
    """How the fragments of these sizes are written, one after the other."""
    turns = Strided(period=len(sizes), num_fragments=len(sizes)).turn
    return Fragments([ReduceFormat(size, compressor(codec), elements) for size in sizes], turns)


def make_state(numel=NUMEL, codec="int8", elements=SLICE, sizes=()):
    """The genesis state of the tests' run; `sizes`: of its fragments, in place of one of `numel`."""
    fragments = written(sizes or (numel,), codec, elements)
    numel = fragments.numel
    anchor = torch.sin(torch.arange(numel, dtype=torch.float32))
    state = OuterState(anchor, [torch.zeros(numel)], Nesterov(lr=0.7, momentum=0.6), fragments)
    state.lineage_id = state.digest()
    return state


def contributions(state, count, seed):
    """Local parameters of `count` members, fp32 [n] each of the fragment whose turn it is."""
    generator, part = torch.Generator().manual_seed(seed), state.part
    anchor = state.anchor[part.start : part.stop]
    return [anchor + 0.01 * torch.randn(len(anchor), generator=generator) for _ in range(count)]


class Run:
    """A peer that has committed rounds with the same companions since genesis."""

    def __init__(self, folder, numel=NUMEL, members=3, sizes=()):
        self.state = make_state(numel, sizes=sizes)
        self.history, self.timing = ChainStore(folder, self.state.lineage_id), STANDARD
        self.identities = [Identity.generate() for _ in range(members)]
        self.states = [self.state.digest()]
        self.valid, self.still = True, asyncio.Lock

    def commit(self, rounds=1, *, seed=0, tokens=TOKENS):
        """Commit rounds; every one gets a certificate of all members."""
        for _ in range(rounds):
            locals_ = contributions(self.state, len(self.identities), self.state.round + 1000 * seed)
            update = reduced(self.state, locals_, [tokens] * len(locals_))
            certificate = self.certify(update, tokens=tokens)
            self.history.append(certificate)
            self.history.keep_update(update.payload)
            self.state.apply(update, self.state.round + 1, certificate.link.id)
            self.states.append(self.state.digest())
        return self

    def fork(self, folder, identities):
        """The same run up to here, which goes on with these members."""
        other = Run(folder, members=0, sizes=self.state.fragments.sizes)
        other.identities, other.states = list(identities), list(self.states)
        other.state.anchor.copy_(self.state.anchor)
        other.state.buffers[0].copy_(self.state.buffers[0])
        other.state.round, other.state.lineage_id = self.state.round, self.state.lineage_id
        other.history.replace(list(self.history.chain))
        for path in self.history.folder.glob("update-*.bin"):
            shutil.copy(path, other.history.folder)
        return other

    async def digest(self):
        """Of the state, as it was when it was new."""
        return self.states[-1]

    async def written(self):
        """Everything is in its file."""

    def certify(self, update, *, signers=None, tokens=TOKENS, **changes):
        """A certificate for `update` on the present state; `changes` are lies about the link."""
        roster = tuple(Member(peer_id=identity.peer_id, tokens=tokens) for identity in self.identities)
        link = Link(
            **{
                "run_id": RUN, "fragment": self.state.part.index, "round": self.state.round,
                "parent": self.state.lineage_id, "roster": roster,
                "update_digest": update.digest(), "state_digest": self.state.digest(), **changes,
            }
        )  # fmt: skip
        statement = bytes.fromhex(link.id)
        signers = self.identities if signers is None else signers
        return Certificate(link=link, signatures={i.peer_id: i.sign(VOTE_DOMAIN, statement).hex() for i in signers})
