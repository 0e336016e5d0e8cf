"""The pools of a fleet on the triage page: their replicas, and facts about them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kneewatch.diagnose.fleet.verdict import FleetVerdict, target_of
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.fleet_rendering import engine_facts
from kneewatch.reports.triage.view_model import RANKS, WORST_FIRST, ReplicaRow
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import plural, quantity

SHOWN: Mapping[str, str] = {
    "kv_usage_ratio": "KV up to {}",
    "running": "{} running",
    "waiting": "{} waiting",
    "ttft_p99_s": "TTFT P99 up to {}",
    "itl_p99_s": "ITL P99 up to {}",
}
"""Words for a pool's signals: sums over its replicas, or the worst replica's value."""


def replica_rows(fleet: FleetVerdict, pool: str) -> list[ReplicaRow]:
    """The replicas of a pool, worst first."""
    own = sorted((e for e in fleet.engines if e.pool == pool), key=lambda e: RANKS[e.health])
    worst = {engine.replica: engine for engine in own}
    rows = [
        ReplicaRow(name, target_of(pool, name), engine.health, engine_facts(engine))
        for name, engine in worst.items()
    ]
    rows += [
        ReplicaRow(gone.replica, "", "unknown", "does not answer" if gone.down else "has no series")
        for gone in fleet.gone
        if gone.pool == pool and gone.replica not in worst
    ]
    return sorted(rows, key=lambda row: -RANKS[row.health])


def pool_facts(verdict: Verdict, rows: list[ReplicaRow], targets: Targets) -> list[str]:
    """Facts about a pool: its replicas by health, and its signals with their targets."""
    stated = {"ttft_p99_s": targets.ttft_p99_s, "itl_p99_s": targets.itl_p99_s}
    counts = Counter(row.health for row in rows)
    tally = ", ".join(f"{counts[word]} {word}" for word in WORST_FIRST if counts[word])
    values = {key: verdict.values.get(key) for key in SHOWN}
    return [
        f"{plural(len(rows), 'replica')}: {tally}",
        *(
            SHOWN[key].format(quantity(key, value))
            + (
                ""
                if (most := stated.get(key)) is None
                else f" (target {quantity(key, most, stated=True)})"
            )
            for key, value in values.items()
            if value is not None
        ),
    ]
