"""The same facts through Python and through promtool: the same conclusion, confidence, severity."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.samples import Series
from kneewatch.dashboards.prometheus.causes import cause_groups, cause_queries, gate_of
from kneewatch.dashboards.prometheus.recording_rules import Recorded
from kneewatch.dashboards.prometheus.rule_group import CAUSE_SEVERITY, CONFIDENCE, Plan, Record
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.ranking import EXAMINED
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.rules.conditions import Compare, nodes
from kneewatch.rules.facts import Targets, recorded
from kneewatch.rules.quantities import RECENT, BaselineValue, Held, Named, Signal, signals_of
from kneewatch.rules.rule import WORDS
from tests.contract import golden
from tests.dashboards.promtool import evaluate
from tests.programs import require

STEP_S, STEPS = 5.0, 125
END_S = STEP_S * (STEPS - 1)
LABELS = re.compile(r'(\w+)="([^"]*)"')
METRIC = re.compile(r"\b(?:kneewatch|vllm):[\w:]+")
AT_ONCE = 120
"""Instances in one run of promtool, whose YAML parser takes the square of a file's length."""

CONCLUDABLE = [record for record in EXAMINED if record.forms and not record.sidecar]
PARTS = {record.id: tuple(nodes(record.forms)) for record in CONCLUDABLE}
"""The conditions and quantities that each record is made of."""


class Told(Struct, frozen=True):
    """A verdict: None and None where nothing is concluded."""

    confidence: float | None
    severity: str | None


def visible(facts: Facts, keys: frozenset[str]) -> Facts:
    """The facts without what only the sidecar can read."""
    values = {key: value for key, value in facts.values.items() if key in {*keys, "lora_max"}}
    return replace(facts, values=values, knee=None, endless=None, lengths=None, adapters=())


def consistent(record: CauseRecord, facts: Facts) -> bool:
    """Whether streaks and signals say the same, as on a real page, and the page has an engine."""
    if facts.values.get("running") is None:
        return False
    if "stalled" in facts.streaks_s and not facts.get("running") + facts.get("waiting") >= 1:
        return False
    for held in (node for node in PARTS[record.id] if isinstance(node, Held)):
        holds = held.of.python()(facts)
        if not held.flagged and holds != (held.name in facts.streaks_s):
            return False
    return True


def series_of(record: CauseRecord, facts: Facts, instance: str) -> Iterator[tuple[Series, str]]:
    """The facts as recorded series, and as those of vLLM that the record reads."""

    def constant(value: float, *, since_s: float = END_S, before: str = "_") -> str:
        ahead = STEPS - 1 - int(since_s / STEP_S + 1e-9)
        return " ".join([*([before] * ahead), f"{value!r}+0x{STEPS - ahead - 1}"])

    def named(name: str, *labels: tuple[str, str]) -> Series:
        return Series(name, (("instance", instance), *labels))

    streaks = {
        held.of.left.key: held
        for held in PARTS[record.id]
        if isinstance(held, Held) and isinstance(held.of, Compare)
        if isinstance(held.of.left, Signal | Named) and not held.flagged
    }

    def held_value(key: str, value: float, *, since_s: float = END_S) -> str:
        """A value that began when its condition did; without a streak, at `since_s`."""
        held = streaks.get(key)
        if held is None or held.name not in facts.streaks_s:
            return constant(value, since_s=since_s)
        return constant(value, since_s=min(END_S, facts.streaks_s[held.name]), before="0")

    watched_s = min(END_S, facts.observed_s)
    for key, value in facts.values.items():
        if value is None or key == "lora_max":
            continue
        yield named(recorded(key)), held_value(key, value, since_s=watched_s)
    for key, value in facts.recent.items():
        if value is not None:
            yield named(recorded(RECENT[key])), constant(value)
    for quantity in {node for node in PARTS[record.id] if isinstance(node, Named)}:
        value = quantity.read()(facts)
        if value is not None:
            yield named(recorded(quantity.key)), held_value(quantity.key, value)
    for usual in {node for node in PARTS[record.id] if isinstance(node, BaselineValue)}:
        value = usual.read()(facts)
        if value is not None:
            yield named(recorded(usual.name)), constant(value)
    queued_s = facts.streaks_s.get("queued")
    flag = constant(0.0) if queued_s is None else constant(
        1.0, since_s=min(END_S, queued_s), before="0"
    )  # fmt: skip
    yield named(recorded("queued")), flag
    if (caching := facts.config.get("enable_prefix_caching")) is not None:
        yield named("vllm:cache_config_info", ("enable_prefix_caching", caching)), constant(1.0)
    if facts.values.get("lora_max") is not None:
        yield named("vllm:lora_requests_info"), constant(1.0)
    stalled_s = facts.streaks_s.get("stalled", 0.0)
    for metric in ("generation_tokens_total", "request_success_total", "kv_cache_usage_perc"):
        moving = [repr(float(min(at * STEP_S, END_S - stalled_s))) for at in range(STEPS)]
        yield named(f"vllm:{metric}"), " ".join(moving)


