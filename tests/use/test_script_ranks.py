"""The ranks of a script: what they agree on, and the state of their optimizers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import atoll
from peer.errors import UserError
from peer.free_weights import layout_of, unwrapped
from peer.train.ranks import ALONE, Ranks
from peer.use.script_ranks import Agreement, Call, ScriptProgress, ranks_of_script, whole_state
from peer.use.script_state import load_state_tensors
from tests.train.in_ranks import in_ranks


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()


def test_an_optimizer_of_divided_parameters_continues_on_one_device_and_the_other_way_round(tmp_path: Path) -> None:
    """The three rows of the first matrix do not divide evenly."""
    alone = network()
    optimizer = torch.optim.AdamW(alone.parameters(), 0.1)
    steps(alone, optimizer, 3)
    kept = {name: tensor.clone() for name, tensor in whole_state(optimizer)}
    weights = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    steps(alone, optimizer, 2)

    def work(_: Ranks) -> dict[str, Any]:
        own = network()
        own.load_state_dict(weights)
        fully_shard(own)
        optimizer = torch.optim.AdamW(own.parameters(), 0.1)
        load_state_tensors(optimizer, kept)
        found = {name: tensor.flatten().tolist() for name, tensor in whole_state(optimizer)}
        steps(own, optimizer, 2)
        atoll.save_weights(own, tmp_path / "whole.safetensors")
        return found

    for found in in_ranks(2, tmp_path, work, sharded=True):
        assert found == {name: tensor.flatten().tolist() for name, tensor in kept.items()}
    saved = load_file(tmp_path / "whole.safetensors")
    for name, values in alone.state_dict().items():
        assert torch.allclose(saved[name], values, atol=1e-6), name


def test_ranks_make_the_same_calls(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> list[Any]:
        agreement, before = Agreement(ranks), signal.getsignal(signal.SIGTERM)
        found: list[Any] = [agreement.reach(Call.STEP, tokens=3 + ranks.rank)]
        found.append(agreement.reach(Call.STEP, 1, finite=ranks.rank == 0))
        with pytest.raises(UserError, match=f"rank {ranks.rank} called {('STEP', 'LEAVE')[ranks.rank]}"):
            agreement.reach((Call.STEP, Call.LEAVE)[ranks.rank])
        with agreement.sharing_signals():
            if ranks.rank:
                os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                agreement.reach(Call.STEP, 1)
            found.append(agreement.reach(Call.LEAVE))
            if ranks.rank:
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGTERM)
        return [*found, agreement.stopped, signal.getsignal(signal.SIGTERM) == before]

    for found in in_ranks(2, tmp_path, work):
        assert found == [[7, True], [2, False], [0, True], True, True]
    assert Agreement(ALONE).reach(Call.STEP, 5, finite=False) == (5, False)
    progress = ScriptProgress(True, 3, 40, 2**40, 8, 0.1)
    assert ScriptProgress.of([*progress.numbers(), 0]) == progress


def test_a_model_is_known_by_its_own_names_and_divided_over_all(tmp_path: Path) -> None:
    def work(_: Ranks) -> bool:
        wrapped = DistributedDataParallel(network())
        compiled = torch.compile(wrapped, backend="eager")
        assert layout_of(unwrapped(compiled)) == layout_of(network())
        met = ranks_of_script(compiled)
        assert (met.count, met.rank, met.sharded) == (2, dist.get_rank(), False)
        partly = network()
        fully_shard(partly[0])
        with pytest.raises(UserError, match=r"2\.bias is not sharded"):
            ranks_of_script(partly)
        own = network()
        fully_shard(own, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
        with pytest.raises(UserError, match="over 1 of 2 processes"):
            ranks_of_script(own)
        divided = network()
        fully_shard(divided)
        return ranks_of_script(divided).sharded

    assert in_ranks(2, tmp_path, work) == [True, True]


def test_processes_that_have_not_met_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_of_script(network()).count == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun started 2 processes, which have not met"):
        ranks_of_script(network())
