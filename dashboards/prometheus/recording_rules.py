"""Recording rules: the signals that the dashboards draw, per engine. Pure."""

from __future__ import annotations

import re

from kneewatch.dashboards.grafana.boards import BOARDS
from kneewatch.dashboards.prometheus.rule_group import Group, Plan, Record
from kneewatch.rules.facts import PREFIX, recorded

RECORDED = re.compile(rf"\b{PREFIX}([\w:]+)")
"""Matches the name of a recorded series in an expression; the group is the signal's key."""

SHOWN_S = 60.0
"""Seconds between two recordings. No alert reads the recorded series."""


def drawn() -> tuple[str, ...]:
    """The keys of the signals that the dashboards draw, in the order of their panels."""
    panels = (panel for board in BOARDS for row in board.rows for panel in row.panels)
    exprs = (query.expr for panel in panels for query in panel.queries)
    return tuple(dict.fromkeys(key for expr in exprs for key in RECORDED.findall(expr)))


def signal_group(plan: Plan) -> Group:
    """A recording rule for each signal that the dashboards draw."""
    exprs = {signal.key: signal.expr.promql(plan.dialect) for signal in plan.signals()}
    rules = tuple(Record(recorded(key), expr) for key in drawn() if (expr := exprs[key]))
    return Group("kneewatch-signals", rules, max(SHOWN_S, plan.interval_s))
