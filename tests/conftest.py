"""What every test needs: one torch thread, no network, and the same hypothesis examples on every machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

# The hub client reads this when it is imported, so it is set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("atoll", derandomize=True, deadline=None, database=None, max_examples=40)
hypothesis.settings.load_profile("atoll")


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """A command that a test runs in this process makes its files private; those of the next test are as usual."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """The log that a command of a test has set up ends with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


class _FailuresAtOnce:
    """Name what failed as it fails: with several workers pytest does so minutes later, when all have ended."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\n{report.nodeid} failed ({report.when})\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and (terminal := config.pluginmanager.get_plugin("terminalreporter")):
        config.pluginmanager.register(_FailuresAtOnce(terminal))