def rows_of(record: CauseRecord) -> Mapping[Targets, dict[str, Facts]]:
    """Every stored fact around the record, by target and instance; those that are the same once."""
    by_targets: dict[Targets, dict[str, Facts]] = defaultdict(dict)
    for name, stored in golden.read().items():
        if name.partition(":")[0] == record.id:
            for at, (change, facts, _) in enumerate(stored.rows):
                label = re.sub("[^a-zA-Z0-9_=.]", "_", f"{name}_{at}_{change.label}")
                by_targets[facts.targets][label] = facts
    return by_targets


def of_prometheus(
    record: CauseRecord, facts: Mapping[str, Facts], plan: Plan, folder: Path
) -> dict[str, Told]:
    """What promtool makes of the recorded rules of one cause, by instance."""
    rules, _ = cause_groups(plan)
    gates = {gate_of(query) for query in cause_queries(plan) if query.record is record}
    own = [
        {"record": rule.name, "expr": rule.expr, "labels": dict(rule.labels)}
        for rule in rules.rules
        if isinstance(rule, Record)
        and (rule.name in gates or rule.labels.get("cause", "").partition(":")[0] == record.id)
    ]
    document = json.dumps({"groups": [{"name": "one", "rules": own}]})
    asked = (recorded(CONFIDENCE), recorded(CAUSE_SEVERITY))
    sure, grave = dict[str, float](), dict[str, float]()
    metrics = {metric for rule in own for metric in METRIC.findall(str(rule["expr"]))}
    # Facts whose series of these metrics are the same make one instance.
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    series_by_instance: dict[str, dict[Series, str]] = {}
    for instance, instance_facts in facts.items():
        series = {key: values for key, values in series_of(record, instance_facts, instance)
                  if key.name in metrics}  # fmt: skip
        content = tuple(sorted(f"{key.name} {key.labels[1:]} {values}"
                               for key, values in series.items()))  # fmt: skip
        if not alike[content]:
            series_by_instance[instance] = series
        alike[content].append(instance)
    instances = list(series_by_instance)
    for at in range(0, len(instances), AT_ONCE):
        series = {
            key: values
            for instance in instances[at : at + AT_ONCE]
            for key, values in series_by_instance[instance].items()
        }
        answers = evaluate(folder / str(at), document, series, asked, step_s=STEP_S, steps=STEPS,
                           from_step=STEPS - 1, evaluated_each_s=END_S)  # fmt: skip
        for expr, by_instance in zip(asked, (sure, grave), strict=True):
            by_instance |= {
                dict(LABELS.findall(sample.labels))["instance"]: sample.value
                for sample in answers[expr][-1]
            }
    words = {float(severity): word for severity, word in WORDS.items()}
    return {
        instance: Told(sure[first], words[grave[first]]) if first in grave else Told(None, None)
        for first, *others in alike.values()
        for instance in (first, *others)
    }


@pytest.mark.parametrize("record", CONCLUDABLE, ids=[record.id for record in CONCLUDABLE])
def test_python_and_promql_conclude_alike(record: CauseRecord, tmp_path: Path) -> None:
    require("promtool")
    compared = concluded = 0
    for at, (targets, rows) in enumerate(rows_of(record).items()):
        plan = Plan(targets=targets, interval_s=STEP_S, scrape_s=STEP_S)
        keys = Recorded(plan).keys
        seen = {label: visible(facts, keys) for label, facts in rows.items()}
        seen = {label: facts for label, facts in seen.items() if consistent(record, facts)}
        theirs = of_prometheus(record, seen, plan, tmp_path / str(at))
        for label, facts in seen.items():
            cause = record.examine(facts)
            ours = Told(None, None)
            if cause is not None:
                ours = Told(cause.confidence, cause.severity.word)
            other = theirs[label]
            assert (ours.severity, label) == (other.severity, label)
            assert ours.confidence == pytest.approx(other.confidence, abs=0.006), label
            compared, concluded = compared + 1, concluded + (cause is not None)
    assert compared > 10
    assert concluded, "the cause is among them"


def test_each_leaf_that_promql_lacks_is_named() -> None:
    keys = Recorded(Plan(targets=Targets(1.0, 0.1))).keys
    for record in CONCLUDABLE:
        for form in record.forms:
            for term in form.terms:
                unseen = [key for key in signals_of((term.value, term.when))
                          if key not in keys]  # fmt: skip
                assert not unseen or term.sidecar, f"{record.id}: {unseen} are not recorded"
