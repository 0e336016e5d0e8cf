"""Confidence rises with evidence and falls with what speaks against; what follows is folded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM, DOUBTFUL_BELOW, Case, strength
from kneewatch.diagnose.ranking import EXPLAINS, ROOTS, ranked
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.diagnose.situations import CALM, CONCLUSIVE, HEAVY_PROMPTS, Situation

REUSED = CONCLUSIVE["prefix_churn"].but(block_reuse_per_s=1.0)
OFF, STALLS = CONCLUSIVE["prefix_cache_off"], CONCLUSIVE["prefill_interference"]
LOST = CONCLUSIVE["prefix_reuse_lost"].but(kv_capacity_tokens=1e7)
RISING: list[tuple[str, str, Situation, list[float]]] = [
    ("kv_pressure", "preemption_ratio_per_s", CONCLUSIVE["kv_pressure"], [0.001, 0.05, 0.1]),
    ("kv_pressure", "kv_usage_avg_ratio", CONCLUSIVE["kv_pressure"], [0.6, 0.8, 0.9, 1.0]),
    ("kv_pressure", "waiting_by_capacity", CONCLUSIVE["kv_pressure"], [0, 1, 2]),
    ("queue_saturation", "waiting_by_capacity", CONCLUSIVE["queue_saturation"], [3, 4, 9]),
    ("queue_saturation", "itl_mean_drift_ratio", CONCLUSIVE["queue_saturation"], [0.5, 1.6, 3]),
    ("queue_saturation", "waiting_slope_per_s", CONCLUSIVE["queue_saturation"], [0, 0.11, 0.3]),
    ("admission_limit", "itl_mean_drift_ratio", CONCLUSIVE["admission_limit"], [1.5, 1, 0.5]),
    ("prefix_cache_off", "prefill_service_ratio", OFF, [0.05, 0.08, 0.2]),
    ("prefix_reuse_lost", "prefix_hit_ratio", LOST, [0.29, 0.2, 0.05, 0.0]),
    ("prefix_churn", "prefix_hit_ratio", CONCLUSIVE["prefix_churn"], [0.44, 0.3, 0.2]),
    ("prefix_churn", "block_eviction_per_s", REUSED, [0.1, 5, 20]),
    ("prefix_churn", "kv_capacity_tokens", CONCLUSIVE["prefix_churn"], [5e5, 3e5, 1e5]),
    ("adapter_thrash", "waiting_deferred_avg", CONCLUSIVE["adapter_thrash"], [0.2, 1, 4]),
    ("adapter_thrash", "lora_change_per_s", CONCLUSIVE["adapter_thrash"], [0, 0.11, 0.4]),
    ("kv_transfer_slow", "kv_transfer_mean_s", CONCLUSIVE["kv_transfer_slow"], [0.06, 0.08, 0.2]),
    ("spec_decode_poor", "spec_acceptance_ratio", CONCLUSIVE["spec_decode_poor"], [0.49, 0.3, 0]),
    ("spec_decode_poor", "running_avg", CONCLUSIVE["spec_decode_poor"], [1, 32, 64]),
    ("prefill_interference", "itl_stall_time_ratio", CONCLUSIVE["prefill_interference"], [0.05, 1]),
    ("prefill_interference", "prefill_long_per_s", STALLS, [0.0, 0.02, 1]),
    ("slo_conflict", "itl_p99_s", CONCLUSIVE["slo_conflict"], [0.11, 0.15, 0.3]),
    ("prefill_bound", "ttft_p99_s", CONCLUSIVE["prefill_bound"], [1.1, 1.5, 3]),
    ("decode_bound", "itl_p50_s", CONCLUSIVE["decode_bound"], [0.11, 0.15, 0.3]),
    ("past_knee", "ttft_p99_p50_drift_ratio", CONCLUSIVE["past_knee"], [2, 3, 4]),
    ("past_knee", "running_avg", CONCLUSIVE["past_knee"], [15, 20, 40]),
    ("runaway_generation", "answers_moved_ratio", CONCLUSIVE["runaway_generation"], [1.2, 1.7, 4]),
    ("underused", "running_avg", CONCLUSIVE["underused"], [0.5, 0.3, 0]),
    ("kv_overprovisioned", "kv_usage_max_ratio", CONCLUSIVE["kv_overprovisioned"], [0.5, 0.3, 0.1]),
]


@pytest.mark.parametrize(
    ("cause_id", "signal", "situation", "ever_stronger"),
    [pytest.param(*row, id=f"{row[0]} by {row[1]}") for row in RISING],
)
def test_stronger_evidence_means_more_confidence(
    cause_id: str, signal: str, situation: Situation, ever_stronger: list[float]
) -> None:
    causes = [situation.but(**{signal: value}).causes().get(cause_id) for value in ever_stronger]
    confidences = [cause.confidence if cause else 0.0 for cause in causes]
    assert confidences == sorted(confidences)
    assert confidences[0] < confidences[-1]


@pytest.mark.parametrize(
    ("cause_id", "with_doubt"),
    [
        pytest.param(
            "kv_pressure",
            CONCLUSIVE["kv_pressure"].but(kv_usage_avg_ratio=0.6, waiting_by_capacity=4.0),
            id="preemptions with a cache that is not full",
        ),
        pytest.param(
            "adapter_thrash",
            CONCLUSIVE["adapter_thrash"].but(kv_usage_avg_ratio=0.97),
            id="deferred requests with a cache that is full as well",
        ),
        pytest.param(
            "prefix_reuse_lost",
            CONCLUSIVE["prefix_reuse_lost"].but(prefix_hit_ratio=0.15, kv_capacity_tokens=1e7),
            id="some prefixes still hit",
        ),
        pytest.param(
            "prefill_interference",
            CONCLUSIVE["prefill_interference"].but(itl_p50_drift_ratio=2.0),
            id="the median step is slower too",
        ),
        pytest.param(
            "underused",
            CONCLUSIVE["underused"].but(gpu_engine_active_ratio=0.8),
            id="few requests on a GPU that is busy",
        ),
    ],
)
def test_evidence_against_is_told_and_costs_confidence(
    cause_id: str, with_doubt: Situation
) -> None:
    sure, doubted = CONCLUSIVE[cause_id].causes()[cause_id], with_doubt.causes()[cause_id]
    assert sure.against == ()
    assert doubted.against
    assert doubted.confidence < sure.confidence


def test_an_unknown_signal_is_no_evidence() -> None:
    for cause_id, signal in (("kv_pressure", "kv_usage_avg_ratio"), ("past_knee", "ttft_p99_s")):
        situation = CONCLUSIVE[cause_id].but(**{signal: None})
        cause = situation.causes().get(cause_id)
        sides = (*cause.evidence, *cause.against) if cause else ()
        assert signal not in {evidence.signal for evidence in sides}
    queue = CONCLUSIVE["queue_saturation"].but(kv_usage_avg_ratio=None).causes()
    assert "kv_usage_avg_ratio" not in {e.signal for e in queue["queue_saturation"].evidence}


def test_what_is_told_as_evidence_is_true() -> None:
    small = CONCLUSIVE["spec_decode_poor"].but(running_avg=2.0).causes()["spec_decode_poor"]
    assert not [e for e in small.evidence if "verification dearer" in e.text]
    quick = CONCLUSIVE["queue_saturation"].but(itl_mean_drift_ratio=1.0, running_max=20.0)
    texts = [e.text for e in quick.causes()["queue_saturation"].evidence]
    assert not [text for text in texts if "steps are slow" in text]


# The arithmetic


@pytest.mark.parametrize(
    ("value", "threshold", "below", "expected"),
    [
        pytest.param(0.05, 0.05, False, 0.5, id="at the threshold: half"),
        pytest.param(0.10, 0.05, False, 1.0, id="at twice it: whole"),
        pytest.param(9.0, 0.05, False, 1.0, id="never more than whole"),
        pytest.param(0.025, 0.05, False, 0.25, id="short of it: less than half"),
        pytest.param(0.0, 0.05, False, 0.0, id="nothing: nothing"),
        pytest.param(0.5, 0.5, True, 0.5, id="below, at the threshold: half"),
        pytest.param(0.25, 0.5, True, 1.0, id="below, at half of it: whole"),
        pytest.param(0.0, 0.5, True, 1.0, id="below, nothing left: whole"),
        pytest.param(1.0, 0.5, True, 0.25, id="below, short of it: less than half"),
        pytest.param(3.0, None, False, 1.0, id="no threshold: whole"),
        pytest.param(3.0, 0.0, False, 1.0, id="a threshold of zero: whole"),
    ],
)
def test_strength(value: float, threshold: float | None, expected: float, *, below: bool) -> None:
    assert strength(value, threshold, below=below) == pytest.approx(expected)


@given(
    value=st.floats(-10, 1e6), more=st.floats(0, 1e6), threshold=st.floats(1e-6, 1e6),
    below=st.booleans(),
)  # fmt: skip
def test_strength_is_a_share_that_grows_beyond_the_threshold(
    value: float, more: float, threshold: float, *, below: bool
) -> None:
    near, far = (
        strength(value, threshold, below=below),
        strength(value - more if below else value + more, threshold, below=below),
    )
    assert 0 <= near <= far <= 1


def case(log_odds: float, severity: Severity = Severity.CRITICAL) -> Cause | None:
    """A case with so much for it."""
    return Case("x", "X.", "X.", severity, log_odds=log_odds).close()


def test_a_case_below_even_odds_is_not_concluded_and_a_doubtful_one_pages_nobody() -> None:
    assert case(math.log(CONCLUDED_FROM / (1 - CONCLUDED_FROM)) - 0.01) is None
    doubtful, sure = case(0.1), case(math.log(DOUBTFUL_BELOW / (1 - DOUBTFUL_BELOW)) + 0.01)
    assert doubtful is not None
    assert doubtful.severity == Severity.INFO
    assert sure is not None
    assert sure.severity == Severity.CRITICAL
    assert doubtful.confidence < sure.confidence


# Ranking


def cause(cause_id: str, severity: Severity, confidence: float = 0.9) -> Cause:
    """A cause with nothing but what ranking looks at."""
    return Cause(
        id=cause_id,
        confidence=confidence,
        severity=severity,
        summary="X.",
        evidence=(),
        against=(),
        guide=(),
        lever="X.",
    )


def test_the_worst_comes_first_and_of_equals_the_surest() -> None:
    causes = [
        cause("spec_decode_poor", Severity.WARNING, 0.7),
        cause("underused", Severity.INFO, 0.99),
        cause("adapter_thrash", Severity.WARNING, 0.9),
        cause("kv_pressure", Severity.CRITICAL, 0.6),
    ]
    assert [c.id for c in ranked(causes)] == [
        *("kv_pressure", "adapter_thrash", "spec_decode_poor", "underused")
    ]
    assert ranked(list(reversed(causes))) == ranked(causes)
    assert ranked([]) == []


@pytest.mark.parametrize("head", list(EXPLAINS))
def test_what_follows_from_a_cause_is_told_with_it(head: str) -> None:
    others = [cause(other, Severity.WARNING, 0.95) for other in EXPLAINS[head]]
    causes = ranked([*others, cause(head, Severity.CRITICAL, 0.6)])
    assert causes[0].id == head
    assert set(causes[0].explains) == set(EXPLAINS[head])
    assert [c.id for c in causes] == [head]


LOST_PREFIX = cause("prefix_reuse_lost", Severity.WARNING)
PAGE = cause("queue_saturation", Severity.CRITICAL, 0.99)
SMALL_QUEUE = cause("queue_saturation", Severity.INFO)


@pytest.mark.parametrize("severity", [Severity.INFO, Severity.WARNING, Severity.CRITICAL])
def test_a_root_cause_is_as_bad_as_what_follows_from_it(severity: Severity) -> None:
    for order in ([LOST_PREFIX, PAGE], [PAGE, LOST_PREFIX]):
        (head,) = ranked([replace(c, severity=severity) if c is LOST_PREFIX else c for c in order])
        assert (head.id, head.explains) == ("prefix_reuse_lost", ("queue_saturation",))
        assert head.severity == Severity.CRITICAL
        assert head.confidence == LOST_PREFIX.confidence, "it is no surer for it"
    (worse,) = ranked([replace(LOST_PREFIX, severity=Severity.CRITICAL), SMALL_QUEUE])
    assert worse.severity == Severity.CRITICAL, "a small queue makes it no better"


@pytest.mark.parametrize(
    "weak",
    [
        pytest.param(replace(LOST_PREFIX, apart=True), id="nothing follows from it now"),
        pytest.param(replace(LOST_PREFIX, confidence=DOUBTFUL_BELOW - 0.01), id="doubtful"),
    ],
)
def test_what_explains_nothing_stands_beside_the_page_with_its_own_severity(weak: Cause) -> None:
    assert [(c.id, c.severity, c.explains) for c in ranked([weak, PAGE])] == [
        ("queue_saturation", Severity.CRITICAL, ()),
        ("prefix_reuse_lost", Severity.WARNING, ()),
    ]
    sure = replace(weak, apart=False, confidence=DOUBTFUL_BELOW)
    assert [c.id for c in ranked([sure, PAGE])] == ["prefix_reuse_lost"]


def test_what_explains_nothing_is_still_explained() -> None:
    apart = replace(PAGE, apart=True, confidence=0.5)
    assert [c.id for c in ranked([LOST_PREFIX, apart])] == ["prefix_reuse_lost"]


@pytest.mark.parametrize("head", list(EXPLAINS))
def test_what_a_cause_explains_is_all_that_follows(head: str) -> None:
    for other in EXPLAINS[head]:
        assert set(EXPLAINS.get(other, ())) <= set(EXPLAINS[head]), other


STARVED = replace(cause("decode_bound", Severity.WARNING), root=True)


@pytest.mark.parametrize("head", [head for head in EXPLAINS if "decode_bound" in EXPLAINS[head]])
def test_a_root_heads_what_explains_it_otherwise(head: str) -> None:
    other = cause(head, Severity.CRITICAL)
    assert [c.id for c in ranked([other, replace(STARVED, root=False)])] == [head]
    (first,) = ranked([other, STARVED])
    is_below = head in ROOTS["decode_bound"]
    assert first.id == ("decode_bound" if is_below else head)
    assert first.severity == Severity.CRITICAL


@pytest.mark.parametrize("head", [head for head in EXPLAINS if "decode_bound" in EXPLAINS[head]])
def test_all_is_reported_with_a_root_and_nothing_twice(head: str) -> None:
    present = {"decode_bound", head, *EXPLAINS[head], *ROOTS["decode_bound"]}
    causes = [
        STARVED if each == "decode_bound" else cause(each, Severity.WARNING) for each in present
    ]
    reported = [name for c in ranked(causes) for name in (c.id, *c.explains)]
    assert sorted(reported) == sorted(present)


@pytest.mark.parametrize("cause_id", ["queue_saturation", "kv_pressure", "admission_limit"])
def test_idle_gpus_head_the_queue_that_slow_steps_make(cause_id: str) -> None:
    slow = replace(
        CONCLUSIVE[cause_id].but(itl_p50_s=0.15, itl_p99_s=0.2), targets=Targets(itl_p99_s=0.1)
    )
    idle, *others = ranked([*slow.but(gpu_engine_active_ratio=0.3).causes().values()])
    assert (idle.id, others) == ("decode_bound", [])
    assert cause_id in idle.explains
    assert "the GPU idles while requests run" in idle.evidence[-1].text
    busy, *_ = ranked([*slow.but(gpu_engine_active_ratio=0.9).causes().values()])
    assert busy.id == cause_id


def test_a_cause_is_explained_by_way_of_another_though_that_one_is_not_there() -> None:
    """Requests that queue behind a slow prefill make both targets fail."""
    assert "slo_conflict" in EXPLAINS["prefix_reuse_lost"]
    conflict = cause("slo_conflict", Severity.CRITICAL)
    (head,) = ranked([conflict, LOST_PREFIX])
    assert (head.id, head.severity) == ("prefix_reuse_lost", Severity.CRITICAL)


def test_who_explains_more_is_reported_worst_first() -> None:
    others = [
        PAGE,
        cause("past_knee", Severity.INFO),
        cause("slo_conflict", Severity.CRITICAL, 0.7),
    ]
    (head,) = ranked([LOST_PREFIX, *others])
    assert head.explains == ("queue_saturation", "slo_conflict", "past_knee")


def test_an_explained_cause_explains_nothing_itself() -> None:
    causes = ranked(
        [
            cause("prefix_churn", Severity.CRITICAL),
            cause("queue_saturation", Severity.WARNING, 0.99),
            cause("spec_decode_poor", Severity.WARNING),
            cause("past_knee", Severity.WARNING, 0.7),
        ]
    )
    assert [c.id for c in causes] == ["prefix_churn", "spec_decode_poor"]
    assert set(causes[0].explains) == {"queue_saturation", "past_knee"}


def test_what_explains_nothing_that_is_there_says_nothing() -> None:
    (alone,) = ranked([cause("kv_pressure", Severity.WARNING)])
    assert alone.explains == ()
    heavy = replace(HEAVY_PROMPTS, quiet={}).but(prefix_hit_ratio=0.0)
    assert [c.explains for c in ranked(list(heavy.causes().values()))] == [()]
    assert ranked(list(CALM.causes().values())) == []
