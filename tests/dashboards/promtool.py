"""promtool's rule tester as an engine: rules over a recording, and what they come to when.

promtool prints what it got wherever that is not what was expected; nothing is expected here.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from kneewatch.agent.captures import STATUS_OK
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.samples import Series
from kneewatch.dashboards.prometheus.rule_files import RECORDED

TIMES = ("vllm:lora_requests_info",)
"""Series whose values are times: promtool's clock begins at 0."""

ASKED = re.compile(r"expr: \"(?P<expr>.*)\", time: (?P<time>[^,]+),")
SAMPLE = re.compile(r"(?P<labels>\{[^{}]*\}) (?P<value>[-+.\dEeNaInf]+)")


class Sample(Struct, frozen=True):
    """A sample of an answer: its labels as PromQL writes them, name included."""

    labels: str
    value: float


def needed(
    groups: Sequence[Mapping[str, Any]], wanted: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """The groups with the rules that are wanted, and the records that these read, directly or
    through others: promtool takes as long for every other rule."""
    rules = [rule for group in groups for rule in group["rules"]]
    exprs = [rule["expr"] for rule in rules if wanted(rule)]
    read: set[str] = set()
    while exprs:
        more = {name for expr in exprs for name in RECORDED.findall(expr)} - read
        read |= more
        exprs = [rule["expr"] for rule in rules if rule.get("record") in more]
    return [
        {**group, "rules": [r for r in group["rules"] if wanted(r) or r.get("record") in read]}
        for group in groups
    ]


def series_of(path: Path, *, step_s: float, instance: str) -> tuple[dict[Series, str], int, float]:
    """A recording's series as promtool writes them, the number of steps, and the first time.

    A series is stale where a page lacks it, and all are where a scrape failed.
    """
    entries = list(CaptureReader(path))
    first_s = entries[0].t_s
    parser = PageParser(Limits())
    rows: dict[Series, dict[int, str]] = {}
    live: set[Series] = set()
    last = 0
    for entry in entries:
        at = max(last, round((entry.t_s - first_s) / step_s))
        last = at
        shown: dict[Series, float] = {}
        ok = entry.body is not None and entry.status in (None, STATUS_OK)
        if ok and entry.body is not None:
            page = parser.parse(entry.body, content_type=entry.content_type)
            shown = {
                _own(series, instance): value - first_s * (series.name in TIMES)
                for series, value in page.samples()
            }
        shown[Series("up", (("instance", instance), ("job", "vllm")))] = float(ok)
        for series, value in shown.items():
            rows.setdefault(series, {})[at] = repr(value)
        for series in live.difference(shown):
            rows[series][at] = "stale"
        live = set(shown)
    values_by_series = {
        series: " ".join(points.get(at, "_") for at in range(last + 1))
        for series, points in rows.items()
    }
    return values_by_series, last + 1, first_s


def evaluate(
    folder: Path,
    rules: str,
    series: Mapping[Series, str],
    exprs: Sequence[str],
    *,
    step_s: float,
    steps: int,
    from_step: int = 0,
    evaluated_each_s: float | None = None,
    series_step_s: float | None = None,
) -> dict[str, list[list[Sample]]]:
    """What each expression comes to at each step (from one on), the rules evaluated at each step
    before it (at another interval, if told); the series have a value at each step of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yml").write_text(rules)
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": f"{round(1000 * (evaluated_each_s or step_s))}ms",
        "tests": [
            {
                "interval": f"{round(1000 * (series_step_s or step_s))}ms",
                "input_series": [
                    {"series": _spelled(series_labels), "values": values}
                    for series_labels, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": expr,
                        "eval_time": f"{round(1000 * step_s * at)}ms",
                        "exp_samples": [{"labels": "nothing", "value": 0}],
                    }
                    for expr in exprs
                    for at in range(from_step, steps)
                ],
            }
        ],
    }
    # JSON is YAML.
    (folder / "tests.yml").write_text(json.dumps(document))
    ran = subprocess.run(
        ["promtool", "test", "rules", str(folder / "tests.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    asked = len(exprs) * (steps - from_step)
    return _answers(ran.stdout + ran.stderr, exprs, step_s=step_s, steps=steps, asked=asked)


def _answers(
    output: str, exprs: Sequence[str], *, step_s: float, steps: int, asked: int
) -> dict[str, list[list[Sample]]]:
    by_expr: dict[str, list[list[Sample]]] = {expr: [[] for _ in range(steps)] for expr in exprs}
    seen = 0
    for block in output.split("expr: ")[1:]:
        question = ASKED.match("expr: " + block)
        assert question is not None, block[:300]
        expr = json.loads(f'"{question["expr"]}"')
        at = round(_seconds(question["time"]) / step_s)
        got = block.partition("got:")[2]
        by_expr[expr][at] = [
            Sample(match["labels"], float(match["value"])) for match in SAMPLE.finditer(got)
        ]
        seen += 1
    assert seen == asked, output[:2000]
    return by_expr


def _seconds(span: str) -> float:
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    parts = re.findall(r"([\d.]+)(ms|h|m|s)", span)
    return sum(float(amount) * units[unit] for amount, unit in parts)


def _own(series: Series, instance: str) -> Series:
    labels = dict(series.labels) | {"instance": instance, "job": "vllm"}
    return Series(series.name, tuple(sorted(labels.items())))


def _spelled(series: Series) -> str:
    inner = ", ".join(f"{name}={json.dumps(value)}" for name, value in series.labels)
    return f"{series.name}{{{inner}}}"
