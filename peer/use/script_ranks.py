"""The processes of a script that `torchrun` started, as one peer: rank 0 has the agent, the others do as it says."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from peer.errors import UserError
from peer.free_weights import unwrapped
from peer.link.shared_vectors import VectorsOf
from peer.outer.state.flat_layout import FlatLayout, trained_parameters
from peer.system.exit_signals import ending_signals
from peer.system.torchrun import under_torchrun
from peer.train.orders import (
    RankLeader,
    RankOrder,
    RankParts,
    next_order,
    receive_document,
    receive_tensors,
    send_document,
)
from peer.train.rank_part import RankPart
from peer.train.ranks import ALONE, Ranks, whole
from peer.use.script_state import load_state_tensors, state_tensors

GONE = "see the output of the rank that ended first; start the script again with resume_from_checkpoint='latest'"


class Call(IntEnum):
    """What all ranks of a script ask of their `Swarm` together."""

    STEP, RESULT, LEAVE = range(3)


class ScriptProgress(NamedTuple):
    """What a script sees of its swarm, the same on all ranks."""

    finished: bool = False
    round: int = 0
    step: int = 0
    tokens: int = 0
    peers: int = 0
    global_step: float = 0.0

    def numbers(self) -> list[int]:
        """As those of an order."""
        (bits,) = struct.unpack("<q", struct.pack("<d", self.global_step))
        return [*map(int, self[:5]), bits]

    @classmethod
    def of(cls, numbers: list[int]) -> ScriptProgress:
        """What `numbers` has written."""
        finished, round, step, tokens, peers, bits, *_ = numbers
        return cls(bool(finished), round, step, tokens, peers, *struct.unpack("<d", struct.pack("<q", bits)))


def ranks_of_script(model: nn.Module) -> Ranks:
    """The processes that train this model together, each of which makes this call.

    Raises:
        UserError: they have not met, or divide the model in another way than FSDP2 does over all of them.
    """
    if not dist.is_initialized():
        if under_torchrun(os.environ):
            what = f"torchrun started {os.environ['WORLD_SIZE']} processes, which have not met"
            raise UserError(what, "call torch.distributed.init_process_group() before atoll.Swarm")
        return ALONE
    if (count := dist.get_world_size()) == 1:
        return ALONE
    named = trained_parameters(unwrapped(model))
    cut = {name: one for name, one in named.items() if isinstance(one, DTensor)}
    if cut and len(cut) < len(named):
        raise UserError(f"{min(named.keys() - cut.keys())} is not sharded, others are", "call fully_shard(model) too")
    for name, one in cut.items():
        if one.device_mesh.size() != count or one.placements != (Shard(0),):
            what = f"{name} is divided as {one.placements} over {one.device_mesh.size()} of {count} processes"
            raise UserError(what, "shard with fully_shard over one mesh of all processes, or wrap the model in DDP")
    return Ranks.met(sharded=bool(cut), near=os.environ.get("GROUP_RANK", "0") == "0")


class Agreement:
    """All ranks make the same calls in the same order.

    A signal that ends the script is raised in all of them after the same step, as KeyboardInterrupt, so that they can
    write one checkpoint; a second one at once.

    Attributes:
        signalled: this rank has got such a signal.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.signalled = ranks, False
        self.stopped = False

    @contextmanager
    def sharing_signals(self) -> Iterator[None]:
        """Where there are several ranks."""
        numbers = ending_signals() if self.ranks.count > 1 else ()
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        if self.signalled:
            raise KeyboardInterrupt
        self.signalled = True

    def reach(self, call: Call, tokens: int = 0, finite: bool = True) -> tuple[int, bool]:
        """-> (tokens of all ranks, whether the values of all are finite).

        Raises:
            UserError: they make different calls, or one has ended.
            KeyboardInterrupt: one was asked to end.
        """
        if self.ranks.count == 1:
            return tokens, finite
        calls = [int(call == one) for one in Call]
        try:
            *calls, tokens, wrong, signals = self.ranks.totals([*calls, tokens, not finite, self.signalled])
        except RuntimeError:
            raise UserError("another rank of this script has ended", GONE) from None
        if calls[call] != self.ranks.count:
            what = f"rank {self.ranks.rank} called {call.name}, other ranks did not"
            raise UserError(what, "all ranks make as many steps, and leave the block after the same one")
        if signals and call == Call.STEP:
            self.stopped = True
            raise KeyboardInterrupt
        return tokens, wrong == 0


def say_layout(leader: RankLeader, layout: FlatLayout) -> None:
    """Tell the other ranks where each parameter lies in the flat vector."""
    leader.order(RankOrder.BUILD)
    fields = {name: getattr(layout, name) for name in ("names", "shapes", "offsets", "numel")}
    send_document(leader.ranks, {"pid": os.getpid(), **fields})


class FollowingRank:
    """A rank other than 0: takes part in what rank 0 does during each call of the script."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self._model, self._optimizer, self._ranks = model, optimizer, ranks

    def call(self) -> ScriptProgress:
        """Follow until rank 0 has done what was called for; -> what it says of the swarm.

        Raises:
            UserError: it has failed.
        """
        while True:
            try:
                kind, numbers = next_order(self._ranks)
                if kind not in (RankOrder.DONE, RankOrder.STOP):
                    self._do(kind, numbers)
            except RuntimeError as error:
                raise UserError("rank 0 of this script has ended", GONE) from error
            if kind == RankOrder.DONE:
                return ScriptProgress.of(numbers)
            if kind == RankOrder.STOP:
                raise UserError("rank 0 of this script failed", "its own output says why")

    def _do(self, kind: RankOrder, numbers: list[int]) -> None:
        if kind == RankOrder.BUILD:
            said = receive_document(self._ranks)
            layout = FlatLayout(
                names=tuple(said["names"]), shapes=tuple(map(tuple, said["shapes"])),
                offsets=tuple(said["offsets"]), numel=said["numel"],
            )  # fmt: skip
            self._parts = RankParts(self._ranks, VectorsOf(said["pid"]), [RankPart(layout, self._model, self._ranks)])
        elif kind in (RankOrder.READ, RankOrder.WRITE):
            self._parts.move(kind, numbers)
        elif kind == RankOrder.RESET:
            self._optimizer.state.clear()
        elif kind == RankOrder.GATHER:
            for _ in whole_state(self._optimizer):
                pass
        elif kind == RankOrder.LOAD:
            load_state_tensors(self._optimizer, receive_tensors(self._ranks))


def whole_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """See `state_tensors`; a whole tensor at a time, which all ranks read together."""
    for name, tensor in state_tensors(optimizer).items():
        yield name, whole(tensor)
