"""The alerts of alerts.toml for a plan. The head of that file explains what is put in. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from kneewatch.collector.names.vllm_metrics import VLLM_PREFIX
from kneewatch.collector.packaged import packaged_tables
from kneewatch.collector.signals.expr import bound_matcher
from kneewatch.collector.signals.vllm import within_ttft
from kneewatch.dashboards.prometheus.rule_group import Alert, Group, Plan, span
from kneewatch.diagnose.fleet.routers import IDLE_KV, QUEUED_MIN, ROUTERS
from kneewatch.rules.facts import number
from kneewatch.rules.rule import BY_WORD, Severity


class AlertText(Struct, frozen=True, forbid_unknown_fields=True):
    """An alert as alerts.toml has it."""

    name: str
    when: str
    expr: str
    summary: str
    description: str
    action: str
    page: str
    severity: tuple[str, ...] = ()
    for_s: float | str = 0.0
    labels: Mapping[str, str] = {}
    group: str = "alerts"
    bounds: str = ""
    target: str = ""
    burn_rate: float = 0.0


_TABLES = packaged_tables("dashboards.prometheus", "alerts.toml")
_PARTS: Mapping[str, str] = _TABLES["parts"]
ALERTS = msgspec.convert(_TABLES["alert"], list[AlertText])

NAME = re.compile(r"<(\w+)>")
METRIC = re.compile(r"\b(vllm:|DCGM_FI_|process_start_time_)(\w+)(?:\{([^}]*)\})?")
SHORTEST_BURN_S = 300.0
"""The shortest range of the alerts on burn rates. They need four scrapes in it."""


def alert_group(plan: Plan) -> Group:
    """All alerts about servers, GPUs and routers."""
    return _group(plan, "alerts")


def own_group(plan: Plan) -> Group:
    """Alerts on the causes and stages that kneewatch concludes, and on kneewatch itself."""
    return _group(plan, "own")


def _group(plan: Plan, name: str) -> Group:
    durations, texts = _durations(plan), _texts(plan)
    return Group(
        f"kneewatch-{name}",
        tuple(
            _alert(plan, row, severity, durations, texts | own)
            for row in ALERTS
            if row.group == name
            for severity, own in _variants(plan, row)
        ),
    )


def _durations(plan: Plan) -> dict[str, float]:
    """The durations that an alert may name, in seconds."""
    return {
        "range": max(2 * plan.window_s, plan.range_s),
        "over": max(300.0, plan.range_s),
        "settles": plan.settles_s,
        "settles_twice": 2 * plan.settles_s,
        "scrapes": 2 * plan.scrape_s,
        "down": max(120.0, 2 * plan.scrape_s),
        "gone": max(5 * plan.window_s, 5 * plan.scrape_s),
        "fresh": max(75.0, 1.25 * plan.scrape_s),
    }


def _texts(plan: Plan) -> dict[str, str]:
    """What is put in for the names in all alerts."""
    durations = _durations(plan)
    return {
        **{name: span(seconds) for name, seconds in durations.items()},
        **{f"{name}_s": number(seconds) for name, seconds in durations.items()},
        **{question: _of_routers(plan, question) for question in ("ready", "queue", "errors")},
        "pool": plan.pool,
        "queued": number(QUEUED_MIN),
        "idle_kv": number(IDLE_KV),
        "le": bound_matcher(le.bound) if (le := within_ttft(plan.targets.ttft_p99_s)) else "",
    }


def _of_routers(plan: Plan, question: str) -> str:
    """A selector for the metric of each known router that answers a question.

    The production-stack router exports metrics under vLLM's own prefix. It is left out if the
    engines use another prefix.
    """
    names = [name for router in ROUTERS if (name := getattr(router, question))]
    own = plan.prefix == VLLM_PREFIX
    names = [name for name in names if own or not name.startswith(VLLM_PREFIX)]
    return names[0] if len(names) == 1 else f'{{__name__=~"{_either(names)}"}}'


def _either(names: Sequence[str]) -> str:
    """A regular expression for any of these names; the end that some share is written once."""
    by_end: dict[str, list[str]] = {}
    for name in names:
        by_end.setdefault("_".join(name.split("_")[-4:]), []).append(name)
    return "|".join(
        of[0] if len(of) == 1 else f"({'|'.join(name.removesuffix(end) for name in of)}){end}"
        for end, of in by_end.items()
    )


def _variants(plan: Plan, row: AlertText) -> Iterator[tuple[Severity, dict[str, str]]]:
    """Yields the severity of each alert that a row stands for, and what is put in for it."""
    if row.bounds:
        yield from _bounds(plan, row.bounds)
        return
    own: dict[str, str] = {}
    if row.target:
        if (target_s := getattr(plan.targets, row.target)) is None:
            return
        own["target"] = number(target_s)
    if row.burn_rate:
        if within_ttft(plan.targets.ttft_p99_s) is None or not plan.serves(SHORTEST_BURN_S):
            return
        own["least"] = number(max(0.001, 1 - row.burn_rate * (1 - plan.objective_ratio)))
    for word in row.severity:
        yield BY_WORD[word], own | {"level": str(int(BY_WORD[word]))}


def _bounds(plan: Plan, rule_id: str) -> Iterator[tuple[Severity, dict[str, str]]]:
    """For the warning and the critical bound of a rule, milder first: the severity, and a
    comparison that ends where the next bound begins. So at most one of the alerts fires."""
    (rule,) = (rule for rule in plan.rules() if rule.id == rule_id)
    bounds = sorted(
        (bound for bound in rule.bounds if bound.severity >= Severity.WARNING),
        key=lambda bound: bound.severity,
    )
    for at, bound in enumerate(bounds):
        below = "".join(f" <= {number(worse.threshold)}" for worse in bounds[at + 1 : at + 2])
        yield bound.severity, {"bounds": f"> {number(bound.threshold)}{below}"}


def _alert(
    plan: Plan,
    row: AlertText,
    severity: Severity,
    durations: Mapping[str, float],
    texts: Mapping[str, str],
) -> Alert:
    def filled(text: str) -> str:
        while (whole := NAME.sub(part, text)) != text:
            text = whole
        return NAME.sub(lambda match: texts[match[1]], METRIC.sub(selector, text))

    def part(match: re.Match[str]) -> str:
        return _PARTS.get(match[1], match[0])

    def selector(match: re.Match[str]) -> str:
        return _selector(plan, *match.groups(default=""))

    of, _, about = row.page.partition("/")
    kind = {"kneewatch": "cause" if of == "causes" else "finding", of.removesuffix("s"): about}
    annotations = {
        "summary": filled(row.summary),
        "description": filled(row.description),
        "action": row.action,
        "runbook_url": f"{plan.runbooks}/{row.page}",
    }
    return Alert(
        row.name,
        filled(row.expr),
        durations[row.for_s] if isinstance(row.for_s, str) else row.for_s,
        {"severity": severity.word} | kind | dict(row.labels),
        annotations | _links(plan, row.labels.get("kneewatch", "")),
    )


def _selector(plan: Plan, family: str, name: str, matchers: str) -> str:
    """A metric with the plan's prefix and selector."""
    if family == "vllm:":
        return plan.dialect.series(name, extra=matchers)
    of = plan.gpu_selector if family == "DCGM_FI_" else plan.selector
    inner = ",".join(part for part in (of, matchers) if part)
    return f"{family}{name}{{{inner}}}" if inner else f"{family}{name}"


def _links(plan: Plan, kind: str) -> dict[str, str]:
    """The links of an alert of a kind to its triage page and dashboard, as far as the addresses are
    known."""
    links: dict[str, str] = {}
    if plan.triage_url and not kind:
        links["triage"] = f"{plan.triage_url.rstrip('/')}/{{{{ $labels.instance }}}}"
    if plan.grafana_url:
        board, variable, label = {
            "": ("replica", "replica", "instance"),
            "gpu": ("gpus", "node", "Hostname"),
        }.get(kind, ("fleet", "model", "model_name"))
        links["dashboard_url"] = (
            f"{plan.grafana_url.rstrip('/')}/d/kneewatch-{board}"
            f"?var-{variable}={{{{ $labels.{label} | urlquery }}}}"
        )
    return links
