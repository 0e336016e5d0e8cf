"""A fleet's page in a real Chromium while something is wrong: its first screen names pool and
cause.

    python -m tests.agent.fleet.test_page_browser FOLDER [FAULT ...]

writes pictures of the page and of the ill pool's page, wide and narrow, light and dark.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace
from playwright.sync_api import Browser, Page, sync_playwright

from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch, engines_of, stored
from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Retention
from kneewatch.agent.store.writer import Store
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import Observed
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.rules.facts import Targets
from tests.agent.api.serving import served, service_of, settings_of
from tests.agent.fleet.prometheus_fleet import saw
from tests.browser import ARGUMENTS, CHROMIUM, browser, opened
from tests.living_faults import FAULTS, FROM_S, Fault, Site, fleet_until
from tests.living_fleet import MIN_S
from tests.living_source import played
from tests.waiting import until

__all__ = ["browser"]

SHOWN = ("hung", "one-takes-all", "kv-pressure", "one-down", "adapter-thrash")
SEEN_S = FROM_S + 4.0 * MIN_S
TARGETS = Targets(ttft_p99_s=2.0)
WIDTHS = (1400, 400)
IN_SIGHT = """() => [...document.querySelectorAll('body *')]
    .filter(e => e.childElementCount === 0 || e.matches('a, code, h1, h2, h3, p'))
    .filter(e => { const at = e.getBoundingClientRect();
                   return at.width && at.top >= 0 && at.bottom <= innerHeight; })
    .map(e => e.innerText).join('\\n')"""
"""The text that is seen without scrolling."""


class FleetPage(Struct):
    """A daemon's page of a fleet."""

    url: str
    ill: str
    cause: str


@contextmanager
def shown(fault: Fault, folder: Path) -> Generator[FleetPage]:
    """The page of a fleet with an ill pool and three others, four minutes into the fault."""
    fleet = fleet_until(SEEN_S, every_s=15, seed=7)
    for name, replicas in (("search", 3), ("rag", 2)):
        fleet.pool("Deployment", name, replicas)
    site = Site(fleet, fault.name)
    fault.plant(site)
    watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    store = Store.open(folder / "s.sqlite", retention=Retention())
    with closing(Reader(folder / "s.sqlite")) as reader:

        def follow(observed: Observed, verdict: FleetVerdict) -> None:
            moment = FleetMoment.of(verdict, engines_of(observed), TARGETS, 15.0)
            saw(watch, moment, seen_s=observed.t_s)
            for pool in moment.pools.values():
                store.put(stored(pool))

        profile = Profile(window_s=60.0, targets=TARGETS)
        played(fleet, folder, [(18 * MIN_S, SEEN_S)], cycle_s=15, profile=profile, follow=follow)
        store.flush()
        now_s = fleet.epoch_s + SEEN_S
        until(lambda: store.stats().written > 0)
        service = replace(service_of(fleet=watch), clock=lambda: now_s, reader=reader, store=store)
        with served(service) as server:
            yield FleetPage(f"{server.url}/triage", site.pool, fault.causes[0])
    store.close(5.0)


def in_sight(page: Page) -> str:
    """The text that is seen without scrolling."""
    return str(page.evaluate(IN_SIGHT))


@pytest.mark.parametrize("name", SHOWN[:2])
def test_the_first_screen_names_pool_and_cause(browser: Browser, tmp_path: Path, name: str) -> None:
    (fault,) = (each for each in FAULTS if each.name == name)
    with (
        shown(fault, tmp_path) as fleet,
        opened(browser, fleet.url, origin=fleet.url.removesuffix("/triage")) as (page, seen),
    ):
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width
            text = in_sight(page)
            assert fleet.ill in text
            assert any(cause in text for cause in fault.causes)
        assert seen.errors == seen.strangers == []


def pictures(names: list[str], into: Path) -> None:
    """Write the pictures of faults."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for fault in (each for each in FAULTS if each.name in names):
            with tempfile.TemporaryDirectory() as folder, shown(fault, Path(folder)) as fleet:
                pool = f"{fleet.url}?target=fleet/{fleet.ill}"
                for kind, url in (("fleet", fleet.url), ("pool", pool)):
                    for width in WIDTHS:
                        for dark in (False, True):
                            with opened(chromium, url, origin=url, width=width, dark=dark) as (
                                page,
                                _,
                            ):
                                scheme = "dark" if dark else "light"
                                path = into / f"{fault.name}-{kind}-{width}-{scheme}.png"
                                page.screenshot(path=path)
        chromium.close()


if __name__ == "__main__":
    pictures(sys.argv[2:] or list(SHOWN), Path(sys.argv[1]))
