"""The exported rules: what promtool and vmalert say of them, and what a person can read in them."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from kneewatch.dashboards.prometheus.promtool_tests import TESTS_FILE, promtool_files, scenarios
from kneewatch.dashboards.prometheus.rule_files import (
    OBJECT_FILE,
    RECORDED,
    RULES_FILE,
    Flavor,
    drawn,
    groups,
    rule_files,
    signal_group,
)
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan, Record, span
from kneewatch.rules.facts import Targets
from tests.dashboards.boards import BOARDS
from tests.programs import require

PLANS = {
    "plain": Plan(),
    "with targets": Plan(targets=Targets(2.0, 0.1)),
    "short window, other names": Plan(
        window_s=15.0, interval_s=2.0, scrape_s=2.0, prefix="ray_vllm_", selector='cluster="a"',
        triage_url="https://triage.example/triage", gpu_selector='cluster="a"',
    ),
    "alerts only": Plan(lean=True),
    "SGLang": Plan(prefix="sglang_"),
    "all engines": Plan(other_prefixes=("llamacpp:", "sglang:", "trtllm_")),
}  # fmt: skip
READABLE = 300
"""The longest expression that an alert may have, in characters."""


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([require("promtool"), *args], capture_output=True, text=True, check=False)


@cache
def files_of(name: str) -> Mapping[str, str]:
    """The files of a plan, made once."""
    return {**rule_files(PLANS[name]), **promtool_files(PLANS[name])}


@cache
def document_of(name: str) -> Mapping[str, Any]:
    """The rules of a plan as they are read; not to be changed."""
    return loaded(files_of(name)[RULES_FILE])


def loaded(text: str) -> dict[str, Any]:
    """YAML, by the quicker parser."""
    document: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)
    return document


def alerts_of(plan: Plan) -> list[Alert]:
    return [rule for group in groups(plan) for rule in group.rules if isinstance(rule, Alert)]


def write(folder: Path, name: str) -> Path:
    for file, text in files_of(name).items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize("plan", PLANS)
def test_promtool_accepts_the_rules(tmp_path: Path, plan: str) -> None:
    ran = promtool("check", "rules", str(write(tmp_path, plan) / RULES_FILE))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "SUCCESS" in ran.stdout


@pytest.mark.parametrize(
    "plan",
    [
        PLANS["alerts only"],
        replace(PLANS["with targets"], lean=True),
        replace(PLANS["all engines"], lean=True),
    ],
    ids=str,
)
def test_the_exported_tests_pass(tmp_path: Path, plan: Plan) -> None:
    for file, text in {**rule_files(plan), **promtool_files(plan)}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    ran = promtool("test", "rules", str(tmp_path / TESTS_FILE))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_all_scenarios_are_in_the_exported_tests() -> None:
    (test,) = loaded(files_of("plain")[TESTS_FILE])["tests"]
    played = scenarios()
    assert [len(e["exp_samples"]) for e in test["promql_expr_test"]] == [
        len(scenario.fires) for scenario in played
    ]
    for scenario in played:
        named = [other.name for other in played if other.name.startswith(scenario.name)]
        assert named == [scenario.name]
        assert all(
            re.search(rf'="{scenario.name}', series) for series in scenario.series(PLANS["plain"])
        )


def test_alerts_without_a_scenario_are_few() -> None:
    played = {name for scenario in scenarios() for name in scenario.fires}
    serious = {alert.name for alert in alerts_of(Plan()) if alert.labels["severity"] != "info"}
    assert serious - played == {
        "KneewatchNoMetrics",  # needs a Prometheus without any server
        "KneewatchAbsent",  # needs a Prometheus without any kneewatch
        "KneewatchCascadeCollapsing",  # as KneewatchCascadeQueueing
        "KneewatchRouterHolds",  # test_router_alerts.py
        "KneewatchRouterStale",
    }


def test_the_exported_tests_can_fail(tmp_path: Path) -> None:
    write(tmp_path, "alerts only")
    rules = tmp_path / RULES_FILE
    rules.write_text(rules.read_text().replace("vllm:num_preemptions_total", "vllm:gone_total"))
    ran = promtool("test", "rules", str(tmp_path / TESTS_FILE))
    assert ran.returncode == 1
    assert "KneewatchKvEvict" in ran.stdout + ran.stderr


@pytest.mark.parametrize("plan", PLANS)
def test_vmalert_accepts_its_rules(tmp_path: Path, plan: str) -> None:
    rules = tmp_path / RULES_FILE
    rules.write_text(rule_files(PLANS[plan], Flavor.VICTORIA)[RULES_FILE])
    assert vmalert_says(rules) == ""
    document = loaded(rules.read_text())
    exprs = [rule["expr"] for group in document["groups"] for rule in group["rules"]]
    own = re.compile(r"\b(rate|increase|changes)\(")
    assert not any(own.search(expr) for expr in exprs), "they begin before the window"
    rules.write_text(rules.read_text().replace("min_over_time(", "min_over_time((", 1))
    assert re.search("KneewatchCauseEngineStalled|engine:sglang_", vmalert_says(rules))


def vmalert_says(rules: Path) -> str:
    """What vmalert has against a file; nothing where it accepts it."""
    command = [require("vmalert"), "-dryRun", f"-rule={rules}", "-loggerLevel=ERROR"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bool(ran.returncode) == bool(ran.stderr)
    return ran.stderr


@pytest.mark.parametrize("plan", ["plain", "with targets"])
def test_an_alert_is_one_expression_that_a_person_can_read(plan: str) -> None:
    alerts = alerts_of(PLANS[plan])
    assert 20 <= len({alert.name for alert in alerts}) <= 33
    for alert in alerts:
        assert len(alert.expr) < READABLE, alert.name
        assert not RECORDED.search(alert.expr), "it stands alone"
        assert "or vector(" not in alert.expr


def test_alerts_carry_what_a_person_needs() -> None:
    for alert in alerts_of(PLANS["short window, other names"]):
        texts = alert.annotations
        assert {"summary", "description", "action", "runbook_url"} <= set(texts)
        assert all(texts.values()), "an empty annotation is no use to anybody"
        assert alert.labels["severity"] in ("info", "warning", "critical")
        if alert.labels["kneewatch"] in ("cause", "finding"):
            assert "{{ or $labels.pod $labels.instance }}" in texts["summary"], alert.name
            assert "{{ or $labels.pod $labels.instance }}" in texts["description"], alert.name


def test_severities_of_an_alert_exclude_each_other() -> None:
    of_rules = [alert for alert in alerts_of(Plan()) if alert.labels["kneewatch"] == "finding"]
    severities = Counter(alert.name for alert in of_rules)
    assert {name for name, count in severities.items() if count == 2} == {
        "KneewatchKvEvict",
        "KneewatchErrors",
    }
    for alert in of_rules:
        if severities[alert.name] == 2 and alert.labels["severity"] == "warning":
            assert " <= " in alert.expr


def test_without_targets_no_alert_judges_latency() -> None:
    judging = {alert.name for alert in alerts_of(PLANS["with targets"])} - {
        alert.name for alert in alerts_of(Plan())
    }
    assert judging == {
        "KneewatchTtftP99",
        "KneewatchItlP99",
        "KneewatchTtftBudgetFastBurn",
        "KneewatchTtftBudgetSlowBurn",
    }


def test_exactly_the_signals_that_dashboards_draw_are_recorded() -> None:
    (group,) = (group for group in groups(Plan()) if group.name == "kneewatch-signals")
    names = [rule.name for rule in group.rules]
    assert len(names) == len(set(names))
    shown = json.dumps([query.expr for b in BOARDS for r in b.rows for p in r.panels
                        for query in p.queries])  # fmt: skip
    assert {f"kneewatch:{key}" for key in RECORDED.findall(shown)} == set(names)
    assert set(drawn()) <= {signal.key for signal in Plan().signals}


def test_signals_are_recorded_once_a_minute_and_not_at_all_where_only_alerts_are_wanted() -> None:
    assert signal_group(Plan()).interval_s == 60.0
    assert signal_group(Plan(interval_s=120.0)).interval_s == 120.0
    lean = [rule for group in groups(Plan(lean=True)) for rule in group.rules]
    assert not any(isinstance(rule, Record) for rule in lean)
    assert lean == alerts_of(Plan())


SPAN = re.compile(r"(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
"""A duration as the definition of PrometheusRule takes it."""


@pytest.mark.parametrize("plan", PLANS)
def test_the_object_holds_the_same_rules_in_the_shape_of_its_kind(plan: str) -> None:
    text = rule_files(PLANS[plan], Flavor.OPERATOR)[OBJECT_FILE]
    plain, wrapped = document_of(plan), loaded(text)
    assert wrapped["spec"] == plain
    assert (wrapped["apiVersion"], wrapped["kind"]) == (
        "monitoring.coreos.com/v1",
        "PrometheusRule",
    )
    names = [group["name"] for group in plain["groups"]]
    assert len(set(names)) == len(names), "groups are kept by name"
    for group in plain["groups"]:
        assert set(group) == {"name", "interval", "rules"}
        assert SPAN.fullmatch(group["interval"])
        for rule in group["rules"]:
            kind = {"alert", "for", "labels", "annotations"}
            assert set(rule) <= {"expr"} | (kind if "alert" in rule else {"record", "labels"})
            assert isinstance(rule["expr"], str)
            assert SPAN.fullmatch(rule.get("for", ""))
            for key in ("labels", "annotations"):
                assert all(isinstance(value, str) for value in rule.get(key, {}).values())
    assert len(text) < 200_000, "a plain `kubectl apply` keeps a copy, of 256 KiB at most"


def test_thresholds_are_the_users() -> None:
    plan = Plan(thresholds={"KV-EVICT": {"warning": 0.123}})
    assert re.search(r"> 0\.123\b", rule_files(plan)[RULES_FILE])


def test_names_and_selector_reach_every_series() -> None:
    text = files_of("short window, other names")[RULES_FILE]
    assert not re.search(r"(?<!ray_)vllm[:_](?!router_)", text)
    assert not re.search(r"ray_vllm_\w+(?!\w|{)", text)
    assert not re.search(r"DCGM_FI_\w+(?!\w|{)", text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7200, "2h"), (120, "2m"), (90, "90s"), (3600 * 1.5, "90m"), (0.5, "500ms"), (1, "1s")],
)
def test_a_duration_is_written_in_its_largest_unit(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"pod": "chat-0", "instance": "10.0.0.1:8000", "namespace": "chat"},
         "vLLM preempts running requests: chat-0 (llama) in chat"),
        ({"instance": "gpu-7:8000"}, "vLLM preempts running requests: gpu-7:8000 (llama)"),
    ],
)  # fmt: skip
def test_the_text_of_an_alert_names_the_replica(
    labels: Mapping[str, str], says: str, tmp_path: Path
) -> None:
    inner = ", ".join(f'{k}="{v}"' for k, v in {**labels, "model_name": "llama"}.items())
    test = {
        "interval": "15s",
        "input_series": [
            {"series": f"vllm:num_preemptions_total{{{inner}}}", "values": "0+75x40"},
            {"series": f"vllm:num_requests_running{{{inner}}}", "values": "16x40"},
        ],
        "alert_rule_test": [{"eval_time": "9m", "alertname": "KneewatchKvEvict"}],
    }
    write(tmp_path, "alerts only")
    (tmp_path / "tests.yml").write_text(json.dumps({"rule_files": [RULES_FILE], "tests": [test]}))
    ran = promtool("test", "rules", str(tmp_path / "tests.yml"))
    said = ran.stdout + ran.stderr
    assert says in said
    name = labels.get("pod", labels["instance"])
    assert f"31.25% of the running requests on {name} are preempted every second" in said
