from __future__ import annotations

import pytest
import torch

from peer.errors import UserError
from peer.system import resources
from peer.train import device as room
from peer.train.device import available_memory, pick_device, set_threads

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
GIB = 2**30


def pretend(monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(("cuda", "mps", "expected"), [(2, True, "cuda"), (0, True, "mps"), (0, False, "cpu")])
def test_auto_prefers_the_fastest(monkeypatch, cuda, mps, expected):
    pretend(monkeypatch, cuda, mps)
    assert pick_device("auto").type == expected


def test_absent_and_misspelt_devices_are_refused(monkeypatch):
    pretend(monkeypatch, cuda=1, mps=False)
    assert pick_device("cuda:0") == CUDA
    assert pick_device("cpu") == CPU
    for name, message in [
        ("cuda:1", "'cuda:1' is not available: this torch sees 1 cuda devices"),
        ("mps", "sees 0 mps devices"), ("meta", "sees 0 meta devices"), ("gpu", "'gpu' is not a device"),
    ]:
        with pytest.raises(UserError, match=message):
            pick_device(name)


def test_threads_are_bounded_by_the_cores_that_this_process_may_use(monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(room, "usable_cores", lambda: 4)
    set_threads(4)
    assert counts == [4]
    for count in (0, 5):
        with pytest.raises(UserError, match=f"torch_threads={count}: must be between 1 and the 4 cores"):
            set_threads(count)
    for own, expected in {64: 4, 2: 2}.items():
        monkeypatch.setattr(torch, "get_num_threads", lambda own=own: own)
        set_threads(None)
        assert counts[-1] == expected


def test_available_memory_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(resources, "available_memory", lambda: 7)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 9))
    assert available_memory(CPU) == 7
    assert available_memory(CUDA) == 5
