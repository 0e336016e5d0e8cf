"""The triage page: what it says, that it is well formed, that names and texts stay text."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.recommend.advice import FlagChange
from kneewatch.diagnose.verdict import Evidence, Verdict
from kneewatch.reports.health import SourceState
from kneewatch.reports.triage.engine import value_words
from kneewatch.reports.triage.page import ASSETS, asset, render, unbroken
from kneewatch.reports.triage.view_model import (
    EngineView,
    TargetView,
    TriageView,
)
from kneewatch.rules.formatting import clock
from kneewatch.rules.library import rule_of, slo_rules
from kneewatch.rules.rule import Finding, Severity
from tests.reports.diagnoses import HEALTHY, NOW_S, PRESSURE, SICK, UNREADABLE, changed, finding
from tests.reports.documents import diagnosis_of, document
from tests.reports.triage import views
from tests.reports.triage.html_tree import Node, read, tree

MARKUP = "<script>alert(1)</script>\"'`&amp;<img src=x onerror=alert(2)>"
HOSTILE = f"{MARKUP}\x00\x1b[2J\u202etxt.exe\ud800"
VIEWS: dict[str, Callable[[], TriageView]] = {
    "cascade": views.cascade,
    "healthy": views.healthy,
    "unreadable": views.unreadable,
    "late": views.late,
    "past": views.past,
    "fleet": views.fleet,
    "many engines": views.many_engines,
    "nothing watched": views.view,
}


def page(view: TriageView) -> Node:
    return tree(render(view))


def alone(*engines: EngineView, **fields: object) -> TriageView:
    return views.view(views.target("gpu-7", *engines, **fields))


@pytest.fixture(scope="module")
def cascade() -> Node:
    return page(views.cascade())


@pytest.mark.parametrize("name", VIEWS)
def test_every_page_is_well_formed(name: str) -> None:
    html = render(VIEWS[name]())
    root, problems = read(html)
    assert problems == []
    levels = [int(node.tag[1]) for node in root.every() if re.fullmatch("h[1-6]", node.tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(
        {"role", "aria-hidden"} & set(svg.attributes) or (svg.parent and svg.parent.tag == "svg")
        for svg in root.every("svg")
    )
    for svg in root.every("svg"):
        if svg.attributes.get("role") == "img":
            assert [child.tag for child in svg.children[:2]] == ["title", "desc"]
            assert svg.one("desc").text.endswith(".")
    assert all(th.attributes["scope"] for th in root.every("th"))
    assert all(table.children[0].tag == "caption" for table in root.every("table"))


def test_the_verdict_says_what_where_since_when_and_what_to_do(cascade: Node) -> None:
    verdict = cascade.one(css="verdict")
    assert verdict.one(css="word").text == "CRITICAL"
    assert verdict.one("h1").text == (
        "KV cache full: vLLM preempts 4.3 requests/s and requests are queueing."
    )
    facts = dict(
        zip(
            [node.text for node in verdict.every("dt")],
            [node.text for node in verdict.every("dd")],
            strict=True,
        )
    )
    assert facts == {
        "Where": "kv_pressure_cascade, model tiny, engine 0",
        "Since": "00:03:04 UTC, for 35 s",
        "Cause": "kv_pressure, confidence 0.99",
        "Changed": "since 00:03: compared with quiet times prompt length x0.70, answer length "
        "x1.8, 39 instead of 51 tokens/s a stream; as usual: requests/s, prefix cache hits; "
        "unknown: engine speed; limited by the size of the KV cache",
        "KV cache": "stage 3 of 4, queueing, for 35 s, since 00:03:04 UTC",
    }
    assert [node.text for node in verdict.every("h2")] == ["Do first", "Then fix it"]
    steps = [node.text for node in verdict.one(css="steps").every("li")]
    assert steps[0].startswith("Send less traffic to this replica")
    assert steps[1] == "Stop batch jobs and very long prompts first."
    command_line = verdict.one(css="command-line")
    assert command_line.one("code").text == "--num-gpu-blocks-override 960"
    assert command_line.one("button").attributes["data-copy"] == "--num-gpu-blocks-override 960"
    assert "Instead of --num-gpu-blocks-override 160." in verdict.text
    assert "Check before: compare with the available KV cache memory" in verdict.text
    assert cascade.one("title").text == "CRITICAL kv_pressure · kv_pressure_cascade · kneewatch"


def test_a_second_cause_that_is_as_severe_is_named_beside_the_first() -> None:
    second = replace(PRESSURE, id="engine_stalled", summary="Engine stalled: no token for 4 min.")
    note = replace(PRESSURE, id="underused", severity=Severity.INFO)
    root = page(alone(EngineView(replace(SICK, causes=(PRESSURE, second, note)))))
    said = root.one(css="verdict").text
    assert "Alsoengine_stalled: Engine stalled: no token for 4 min." in said
    assert "and 1 more" in said


def test_what_is_announced_does_not_change_with_every_scrape(cascade: Node) -> None:
    said = cascade.one(css="announce")
    assert said.attributes["aria-live"] == "polite"
    assert said.text == "CRITICAL: kv_pressure on kv_pressure_cascade, KV cache stage queueing."


def test_the_timeline_names_every_stage(cascade: Node) -> None:
    lanes = cascade.one(css="lanes")
    names = [item.text for item in lanes.one("ul").children]
    assert names == ["4 collapsing", "3 queueing", "2 evicting", "1 filling", "0 steady"]
    (now,) = [item.text for item in lanes.every("li", css="current")]
    assert now == "3 queueing"
    stages = lanes.one("svg", css="stages")
    assert "stage 3 (queueing) since 00:03:04 UTC." in stages.one("desc").text
    assert [node.text for node in lanes.one("svg", css="axis").every("text")]
    assert lanes.one("svg", css="cause").one("title").text == "Cause kv_pressure"


def test_no_data_before_the_first_scrape_and_not_before_the_axis() -> None:
    shown = views.cascade()
    first_s = shown.targets[0].engines[0].times[0]
    html = render(replace(shown, since_s=shown.now_s - 3600))
    assert f"{clock(first_s)} UTC</time>.</p>" in html.split("No data before")[1][:90]
    assert "No data before" not in render(replace(shown, since_s=first_s))


def test_evidence_is_drawn_with_its_bound(cascade: Node) -> None:
    items = list(cascade.every("li", css="evidence"))
    assert [item.one(css="side").text for item in items] == ["for"] * 4
    signals = [item.one(css="signal").text for item in items]
    assert signals[0] == "preemption_ratio_per_s 23%/s"
    chart = items[0].one("svg", css="chart")
    assert chart.one("title").text == "preemption_ratio_per_s"
    assert "bound 5%/s" in chart.one("desc").text
    assert len(list(chart.every("line", css="bound"))) == 1
    assert chart.one("path", css="line").attributes["d"].startswith("M")


def test_recommendations_have_flags_numbers_checks_and_alternatives(cascade: Node) -> None:
    change = cascade.one("div", css="change")
    rows = [[cell.text for cell in row.children] for row in change.every("tr")]
    assert rows[0] == ["number", "then", "after"]
    assert change.one("caption").text == "Expected effect for the load of 00:03:36 UTC"
    assert ["KV tokens", "5,088", "30,688"] in rows
    assert ["preemptions", "4.3/s", "0/s"] in rows
    words = change.text
    assert "Then verify num_gpu_blocks in vllm:cache_config_info is about 960" in words
    assert "Risk vLLM runs out of memory at start if the blocks do not fit." in words
    assert "Cost no change in price; needs a restart" in words
    others = [node.one("summary").text for node in cascade.every("details", css="change")]
    assert others[0] == (
        "or --kv-cache-dtype fp8 (now auto), --num-gpu-blocks-override 320 (now 160) "
        "(not enough alone)"
    )
    assert "or replicas 1 → 2 (not enough alone)" in others


def test_what_is_not_known_is_said_with_its_reason(cascade: Node) -> None:
    lines = [node.text for node in cascade.one("section", css="gaps").every("li")]
    assert "gpu_*: no GPU source" in lines
    assert "rule BREAKER: no TTFT target (slo.ttft_p99_s)" in lines


def test_a_healthy_page_is_short_and_says_so() -> None:
    root = page(views.healthy())
    assert root.one(css="verdict").one("h1").text == "No problem found."
    assert not list(root.every(css="first"))
    assert not list(root.every("article"))
    labels = [node.text for node in root.one(css="vitals").every(css="label")]
    assert labels == ["KV cache used", "running", "waiting", "preempted every second", "TTFT P99",
                      "ITL P99"]  # fmt: skip
    measured = [node.text for node in root.one(css="vitals").every(css="signal")]
    assert measured == ["last scrape"] * 3 + ["last 15 s"] * 3


def test_a_page_that_cannot_be_read_shows_what_was_known_before() -> None:
    root = page(views.unreadable())
    verdict = root.one(css="verdict")
    assert "scrapes in a row failed" in verdict.one("h1").text
    assert "unknown; stage 0 (steady) until 00:38:37 UTC" in verdict.text
    assert root.one(css="vitals").one("h2").text == "Before that"
    assert not list(root.one(css="vitals").every("b")), "no value is known now"
    gap = list(root.one("svg", css="stages").every("rect", css="gap"))[-1]
    assert gap.one("title").text == "the page could not be read"
    assert "How we know" not in root.text, "the only evidence is in the headline already"


def test_old_numbers_are_not_called_healthy() -> None:
    root = page(views.late())
    verdict = root.one(css="verdict")
    assert verdict.one(css="word").text == "UNKNOWN"
    assert "unknown" in verdict.attributes["class"].split()
    assert verdict.one("h1").text == ("No data for 2 min; it was ok then.")
    assert root.one(css="vitals").one("h2").text == "When last seen"
    steady = list(root.one("svg", css="stages").every("rect", css="bar"))[-1]
    left, width = (float(steady.attributes[name].rstrip("%")) for name in ("x", "width"))
    assert left + width < 70, "the bar ends where the last scrape was"
    assert not list(root.every("li", css="current"))


def test_old_numbers_of_a_sick_engine_stay_critical_and_are_called_old() -> None:
    view = views.cascade()
    root = page(replace(view, now_s=view.now_s + 100))
    assert root.one(css="word").text == "CRITICAL"
    assert root.one(css="late").text.startswith("No scrape for 101 s")
    assert "(until the last scrape)" in root.one(css="verdict").text


def test_a_past_moment_is_marked_and_leads_back() -> None:
    view = views.past()
    root = page(view)
    banner = root.one("aside", css="banner")
    assert banner.text == ("Past state: 2026-11-21 00:03:39 UTC, 60 min ago. Back to now")
    assert banner.one("a").attributes["href"] == "?target=kv_pressure_cascade"
    assert root.one(css="first").one("h2").text == "Advice at that time"
    assert "data-refresh" not in root.one("body").attributes
    assert not list(root.every("noscript")), "the past does not change"
    assert root.one("svg", css="chart").one("line", css="moment")
    form = root.one("form")
    assert {node.attributes["name"]: node.attributes["value"] for node in form.every("input")} == {
        "target": "kv_pressure_cascade",
        "at": "2026-11-21T00:03:39",
    }
    time_steps = [node.attributes["href"] for node in root.one("ul", css="time-steps").every("a")]
    assert time_steps[0] == "?target=kv_pressure_cascade&at=2026-11-20T23%3A03%3A40Z"


def test_a_past_moment_at_which_nothing_was_watched() -> None:
    view = alone(error="not watched at that moment")
    root = page(replace(view, now_s=NOW_S + 60, at_s=NOW_S, since_s=NOW_S - 600, until_s=NOW_S))
    assert root.one(css="word").text == "UNKNOWN"
    assert root.one("h1").text == "Not watched at that moment."
    assert root.one("form"), "another moment can be asked for"


def test_an_empty_board_says_how_to_begin() -> None:
    root = page(views.view())
    assert root.one("h1").text == "No targets."
    assert "kneewatch run http://host:8000" in root.text
    assert "unknown" in root.one(css="verdict").attributes["class"].split()


def test_all_targets_worst_first() -> None:
    root = page(views.fleet())
    verdict = root.one(css="verdict")
    assert verdict.one(css="tally").text == (
        "8 targets: 2 critical, 2 warning, 1 unknown, 1 info, 2 ok"
    )
    assert verdict.one("dd").one("a").attributes["href"] == "?target=vllm-0"
    items = list(root.one("section", css="targets").one("ol").children)
    words = [item.one(css="badge").text for item in items]
    assert words == ["CRITICAL"] * 2 + ["WARNING"] * 2 + [
        "UNKNOWN", "INFO", "OK", "OK",
    ]  # fmt: skip
    assert items[4].one(css="headline").text == "This target has not been scraped yet."
    assert all(item.one("svg", css="strip").one("desc").text for item in items)
    assert [item.one("h3").text for item in items[:2]] == ["vllm-0", "vllm-1"]


def test_a_page_of_targets_that_are_all_ok_names_none_of_them_as_the_place() -> None:
    quiet = [views.target(name, EngineView(HEALTHY)) for name in ("gpu-7", "gpu-8")]
    assert "Where" not in page(views.view(*quiet)).text
    sick = views.target("gpu-9", EngineView(SICK))
    assert "Where" in page(views.view(*quiet, sick)).text


def test_a_stage_without_a_cause_is_told_once() -> None:
    evicting = [views.target(n, EngineView(replace(SICK, causes=[]))) for n in ("a", "b")]
    facts = page(views.view(*evicting)).every("ul", css="facts")
    assert ["stage 3" in row.text for row in facts] == [False, False]
    facts = page(views.view(*(views.target(n, EngineView(SICK)) for n in "ab"))).every(
        "ul", css="facts"
    )
    assert ["stage 3" in row.text for row in facts] == [True, True]


def test_the_scrape_interval_reads_as_it_was_set() -> None:
    target = replace(views.target("vllm-0", EngineView(HEALTHY)), interval_s=2.5)
    assert "every 2.5 s, last at" in page(views.view(target, single=True)).text


def test_engines_of_one_target_are_told_apart() -> None:
    root = page(views.many_engines())
    engines = list(root.every("details", css="engine"))
    assert [engine.one("h2").text for engine in engines] == [
        "CRITICAL model tiny, engine 0", *(f"OK model tiny, engine {n}" for n in (1, 2, 3)),
    ]  # fmt: skip
    assert ["open" in engine.attributes for engine in engines] == [True, False, False, False]


def test_without_the_script_the_page_loads_anew() -> None:
    html = render(views.healthy())
    assert '<noscript><meta http-equiv="refresh" content="30"></noscript>' in html
    slow = replace(views.healthy(), refresh_s=60.0)
    assert 'content="60"' in render(slow)


def test_a_routers_page_has_no_kv_cache() -> None:
    router = Verdict(
        t_s=views.healthy().now_s,
        target="r",
        program="vllm-router",
        health="ok",
        values={"running": 3.0, "waiting": None},
    )
    text = page(alone(EngineView(router))).text
    assert "running" in text
    assert not [word for word in ("KV cache", "collapsing", "TTFT", "Changed") if word in text]


def test_findings_that_no_cause_tells() -> None:
    findings = [finding("ERRORS", "critical", 0.2), finding("KV-FULL", "info", 0.93)]
    root = page(alone(EngineView(changed(HEALTHY, health="critical", findings=findings))))
    assert root.one("h1").text == "Requests end in an error."
    lines = [node.text for node in root.every("li", css="finding")]
    assert lines[0].startswith("critical Requests end in an error: 20% ERRORS finished_error_ratio")
    assert "Read vLLM's log." in lines[0]
    assert lines[1].startswith("info KV cache usage is above its target band: 93%")


@pytest.mark.parametrize("percent", [50, 99])
def test_a_target_is_drawn_where_its_rule_is_out_of_bounds(percent: int) -> None:
    rules = {rule.id: rule for rule in slo_rules(ttft_p99_s=1.25, itl_p99_s=None)}
    recorded = list(views.until("kv_pressure_cascade", 100))
    rule = rules[f"TTFT-P{percent}"]
    out_of_bounds = Finding(
        rule.id,
        "critical",
        rule.signal,
        5.1,
        since_s=recorded[-1].t_s - 20,
        bounds={bound.severity.word: bound.threshold for bound in rule.bounds},
    )
    recorded[-1] = changed(recorded[-1], causes=[], recommendations=(), findings=[out_of_bounds])
    read = diagnosis_of(document(recorded[-1]))
    shown = replace(views.engine(recorded), diagnosis=read)
    item = page(alone(shown)).one("li", css="finding")
    assert [line.attributes["class"] for line in item.every("line", css="bound")] == ["bound"]
    assert " 1.25 s" in item.one("p", css="bounds").text


def test_what_is_over_is_told_as_over_and_its_stretch_ends() -> None:
    recorded = list(views.until("kv_pressure_cascade", 100))
    t_s = recorded[-1].t_s
    over = finding(
        "KV-EVICT", "info", 0.0, clearing_since_s=t_s - 9, was=0.4, was_severity=Severity.CRITICAL
    )
    over = replace(over, since_s=t_s - 40)
    drawn = [over, replace(over, clearing_since_s=None, was_severity=None)]
    widths: list[float] = []
    for shown_finding in drawn:
        recorded[-1] = changed(
            recorded[-1], health="info", causes=[], recommendations=(), findings=[shown_finding],
            stage=HEALTHY.stage,
        )  # fmt: skip
        root = page(alone(views.engine(recorded)))
        item = root.one("li", css="finding")
        widths.append(float(item.one("rect", css="held").attributes["width"].rstrip("%")))
        assert ("was 40%/s until" in item.text) == (shown_finding is over)
        assert (rule_of(over).summary in root.text) == (shown_finding is not over)
    assert widths[0] < widths[1] * 0.9


def test_what_keeps_a_rule_quiet_stands_by_its_vital_sign() -> None:
    note = "not judged: fewer than 3 preemptions in the window"
    quiet = finding("KV-EVICT", "ok", 0.14, note=note)
    values = {**HEALTHY.values, "preemption_ratio_per_s": 0.14}
    root = page(alone(EngineView(changed(HEALTHY, findings=[quiet], values=values))))
    (said,) = [vital for vital in root.one(css="vitals").every("li") if note in vital.text]
    assert "preempted every second" in said.text


def test_what_was_checked_and_is_fine_is_a_list() -> None:
    findings = [
        finding("KV-FULL", "ok", 0.4),
        finding("ERRORS", "unknown", None),
        finding("KV-EVICT", "ok", 0.14, note="not judged: fewer than 3 preemptions in the window"),
        finding("REJECTED", "ok", 0.0),
    ]
    root = page(alone(EngineView(changed(HEALTHY, findings=findings))))
    fine = [item.text for item in root.one("section", css="fine").every("li")]
    assert fine == ["The KV cache has room (40%)", "No request is rejected (0/s)"]


def test_evidence_that_weighs_something_else_has_no_bound_in_the_signals_chart() -> None:
    """A cause may weigh the growth of a signal: its bound is none of the signal's."""
    recorded = list(views.until("kv_pressure_cascade", 100))
    growth = Evidence("running", 2.5, 1.5, "the batch has grown")
    cause = replace(PRESSURE, evidence=(growth,), against=(), since_s=recorded[-1].t_s - 9)
    recorded[-1] = changed(recorded[-1], causes=[cause], recommendations=())
    item = page(alone(views.engine(recorded))).one("li", css="evidence")
    assert item.one("svg", css="chart")
    assert not list(item.every("line", css="bound"))
    assert item.one(css="signal").text == "running now 13"


