"""The report in a real Chromium: sizes, schemes, paper, no requests, no errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.report import WeeklyReport
from tests.browser import Seen, browser, opened, papers
from tests.reports.weekly.page import examples
from tests.reports.weekly.page.hostile_report import hostile

__all__ = ["browser"]

SHOWN: dict[str, Callable[[], WeeklyReport]] = {
    "fleet": examples.fleet,
    "empty": examples.empty,
    "many tiers": lambda: examples.many(14, incidents=3),
    "hostile": lambda: hostile(examples.fleet()),
}
TOO_WIDE = """[...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.wide, svg, .unseen, .skip'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
    .map(e => e.outerHTML.slice(0, 80))"""
UNFOLD = "document.querySelectorAll('details').forEach(each => { each.open = true })"
SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll('svg.plot')].map(
    e => 11 * e.getBoundingClientRect().width / e.viewBox.baseVal.width))"""


@contextmanager
def looking(
    browser: Browser, folder: Path, report: WeeklyReport, *, width: int = 1280, dark: bool = False
) -> Generator[tuple[Page, Seen]]:
    """A browser that looks at a report's file."""
    file = folder / "report.html"
    file.write_text(render(report), encoding="utf-8")
    with opened(browser, file.as_uri(), origin="file://", width=width, dark=dark, script=True) as (
        page,
        seen,
    ):
        yield page, seen


@pytest.mark.parametrize("name", SHOWN)
def test_a_report_fits_and_asks_for_nothing(browser: Browser, tmp_path: Path, name: str) -> None:
    with looking(browser, tmp_path, SHOWN[name]()) as (page, seen):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.reload()
        for width in (1280, 360):
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate(UNFOLD)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(TOO_WIDE) == []
        assert len(asked) == 1
        assert seen.errors == []
        assert seen.strangers == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_light_and_dark(browser: Browser, tmp_path: Path, dark: bool) -> None:
    with looking(browser, tmp_path, examples.fleet(), dark=dark) as (page, seen):
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert ground == ("rgb(16, 18, 21)" if dark else "rgb(245, 243, 238)")
        line = page.evaluate("getComputedStyle(document.querySelector('.plot .p99')).stroke")
        assert line == ("rgb(195, 199, 206)" if dark else "rgb(61, 67, 80)")
        assert seen.errors == []


def test_on_a_phone_the_sections_after_the_first_are_folded(
    browser: Browser, tmp_path: Path
) -> None:
    with looking(browser, tmp_path, examples.fleet(), width=360) as (page, _):
        section = page.locator("section[aria-labelledby=tables]")
        expect(section.locator("h2")).to_be_visible()
        expect(section.locator("table").first).to_be_hidden()
        section.locator(".appendix > summary").click()
        expect(section.locator("table").first).to_be_visible()
        size = page.locator("section[aria-labelledby=size] .appendix")
        expect(size.locator("h3").first).to_be_hidden()
        page.set_viewport_size({"width": 1280, "height": 900})
        expect(size.locator("h3").first).to_be_visible()
        expect(size.locator("> summary")).to_be_hidden()


def test_on_a_phone_charts_can_be_read(browser: Browser, tmp_path: Path) -> None:
    with looking(browser, tmp_path, examples.fleet(), width=360) as (page, _):
        page.evaluate(UNFOLD)
        assert page.evaluate(SMALLEST_TEXT) >= 9
        line = page.locator(".steps tbody tr").first
        expect(line).to_contain_text("Store the KV cache in fp8.")
        assert line.evaluate("e => getComputedStyle(e).display") == "grid"


def test_the_tables_behind_charts_fold_out(browser: Browser, tmp_path: Path) -> None:
    with looking(browser, tmp_path, examples.fleet()) as (page, _):
        details = page.locator("details.behind", has_text="The numbers behind these charts").first
        cell = details.get_by_role("cell", name="31 s").first
        expect(cell).to_be_hidden()
        details.locator("summary").press("Enter")
        expect(cell).to_be_visible()


def test_links_lead_to_the_sections(browser: Browser, tmp_path: Path) -> None:
    with looking(browser, tmp_path, examples.fleet()) as (page, seen):
        page.get_by_role("navigation").get_by_role("link", name="Money").click()
        expect(page.get_by_role("heading", name="8 Money")).to_be_in_viewport()
        assert seen.errors == []


@pytest.mark.parametrize(
    ("tiers", "engines_each", "most"), [(4, 1, 6), (2, 2, 6), (12, 8, 12), (25, 4, 12)]
)
def test_a_report_is_few_pages(
    browser: Browser, tmp_path: Path, tiers: int, engines_each: int, most: int
) -> None:
    report = examples.many(tiers, engines_each=engines_each, incidents=tiers)
    with looking(browser, tmp_path, report) as (page, _):
        assert papers(page.pdf(prefer_css_page_size=True, print_background=True)) <= most


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_paper(browser: Browser, tmp_path: Path, dark: bool) -> None:
    with looking(browser, tmp_path, examples.fleet(), dark=dark) as (page, _):
        pdf = page.pdf(prefer_css_page_size=True, print_background=True)
        assert 2 <= papers(pdf) <= 6
        assert re.search(rb"/MediaBox\s*\[0 0 59[45]\S* 84[12]", pdf), "A4"
        page.emulate_media(media="print")
        for ground in ("documentElement", "body"):
            colour = page.evaluate(f"getComputedStyle(document.{ground}).backgroundColor")
            assert colour == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == (
            "rgb(27, 29, 34)"
        )
        expect(page.locator("details.behind").first).to_be_hidden()
        # As wide as A4 between its margins: nothing is cut at the right.
        page.set_viewport_size({"width": 695, "height": 900})
        assert page.evaluate(TOO_WIDE) == []
        expect(page.locator(".tiers thead")).to_be_visible()


def test_hostile_text_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    with looking(browser, tmp_path, hostile(examples.fleet())) as (page, seen):
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        page.reload()
        assert dialogs == []
        assert seen.errors == []
        assert page.locator("main script, main img").count() == 0
