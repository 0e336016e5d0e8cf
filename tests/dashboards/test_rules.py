"""The exported rules: what promtool, and a recording of trouble, say of them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kneewatch.collector.errors import SettingsError
from kneewatch.collector.signals.signal import Signal
from kneewatch.dashboards.prometheus.alerts import expressible
from kneewatch.dashboards.prometheus.causes import cause_queries, gate_of, left_out
from kneewatch.dashboards.prometheus.promtool_tests import TESTS_FILE, promtool_files, scenarios
from kneewatch.dashboards.prometheus.recording_rules import inexpressible
from kneewatch.dashboards.prometheus.rule_files import (
    OBJECT_FILE,
    RULES_FILE,
    Flavor,
    groups,
    rule_files,
)
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan, Record
from kneewatch.diagnose.causes.ranking import CAUSES
from kneewatch.rules.facts import Targets
from tests.programs import require

PLANS = {
    "plain": Plan(),
    "with targets": Plan(
        targets=Targets(2.0, 0.1), gpus=8, peak_flop_per_s=989e12, peak_bytes_per_s=3.35e12
    ),
    "short window, other names": Plan(
        window_s=15.0, interval_s=2.0, scrape_s=2.0, prefix="ray_vllm_", selector='cluster="a"',
        gpu_join=(("pod", "exported_pod"),),
        triage_url="https://triage.example/triage",
    ),
    "joined": Plan(gpu_join=(("namespace", "exported_namespace"), ("pod", "exported_pod"))),
}  # fmt: skip


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([require("promtool"), *args], capture_output=True, text=True, check=False)


@cache
def files_of(name: str) -> Mapping[str, str]:
    """The files of a plan, made once: to write YAML takes a second."""
    return {**rule_files(PLANS[name]), **promtool_files(PLANS[name])}


def write_for_vmalert(folder: Path, name: str) -> Path:
    """The path of the VictoriaMetrics rules of a plan."""
    rules = folder / RULES_FILE
    rules.write_text(rule_files(PLANS[name], Flavor.VICTORIA)[RULES_FILE])
    return rules


@cache
def document_of(name: str) -> Mapping[str, Any]:
    """The rules of a plan as they are read; not to be changed."""
    return loaded(files_of(name)[RULES_FILE])


def loaded(text: str) -> dict[str, Any]:
    """YAML, by the quicker parser."""
    document: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)
    return document


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


def only(folder: Path, wanted: str) -> list[dict[str, Any]]:
    """Leave the scenarios that a pattern finds: what they expect, and their series."""
    tests = loaded((folder / TESTS_FILE).read_text())
    (test,) = tests["tests"]
    test["promql_expr_test"] = [e for e in test["promql_expr_test"] if re.search(wanted, e["expr"])]
    test["input_series"] = [s for s in test["input_series"] if re.search(wanted, s["series"])]
    (folder / TESTS_FILE).write_text(json.dumps(tests))  # JSON is YAML
    queries: list[dict[str, Any]] = test["promql_expr_test"]
    return queries


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        pytest.param("with targets", "", id="with targets, all"),
        # They differ where targets are not stated: at a queue, and where all is well.
        pytest.param("plain", "serves|served|preempted", id="plain"),
        pytest.param("joined", "GPU", id="joined"),
    ],
)
def test_the_exported_tests_pass(tmp_path: Path, plan: str, wanted: str) -> None:
    assert len(only(write(tmp_path, plan), wanted)) >= 3
    ran = promtool("test", "rules", str(tmp_path / TESTS_FILE))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_all_scenarios_are_in_the_exported_tests() -> None:
    (test,) = loaded(files_of("joined")[TESTS_FILE])["tests"]
    played = scenarios(PLANS["joined"])
    assert [len(e["exp_samples"]) for e in test["promql_expr_test"]] == [
        len(scenario.fires) for scenario in played
    ]
    for scenario in played:
        named = [other.name for other in played if other.name.startswith(scenario.name)]
        assert named == [scenario.name]
        assert all(re.search(rf'="{scenario.name}', series) for series in scenario.series)
    alerts_by_scenario = {
        scenario.name: sorted(alert for alert, _ in scenario.fires) for scenario in played
    }
    assert alerts_by_scenario["a GPU falls off the bus"] == [
        "KneewatchCauseGpuFault",
        "KneewatchGpuFault",
    ], "a GPU that is joined is told of its server too"


def test_the_exported_tests_can_fail(tmp_path: Path) -> None:
    write(tmp_path, "plain")
    rules = tmp_path / RULES_FILE
    rules.write_text(rules.read_text().replace("irate(vllm:num_preemptions", "irate(vllm:gone"))
    only(tmp_path, "preempted")
    ran = promtool("test", "rules", str(tmp_path / TESTS_FILE))
    assert ran.returncode == 1
    assert "KneewatchCauseKvPressure" in ran.stdout + ran.stderr


@pytest.mark.parametrize("plan", PLANS)
def test_vmalert_accepts_its_rules(tmp_path: Path, plan: str) -> None:
    rules = write_for_vmalert(tmp_path, plan)
    assert vmalert_says(rules) == ""
    document = loaded(rules.read_text())
    exprs = [rule["expr"] for group in document["groups"] for rule in group["rules"]]
    assert max(map(len, exprs)) < 16384, "VictoriaMetrics refuses longer queries"
    own = re.compile(r"\b(rate|increase|changes)\(")
    assert not any(own.search(expr) for expr in exprs), "they begin before the window"


def test_vmalert_refuses_what_it_does_not_understand(tmp_path: Path) -> None:
    rules = write_for_vmalert(tmp_path, "plain")
    rules.write_text(rules.read_text().replace("irate(", "irate(("))
    assert "kneewatch:cascade_evidence" in vmalert_says(rules)


def vmalert_says(rules: Path) -> str:
    """What vmalert has against a file; nothing where it accepts it."""
    command = [require("vmalert"), "-dryRun", f"-rule={rules}", "-loggerLevel=ERROR"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bool(ran.returncode) == bool(ran.stderr)
    return ran.stderr


def test_there_are_negative_scenarios() -> None:
    quiet = [scenario.name for scenario in scenarios(Plan()) if not scenario.fires]
    assert len(quiet) >= 4


def test_every_signal_is_recorded_or_named_as_left_out() -> None:
    plan = PLANS["with targets"]
    text = files_of("with targets")[RULES_FILE]
    for signal in plan.signals():
        assert isinstance(signal, Signal)
        recorded = f"record: kneewatch:{signal.key}\n" in text
        assert recorded != (signal in inexpressible(plan)), signal.key
        assert recorded or f"signal {signal.key} " in text


def test_every_rule_is_an_alert_or_named_as_left_out() -> None:
    plan = PLANS["with targets"]
    can, cannot = expressible(plan)
    assert {rule.id for rule in plan.rules()} == {
        *(rule.id for rule in can),
        *(rule.id for rule, _ in cannot),
    }
    text = files_of("with targets")[RULES_FILE]
    assert all(f"rule {rule.id} (needs {signal}" in text for rule, signal in cannot)
    gpu_rules = [line for line in text.splitlines() if "needs gpu_" in line]
    assert gpu_rules
    assert all("state with --gpu-join" in line for line in gpu_rules)
    assert "KV-EVICT" in {rule.id for rule in can}


@pytest.mark.parametrize("plan", PLANS)
def test_every_series_that_is_read_is_recorded(plan: str) -> None:
    rules = [rule for group in document_of(plan)["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    read = {name for rule in rules for name in re.findall(r"kneewatch:[\w:]+", rule["expr"])}
    assert read - recorded == set()


def test_every_cause_is_concluded_or_named_as_left_out() -> None:
    plan = PLANS["with targets"]
    concluded = {query.record.id for query in cause_queries(plan)}
    assert {record.id for record in CAUSES} - concluded - {"target_down"} == set(left_out(plan))
    assert all(left_out(plan).values()), "each with its reason"


def test_alerts_carry_what_a_person_needs() -> None:
    document = document_of("short window, other names")
    alerts = [rule for group in document["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 50
    for alert in alerts:
        assert {"summary", "description", "action"} <= set(alert["annotations"])
        assert "guide" not in alert["annotations"], "readers do not have its text"
        assert all(alert["annotations"].values()), "an empty annotation is no use to anybody"
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        if alert["labels"]["kneewatch"] in ("cause", "finding", "stage"):
            link = alert["annotations"]["triage"]
            assert link.startswith("https://triage.example/triage/{{")
            assert '{{ label "instance" $worst }}' in link


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
            kind = {"alert", "for", "keep_firing_for", "annotations"}
            assert set(rule) <= {"expr", "labels"} | (kind if "alert" in rule else {"record"})
            assert isinstance(rule["expr"], str)
            for key in ("for", "keep_firing_for"):
                assert SPAN.fullmatch(rule.get(key, ""))
            for key in ("labels", "annotations"):
                assert all(isinstance(value, str) for value in rule.get(key, {}).values())
    assert len(text) < 1_000_000, "Kubernetes keeps no object above 1.5 MiB"


def test_thresholds_are_the_users() -> None:
    plan = Plan(thresholds={"KV-EVICT": {"warning": 0.123}})
    text = rule_files(plan)[RULES_FILE]
    assert re.search(r"preemption_ratio_per_s > 0\.123\b", text)
    with pytest.raises(SettingsError, match="KV-EVICTION"):
        rule_files(Plan(thresholds={"KV-EVICTION": {"warning": 0.1}}))


def test_names_and_selector_reach_every_series() -> None:
    text = files_of("short window, other names")[RULES_FILE]
    assert "vllm:" not in text.replace("ray_vllm_", "")
    assert not re.search(r"ray_vllm_\w+(?!\w|{)", text)


def test_an_alert_has_the_labels_of_a_pool_alone() -> None:
    alerts = [rule for group in groups(Plan()) for rule in group.rules if isinstance(rule, Alert)]
    of_pools = [
        alert for alert in alerts if alert.labels["kneewatch"] in ("cause", "finding", "stage")
    ]
    assert len(of_pools) > 50
    for alert in of_pools:
        assert alert.expr.lstrip("(").startswith(f"count by ({Plan().pool}) ("), alert.name
    assert not {"pod", "instance", "engine"} & set(Plan().pool_labels)


def test_lean_rules_have_no_findings_and_record_only_what_is_read() -> None:
    lean = [rule for group in groups(Plan(lean=True)) for rule in group.rules]
    read = {name for rule in lean for name in re.findall(r"kneewatch:[\w:]+", rule.expr)}
    assert {rule.name for rule in lean if isinstance(rule, Record)} <= read
    kinds = {
        plan: {
            (rule.name, rule.labels["severity"])
            for group in groups(plan_of)
            for rule in group.rules
            if isinstance(rule, Alert) and rule.labels["kneewatch"] != "finding"
        }
        for plan, plan_of in (("all", Plan()), ("lean", Plan(lean=True)))
    }
    assert kinds["lean"] == kinds["all"]
    assert not any(
        rule.labels["kneewatch"] == "finding" for rule in lean if isinstance(rule, Alert)
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_signal_that_no_rule_reads_is_recorded_once_and_more_seldom(plan: str) -> None:
    judging, shown, *_ = groups(PLANS[plan])
    names = [rule.name for group in (judging, shown) for rule in group.rules]
    keys = {f"kneewatch:{signal.key}" for signal in PLANS[plan].signals()}
    signals = [name for name in names if name in keys]
    assert len(signals) == len(set(signals))
    read = {name for group in groups(PLANS[plan]) for rule in group.rules
            for name in re.findall(r"kneewatch:[\w:]+", rule.expr)}  # fmt: skip
    assert {rule.name for rule in shown.rules} == set(signals) - read
    assert shown.interval_s == max(60.0, PLANS[plan].interval_s)
    assert len(shown.rules) > 40


def test_a_ratio_reads_the_quantiles_that_are_recorded_before_it() -> None:
    exprs = {rule.name: rule.expr for group in groups(Plan()) for rule in group.rules}
    assert exprs["kneewatch:ttft_p99_p50_ratio"] == (
        "kneewatch:ttft_p99_s / (kneewatch:ttft_p50_s > 0)"
    )
    unordered = {r.name: r.expr for g in groups(Plan(ordered=False)) for r in g.rules}
    assert "kneewatch" not in unordered["kneewatch:ttft_p99_p50_ratio"]


@pytest.mark.parametrize("plan", PLANS)
def test_a_rate_that_many_signals_read_is_computed_once(plan: str) -> None:
    judging = groups(PLANS[plan])[0].rules
    shared = {rule.expr: rule.name for rule in judging if rule.name.endswith(":rate")}
    assert "kneewatch:inter_token_latency_seconds_count:rate" in shared.values()
    names = [rule.name for rule in judging]
    for rule in (rule for group in groups(PLANS[plan]) for rule in group.rules):
        for rate, name in shared.items():
            assert rule.name == name or rate not in rule.expr
            if name in rule.expr and rule in judging:
                assert names.index(name) < names.index(rule.name), "computed before it is read"
    assert not any("_bucket" in name for name in shared.values()), "a series for each bucket"
    unordered = [rule for group in groups(Plan(ordered=False)) for rule in group.rules]
    assert not any(rule.name.endswith(":rate") for rule in unordered)


def test_evidence_is_weighed_where_the_gate_of_its_cause_is_open() -> None:
    judging = groups(Plan())[0].rules
    at = {rule.name: place for place, rule in enumerate(judging)}
    for query in cause_queries(Plan()):
        place, gate = at[gate_of(query)], gate_of(query)
        sure = judging[place + 1]
        assert (sure.name, sure.labels) == ("kneewatch:cause_confidence", {"cause": query.series})
        weighed = re.findall(r"clamp(?:_max)?\(0\.5", sure.expr)
        assert sure.expr.count(f"and {gate}") >= len(weighed)


def test_rules_are_either_kind() -> None:
    assert all(isinstance(rule, Record | Alert) for group in groups(Plan()) for rule in group.rules)