def test_evidence_against_is_marked() -> None:
    root = page(alone(EngineView(SICK)))
    sides = [(n.one(css="side").text, n.one("p").text) for n in root.every("li", css="evidence")]
    assert sides[-1] == ("against", "against the cache is large")
    assert not list(root.every("svg", css="chart")), "nothing is drawn of what is not stored"


def test_notices_about_kneewatch_itself() -> None:
    root = page(replace(views.healthy(), notices=("The history cannot be written.",)))
    assert root.one("aside", css="notice").text == "The history cannot be written."


def hostile() -> TriageView:
    cause = replace(
        PRESSURE,
        id=HOSTILE,
        summary=HOSTILE,
        lever=HOSTILE,
        evidence=(Evidence(HOSTILE, 1.0, 2.0, HOSTILE),),
        explains=(HOSTILE,),
        guide=(HOSTILE,),
    )
    diagnosis = views.recorded("kv_pressure_cascade")[70]
    recommendation = replace(
        diagnosis.recommendations[0],
        cause=HOSTILE,
        id=HOSTILE,
        summary=HOSTILE,
        changes=(FlagChange("--kv-cache-dtype", HOSTILE, HOSTILE), FlagChange(HOSTILE, 1, 2)),
        checks=(HOSTILE,),
        verify=(HOSTILE,),
        risk=HOSTILE,
        unknown=(HOSTILE,),
    )
    sick = changed(
        SICK,
        target=HOSTILE,
        model=HOSTILE,
        engine=HOSTILE,
        causes=[cause],
        recommendations=(recommendation, recommendation),
        symptoms=[HOSTILE],
        unknown=[f"x: {HOSTILE}"],
        judged_against=HOSTILE,
    )
    engine = EngineView(
        sick,
        [
            views.interval(kind, HOSTILE, Severity.OK, NOW_S - 100)
            for kind in ("stage", "cause", "health", HOSTILE)
        ],
    )
    target = TargetView(
        HOSTILE,
        HOSTILE,
        {HOSTILE: HOSTILE},
        (engine,),
        5.0,
        NOW_S,
        error=HOSTILE,
        sources=(SourceState(HOSTILE, NOW_S, False, 0.1, HOSTILE, HOSTILE),),
    )
    made_view = views.view(target, single=True)
    return replace(made_view, version=HOSTILE, since=HOSTILE, notices=(HOSTILE,))


