"""One alert for a pool: where it fires, and what it says of the pool and its worst replica. Pure.

An alert has the labels of its pool alone, so that it stays the same alert while replicas come and
go. Its annotations ask Prometheus for the rest when they are written.
"""

from __future__ import annotations

from kneewatch.dashboards.prometheus.rule_group import Plan
from kneewatch.rules.facts import recorded
from kneewatch.rules.rule import Severity

WHERE = (
    "{{ with $labels.model_name }}{{ . }}{{ else }}the model{{ end }}"
    "{{ with $labels.namespace }} in {{ . }}{{ end }}"
    "{{ with $labels.job }} (job {{ . }}){{ end }}"
)
"""An alert's pool in an annotation: its model, namespace and job."""

WORST_NAME = '{{ with label "pod" $worst }}{{ . }}{{ else }}{{ label "instance" $worst }}{{ end }}'


def firing(plan: Plan, in_force: str, severity: Severity) -> str:
    """How many replicas of a pool are affected, where the worst of them has this severity.

    `in_force` is an expression that gives engines their severities. A note counts all of them,
    worse alerts those at warning or worse.
    """
    least = min(severity, Severity.WARNING)
    worst = f"(max by ({plan.pool}) ({in_force}) == {int(severity)})"
    return f"{affected(plan, f'{in_force} >= {int(least)}')} and on ({plan.pool}) {worst}"


def affected(plan: Plan, engines: str) -> str:
    """How many replicas of each pool have an engine among these."""
    return f"count by ({plan.pool}) (max by ({plan.replica}) ({engines}))"


def count_text(plan: Plan, *, also: str = "") -> str:
    """How many of the pool's replicas are affected, as a template: "5 of 8 replicas of llama in
    chat". `also` is a series of replicas that are not scraped."""
    of_pool = "{%s}"
    seen = recorded("running") + of_pool + (f" or {also}{of_pool}" if also else "")
    pools = "$pool $pool" if also else "$pool"
    query = f'printf "count(count by ({plan.replica}) ({seen}))" {pools}'
    total = f"{{{{ with {query} | query }}}} of {{{{ . | first | value }}}}{{{{ end }}}}"
    return f'{_pool(plan)}{{{{ printf "%.0f" $value }}}}{total} replicas of {WHERE}'


def worst_text(plan: Plan, query: str, text: str) -> str:
    """A template about the replica that a query finds, as `$worst`; empty where it finds none.

    `query` has POOL for the pool's matchers, and no other percent sign.
    """
    pools = " ".join(["$pool"] * query.count(POOL))
    asked = query.replace('"', r"\"").replace(POOL, "%s")
    query = f'printf "{asked}" {pools}'
    return (
        f"{_pool(plan)}{{{{ with {query} | query }}}}{{{{ $worst := first . }}}}{text}{{{{ end }}}}"
    )


POOL = "%POOL%"
"""In a query of `worst_text`: the matchers of the alert's pool."""


def _pool(plan: Plan) -> str:
    """The matchers of the alert's pool as the template's variable `$pool`."""
    matchers = ",".join(f"{label}=%q" for label in plan.pool_labels)
    values = " ".join(f"$labels.{label}" for label in plan.pool_labels)
    return f'{{{{ $pool := printf "{matchers}" {values} }}}}'
