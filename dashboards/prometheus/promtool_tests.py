"""Tests of the rules for promtool: simulated servers and GPUs, and the alerts that must fire for
them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import VLLM
from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.collector.signals.promql import Dialect, NoSeriesError, duration, number
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, groups, yaml_text
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan
from kneewatch.rules.cascade import EVICT_CRITICAL_PER_S

Texts = dict[str, str]


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of promtool_scenarios.toml, whose head explains the fields."""

    name: str
    servers: tuple[dict[str, Any], ...] = ()
    gpus: dict[str, Texts] = field(default_factory=dict[str, Texts])
    own: Texts = field(default_factory=dict[str, str])
    fires: Texts = field(default_factory=dict[str, str])

    def series(self, plan: Plan) -> Texts:
        """Its series by name and labels, each with its values."""
        series: Texts = {}
        for at, played in enumerate(self.servers):
            name = f"{self.name}, {at}" if len(self.servers) > 1 else ""
            series |= Server(plan, self.name, name=name).plays(played)
        for gpu, fields in self.gpus.items():
            series |= self._gpu(plan, gpu, fields)
        labels = f'namespace="{self.name}",instance="kneewatch",target="r0",model="m",engine="0"'
        for key, text in self.own.items():
            name, _, more = key.rstrip("}").partition("{")
            named = ",".join(filter(None, (more, labels)))
            series[f"kneewatch_{name}{{{named}}}"] = values_of(text, plan)
        return series

    def _gpu(self, plan: Plan, name: str, fields: Texts) -> Texts:
        """The series of a busy H100 on a node of its own; `fields` replace what it shows."""
        node, _, mig = name.partition(" ") if name.startswith("MIG") else (name, "", "")
        node = f"{self.name}: {node}"
        labels = {"gpu": "0", "UUID": node, "modelName": "NVIDIA H100 80GB HBM3", "Hostname": node}
        inner = ", ".join(pairs(labels | ({"GPU_I_ID": mig} if mig else {})))
        busy = packaged_tables("dashboards.prometheus", "promtool_scenarios.toml")["busy_gpu"]
        shown = {key: number(value) for key, value in busy.items()} | fields
        return {f"DCGM_FI_{key}{{{inner}}}": values_of(text, plan) for key, text in shown.items()}


def values_of(text: str, plan: Plan) -> str:
    """Values in promtool's notation (start+step x count), from phases as in the head of the
    table."""
    phases, steps = text.split(), steps_of(plan)
    first, _, count = phases[0].partition("x")
    lengths = [round(steps / len(phases))] * len(phases)
    if count:
        few = int(count) % steps
        phases[0], lengths = first, [few, steps - few]
    if len(phases) == 2 and phases[1] == "stale":
        return f"{phases[0]}x{lengths[0]} stale"
    parts: list[str] = []
    reached = 0.0
    for phase, length in zip(phases, lengths, strict=True):
        start, plus, per_s = phase.partition("+")
        value = float(start) if start else reached
        step = float(per_s or 0) * plan.scrape_s
        parts.append(f"{number(value)}{plus}{number(step) if plus else ''}x{length}")
        reached = value + step * (length + 1)
    return " ".join(parts)


# --- Simulated servers ----------------------------------------------------------------------------


LASTS_S = 2400.0
"""Seconds that a scenario lasts. Its problem begins in the middle."""


def steps_of(plan: Plan) -> int:
    """Number of scrapes in a scenario."""
    return round(LASTS_S / plan.scrape_s)