@pytest.mark.parametrize("single", [True, False])
def test_what_comes_from_elsewhere_stays_text(single: bool) -> None:
    html = render(replace(hostile(), single=single))
    html.encode()
    root = tree(html)
    assert [node.attributes for node in root.every("script")] == [
        {"src": "triage/triage.js", "defer": ""}
    ]
    assert not list(root.every("img"))
    assert MARKUP in root.text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", html)


def test_a_hostile_value_to_type_is_quoted_for_the_shell() -> None:
    code = page(hostile()).one("code").text
    assert code.startswith("--kv-cache-dtype '<script>alert(1)</script>\"'\"'\"'`&amp;")


def test_a_name_in_another_script_is_kept_and_set_apart() -> None:
    root = page(alone(EngineView(changed(HEALTHY, model="نموذج"))))
    assert "model نموذج" in root.one("dd").text
    assert root.one("dd").one("bdi").text == "gpu-7"


def test_a_cause_and_a_health_word_of_another_version_are_shown() -> None:
    strange = changed(SICK, health="splendid", causes=[replace(PRESSURE, id="quite_new")])
    root = page(alone(EngineView(strange)))
    assert root.one(css="word").text == "UNKNOWN", "what is not understood is not called healthy"
    assert "quite_new" in root.text


def test_a_cause_that_only_lingers_says_of_when_its_numbers_are() -> None:
    lingering = changed(SICK, causes=[replace(PRESSURE, seen_s=SICK.t_s - 8)])
    root = page(alone(EngineView(lingering)))
    words = f"Ending: last detected 8 s ago. It was: {PRESSURE.summary}"
    assert root.one("h1").text == words
    assert f"1. {words}" in root.text
    assert root.one(css="first").one("h2").text == "If it returns, do first"


