"""A real Chromium for the tests of pages."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.waiting import PATIENCE_S

CHROMIUM = Path("/usr/bin/chromium")
expect.set_options(timeout=1000 * PATIENCE_S)
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium for the tests of a module. Where there is none they are skipped; with CI=true
    they fail."""
    if not CHROMIUM.exists():
        message = f"{CHROMIUM} is not installed; `sh tests/programs.sh` installs it on Debian"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, timeout=1000 * PATIENCE_S
        )
        yield browser
        browser.close()


class Seen:
    """What a page did besides being shown."""

    def __init__(self, page: Page, origin: str) -> None:
        self.errors: list[str] = []
        self.strangers: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self._take_message(message.type, message.text))
        page.on("request", lambda request: self._asked(request.url, origin))

    def _take_message(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def _asked(self, url: str, origin: str) -> None:
        if not url.startswith((origin, "data:")):
            self.strangers.append(url)


@contextmanager
def opened(
    browser: Browser,
    url: str,
    *,
    origin: str,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    script: bool = True,
) -> Generator[tuple[Page, Seen]]:
    """A page in a window of its own, and what it did besides."""
    context: BrowserContext = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        java_script_enabled=script,
        timezone_id="Europe/Berlin",
        locale="en-GB",
    )
    try:
        context.set_default_timeout(1000 * PATIENCE_S)
        page = context.new_page()
        seen = Seen(page, origin)
        page.goto(url)
        yield page, seen
    finally:
        context.close()


def papers(pdf: bytes) -> int:
    """How many pages a PDF has."""
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))
