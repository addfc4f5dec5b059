"""A simulation whose steps are made on a device has the trajectory of one in RAM, where both compute alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peer.outer.recipe.published import RECIPES
from peer.sim.learner.placed import Placed
from tests.sim.golden.trajectory import trajectory


class Apart(Placed):
    """Two homes in RAM. The outdated one holds NaN, so that a read of it shows in the result."""

    @classmethod
    def of(cls, values: Tensor, device: torch.device) -> Apart:  # noqa: ARG003
        return cls(values, values.clone())

    def _at(self, home: Tensor) -> Tensor:
        outdated = self._newest
        super()._at(home)
        if outdated is not home:
            outdated.fill_(torch.nan)
        return home


def test_the_newest_values_are_at_the_home_that_was_asked_for_last() -> None:
    ram, device = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    placed = Placed(ram, device)
    placed.on_device.add_(1.0)
    assert placed.in_ram is ram
    assert ram.tolist() == [2.0, 3.0]
    placed.in_ram.mul_(2.0)
    assert placed.on_device is device
    assert device.tolist() == [4.0, 6.0]
    one = Placed.of(ram, torch.device("cpu"))
    assert one.in_ram is one.on_device is ram


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_reads_an_outdated_home(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = trajectory(name)
    monkeypatch.setattr("peer.sim.engine.learners.Placed", Apart)
    assert trajectory(name) == together
