"""The exported alerts and dashboards of engines that are not vLLM: SGLang's own collector classes
play faults and quiet loads to promtool, and a real Prometheus answers each panel."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from kneewatch.collector.engines.engine_kind import engine_kinds
from kneewatch.collector.exposition import Limits, PageParser, parse
from kneewatch.collector.page import Page, Series
from kneewatch.dashboards.grafana import boards_of
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, groups, rule_files
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan
from kneewatch.rules.facts import Targets
from tests.collector.oracle import Prometheus, Target, running
from tests.dashboards.grafana_boards import dashboards
from tests.dashboards.promtool import evaluate
from tests.dashboards.test_grafana import answered, asked, wait_for
from tests.programs import require
from tests.simulator.cases import Case
from tests.simulator.sglang_cases import StoredCase, recorded, restored, sglang_cases
from tests.waiting import PATIENCE_S

AHEAD_S = 300.0
"""How far what is loaded reaches into the future: a busy machine asks late."""

PAGE = Path(__file__).parents[1] / "fixtures" / "pages" / "sglang-0.5.23-rendered.txt.gz"
SCRAPE_S = 5.0
OTHERS = tuple(kind.prefixes[0] for kind in engine_kinds() if kind.prefixes)
FIRING = (
    'ALERTS{alertstate="firing", severity=~"warning|critical", alertname!="KneewatchNoMetrics"}'
)
QUEUE, STALL, ERRORS = "KneewatchQueueGrows", "KneewatchCauseEngineStalled", "KneewatchErrors"

FIRST = {
    "KV too small for the peak": QUEUE,
    "more prompts than the GPUs compute": QUEUE,
    "max_num_seqs too low": QUEUE,
    "deadlock": STALL,
    "a host that cannot feed the GPUs": "KneewatchItlP99",
    "prompts too long for the TTFT target": "KneewatchTtftP99",
    "the server is killed": "KneewatchTargetDown",
    "429 tokens/s, a full cache, then 30": QUEUE,
    "long contexts queue for 250 s by the reserve": QUEUE,
    "stops with 99 requests in 100 seats": QUEUE,
    "50 seats where 128 were asked for": QUEUE,
    "transfers that never end hold the slots": QUEUE,
    "100 transfers take 5 minutes, 30 s before": QUEUE,
    "transfers run into their time-out": ERRORS,
    "after idle hours every call fails": ERRORS,
}
"""The first alert of a fault, by the end of its name. Others show in no alert, as for vLLM."""


@cache
def cases() -> Sequence[tuple[Case, StoredCase]]:
    return [*zip(sglang_cases(), recorded(), strict=True)]


def played(
    chosen: Sequence[tuple[Case, StoredCase]], targets: Targets, folder: Path
) -> dict[str, list[str]]:
    """The alerts of each case, as a server of its own, in the order in which they fire."""
    plan = Plan(
        prefix="sglang:", scrape_s=SCRAPE_S, interval_s=SCRAPE_S, targets=targets, lean=True
    )
    rules = rule_files(plan)[RULES_FILE]
    read = set(re.findall(r"[a-zA-Z_][\w:]*", rules))
    series: dict[Series, list[str]] = {}
    steps = max(len(own.pages) for _, own in chosen)
    for case, own in chosen:
        name = f"{case.machine} {case.name}"
        labels = {"instance": name, "namespace": name, "job": "sglang"}
        series |= {key: row for key, row in rows(own, labels, steps).items() if key.name in read}
    return fired_by(rules, {key: " ".join(row) for key, row in series.items()}, steps, folder)


def rows(own: StoredCase, labels: dict[str, str], steps: int) -> dict[Series, list[str]]:
    """The values of each series of a case, one for each scrape."""
    parser, series = PageParser(Limits()), dict[Series, list[str]]()
    up = series.setdefault(Series("up", tuple(sorted(labels.items()))), ["_"] * steps)
    for at, (_, body) in enumerate(restored(own.pages)):
        up[at] = "0" if body is None else "1"
        page = parser.parse(body or "")
        shown = dict(zip(page.layout.series, page.values, strict=True))
        for each, value in shown.items():
            key = Series(each.name, tuple(sorted({**dict(each.labels), **labels}.items())))
            series.setdefault(key, ["_"] * steps)[at] = f"{value:.10g}".replace("nan", "NaN")
        if body is None:
            for row in series.values():
                row[at] = (
                    "stale" if row is not up and row[at - 1] not in ("_", "stale") else row[at]
                )
    return series


def fired_by(
    rules: str, series: dict[Series, str], steps: int, folder: Path
) -> dict[str, list[str]]:
    """The alerts of each server, by its address, in the order in which they fire."""
    answers = evaluate(folder, rules, series, [FIRING], step_s=SCRAPE_S, steps=steps)
    fired: dict[str, list[str]] = {}
    for now in answers[FIRING]:
        for sample in now:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', sample.labels))
            names = fired.setdefault(labels.get("instance", ""), [])
            if labels["alertname"] not in names:
                names.append(labels["alertname"])
    return fired


def test_each_fault_of_sglang_fires_its_alert_first_and_quiet_loads_fire_none(
    tmp_path: Path,
) -> None:
    require("promtool")
    by_targets: dict[Targets, list[tuple[Case, StoredCase]]] = {}
    for case, own in cases():
        wanted = any(case.name.endswith(name) for name in FIRST) or not case.wanted
        if wanted:
            by_targets.setdefault(case.faults[0].targets, []).append((case, own))
    quiet = [case for case, _ in cases() if not case.wanted]
    assert len(quiet) >= 12
    for at, (targets, chosen) in enumerate(by_targets.items()):
        fired = played(chosen, targets, tmp_path / str(at))
        for case, _ in chosen:
            first = [alert for name, alert in FIRST.items() if case.name.endswith(name)]
            assert fired.get(f"{case.machine} {case.name}", [])[:1] == first, case.name


DP = {"model_name": "m", "engine_type": "unified", "job": "j", "instance": "s"}


def of_rank(name: str, rank: str = "", **labels: str) -> Series:
    ranks = {"dp_rank": rank, "tp_rank": rank, "pp_rank": "0", "moe_ep_rank": "0"} if rank else {}
    return Series(name, tuple(sorted({**DP, **ranks, **labels}.items())))


def test_a_rank_that_hangs_is_named_and_a_queue_is_that_of_the_page(tmp_path: Path) -> None:
    require("promtool")
    steps, decode = 80, {"mode": "decode"}
    series = {
        of_rank("sglang:num_running_reqs", "0"): f"9x{steps}",
        of_rank("sglang:num_running_reqs", "1"): f"9x{steps}",
        of_rank("sglang:num_queue_reqs", "0"): f"60x{steps}",
        of_rank("sglang:num_queue_reqs", "1"): f"60x{steps}",
        of_rank("sglang:realtime_tokens_total", "0", **decode): f"0+900x{steps}",
        of_rank("sglang:realtime_tokens_total", "1", **decode): f"500x{steps}",
        of_rank("sglang:time_to_first_token_seconds_count", is_streaming="true"): f"0+50x{steps}",
    }
    rules = rule_files(Plan(prefix="sglang:", scrape_s=SCRAPE_S, interval_s=SCRAPE_S))[RULES_FILE]
    answers = evaluate(tmp_path, rules, series, [FIRING], step_s=SCRAPE_S, steps=steps)
    last = [dict(re.findall(r'(\w+)="([^"]*)"', each.labels)) for each in answers[FIRING][-1]]
    assert {(each["alertname"], each.get("engine")) for each in last} == {
        (STALL, "1"),
        (QUEUE, None),
    }


def test_an_alert_of_another_engine_is_short_and_in_its_words() -> None:
    plan = Plan(targets=Targets(2.0, 0.1), other_prefixes=OTHERS)
    own = [each for each in plan.by_engine if each.prefix in OTHERS]
    assert {each.engine.title for each in own} == {"SGLang", "TensorRT-LLM", "llama.cpp"}
    shared = {"--previous"}
    for each in own:
        spelled = {*each.engine.flags.values(), *re.findall(r"--[\w-]+", each.engine.switch_on)}
        alerts = [
            rule
            for group in groups(each)
            for rule in group.rules
            if isinstance(rule, Alert) and rule.labels.get("program") == each.engine.title
        ]
        assert len({alert.name for alert in alerts}) >= 10
        for alert in alerts:
            assert len(alert.expr) < 300, alert.name
            texts = " ".join(v for k, v in alert.annotations.items() if k != "runbook_url")
            assert all(alert.annotations.values()), alert.name
            assert "vLLM" not in texts, alert.name
            flags = set(re.findall(r"--[\w-]+", texts))
            assert flags <= spelled | shared, alert.name


def test_what_an_engine_lacks_is_no_alert() -> None:
    def names(prefix: str) -> set[str]:
        rules = (rule for group in groups(Plan(prefix=prefix)) for rule in group.rules)
        return {rule.name for rule in rules if isinstance(rule, Alert)}

    every = names("vllm:")
    assert every - names("sglang:") == {"KneewatchLoraWait", "KneewatchKvTransferSlow"}
    assert every - names("trtllm_") == {
        "KneewatchLoraWait",
        "KneewatchKvTransferSlow",
        "KneewatchKvEvict",
        "KneewatchReplicaSlow",
    }
    assert names("llamacpp:") >= {"KneewatchTargetDown", STALL, "KneewatchPrefixHitFell"}
    assert names("llamacpp:").isdisjoint({"KneewatchKvFull", "KneewatchTtftP99", ERRORS})


# --- Dashboards


def scrapes(body: str, now_ms: int, count: int = 181) -> Iterator[tuple[int, Page]]:
    """A page whose counters grow at each scrape of two seconds."""
    page = parse(body)
    grows = [
        bool(re.search(r"_(total|count|sum|bucket)$", each.name)) for each in page.layout.series
    ]
    for at in range(count):
        values = [v * (1 + 0.1 * at) if g else v for v, g in zip(page.values, grows, strict=True)]
        yield now_ms - 2000 * (count - 1 - at), Page(page.layout, values)


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    """One that scraped a page of SGLang's collector classes, with the exported rules."""
    plan = Plan(prefix="sglang:", interval_s=1.0, scrape_s=2.0)
    rules = rule_files(plan)[RULES_FILE].replace("interval: 1m", "interval: 1s")
    idle = gzip.decompress(PAGE.read_bytes()).decode()
    body = re.sub(r"(?m)^(sglang:num_running_reqs\{.*\}) 0\.0$", r"\1 3.0", idle)
    with running(require("prometheus"), rules=rules) as started:
        now_ms = round(1000 * (time.time() + AHEAD_S))
        started.load([Target("sglang-0", [*scrapes(body, now_ms)])])
        wait_for(started, "kneewatch:running", least=1)
        yield started


