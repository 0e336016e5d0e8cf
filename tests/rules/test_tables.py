"""The guide's tables, row by row: each is covered, or it is said why it cannot be."""

from __future__ import annotations

from collections import Counter

import pytest

from kneewatch.diagnose.ranking import BY_ID, EXAMINED, EXPLAINS
from kneewatch.diagnose.verdict import SYMPTOMS
from kneewatch.reports.weekly.guide_tables import Row
from tests.guide_rows import ROWS
from tests.rules.judged import ALL

FLEET = {"routing_dilution", "replica_imbalance", "mixed_tiers", "bad_node", "cold_replica",
         "router_fault"}  # fmt: skip
HARDWARE = {"gpu_throttled", "gpu_fault"}
OBSERVER = {"engine_restarted", "target_down", "metrics_missing"}
FROM_LOG = {"startup_failed", "engine_died"}
DESIGNED = FLEET | HARDWARE | OBSERVER | FROM_LOG | {
    *("kv_pressure", "queue_saturation", "admission_limit", "past_knee"),
    *("prefix_cache_off", "prefix_reuse_lost", "prefix_churn", "prefix_block_too_large"),
    *("prefill_interference", "prefill_bound", "decode_bound", "slo_conflict"),
    *("spec_decode_poor", "adapter_thrash", "kv_transfer_slow"),
    *("underused", "kv_overprovisioned", "tp_overhead", "runaway_generation", "engine_stalled"),
    *("engine_asleep", "kv_leak", "kv_exhaustion_ahead"),
    *("workload_drift", "clients_give_up", "client_errors", "host_memory_leak"),
    *("spec_acceptance_drift", "host_contention", "slow_steps"),
    *("unexplained_latency",
    "usual_changed", "requests_failing", "kv_held", "metrics_stale"),
}  # fmt: skip
"""The cause ids that are promised to stay: DESIGN, "Cause ids". Others may be added."""

PER_PAGE = {record.id for record in EXAMINED} | {
    *("target_down", "metrics_missing", "usual_changed"),
}
"""What one engine's facts show, and what is concluded by whoever fetches its page."""

BY_ROW = pytest.mark.parametrize("row", ROWS, ids=[f"{row.section}: {row.subject}" for row in ROWS])


@pytest.mark.parametrize(
    ("section", "rows"),
    [
        pytest.param("9.3", 13, id="9.3 lists thirteen metrics"),
        pytest.param("7.7", 6, id="7.7 lists six"),
        pytest.param("7.4", 7, id="7.4 has seven decisions"),
        pytest.param("8.5", 8, id="8.5 has eight symptoms"),
    ],
)
def test_a_table_is_covered_row_by_row(section: str, rows: int) -> None:
    assert Counter(row.section for row in ROWS)[section] == rows


@pytest.mark.parametrize(("section", "least"), [("9.1 step 13", 2), ("9.4", 5), ("9.5", 1)])
def test_prose_is_covered(section: str, least: int) -> None:
    assert Counter(row.section for row in ROWS)[section] >= least


@BY_ROW
def test_a_row_names_only_what_exists(row: Row) -> None:
    assert set(row.rules) <= {rule.id for rule in ALL}
    assert set(row.causes) <= PER_PAGE


@BY_ROW
def test_a_row_is_covered_or_says_why_not(row: Row) -> None:
    assert row.rules or row.causes or row.gap
    assert row.subject
    assert not row.gap.endswith("."), "gaps are cells of a table"


def test_no_row_stands_twice() -> None:
    assert len({(row.section, row.subject) for row in ROWS}) == len(ROWS)


def test_rules_of_a_row_cite_its_section_of_the_guide() -> None:
    sections = {rule.id: rule.guide for rule in ALL}
    uncited = [
        (row.section, rule)
        for row in ROWS
        for rule in row.rules
        if row.section in ("9.3", "7.7", "9.4") and row.section not in sections[rule]
    ]
    assert uncited == []


def test_symptoms_are_the_rows_of_the_list_in_its_order() -> None:
    rows = [row for row in ROWS if row.section == "8.5"]
    assert [row.subject.split()[0] for row in rows] == list(SYMPTOMS)
    assert {each for symptom in SYMPTOMS.values() for each in symptom.causes} <= set(BY_ID)
    assert all(row.rules or row.causes for row in rows), "each can be observed"


def test_every_promised_cause_is_there() -> None:
    assert DESIGNED - PER_PAGE == FLEET | FROM_LOG, "what one page cannot show"
    assert {c for explained in EXPLAINS.values() for c in explained} <= set(BY_ID)
    assert set(BY_ID) >= DESIGNED


def test_what_explains_is_not_explained_by_what_it_explains() -> None:
    both = [(a, b) for a, others in EXPLAINS.items() for b in others if a in EXPLAINS.get(b, ())]
    assert both == []
    assert not [cause for cause, others in EXPLAINS.items() if cause in others]