class Server:
    """The series of a simulated server, in promtool's notation (start+step x count). The servers of
    a scenario serve the same model in the same namespace; both have the scenario's name."""

    def __init__(self, plan: Plan, scenario: str, *, name: str = "") -> None:
        self._plan, self._scenario = plan, scenario
        self._process = {"instance": name or scenario, "job": "vllm", "namespace": scenario}
        self._kind = plan.engine
        number = "engine" if self._kind is VLLM else self._kind.engine_label or "rank"
        self._engine = self._process | {"model_name": scenario, number: "0"}
        self.steps = steps_of(plan)
        self.half = self.steps // 2

    def plays(self, played: Mapping[str, Any]) -> Texts:
        """The series of a server of a scenario."""
        busy = dict(played.get("busy", {}))
        if "waiting" in busy:
            busy["waiting"] = values_of(busy["waiting"], self._plan)
        if "at_limit" in busy:
            critical = self._plan.thresholds.get("KV-EVICT", {}).get("critical")
            limit = busy.pop("at_limit") * busy["running"]
            busy["preempted_per_s"] = limit * (critical or EVICT_CRITICAL_PER_S)
        series = self.busy(**busy) if busy else {}
        if until := played.get("until"):
            count = self.half if until == "half" else until
            series = {
                k: f"{values.partition('x')[0]}x{count} stale" for k, values in series.items()
            }
        others = "other_engine" if self._kind is not VLLM else ""
        for kind, named in (("engine", self.named), ("page", self.page), (others, self.named)):
            for key, text in played.get(kind, {}).items():
                name, _, labels = key.rstrip("}").partition("{")
                series[named(name, *filter(None, [labels]))] = values_of(text, self._plan)
        return {name: values for name, values in series.items() if name}

    def level(self, value: float) -> str:
        """The values of a constant gauge."""
        return f"{number(value)}x{self.steps}"

    def rate(self, per_s: float) -> str:
        """The values of a counter or gauge that grows by `per_s` per second."""
        return f"0+{number(per_s * self._plan.scrape_s)}x{self.steps}"

    def named(self, metric: str, *labels: str) -> str:
        """The series of the engine that is, or is a part of, a canonical one; empty without one."""
        spelled = Dialect(self._plan.range_s, prefix=self._plan.prefix)
        if self._kind is VLLM:
            return spelled.labelled(metric, [", ".join((*pairs(self._engine), *labels))])
        name, suffix = SUFFIXED.fullmatch(metric).groups()  # type: ignore[union-attr]
        where = [label for label in labels if re.match(r"(?!le=)\w+=", label)]
        extra = ", ".join((*pairs(self._engine), *(each for each in labels if each not in where)))
        given = tuple((label, value[1:-1]) for label, _, value in (w.partition("=") for w in where))
        # Where a label is the table's, the sources without it are all that it does not name.
        unnamed = replace(self._kind, sources=tuple(s for s in self._kind.sources if not s.labels))
        for dialect, labelled in ((spelled, given), (replace(spelled, kind=unnamed), ())):
            with suppress(NoSeriesError):
                own, *_ = dialect.each(name, suffix, labelled, extra)
                return PATTERN.sub(lambda match: f'="{_first(match[1])}"', own)
        return ""

    def page(self, metric: str, *labels: str) -> str:
        """A series that has no labels of an engine."""
        return f"{metric}{{{', '.join((*pairs(self._process), *labels))}}}"

    @property
    def up(self) -> str:
        """The series `up` of the server."""
        return self.page("up")

    def busy(
        self,
        *,
        running: float,
        waiting: str = "",
        usage: float = 0.5,
        preempted_per_s: float = 0.0,
        served_per_s: float = 4.0,
        tokens_per_s: float = 800.0,
        itl_s: float = 0.02,
    ) -> dict[str, str]:
        """The series of a serving server with a TTFT of 0.2 s."""
        queue = waiting or self.level(0)
        series = {
            self.named("num_requests_running"): self.level(running),
            self.named("num_requests_waiting"): queue,
            self.named("num_requests_waiting_by_reason", 'reason="capacity"'): queue,
            self.named("num_requests_waiting_by_reason", 'reason="deferred"'): self.level(0),
            self.named("kv_cache_usage_perc"): self.level(usage),
            self.named("num_preemptions_total"): self.rate(preempted_per_s),
            self.named("generation_tokens_total"): self.rate(tokens_per_s),
            self.named("iteration_tokens_total_count"): self.rate(bool(tokens_per_s) / itl_s),
            self.named("prompt_tokens_total"): self.rate(4 * served_per_s),
            self.named("request_success_total", 'finished_reason="stop"'): self.rate(served_per_s),
            self.up: self.level(1),
        }
        if self._kind is not VLLM:
            series[self.named("engine_steps_total")] = self.rate(tokens_per_s)
            series[self.named("decode_passes_total")] = self.rate(bool(tokens_per_s) / itl_s)
        for name, bounds, value_s, per_s in (
            ("time_to_first_token_seconds", (0.1, 0.25, 1.0), 0.2, served_per_s),
            ("inter_token_latency_seconds", (0.01, 0.025, 0.05, 0.075, 0.5), itl_s, tokens_per_s),
            ("e2e_request_latency_seconds", (1.0, 5.0, 10.0), 4.0, served_per_s),
            ("request_prefill_time_seconds", (0.1, 0.3, 1.0), 0.05, served_per_s),
        ):
            series |= self._histogram(name, bounds, value_s=value_s, per_s=per_s)
        return series

    def _histogram(
        self, name: str, bounds: tuple[float, ...], *, value_s: float, per_s: float
    ) -> dict[str, str]:
        """The series of a histogram whose observations are all equal to `value_s`."""
        series = {
            self.named(f"{name}_bucket", f'le="{bound}"'): self.rate(
                per_s if bound >= value_s else 0.0
            )
            for bound in bounds
        }
        series[self.named(f"{name}_bucket", 'le="+Inf"')] = self.rate(per_s)
        series[self.named(f"{name}_count")] = self.rate(per_s)
        series[self.named(f"{name}_sum")] = self.rate(value_s * per_s)
        return series