def test_every_panel_of_sglang_has_an_answer(prometheus: Prometheus) -> None:
    boards = boards_of(Plan(prefix="sglang:"), dashboards())
    own = re.compile(r"kneewatch_|DCGM_FI_")
    panels = [
        (panel["title"], [asked(target["expr"]) for target in panel["targets"]])
        for text in boards.values()
        for panel in json.loads(text)["panels"]
        if panel["type"] != "row" and not any(own.search(t["expr"]) for t in panel["targets"])
    ]
    assert len(panels) >= 25

    def silent() -> list[str]:
        return [title for title, exprs in panels if not any(answered(prometheus, e) for e in exprs)]

    give_up_s = time.monotonic() + PATIENCE_S
    while (missing := silent()) and time.monotonic() < give_up_s:
        time.sleep(0.3)
    assert not missing, missing
    assert answered(prometheus, 'kneewatch:running{tier="SGLang", program="SGLang"}') == 1


def test_a_dashboard_says_what_an_engine_lacks() -> None:
    alone = boards_of(Plan(prefix="sglang:"), dashboards())
    assert "kneewatch-lora.json" not in alone
    cache_board = json.loads(alone["kneewatch-cache.json"])
    assert cache_board["description"].endswith("SGLang does not report: Residency, Blocks evicted.")
    titles = [panel["title"] for panel in cache_board["panels"]]
    assert "Residency" not in titles
    assert cache_board["tags"] == ["kneewatch", "sglang"]
    mixed = boards_of(Plan(other_prefixes=("sglang:",)), dashboards())
    both = json.loads(mixed["kneewatch-cache.json"])
    assert "Residency" in [panel["title"] for panel in both["panels"]]
    assert both["description"] == cache_board["description"]
    assert both["uid"] == cache_board["uid"]
    assert boards_of(Plan(), dashboards()) == dashboards()


@pytest.mark.parametrize("prefix", OTHERS)
def test_panels_do_not_overlap(prefix: str) -> None:
    for text in boards_of(Plan(prefix=prefix), dashboards()).values():
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(text)["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not taken & cells, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells
