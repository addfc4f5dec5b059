"""A task of a few hundred weights, as files in the working folder."""

from __future__ import annotations

import pytest

from tests.sim.typed import MANIFEST


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Flags of a task that learns in seconds; the working folder is `tmp_path`."""
    (tmp_path / "tiny.yaml").write_text(MANIFEST)
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path
