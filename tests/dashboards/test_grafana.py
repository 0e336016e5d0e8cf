"""The dashboards: every panel's query has an answer on a real Prometheus fed with recordings."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.page import Page
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, rule_files
from kneewatch.dashboards.prometheus.rule_group import Plan
from tests.collector.oracle import Prometheus, Target, running
from tests.dashboards.boards import BOARDS, Board, Panel, bounds_of
from tests.dashboards.grafana_boards import dashboards
from tests.programs import require
from tests.recordings import CAPTURES, phases
from tests.waiting import PATIENCE_S, until

GENERATED = Path(__file__).parents[2] / "dashboards" / "generated" / "grafana"
RECORDINGS = ("kv_pressure_cascade", "lora_thrash", "prefix_churn", "spec_mixed")
OWN = """\
kneewatch_stage{target="r0",model="m",engine="0"} 3
kneewatch_cause_severity{target="r0",model="m",engine="0",cause="kv_pressure"} 3
"""
GPU = 'gpu="0",UUID="GPU-c4529c8d",modelName="NVIDIA H100 80GB HBM3",Hostname="gpu-node-1"'


def panels() -> list[tuple[Board, Panel]]:
    return [(board, panel) for board in BOARDS for row in board.rows for panel in row.panels]


def gpu_page(tick: int) -> Page:
    """A DCGM exporter's page that has every field the board asks for."""
    fields = sorted(
        set(re.findall(r"DCGM_FI_\w+", json.dumps([p.queries[0].expr for _, p in panels()])))
    )
    lines = [f"{field}{{{GPU}}} {tick}" for field in fields]
    return PageParser(Limits()).parse("\n".join(lines) + "\n", content_type="")


def until_the_end_of_load(name: str) -> list[tuple[float, Page]]:
    """A recording's pages up to the end of its last phase under load."""
    mine = [phase for phase in phases() if phase.capture.name.startswith(f"{name}.")]
    end_s = max(phase.to_s for phase in mine if phase.state not in ("idle", "draining"))
    parser = PageParser(Limits())
    return [
        (entry.t_s, parser.parse(entry.body, content_type=entry.content_type))
        for entry in CaptureReader(CAPTURES / f"{name}.jsonl.gz")
        if entry.body is not None and entry.t_s <= end_s
    ]


AHEAD_S = 30.0
"""How far what is loaded reaches into the future: it must be recent when a busy machine asks."""


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    """One that has seen four recordings and a GPU page, up to now, with the exported rules."""
    plan = Plan(window_s=60.0, interval_s=1.0, scrape_s=2.0)
    rules = rule_files(plan)[RULES_FILE].replace("interval: 1m", "interval: 1s")
    with running(require("prometheus"), rules=rules) as started:
        now_ms = round(1000 * (time.time() + AHEAD_S))
        for name in RECORDINGS:
            pages = until_the_end_of_load(name)
            shift_ms = now_ms - round(1000 * pages[-1][0])
            scrapes = [(round(1000 * t_s) + shift_ms, page) for t_s, page in pages]
            started.load([Target(name, scrapes)])
        gpus = [(now_ms - 5000 * tick, gpu_page(60 - tick)) for tick in range(60, -1, -1)]
        started.load([Target("gpu-node-1:9400", gpus)])
        own = PageParser(Limits()).parse(OWN, content_type="")
        started.load([Target("kneewatch:9877", [(now_ms - 5000 * at, own) for at in (12, 6, 0)])])
        wait_for(started, "kneewatch:running", least=len(RECORDINGS))
        yield started


def wait_for(prometheus: Prometheus, query: str, *, least: int) -> None:
    """Wait until the rules have seen every recording."""
    until(lambda: answered(prometheus, query) >= least)


def answered(prometheus: Prometheus, query: str) -> int:
    return len(prometheus.ask(query, round(1000 * time.time())))


def asked(expr: str) -> str:
    """An expression as Grafana sends it with everything chosen."""
    for name in ("cluster", "namespace", "tier", "model", "pod", "replica", "node"):
        expr = expr.replace(f"${name}", ".*")
    # A week in steps of five minutes has no step since this Prometheus was started.
    return expr.replace("$usd_per_hour", "2").replace("[7d:5m]", "[1m:1s]")


def silent(prometheus: Prometheus) -> list[str]:
    """Panels none of whose queries has an answer."""
    return [
        f"{board.title}: {panel.title}"
        for board, panel in panels()
        if not any(answered(prometheus, asked(query.expr)) for query in panel.queries)
    ]


def test_every_panel_has_an_answer(prometheus: Prometheus) -> None:
    # A subquery's steps are whole seconds: what was recorded in this one is seen in the next.
    give_up_s = time.monotonic() + PATIENCE_S
    while (missing := silent(prometheus)) and time.monotonic() < give_up_s:
        time.sleep(0.3)
    assert missing == []


def test_every_query_is_understood(prometheus: Prometheus) -> None:
    for _, panel in panels():
        for query in panel.queries:
            prometheus.ask(asked(query.expr), round(1000 * time.time()))


def test_a_query_without_data_is_seen(prometheus: Prometheus) -> None:
    assert not answered(prometheus, asked('kneewatch:gone{instance=~"$replica"}'))


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_what_is_checked_in_is_what_is_built(name: str) -> None:
    assert (GENERATED / name).read_text() == dashboards()[name]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_can_be_read(board: Board) -> None:
    document: dict[str, Any] = json.loads((GENERATED / f"{board.uid}.json").read_text())
    assert document["uid"] == board.uid
    assert document["description"]
    names = {variable["name"] for variable in document["templating"]["list"]}
    assert {"datasource", "tier", "model", "replica"} <= names
    shown = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert len(shown) == sum(len(row.panels) for row in board.rows)
    for panel in shown:
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["options"]
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_bounds_are_the_rules() -> None:
    bounds, below = bounds_of("preemption_ratio_per_s")
    assert bounds == ((0.05, "warning"), (0.2, "critical"))
    assert not below
    assert bounds_of("spec_acceptance_ratio") == (((0.6, "info"),), True)
    assert bounds_of("running") == ((), False)