def test_unreadable_from_the_start() -> None:
    root = page(alone(EngineView(changed(UNREADABLE, model="", engine=""))))
    assert root.one("dd").text == "gpu-7"
    assert "See whether the server runs and listens." in root.one(css="first").text


def test_fifty_targets_are_light() -> None:
    html = render(views.fleet(50))
    assert len(html.encode()) < 400_000
    assert len(list(tree(html).one("section", css="targets").one("ol").children)) == 50


def test_the_pages_files_are_shipped_and_nothing_else_is_given() -> None:
    for name in ASSETS:
        assert asset(name)
    with pytest.raises(KeyError):
        asset("page.html.j2")
    with pytest.raises(KeyError):
        asset("../words.py")


def test_no_line_breaks_within_a_flag() -> None:
    assert unbroken("Set --max-num-seqs 11, not a<b") == (
        'Set <span class="flag">--max-num-seqs</span> 11, not a&lt;b'
    )


def test_evidence_that_compares_engines_of_a_fleet_has_no_value_of_its_signal() -> None:
    compared = Evidence("running_avg", 85.9, 3.0, "85.9x the median requests in flight")
    verdict = changed(SICK, values={})
    assert value_words(compared, verdict, same=False, is_fleet=True) == ""
    turns = Evidence("lora_turns", 12.0, None, "least number of turns in a slot")
    assert value_words(turns, verdict, same=False, is_fleet=False) == "12"


def test_what_to_do_first_is_read_once() -> None:
    html = render(views.cascade())
    assert html.count("Stop batch jobs and very long prompts first.") == 1
    assert "Speed predicted" in html
    assert "Speed predicted" not in tree(html).one(css="first").text, "the article derives it"
    many = render(views.many_engines())
    assert many.count("Stop batch jobs and very long prompts first.") == 1


def test_a_target_that_was_never_scraped_offers_no_time() -> None:
    unseen = TargetView("vllm-new", "http://vllm-new:8000/metrics", {}, (), 5.0, None)
    root = page(views.view(unseen))
    assert root.one("h1").text == "This target has not been scraped yet."
    assert not list(root.every("input")), "there is no past to choose"
    assert list(page(views.cascade()).every("input"))
