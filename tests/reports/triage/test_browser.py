"""The triage page in a real Chromium: sizes, schemes, keyboard, live updates, without a script."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Locator, Page, expect

from kneewatch.reports.triage.view_model import EngineView, TriageView
from tests.browser import Seen, browser, opened
from tests.reports.diagnoses import HEALTHY, PRESSURE, SICK, changed
from tests.reports.test_advice import FP8
from tests.reports.triage import views
from tests.reports.triage.page_server import PageServer, serving
from tests.reports.triage.test_page import hostile
from tests.waiting import until

__all__ = ["browser"]

COPY = "Copy --num-gpu-blocks-override 960"
SHOWN: dict[str, Callable[[], TriageView]] = {
    "healthy": views.healthy,
    "cascade": views.cascade,
    "unreadable": views.unreadable,
    "fleet": views.fleet,
    "hostile": hostile,
}
TOO_WIDE = """[...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.wide, svg, .unseen, .announce, .skip'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
    .map(e => e.outerHTML.slice(0, 80))"""
QUICK_S = 0.1
NEVER_S = 3600.0


@contextmanager
def looking(
    browser: Browser,
    view: TriageView | Callable[[str], TriageView],
    *,
    width: int = 1280,
    dark: bool = False,
    script: bool = True,
) -> Generator[tuple[Page, PageServer, Seen]]:
    """A browser that looks at a view."""
    with (
        serving(view) as server,
        opened(
            browser, server.url, origin=server.origin, width=width, dark=dark, script=script
        ) as (page, seen),
    ):
        yield page, server, seen


def goes_on(page: Page, server: PageServer) -> bool:
    """Whether a page asks for more within many times its interval."""
    asked = len(server.asked)
    page.wait_for_timeout(1000 * 5 * QUICK_S)
    return len(server.asked) > asked


def still(view: TriageView) -> TriageView:
    """A view that is not asked for again."""
    return replace(view, refresh_s=NEVER_S)


def cascade_at(place: int) -> TriageView:
    """The cascade at one of its scrapes, followed quickly."""
    view = views.view(
        views.target("cascade", views.engine(views.recorded("kv_pressure_cascade")[:place]))
    )
    return replace(view, refresh_s=QUICK_S)


@pytest.mark.parametrize("name", SHOWN)
def test_a_page_fits_and_asks_nobody_else(browser: Browser, tmp_path: Path, name: str) -> None:
    with looking(browser, still(SHOWN[name]())) as (page, server, seen):
        for width in (1280, 360):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(TOO_WIDE) == []
            for dark in (False, True):
                page.emulate_media(color_scheme="dark" if dark else "light")
                ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
                assert ground == ("rgb(16, 18, 21)" if dark else "rgb(245, 243, 238)")
                shot = tmp_path / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                assert page.screenshot(path=shot, full_page=True)
        assert seen.errors == []
        assert seen.strangers == []
        assert set(server.asked) == {"/triage", "/triage/triage.css", "/triage/triage.js"}


def test_what_a_screen_reader_is_told(browser: Browser) -> None:
    with looking(browser, still(views.cascade())) as (page, _, _):
        snapshot = page.locator("body").aria_snapshot()
        for line in (
            '- link "Skip to the verdict"',
            "- banner:",
            '- navigation "Where you are":',
            '- region "Verdict":',
            "- paragraph: CRITICAL",
            '- heading "Do first" [level=2]',
            f'- button "{COPY}"',
            '- region "Now":',
            '- img "kv_usage_ratio"',
            '- region "The last 2 min":',
            '- img "Stages of the KV cache, worst on top"',
            '- img "Cause kv_pressure"',
            '- textbox "Moment (UTC)"',
            '- heading "How we know" [level=4]',
            '- rowheader "KV tokens"',
            '- region "Not judged, and why":',
            "- contentinfo:",
        ):
            assert line in snapshot, line
        status = page.get_by_role("status").filter(has_text="CRITICAL: kv_pressure on")
        expect(status).to_have_count(1)


def test_the_keyboard_reaches_what_to_do_first(browser: Browser) -> None:
    with looking(browser, still(views.cascade())) as (page, _, _):
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the verdict")).to_be_focused()
        expect(page.get_by_text("Skip to the verdict")).to_be_in_viewport()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="kv_pressure", exact=True).first).to_be_focused()
        page.keyboard.press("Tab")
        button = page.get_by_role("button", name=COPY).first
        expect(button).to_be_focused()
        assert outlined(button)
        page.keyboard.press("Enter")
        expect(button).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == ("--num-gpu-blocks-override 960")


def outlined(element: Locator) -> bool:
    """Whether the focus can be seen."""
    return bool(element.evaluate("e => parseFloat(getComputedStyle(e).outlineWidth) >= 2"))


def test_everything_that_takes_the_focus_shows_it(browser: Browser) -> None:
    with looking(browser, still(views.cascade())) as (page, _, _):
        seen: list[str] = []
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            tag, width = page.evaluate(
                "(e => [e.tagName, parseFloat(getComputedStyle(e).outlineWidth)])"
                "(document.activeElement)"
            )
            assert width >= 2, tag
            seen.append(tag)
        assert set(seen) == {"A", "BUTTON", "INPUT", "SUMMARY"}
        assert seen[-1] == "A", "the page's foot is reached"


def test_copying_without_a_clipboard(browser: Browser) -> None:
    """A page that came without TLS has no clipboard."""
    with looking(browser, still(views.cascade())) as (page, _, _):
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        page.evaluate(
            "document.addEventListener('copy', e => {"
            "const a = document.activeElement;"
            "window.copied = a.value.slice(a.selectionStart, a.selectionEnd)})"
        )
        button = page.get_by_role("button", name=COPY).first
        button.click()
        expect(button).to_have_text("Copied")
        expect(button).to_be_focused()
        assert page.evaluate("window.copied") == "--num-gpu-blocks-override 960"


def test_the_page_follows_its_target(browser: Browser) -> None:
    with looking(browser, cascade_at(14)) as (page, server, seen):
        expect(page.locator(".word")).to_have_text("OK")
        server.show(cascade_at(60))
        expect(page.locator(".word")).to_have_text("CRITICAL")
        expect(page.locator("h1")).to_contain_text("KV cache full: vLLM preempts")
        expect(page).to_have_title("CRITICAL kv_pressure · cascade · kneewatch")
        assert "b3261e" in str(page.locator("link[rel=icon]").get_attribute("href"))
        expect(page.locator(".stages")).to_contain_text("stage 3 (queueing)")
        server.show(cascade_at(14))
        expect(page.locator(".word")).to_have_text("OK")
        expect(page.locator("article")).to_have_count(0)
        assert seen.errors == []


def test_an_update_disturbs_nothing(browser: Browser) -> None:
    with looking(browser, cascade_at(53)) as (page, server, _):
        expect(page.locator(".word")).to_have_text("CRITICAL")
        page.locator("#log-1 summary").click()
        page.locator("details.change summary").first.click()
        page.locator("#at").focus()
        page.locator("#at").fill("2026-11-21T00:01:02")
        page.evaluate("document.querySelector('#log-1').dataset.mark = 'same'")
        page.evaluate("scrollTo(0, 700)")
        before = page.locator(".vitals").inner_text()
        server.show(cascade_at(54))
        expect(page.locator(".vitals")).not_to_have_text(before)
        assert page.evaluate("scrollY") == 700
        expect(page.locator("#at")).to_be_focused()
        assert page.locator("#at").input_value() == "2026-11-21T00:01:02"
        assert page.evaluate("document.querySelector('#log-1').open")
        assert page.locator("details.change").first.evaluate("e => e.open")


def test_an_update_leaves_what_is_selected(browser: Browser) -> None:
    """To select a flag by hand and lose it at every scrape would be a torment."""
    with looking(browser, cascade_at(53)) as (page, server, _):
        page.evaluate(
            "getSelection().selectAllChildren(document.querySelector('article .command-line code'))"
        )
        before = page.locator(".vitals").inner_text()
        server.show(cascade_at(54))
        expect(page.locator(".vitals")).not_to_have_text(before)
        assert page.evaluate("getSelection().toString()") == "--num-gpu-blocks-override 960"


def test_a_lost_connection_is_said_and_found_again(browser: Browser) -> None:
    with looking(browser, cascade_at(60)) as (page, server, _):
        server.status = 503
        line = page.locator("#connection")
        expect(line).to_contain_text("lost at")
        expect(line).to_contain_text("kneewatch responded with status 503")
        expect(page.locator("html")).to_have_class("js is-lost")
        expect(page.locator("h1")).to_contain_text("KV cache full: vLLM preempts")
        server.status = 200
        expect(line).to_have_text("")
        expect(page.locator("html")).to_have_class("js")


def test_no_answer_at_all_and_another_page_instead_of_ours(browser: Browser) -> None:
    with looking(browser, cascade_at(60)) as (page, server, _):
        page.route("**/triage", lambda route: route.abort("connectionrefused"))
        expect(page.locator("#connection")).to_contain_text("no answer")
        page.unroute("**/triage")
        expect(page.locator("#connection")).to_have_text("")
        page.route("**/triage", lambda route: route.fulfill(body="<p>Sign in</p>"))
        expect(page.locator("#connection")).to_contain_text("you may need to sign in again")
        expect(page.locator("h1")).to_contain_text("KV cache full: vLLM preempts")
        assert server.asked


def test_ages_grow_while_nothing_comes(browser: Browser) -> None:
    with (
        serving(still(views.healthy())) as server,
        opened(browser, "about:blank", origin="about:blank") as (page, _),
    ):
        page.clock.install()
        page.goto(server.url)
        expect(page.locator(".clock")).to_contain_text("data 1 s old")
        page.clock.run_for(30_000)
        expect(page.locator(".clock")).to_contain_text("data 31 s old")
        page.clock.run_for(200_000)
        expect(page.locator(".clock")).to_contain_text("data 4 min old")


def test_the_readers_own_time_stands_beside_utc(browser: Browser) -> None:
    with looking(browser, still(views.cascade())) as (page, _, _):
        since = page.locator(".verdict dd", has_text="for 35 s").first
        expect(since).to_have_text("00:03:04 UTC (01:03:04 CET), for 35 s")


def test_the_page_can_be_held(browser: Browser) -> None:
    with looking(browser, cascade_at(53)) as (page, server, _):
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#connection")).to_contain_text("Paused")
        expect(page.get_by_role("button", name="Resume")).to_have_attribute("aria-pressed", "true")
        until(lambda: not goes_on(page, server))
        server.show(cascade_at(14))
        page.get_by_role("button", name="Resume").click()
        expect(page.locator(".word")).to_have_text("OK")


def test_a_past_moment_stands_still(browser: Browser) -> None:
    with looking(browser, replace(views.past(), refresh_s=QUICK_S)) as (page, server, seen):
        expect(page.locator(".banner")).to_contain_text("Past state")
        page.wait_for_timeout(500)
        assert server.asked.count("/triage") == 1
        expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        assert seen.errors == []


def test_without_a_script(browser: Browser) -> None:
    with looking(browser, still(views.cascade()), width=360, script=False) as (page, server, _):
        expect(page.locator("h1")).to_contain_text("KV cache full: vLLM preempts")
        expect(page.locator(".command-line code").first).to_have_text(
            "--num-gpu-blocks-override 960"
        )
        expect(page.locator(".copy").first).to_be_hidden()
        expect(page.locator("#pause")).to_be_hidden()
        summary = page.locator("#log-1 summary")
        summary.click()
        expect(page.locator("#log-1 table")).to_be_visible()
        page.locator("#at").fill("2026-11-21T00:03:07")
        page.get_by_role("button", name="Show").click()
        asked = [path for path in server.asked if "at=" in path]
        assert asked == ["/triage?target=kv_pressure_cascade&at=2026-11-21T00%3A03%3A07"]


def test_links_stay_on_the_page(browser: Browser) -> None:
    with looking(browser, lambda path: still(
        views.cascade() if "target=" in path else views.fleet()
    )) as (page, server, seen):  # fmt: skip
        page.get_by_role("heading", name="vllm-0").get_by_role("link").click()
        expect(page.get_by_role("heading", name="Why", exact=True)).to_be_visible()
        page.get_by_role("link", name="All targets").click()
        expect(page.locator(".targets > ol > li")).to_have_count(8)
        page.get_by_role("link", name="24h").click()
        assert "/triage?since=24h" in server.asked
        assert seen.errors == []


def test_a_hostile_page_runs_nothing(browser: Browser) -> None:
    with looking(browser, still(hostile())) as (page, _, seen):
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        page.reload()
        page.locator(".copy").first.click()
        assert dialogs == []
        assert seen.errors == []


def test_a_name_without_a_blank_breaks_no_layout(browser: Browser) -> None:
    long = "x" * 300
    cause = replace(PRESSURE, id=long, summary=long)
    engine = EngineView(changed(HEALTHY, health="critical", model=long, causes=[cause]))
    target = views.target(long, engine, labels={long: long})
    for single in (True, False):
        with looking(browser, still(views.view(target, single=single)), width=360) as (page, _, _):
            assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_no_number_is_broken_where_there_is_little_room(browser: Browser) -> None:
    numbers = dict.fromkeys(("usd_per_million_tokens_at_least", "kv_capacity_tokens"), 12_256_512.0)
    recommendation = replace(
        FP8, before=numbers, predicted={key: 2 * now for key, now in numbers.items()}
    )
    view = views.view(
        views.target("a", EngineView(changed(SICK, recommendations=(recommendation,))))
    )
    with looking(browser, still(view), width=360) as (page, _, _):
        broken = page.evaluate(
            """[...document.querySelectorAll('.numbers td')].filter(td => {
                const range = document.createRange();
                range.selectNodeContents(td);
                return new Set([...range.getClientRects()].map(r => r.top)).size > 1;
            }).map(td => td.textContent)"""
        )
        assert page.locator(".numbers td").count() == 4
        assert broken == []
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_on_paper_nothing_is_folded_away(browser: Browser) -> None:
    with looking(browser, still(views.cascade())) as (page, _, _):
        page.emulate_media(media="print")
        expect(page.locator("#log-1 table")).to_be_visible()
        expect(page.locator(".time-nav").first).to_be_hidden()
        expect(page.locator(".copy").first).to_be_hidden()
