"""Whether replicas fit the RAM of a machine, and the device of their steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peer.errors import UserError
from peer.sim.campaign.label import parse_label
from peer.sim.campaign.memory import check_swarm_memory
from peer.sim.campaign.plan import Job, build_swarm, load_task

CUDA = torch.device("cuda", 0)


def job_on(device: torch.device) -> Job:
    manifest = load_task(None)
    swarm = build_swarm(manifest, network="ideal", peers=4, tokens="100k", step_s=1.0, evaluations=1)
    recipe = parse_label("diloco").recipe()
    return Job(label="diloco", recipe=recipe, inner=manifest.inner, seed=0, swarm=replace(swarm, device=device))


@pytest.mark.parametrize(("device", "full", "where"), [(CUDA, CUDA, "cuda:0"), (CUDA, torch.device("cpu"), "cpu")])
def test_both_homes_of_a_vector_must_fit(
    device: torch.device, full: torch.device, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.sim.campaign.memory.available_memory", lambda one: 1 if one == full else 10**15)
    with pytest.raises(UserError, match=f"0.0 GiB are free on {where}"):
        check_swarm_memory(100_000, [job_on(device)], 1)


def test_on_the_cpu_the_device_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[torch.device]()
    monkeypatch.setattr("peer.sim.campaign.memory.available_memory", lambda one: asked.append(one) or 10**15)
    check_swarm_memory(100_000, [job_on(torch.device("cpu"))], 2)
    assert asked == [torch.device("cpu")]
