"""The local parameters of this process, and the anchor that they were trained from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Protocol

import torch
from torch import Tensor

from peer.link.memory import SharedState
from peer.link.messages import LivePeers, Message, RoundEnded
from peer.link.second_trajectory import LocalParameters, SecondTrajectory
from peer.link.transfer import BackgroundCopies, Done, Transfer
from peer.outer.aggregate.gram import largest_magnitude
from peer.outer.compress.base import LARGEST_VALUE
from peer.outer.optim.optimizers import OuterOptimizer
from peer.outer.policy.merge_rules import Carry, MergeRule
from peer.outer.policy.regular import Event
from peer.outer.state.own_part import OwnPart

CARRY: Final = Carry()


class InnerLoop(Protocol):
    """What makes the local steps."""

    def begin_round(self, anchor: Tensor) -> None:
        """The parameters have taken up a new anchor (fp32 [P], unchanged until the next), or went back to one."""


@dataclass(frozen=True, kw_only=True)
class InnerParts:
    """What makes the local steps, and what of it takes part in rounds beside the parameters.

    Attributes:
        second: trained beside the local parameters, where the recipe has such; then there is one fragment.
        moments: the first and the second of the inner optimizer, where peers average them.
    """

    loop: InnerLoop | None = None
    second: SecondTrajectory | None = None
    moments: Sequence[LocalParameters] = ()


@dataclass(frozen=True, eq=False)
class _PutOff:
    """A round of one fragment that the parameters have yet to take up.

    Attributes:
        until: the step to do so.
        sent, before: the fragment's values of this peer's snapshot, and of the anchor before the round.
    """

    until: int
    fragment: int
    sent: Tensor
    before: Tensor


class LocalAnchor:
    """This process's copy of the anchor, and what becomes of the parameters when there is a new one.

    Args:
        optimizer: says what the run yields: the anchor, or an average of anchors.
        rule: how the parameters take up a new anchor that holds what they have sent.
        sizes: elements of each fragment, where there are several.

    Attributes:
        round: of the copy.
        base: the copy, fp32 [P]; it stays as it is until the next merge.
        scratch: fp32 [P], for any use between two merges.
        copies: of a device with memory of its own; None: parameters are copied at once.
        own: this peer's share of the round that is under way, where the rule is eager; then there is one fragment.
        peers: that share a round.
    """

    def __init__(
        self, memory: SharedState, replica: LocalParameters, optimizer: OuterOptimizer, rule: MergeRule = CARRY,
        sizes: Sequence[int] = (), inner: InnerParts = InnerParts(),
    ) -> None:  # fmt: skip
        self.memory, self.replica, self._optimizer, self._rule = memory, replica, optimizer, rule
        self.second, self._inner, self._moments = inner.second, inner.loop, inner.moments
        self.own = OwnPart(optimizer, memory.anchor.numel()) if rule.eager else None
        self.peers = 1
        self._bounds = list(pairwise(accumulate(sizes or [memory.anchor.numel()], initial=0)))
        self.copies: BackgroundCopies | None = None
        self._carried: int | None = None  # the fragment that a device merges
        self._put_off: list[_PutOff] = []
        self.round = self._taken = 0
        self.base = memory.private(memory.anchor.numel())
        self.scratch = memory.private(memory.anchor.numel())
        self._result: Tensor | None = None

    @property
    def fragments(self) -> int:
        """How many there are."""
        return len(self._bounds)

    @property
    def result(self) -> Tensor:
        """What the run yields at `round`, fp32 [P]: to evaluate and to export. Usually the anchor."""
        return self.base if self._result is None else self._result

    def take(self, round: int) -> None:
        """local <- anchor."""
        self._put_off.clear()
        self.replica.write(self.memory.anchor)
        if self.second is not None:
            self.second.begin(self.memory.anchor)
        if self.own is not None:
            self.own.forget()
        self.keep(round)

    def begin_merge(self, fragment: int | None, sent: int | None) -> Transfer:
        """Bring to the device what `merge` with these arguments needs; the anchor must stay as it is until then."""
        plain = self.second is None and (sent is None or self._rule.carries)
        plain = plain and not (sent is None and self._rule.kept_rounds)
        self._carried = 0 if len(self._bounds) == 1 else fragment
        if self.copies is None or not plain or self._carried is None:
            self._carried = None
            return Done()
        start, stop = self._bounds[self._carried]
        before = self._sent[: stop - start] if self._carried == sent else self.base[start:stop]
        return self.copies.begin_carry(before, self.memory.anchor[start:stop], start)

    def merge(self, round: int, fragment: int | None, sent: int | None) -> None:
        """Take up the new anchor as the recipe says, if it holds what was sent; else keep every step that it does not
        hold yet.

        Args:
            round: of the new anchor.
            fragment: the only one that is new; None: any may be.
            sent: the fragment whose snapshot went into it.
        """
        if self.second is not None and round > self.round:
            self.second.follow(self.base, self.scratch, contributed=sent is not None)
        kept = sent is None and 0 < self._rule.kept_rounds >= round - self._taken
        for index, (start, stop) in enumerate(self._bounds):
            anchor, before = self.memory.anchor[start:stop], self.base[start:stop]
            same = len(self._bounds) > 1 and fragment is None and torch.equal(anchor, before)
            if same or fragment not in (None, index):
                continue
            self.take_up(fragment=index)
            if index == self._carried and self.copies is not None:
                self.copies.carry()
                before.copy_(anchor)
                continue
            self.replica.read(local := self.scratch[: stop - start], start)
            if kept:
                before.copy_(anchor)
                continue
            if index == sent:
                self._rule.merge_(local, self._sent[: stop - start], before, anchor)
            else:
                CARRY.merge_(local, before, before, anchor)
            self.replica.write(local, start)
            before.copy_(anchor)
        if self.own is not None and sent is not None:
            self.own.counted()
        if not kept:
            self._taken = round
        self._keep_result(round)

    def put_off(self, round: int, fragment: int, until: int) -> None:
        """Copy the new anchor of a fragment whose snapshot went into it; the parameters take it up at step `until`."""
        start, stop = self._bounds[fragment]
        before = self.base[start:stop]
        self._put_off.append(_PutOff(until, fragment, self._sent[: stop - start].clone(), before.clone()))
        before.copy_(self.memory.anchor[start:stop])
        self._taken = round
        self._keep_result(round)

    def take_up(self, step: float = math.inf, fragment: int | None = None) -> None:
        """Take up what was put off until this step, of one fragment or of all."""
        for one in [one for one in self._put_off if one.until <= step and fragment in (None, one.fragment)]:
            self._put_off.remove(one)
            start, stop = self._bounds[one.fragment]
            self.replica.read(local := self.scratch[: stop - start], start)
            self._rule.merge_(local, one.sent, one.before, self.base[start:stop])
            self.replica.write(local, start)

    def merge_moments(self, round: int, kind: int, contributed: bool) -> None:
        """Take up the mean of moments of this kind, with what the steps since the snapshot have changed; keep moments
        that the mean does not hold. The anchor is as it was.
        """
        if contributed:
            moments, sent = self._moments[kind - 1], self.memory.snapshot
            moments.read(self.scratch)
            CARRY.merge_(self.scratch, sent, sent, self.memory.buffers[kind - 3])
            moments.write(self.scratch)
        self.round = round

    def begin_read(self, event: Event) -> Transfer:
        """Write what this peer contributes to a round at this moment into the shared snapshot."""
        if event.moments:
            self._moments[event.moments - 1].read(self.memory.snapshot)
            return Done()
        self.take_up(fragment=event.fragment)
        start, stop = self._bounds[event.fragment]
        local = self.memory.snapshot[: stop - start]
        if self.copies is not None and self.beside is None:
            return self.copies.begin_read(local, start)
        self.replica.read(local, start)
        if self.beside is not None:
            self.beside.subtract(local)
        return Done()

    @property
    def beside(self) -> SecondTrajectory | OwnPart | None:
        """What is kept beside the local parameters, and makes of them what is sent."""
        return self.second or self.own

    def count_peers(self, message: Message, first: bool) -> None:
        """How many share a round: as many as in this peer's last one; before its first, those that are live."""
        if isinstance(message, RoundEnded) and message.record.status == "committed":
            self.peers = len(message.record.members)
        elif isinstance(message, LivePeers) and first:
            self.peers = max(1, sum(peer.state == "training" for peer in message.peers.values()))

    def hand_over(self) -> None:
        """What lies in the shared snapshot is sent now; an eager peer starts from the anchor and its share of that."""
        if self.own is not None:
            self.own.renew(self.base, self.memory.snapshot, self.peers)
            self._start_early()

    def _start_early(self) -> None:
        assert self.own is not None
        self.replica.write(torch.add(self.base, self.own.offset, out=self.scratch))

    def snapshot_fits(self, event: Event) -> bool:
        """Whether what was written there can be averaged and applied."""
        if event.moments:
            return largest_magnitude(self.memory.snapshot) <= LARGEST_VALUE / 2  # less a mean that is no larger
        start, stop = self._bounds[event.fragment]
        return self._fits(self.memory.snapshot[: stop - start], start)

    @property
    def _sent(self) -> Tensor:
        """The local parameters at the snapshot."""
        return self.memory.snapshot if self.second is None else self.second.local_sent

    @property
    def usable(self) -> bool:
        """Whether the local parameters are finite, and a contribution that can be averaged and applied."""
        self.replica.read(self.scratch)
        return self._fits(self.scratch, 0)

    def _fits(self, local: Tensor, start: int) -> bool:
        difference = torch.sub(local, self.base[start : start + local.numel()], out=self.scratch[: local.numel()])
        return largest_magnitude(difference) <= LARGEST_VALUE  # NaN compares as false

    def drop(self, sent: int | None) -> None:
        """local <- the anchor, but for a fragment whose snapshot is on its way: that snapshot."""
        if self.own is not None:
            self._start_early()
            return self._begin_round()
        self._put_off.clear()
        for index, (start, stop) in enumerate(self._bounds):
            self.replica.write(self._sent[: stop - start] if index == sent else self.base[start:stop], start)
        if self.second is not None:
            self.second.go_back(outstanding=sent is not None)
        self._begin_round()

    def keep(self, round: int) -> None:
        """Copy what the agent may change again as soon as it hears that this process has merged."""
        self.base.copy_(self.memory.anchor)
        self._taken = round
        self._keep_result(round)

    def _keep_result(self, round: int) -> None:
        self.round = round
        result = self._optimizer.result(self.memory.anchor, self.memory.buffers, round)
        self._result = None if result is self.memory.anchor else result
        self._begin_round()

    def _begin_round(self) -> None:
        if self._inner is not None:
            self._inner.begin_round(self.base)