SUFFIXED = re.compile(r"(\w+?)(_total|_bucket|_count|_sum|)")
PATTERN = re.compile(r'=~"([^"]*)"')


def _first(pattern: str) -> str:
    """A value that a pattern of an engine's table matches."""
    return re.sub(r"\(([^|)]*)\|[^)]*\)", r"\1", pattern).partition("|")[0]


def pairs(labels: Mapping[str, str]) -> Iterator[str]:
    """Yields labels in the form in which a selector has them."""
    return (f'{name}="{value}"' for name, value in labels.items())


# --- The test file --------------------------------------------------------------------------------


TESTS_FILE = "tests/kneewatch.tests.yml"
"""Path of the test file. It is not in the folder of the rules, so that a pattern such as `*.yml`
for rule files does not match it."""

HEAD = "# Generated by `kneewatch export prometheus-tests`: promtool test rules {}\n"

STATED = "TTFT-P99|ITL-P99"
"""A pattern for the rules whose alerts exist only if the user sets targets."""


@cache
def scenarios() -> tuple[Scenario, ...]:
    """All scenarios: those with problems, and those that only look like a problem."""
    tables = packaged_tables("dashboards.prometheus", "promtool_scenarios.toml")["scenarios"]
    return read_as(tables, tuple[Scenario, ...])


def promtool_files(plan: Plan) -> dict[str, str]:
    """The test file: text by file name. It must be stored next to the rule file.

    All scenarios are in a single test, because promtool takes as long for one server as for twelve.
    """
    document: dict[str, Any] = {
        "rule_files": [f"../{RULES_FILE}"],
        "evaluation_interval": duration(plan.interval_s),
        "tests": [_test(each) for each in plan.by_engine],
    }
    body = yaml_text(document)
    return {TESTS_FILE: HEAD.format(TESTS_FILE) + body}


def _test(plan: Plan) -> dict[str, Any]:
    """The scenarios whose alerts the engine has."""
    rules = [rule for group in groups(plan) for rule in group.rules]
    alerts = {rule.name for rule in rules if isinstance(rule, Alert)}
    all_scenarios = [scenario for scenario in scenarios() if scenario.fires.keys() <= alerts]
    series = {k: values for played in all_scenarios for k, values in played.series(plan).items()}
    return {
        "name": "; ".join(played.name for played in all_scenarios),
        "interval": duration(plan.scrape_s),
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [_expected(plan, scenario) for scenario in all_scenarios],
    }


def _expected(plan: Plan, scenario: Scenario) -> dict[str, Any]:
    """The expectation for promtool: exactly these alerts fire for the scenario's servers and
    GPUs."""
    firing = 'alertname=~"Kneewatch.+", alertstate="firing", severity=~"warning|critical"'
    fired = " or ".join(
        f'ALERTS{{{label}=~"{scenario.name}.*", {firing}, rule!~"{STATED}"}}'
        for label in ("namespace", "Hostname")
    )
    return {
        "expr": f"count by (alertname, severity) ({fired})",
        "eval_time": duration(LASTS_S - plan.scrape_s),
        "exp_samples": [
            {"labels": f'{{alertname="{name}", severity="{severity}"}}', "value": 1}
            for name, severity in sorted(scenario.fires.items())
        ],
    }
