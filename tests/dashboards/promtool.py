"""promtool's rule tester as an engine: rules over a recording, and what they come to when.

promtool prints what it got wherever that is not what was expected; nothing is expected here.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from kneewatch.collector.page import Series

ASKED = re.compile(r"expr: \"(?P<expr>.*)\", time: (?P<time>[^,]+),")
SAMPLE = re.compile(r"(?P<labels>\{[^{}]*\}) (?P<value>[-+.\dEeNaInf]+)")


class Sample(Struct, frozen=True):
    """A sample of an answer: its labels as PromQL writes them, name included."""

    labels: str
    value: float


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


def _spelled(series: Series) -> str:
    inner = ", ".join(f"{name}={json.dumps(value)}" for name, value in series.labels)
    return f"{series.name}{{{inner}}}"
