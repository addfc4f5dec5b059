"""A real bootstrap with its page, three real peers, and Chromium. Run by `make page`, which installs what it takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.network.bootstraps import MANIFEST, BootstrapProcess
from tests.network.processes import JoinedPeer

DILOCO = "name: diloco, compressor: int8"
SHOTS = Path(os.environ.get("ATOLL_PAGE_SHOTS", "build/page"))
NAMES = ("alpha", "bravo", "charlie")
expect.set_options(timeout=60_000)  # peers have less of the machine than the tests that run beside these


class LiveRun:
    """A bootstrap that serves its page, and peers by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = MANIFEST.format(hidden=16, recipe=DILOCO, steps=20, wait=2.0, total=", total: 5000")
        self.bootstrap = self.start_bootstrap()
        self.peers = {name: self.join(name) for name in NAMES}

    def start_bootstrap(self, port: int = 0, page_port: int = 0) -> BootstrapProcess:
        flags = ("--http", f"127.0.0.1:{page_port}")
        return BootstrapProcess(self.folder / "bootstrap", self.text, port=port, flags=flags)

    def join(self, name: str) -> JoinedPeer:
        flags = ("--eval-every-rounds", "1", "--eval-sequences", "4")
        peer = JoinedPeer(self.folder / name, self.bootstrap.address, *flags)
        os.setpriority(os.PRIO_PGRP, peer.process.pid, 10)  # the browser goes first
        return peer

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.bootstrap.close()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path_factory.mktemp("live"))
    yield run
    run.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def is_problem(message: ConsoleMessage) -> bool:
    return message.type == "error" and "net::ERR" not in message.text


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; fails if one logs an error or a violation of the policy, other than that a server is away."""
    problems: list[str] = []
    contexts = []

    def open_(
        url: str, width: int = 1440, theme: str = "light", before: Callable[[Page], None] | None = None,
        refused: bool = False,
    ) -> Page:
        """`refused`: answers of a server that is away are no problem of the page."""
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, locale="en-US")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        if not refused:
            page.on("console", lambda message: problems.append(message.text) if is_problem(message) else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
        if before is not None:
            before(page)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []


def serious(page: Page) -> list[Any]:
    """What axe-core finds of serious and critical violations."""
    found = Axe().run(page).response["violations"]
    return [
        (one["id"], [node["html"][:120] for node in one["nodes"][:3]])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
