"""PromQL in the words that mean the same to VictoriaMetrics. Pure.

Its own `rate`, `increase` and `changes` begin with the last sample before the window: a longer
window than the sidecar's, in which something else may have been. `increase_prometheus` and
`changes_prometheus` begin with the first sample inside; its oldest versions that vmalert is in use
with have no `rate_prometheus`, so the rate is the increase over the time that it was seen in. That
is Prometheus's, whose extrapolation to the whole window is divided by the whole window again.
"""

from __future__ import annotations

import re

RANGE = r"([^()]*\[\w+\](?: offset \w+)?)"
SPELLED = (
    (
        re.compile(rf"\brate\({RANGE}\)"),
        r"(increase_prometheus(\1) / (tlast_over_time(\1) - tfirst_over_time(\1)))",
    ),
    (re.compile(rf"\bincrease\({RANGE}\)"), r"increase_prometheus(\1)"),
    (re.compile(rf"\bchanges\({RANGE}\)"), r"changes_prometheus(\1)"),
)


def metricsql(expr: str) -> str:
    """An expression as VictoriaMetrics from 1.79 on evaluates it like Prometheus."""
    for pattern, said in SPELLED:
        expr = pattern.sub(said, expr)
    return expr
