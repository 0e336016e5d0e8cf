"""Recommendations as a person reads them."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.recommend.recommendation import (
    MEASURED,
    Change,
    Recommendation,
    change_words,
)
from kneewatch.reports.diagnosis_text import Style, markdown, text
from kneewatch.reports.recommendation_text import advised, rows, stop_gap
from tests.recordings import CAPTURES, diagnoses
from tests.reports.diagnoses import SICK, changed
from tests.reports.documents import document
from tests.reports.schema import problems

FP8 = Recommendation(
    id="kv-fp8",
    cause="kv_pressure",
    changes=(Change("--kv-cache-dtype", "auto", "fp8"),),
    summary="The same memory holds 2.0 times the KV blocks in FP8.",
    before={"kv_capacity_tokens": 5088, "kv_usage_ratio": 0.99, "preemption_per_s": 4.8},
    predicted={
        "kv_capacity_tokens": 10208,
        "kv_usage_ratio": 0.8,
        "kv_demand_ratio": 0.8,
        "preemption_per_s": 0.0,
    },
    cost_usd_per_hour=0.0,
    checks=("quality on long contexts",),
    risk="Quality can suffer.",
    verify=("preemption_per_s goes to 0 within 5 minutes",),
    guide=("7.4",),
)
REPLICAS = replace(
    FP8, id="replicas", changes=(Change("replicas", 1, 3),), cost_usd_per_hour=6.0,
    predicted={"kv_demand_ratio": 0.95}, suffices=False,
)  # fmt: skip
ADVISED = replace(SICK, recommendations=(FP8, REPLICAS))


def test_the_best_in_full_and_the_others_short() -> None:
    assert text([ADVISED], Style(), footers=False).splitlines()[13:] == [
        "   do first: --kv-cache-dtype auto -> fp8. The same memory holds 2.0 times the KV blocks "
        "in FP8.",
        "   expected: KV tokens 5,088 -> 10,208; KV usage 99% -> 80%; preemptions/s 4.8 -> 0",
        "   check before: quality on long contexts",
        "   verify: preemption_per_s goes to 0 within 5 minutes",
        "   alternatives: replicas 1 -> 3 (not enough alone, +6 USD/h)",
    ]


def test_markdown_says_the_same() -> None:
    rendered = markdown([ADVISED])
    assert "**Do first:** --kv-cache-dtype auto -\\> fp8. The same memory" in rendered
    assert "**Verify:** preemption_per_s goes to 0" in rendered
    assert "**Alternatives:** replicas 1 -\\> 3" in rendered


def test_one_document_has_one_truth_about_now() -> None:
    numbers_checked = 0
    for diagnosis in diagnoses(CAPTURES / "kv_pressure_cascade.jsonl.gz"):
        for recommendation in document(diagnosis)["recommendations"]:
            assert not re.search(r"from [0-9.]+ ", " ".join(recommendation["verify"]))
            for key, signal in MEASURED.items():
                if key in recommendation["before"]:
                    now = diagnosis.values[signal]
                    assert recommendation["before"][key] == pytest.approx(now, rel=1e-5), (
                        key,
                        recommendation["id"],
                    )
                    numbers_checked += 1
    assert numbers_checked > 100


def test_the_numbers_of_now_are_those_of_the_diagnosis() -> None:
    values = {**SICK.values, "kv_usage_avg_ratio": 0.89, "preemption_per_s": 6.5}
    diagnosis = changed(ADVISED, values=values)
    (cause,) = diagnosis.causes
    for rendered in (text([diagnosis], Style()), markdown([diagnosis]).replace("\\", "")):
        assert "KV usage 89% -> 80%; preemptions/s 6.5 -> 0" in rendered
    assert advised(diagnosis, cause)[0].changes == ADVISED.recommendations[0].changes


def test_the_document() -> None:
    json_document = document(ADVISED)
    assert problems(json_document) == []
    first, second = json_document["recommendations"]
    assert first["changes"] == [{"flag": "--kv-cache-dtype", "from": "auto", "to": "fp8"}]
    assert first["predicted"]["kv_capacity_tokens"] == 10208
    assert second["cost_usd_per_hour"] == 6.0


def test_the_price_is_told() -> None:
    assert "expected: +6.00 USD/h" in rows([REPLICAS])


def test_advice_without_a_change() -> None:
    lines = rows([replace(FP8, changes=(), predicted={})])
    assert lines[0].startswith("advice: The same memory")
    assert rows([]) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change("--max-num-seqs", None, 64), "--max-num-seqs -> 64"),
        (Change("--gpu-memory-utilization", 0.9, 0.95), "--gpu-memory-utilization 0.9 -> 0.95"),
        (Change("--no-enable-prefix-caching", True, None), "drop --no-enable-prefix-caching"),
        (Change("--enable-prefix-caching", False, True), "add --enable-prefix-caching"),
        (Change("--speculative-config", "{}", None), "drop --speculative-config"),
    ],
)
def test_changes_as_they_are_typed(change: Change, words: str) -> None:
    assert change_words(change) == words


def test_every_cause_to_act_on_has_a_stop_gap_in_plain_text() -> None:
    pages = {cause_id: stop_gap(cause_id) for cause_id in BY_ID}
    without = {cause_id for cause_id, steps in pages.items() if not steps}
    assert without == {
        "kv_overprovisioned",
        "prefix_block_too_large",
        "spec_acceptance_drift",
        "tp_overhead",
        "underused",
    }
    assert pages["kv_pressure"][1] == "Stop batch jobs and very long prompts first."
    assert not [step for steps in pages.values() for step in steps if re.search(r"[`\]]|\n", step)]
    assert stop_gap("of_another_version") == ()
