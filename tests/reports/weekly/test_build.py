"""The whole report of values made by hand: each figure is what it must be."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from kneewatch.agent.stated_deployment import named_model
from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine_history import PastAdvice
from kneewatch.diagnose.recommend.advice import Advice, FlagChange
from kneewatch.diagnose.sizing.plan.workload_profile import SessionShape, read_profile
from kneewatch.diagnose.sizing.replica_count import SAFETY_DEFAULT
from kneewatch.diagnose.verdict import Cause, Evidence
from kneewatch.reports.json_schemas import schema as schema_of
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.build_report import EMPTY, build
from kneewatch.reports.weekly.figures import DOWN, SAME, UP, Period
from kneewatch.reports.weekly.guide_tables import kv_metrics, monitoring
from kneewatch.reports.weekly.incidents import title
from kneewatch.reports.weekly.observed import (
    SERVING,
    Episode,
    EpisodeObserved,
    Observed,
    Slot,
    Span,
    TierStated,
)
from kneewatch.reports.weekly.page.html import first_steps, incidents_in_full
from kneewatch.reports.weekly.report import TableRow, WeeklyReport, render_json
from kneewatch.reports.weekly.verdict import watched_words
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import number
from kneewatch.rules.rule import HOUR_S, Severity
from tests.diagnose.workloads import SMALLEST, lengths_table
from tests.reports.weekly.observing import (
    BEFORE,
    TO_S,
    WEEK,
    engine,
    level,
    observed,
    points,
    span,
    tier,
)

STATED = TierStated(
    Profile(
        targets=Targets(ttft_p99_s=1.0, itl_p99_s=0.2),
        benchmark={"benchmark.ttft_p99_s": 0.05, "benchmark.requests_per_s": 7.0},
        stated=Stated(gpus=2, usd_per_gpu_hour=3.0),
    )
)


def judged_by(**changed: object) -> TierStated:
    """The settings with others to judge by."""
    return replace(STATED, profile=replace(STATED.profile, **changed))


SCHEMA: dict[str, Any] = schema_of("report")


def made(of: Observed) -> WeeklyReport:
    """Its report."""
    return build(of, made_s=TO_S, version="0")


def row(rows: tuple[TableRow, ...], subject: str) -> TableRow:
    """A row of a table."""
    return next(table_row for table_row in rows if table_row.subject == subject)


def test_every_row_of_both_tables_is_there() -> None:
    (tables,) = made(observed(tier("t", [engine("a")]))).tables
    assert [table_row.subject for table_row in tables.monitoring] == [
        table_row.subject for table_row in monitoring(None, {})
    ]
    assert [table_row.subject for table_row in tables.kv] == [
        table_row.subject for table_row in kv_metrics({})
    ]
    for table_row in (*tables.monitoring, *tables.kv):
        has_value = table_row.figures[0].value is not None
        assert has_value == (table_row.state not in ("unknown", "off"))
        assert has_value or (table_row.missing and table_row.enable), table_row.subject
        assert (table_row.spark is not None) == has_value


def test_figures_are_sums_over_time_and_engines() -> None:
    busy, quiet = engine("a", busy=lambda _slot: 3.0), engine("b", busy=lambda _slot: 1.0)
    report = made(observed(tier("t", [busy, quiet], stated=STATED)))
    slo, money, work = report.slo[0], report.money[0], report.workloads[0]
    assert slo.served_per_s.value == pytest.approx(4.0)
    assert slo.goodput_per_s.value == pytest.approx(4.0)
    assert slo.queue_ratio == pytest.approx(0.1)
    assert slo.prefill_ratio == pytest.approx(0.1)
    assert slo.decode_ratio == pytest.approx(0.75)
    assert slo.other_ratio == pytest.approx(0.05)
    assert money.gpu_hours == pytest.approx(168 * 2 * 2)
    assert money.usd.value == pytest.approx(168 * 2 * 2 * 3.0)
    assert money.tokens_per_gpu_hour.value == pytest.approx(4 * 150 * 3600 / 4)
    assert money.usd_per_million_tokens.value == pytest.approx(12e6 / (4 * 150 * 3600))
    assert money.requests_per_s_per_gpu.value == pytest.approx(4 / 4)
    assert money.requests_in_time_per_usd.value == pytest.approx(4 * 3600 / 12)
    assert report.verdicts[0].money_text == (
        "2,016 USD, 5.56 USD per million generated tokens; idle hours cost 0 USD; "
        "nothing to save: no recommendation costs less"
    )
    assert work.arrivals.mean_per_s.value == pytest.approx(4.0)
    assert work.computed_prompt_ratio == pytest.approx(0.25)
    hits = row(report.tables[0].monitoring, "Prefix cache hit rate")
    assert hits.figures[0].value == pytest.approx(0.75)


def test_tiers_are_never_blended() -> None:
    slow = engine("slow", late_ratio=1.0)
    report = made(observed(tier("fast", [engine("a")], stated=STATED),
                           tier("slow", [slow], stated=STATED)))  # fmt: skip
    fast_p99, slow_p99 = (slo.latencies[0].p99.value for slo in report.slo)
    assert fast_p99 is not None
    assert slow_p99 is not None
    assert fast_p99 < 0.5
    assert slow_p99 > 2.5
    assert [slo.budget.bad_ratio for slo in report.slo] == [0.0, 1.0]


def test_the_hottest_engine_is_not_hidden_by_the_mean() -> None:
    hot = engine("hot")
    spans = [
        replace(slot_span, levels={**slot_span.levels, name: level(value, slot_span.watched_s)})
        for slot_span, (name, value) in zip(
            hot.spans,
            [(m.KV_USAGE + SERVING, 0.97 if at == 30 else 0.2) for at in range(len(hot.spans))],
            strict=True,
        )
    ]
    cool = [
        replace(
            slot_span,
            levels={**slot_span.levels, m.KV_USAGE + SERVING: level(0.2, slot_span.watched_s)},
        )
        for slot_span in engine("cool").spans
    ]
    engines = [replace(hot, spans=spans), replace(engine("cool"), spans=cool)]
    report = made(observed(tier("t", engines)))
    usage = row(report.tables[0].kv, "KV cache utilization")
    assert usage.figures[0].value == pytest.approx(0.2 + 0.77 / 336)
    assert usage.figures[1].value == pytest.approx(0.97)
    assert usage.state == "info"


def test_the_error_budget_and_its_burn() -> None:
    late = engine("a", late_ratio=0.02)
    report = made(observed(tier("t", [late], stated=STATED)))
    slo = report.slo[0]
    assert slo.budget.requests == pytest.approx(2.0 * 168 * HOUR_S)
    assert slo.budget.bad_ratio == pytest.approx(0.02)
    assert slo.budget.spent_ratio == pytest.approx(2.0)
    assert all(hour.burn == pytest.approx(2.0) for hour in slo.hours)
    assert len(slo.hours) == 168
    assert len(slo.by_weekday) == 168
    assert slo.latencies[0].state == "warning"
    assert row(report.tables[0].monitoring, "TTFT P50 / P99").state == "warning"
    assert report.severity == "warning"


def test_without_a_target_nothing_is_late_and_it_is_said() -> None:
    report = made(observed(tier("t", [engine("a", late_ratio=0.5)])))
    slo = report.slo[0]
    assert slo.goodput_per_s.value is None
    assert "slo.ttft_p99_s" in slo.goodput_per_s.missing
    assert slo.budget.bad_ratio is None
    ttft = row(report.tables[0].monitoring, "TTFT P50 / P99")
    assert ttft.state == "trend"
    assert "slo.ttft_p99_s" in ttft.enable


def test_last_week_is_compared_and_arrows_are_told() -> None:
    now = engine("a", busy=lambda slot: 3.0 if slot.weekday < 5 else 1.0, late_ratio=0.0)
    was = engine("a", BEFORE, busy=lambda slot: 2.0 if slot.weekday < 5 else 0.6, late_ratio=0.02)
    report = made(observed(tier("t", [now], [was], stated=STATED)))
    assert report.slo[0].served_per_s.direction == UP
    assert report.slo[0].latencies[0].p99.direction == DOWN
    assert report.slo[0].latencies[0].p99.good is True
    assert report.slo[0].latencies[1].p99.direction == SAME
    assert report.money[0].usd_per_million_tokens.direction == DOWN
    assert report.compared is not None


def test_an_engine_that_came_in_midweek() -> None:
    whole = engine("a", busy=lambda _slot: 1.0)
    late = engine("b", busy=lambda _slot: 1.0)
    half = [Span() if slot.day < 4 else slot_span
            for slot, slot_span in zip(WEEK.slots, late.spans, strict=True)]  # fmt: skip
    late = replace(late, spans=half, first_s=WEEK.day_starts_s[4],
                   minutes=[math.nan] * (4 * 1440) + list(late.minutes[4 * 1440:]))  # fmt: skip
    report = made(observed(tier("t", [whole, late], stated=STATED)))
    assert report.slo[0].served_per_s.value == pytest.approx((4 * 1 + 3 * 2) / 7)
    assert report.money[0].gpu_hours == pytest.approx((168 + 72) * 2)
    assert report.workloads[0].arrivals.p99_per_s.value == pytest.approx(2.0)
    assert report.sizes[0].replicas_present == 2


def test_a_rollout_does_not_double_the_replicas() -> None:
    rolled_s = WEEK.to_s - 3600
    old = [replace(engine(f"old-{at}"), last_s=rolled_s + 300) for at in range(4)]
    new = [replace(engine(f"new-{at}"), first_s=rolled_s) for at in range(4)]
    report = made(observed(tier("t", [*old, *new], stated=STATED)))
    assert report.sizes[0].replicas_present == 4
    assert (report.tiers[0].engines_present, report.tiers[0].gpus) == (4, 8)


def test_an_outage_of_all_does_not_halve_the_replicas() -> None:
    old = [replace(engine(f"old-{at}"), last_s=WEEK.to_s - 3600) for at in range(4)]
    new = [replace(engine(f"new-{at}"), first_s=WEEK.to_s - 1200) for at in range(4)]
    report = made(observed(tier("t", [*old, *new], stated=STATED)))
    assert report.sizes[0].replicas_present == 4


def test_an_engine_that_vanished_is_not_present() -> None:
    gone = replace(engine("b"), last_s=WEEK.day_starts_s[2])
    (size,) = made(observed(tier("t", [engine("a"), gone], stated=STATED))).sizes
    assert size.replicas_present == 1


def test_an_empty_week_says_so() -> None:
    for of in (observed(), observed(tier("t", [], stated=STATED))):
        report = made(of)
        assert EMPTY in report.notices
        assert report.severity == "ok"
        assert all(verdict.health == "unknown" for verdict in report.verdicts)
        json.loads(render_json(report))


def test_a_partial_week_says_so() -> None:
    engine_week = engine("a")
    spans = [Span() if slot.day > 3 else was
             for slot, was in zip(WEEK.slots, engine_week.spans, strict=True)]  # fmt: skip
    report = made(observed(tier("t", [replace(engine_week, spans=spans)])))
    assert "only 4 days of 7 days were watched" in report.notices
    minutes = Period(0.0, 7 * 86_400.0, 180.0, 7)
    assert watched_words(minutes) == "only 3 min of 7 days were watched"


def episode(cause: str, severity: Severity, start_s: float, end_s: float) -> EpisodeObserved:
    """An incident of engine a of tier t."""
    held = (Interval("cause", cause, severity, start_s, end_s, end_s, "ended"),)
    of = Episode(cause, list(held))
    slot = WEEK.slots[0]
    return EpisodeObserved(
        "t", "a", "0", of,
        cause=Cause(id=cause, severity=severity, evidence=(Evidence("x", 1.0, None, "seen"),),
                    guide=("9.3",)),
        during=span(slot, 1.0, late_ratio=0.5, preempted_per_s=0.5),
        hour_before=span(slot, 2.0),
        series={"ttft_p99_s": ([start_s - 60, start_s + 30, start_s + 60], [0.2, 1.4, 2.0])},
    )  # fmt: skip


def test_harm_ranks_incidents_of_one_severity_before_duration_and_order() -> None:
    start_s = WEEK.from_s + 90
    rollouts = [
        replace(
            episode("target_down", Severity.WARNING, start_s + 900 * at, start_s + 900 * at + 800),
            during=Span(),
            hour_before=Span(),
        )
        for at in range(30)
    ]
    overload = episode("queue_saturation", Severity.WARNING, start_s + 90_000, start_s + 90_060)
    tiers = observed(tier("t", [engine("a")], stated=STATED), episodes=[*rollouts, overload])
    report = made(tiers)
    assert report.verdicts[0].health_text.startswith(title("queue_saturation"))
    shown = incidents_in_full(report)
    assert report.incidents[-1].cause == "queue_saturation"
    assert report.incidents[-1].id in shown
    assert len(shown) < len(report.incidents)


def recommended(cause: str, fate: str = "open", cost: float = -6.0) -> PastAdvice:
    """A recommendation for engine a."""
    made_of = Advice(
        id="kv-fp8", cause=cause, summary="fp8 KV cache",
        changes=(FlagChange("--kv-cache-dtype", "auto", "fp8"),),
        before={"waiting": 4.0}, predicted={"waiting": 2.0}, cost_usd_per_hour=cost,
        risk="quality", verify=("watch",), guide=("4.3",),
    )  # fmt: skip
    return PastAdvice(
        tier="t", target="a", engine="0", recommendation=made_of, outcome=fate,
        first_s=WEEK.from_s + 100, last_s=WEEK.from_s + 900, applied_s=None,
        measured={"waiting": 3.0} if fate == "missed" else {},
    )  # fmt: skip


def test_an_incident_with_its_cost_and_advice() -> None:
    start_s = WEEK.from_s + 90
    report = made(
        observed(
            tier("t", [engine("a")], stated=STATED),
            episodes=[episode("kv_pressure", Severity.CRITICAL, start_s, start_s + 600)],
            recommended=[recommended("kv_pressure")],
        )
    )
    (incident,) = report.incidents
    assert incident.late_s == start_s + 30
    assert incident.cost.preemptions == pytest.approx(1800)
    assert incident.cost.recomputed_tokens == pytest.approx(1800 * 400)
    assert incident.cost.late_requests == pytest.approx(1800)
    assert incident.cost.lost_requests is None
    assert [advice.fate for advice in incident.advice] == ["open"]
    assert report.severity == "critical"
    verdict = report.verdicts[0]
    assert verdict.health == "critical"
    assert verdict.action is not None
    assert verdict.action.recommendation == "kv-fp8"
    eviction = row(report.tables[0].monitoring, "KV cache eviction rate")
    assert eviction.state == "critical", "the row knows of the incident"
    assert report.money[0].savings[0].saves_usd_per_month == pytest.approx(6 * 730)
    assert "; can save 4,380 USD a month: " in verdict.money_text


def test_what_replicas_have_of_one_cause_at_the_same_time_is_one_incident() -> None:
    start_s = WEEK.from_s + 90
    first = episode("queue_saturation", Severity.WARNING, start_s, start_s + 600)
    worst = episode("queue_saturation", Severity.CRITICAL, start_s + 300, start_s + 700)
    later = episode("queue_saturation", Severity.WARNING, start_s + 5000, start_s + 5600)
    stall = episode("engine_stalled", Severity.CRITICAL, start_s, start_s + 600)
    engines = [engine(name) for name in "abcd"]
    report = made(
        observed(
            tier("t", engines, stated=STATED),
            episodes=[first, replace(worst, target="b"), replace(later, target="b"), stall],
        )
    )
    both, stalled, again = sorted(
        report.incidents, key=lambda incident: (incident.start_s, -incident.last_s)
    )
    assert (both.target, both.severity, both.replicas) == ("b", "critical", ("a", "b"))
    assert (both.start_s, both.end_s) == (start_s, start_s + 700)
    assert both.where == "2 of 4 replicas, worst b"
    assert both.cost.late_requests == pytest.approx(2 * stalled.cost.late_requests)  # type: ignore[operator]
    assert (stalled.cause, stalled.where) == ("engine_stalled", "a, engine 0")
    assert again.replicas == ("b",)


def test_of_a_change_that_is_told_again_the_newest_or_the_followed_one_counts() -> None:
    start_s = WEEK.from_s + 90
    first = recommended("kv_pressure")
    again = replace(first, first_s=first.first_s + 60,
                    recommendation=replace(first.recommendation, summary="larger"))  # fmt: skip
    other = changing(first, "replicas", "replicas", "more")
    retune = changing(first, "spec-watch", None, "retune the draft")
    later = changing(again, "spec-off", "--speculative-config", "drop it")

    def counted_ids(*made_of: PastAdvice) -> list[str]:
        report = made(
            observed(
                tier("t", [engine("a")], stated=STATED),
                episodes=[episode("kv_pressure", Severity.CRITICAL, start_s, start_s + 600)],
                recommended=made_of,
            )
        )
        assert len(report.track_record.rows) == len(made_of), "all of them are on record"
        return [advice.summary for advice in report.incidents[0].advice]

    assert counted_ids(first, other, again) == ["larger", "more"]
    kept = replace(
        first, outcome="kept", recommendation=replace(first.recommendation, summary="done")
    )
    assert counted_ids(kept, again) == ["done"]
    assert counted_ids(retune, later) == ["drop it"], "no two that contradict each other"


def changing(first: PastAdvice, name: str, flag: str | None, summary: str) -> PastAdvice:
    """The recommendation of another lever at the same time."""
    changes = () if flag is None else (FlagChange(flag, 1, 2),)
    made_of = replace(first.recommendation, id=name, summary=summary, changes=changes)
    return replace(first, recommendation=made_of)


def test_the_report_has_one_verdict_on_replicas_and_the_ledgers_order() -> None:
    """Incidents advise for their own load; the size is for the week's peak. Advice that assumed one
    replica is none where two served."""
    start_s = WEEK.from_s + 90
    free = recommended("kv_pressure", cost=0.0)
    more = changing(recommended("kv_pressure", cost=4.0), "replicas", "replicas", "1 -> 2")
    bound = changing(free, "max-num-seqs-up", "--max-num-seqs", "seats")
    report = made(
        observed(
            tier("t", [engine("a"), engine("b")], stated=STATED),
            episodes=[episode("kv_pressure", Severity.CRITICAL, start_s, start_s + 600)],
            recommended=[more, free, bound],
        )
    )
    assert report.sizes[0].verdict == "right"
    assert [lever.id for lever in report.sizes[0].levers] == ["max-num-seqs-up", "kv-fp8"]
    assert first_steps(report)[0].effort == "a restart of a", "the other engine is not concerned"
    assert report.verdicts[0].money_text.endswith("; nothing to save: no recommendation costs less")
    told = [advice.id for advice in report.incidents[0].advice]
    assert told == ["max-num-seqs-up", "kv-fp8"]
    alone = made(
        observed(
            tier("t", [engine("a")], stated=STATED),
            episodes=[episode("kv_pressure", Severity.CRITICAL, start_s, start_s + 600)],
            recommended=[more],
        )
    )
    assert [advice.id for advice in alone.incidents[0].advice] == ["replicas"]
    action = report.verdicts[0].action
    assert action is not None
    assert action.recommendation == "max-num-seqs-up"


def test_a_tier_that_vanished_says_so_and_nothing_of_money_or_size() -> None:
    gone = tier("gone", [], [engine("a")], STATED)
    (line,) = made(observed(gone)).verdicts
    assert (line.health, line.action) == ("unknown", None)
    for words in (line.health_text, line.size_text, line.money_text):
        assert words.endswith("no engine was watched in this period")


def test_times_within_the_lowest_bucket_are_not_told_as_known() -> None:
    report = made(observed(tier("t", [engine("a")], stated=STATED)))
    by_name = {latency.name: latency for latency in report.slo[0].latencies}
    assert by_name["itl"].missing == "P50, P95, P99: anywhere below 100 ms, the lowest bucket"
    assert by_name["e2e"].missing == ""


def test_where_no_target_is_set_the_proposed_one_is_shown() -> None:
    stated = TierStated(proposed=Targets(1.2, 0.06))
    report = made(observed(tier("t", [engine("a")], stated=stated)))
    words = report.slo[0].budget.missing
    assert words.endswith(
        "quiet hours suggest TTFT P99 1.2 s, ITL P99 60 ms: set slo.ttft_p99_s = 1.2 and "
        "slo.itl_p99_s = 0.06"
    )
    set_already = replace(stated, profile=Profile(targets=Targets(2.0, 0.1)))
    report = made(observed(tier("t", [engine("a")], stated=set_already)))
    assert report.slo[0].budget.missing == ""


def test_each_incident_of_a_tier_is_named_by_its_cause() -> None:
    start_s = WEEK.from_s + 7200
    causes = ("kv_pressure", "prefix_reuse_lost", "admission_limit", "admission_limit")
    episodes = [
        episode(cause, Severity.CRITICAL if place == 0 else Severity.WARNING,
                start_s + 3600 * place, start_s + 3600 * place + 300)
        for place, cause in enumerate(causes)
    ]  # fmt: skip
    report = made(observed(tier("t", [engine("a")], stated=STATED), episodes=episodes))
    words = report.verdicts[0].health_text
    assert words.startswith(f"{title('kv_pressure')} on a for 5 min; also: ")
    assert title("prefix_reuse_lost") in words
    assert f"{title('admission_limit')} (2x)" in words


def test_an_outage_loses_what_the_hour_before_served() -> None:
    start_s = WEEK.from_s + 7200
    down = episode("target_down", Severity.CRITICAL, start_s, start_s + 600)
    down = replace(down, during=Span())
    report = made(observed(tier("t", [engine("a")], stated=STATED), episodes=[down]))
    assert report.incidents[0].cost.lost_requests == pytest.approx(1200)


def test_an_outage_amid_an_overload_is_neither_its_length_nor_its_harm() -> None:
    start_s = WEEK.from_s + 7200
    overload = episode("kv_pressure", Severity.CRITICAL, start_s, start_s + 240)
    down = episode("target_down", Severity.CRITICAL, start_s + 95, start_s + 133)
    follows = Interval("cause", "kv_pressure", Severity.WARNING, start_s + 140, start_s + 300)
    down.episode.causes.append(replace(follows, end_s=start_s + 300, ended="ended"))
    down = replace(down, during=Span())
    tiers = tier("t", [engine("a")], stated=STATED)

    alone = made(observed(tiers, episodes=[down]))
    assert alone.verdicts[0].health_text == "Target down on a for 38 s"
    report = made(observed(tiers, episodes=[overload, down]))
    assert report.verdicts[0].health_text.startswith(title("kv_pressure"))
    (step,) = first_steps(report)
    harmed = report.incidents[0].cost.harmed_requests
    assert (report.incidents[0].cause, step.saving) == (
        "kv_pressure",
        f"{number(round(harmed))} requests preempted, late or lost",
    )


def test_the_track_record() -> None:
    rows = [recommended("kv_pressure", fate) for fate in ("kept", "missed", "open", "lapsed")]
    record = made(observed(tier("t", [engine("a")]), recommended=rows)).track_record
    assert (record.made, record.applied, record.kept, record.missed) == (4, 2, 1, 1)
    missed = next(record_row for record_row in record.rows if record_row.advice.fate == "missed")
    assert missed.comparisons[0].off_ratio == pytest.approx(0.5)


def test_the_size_against_the_learned_knee() -> None:
    calm = made(observed(tier("t", [engine("a"), engine("b"), engine("c")], stated=STATED)))
    assert calm.knees[0].c_max is not None
    assert calm.knees[0].reached
    usable = calm.sizes[0].usable_requests_per_s
    assert usable is not None
    assert calm.sizes[0].verdict == "too large"
    busy = engine("a", busy=lambda _slot: 2 * usable)
    tight = made(observed(tier("t", [busy], stated=STATED))).sizes[0]
    assert tight.verdict == "too small"
    assert tight.replicas_needed == math.ceil(2 * SAFETY_DEFAULT)
    assert tight.gpus_needed == 2 * (tight.replicas_needed or 0)


def test_limits_for_the_gateway_and_replicas_by_hour_follow_from_the_week() -> None:
    usable = made(observed(tier("t", [engine("a")], stated=STATED))).sizes[0].usable_requests_per_s
    assert usable is not None

    def busy(slot: Slot) -> float:
        return usable * (1.5 if slot.weekday < 5 and 9 <= slot.hour < 17 else 0.2)

    engines = [engine("a", busy=busy)]
    (size,) = made(observed(tier("t", engines, stated=STATED))).sizes
    assert size.schedule == (
        "Mon-Fri: 1 replica, from 08:00 2, from 17:00 1",
        "Sat-Sun: 1 replica",
    )
    assert [line.split(":")[0] for line in size.limits] == [
        "max_input_tokens 960",
        "max_tokens 496",
        "HTTP 429 from 17 to 19 queued requests on, in the whole tier",
    ]
    no_target = judged_by(targets=Targets())
    (size,) = made(observed(tier("t", engines, stated=no_target))).sizes
    assert size.limits[-1] == "no queue limit: no TTFT target set (slo.ttft_p99_s)"


def test_a_fleet_between_both_counts_of_the_guide_is_right() -> None:
    calm = engine("a", busy=lambda _slot: 0.5)
    (size,) = made(observed(tier("t", [calm], stated=STATED))).sizes
    assert (size.verdict, size.replicas_needed) == ("right", 1), "not two for rounding twice"
    two = made(observed(tier("t", [calm, replace(calm, target="b")], stated=STATED))).sizes[0]
    assert (two.verdict, two.replicas_needed) == ("right", 2)


def test_incidents_of_too_little_capacity_are_a_doubt() -> None:
    start_s = WEEK.from_s + 90
    short = episode("queue_saturation", Severity.WARNING, start_s, start_s + 600)
    engines = [engine(name, busy=lambda _slot: 0.5) for name in "abc"]
    report = made(observed(tier("t", engines, stated=STATED), episodes=[short]))
    assert report.sizes[0].verdict == "unknown"
    assert "incidents of too little capacity" in report.verdicts[0].size_text
    assert "; savings unknown, like the size" in report.verdicts[0].money_text


def test_what_an_engine_serves_in_a_fault_is_no_measure_of_its_capacity() -> None:
    healthy, slow_s = engine("a"), TO_S - 3600.0
    slow = [
        replace(each, t_s=each.t_s + after_s, ttft_p99_s=9.0 if each.in_flight > 2 else 0.2)
        for each in points()
        for after_s in (1800.0, 1810.0)
    ]
    ill = replace(healthy, points=[*healthy.points, *slow])
    fault = episode("slow_steps", Severity.WARNING, slow_s + 1790.0, TO_S)
    known = made(observed(tier("t", [ill], stated=STATED), episodes=[fault])).sizes[0]
    unknown = made(observed(tier("t", [ill], stated=STATED))).sizes[0]
    calm = made(observed(tier("t", [healthy], stated=STATED))).sizes[0]
    assert known.usable_requests_per_s == calm.usable_requests_per_s
    assert unknown.usable_requests_per_s != calm.usable_requests_per_s


def test_a_queue_behind_a_fault_is_no_lack_of_capacity() -> None:
    start_s = WEEK.from_s + 90
    hung = episode("engine_stalled", Severity.CRITICAL, start_s, start_s + 600)
    end_s = start_s + 600
    queue = Interval("cause", "queue_saturation", Severity.WARNING, start_s, end_s, end_s, "ended")
    both = replace(hung.episode, causes=[*hung.episode.causes, queue])
    hung = replace(hung, episode=both)
    engines = [engine(name, busy=lambda _slot: 0.5) for name in "ab"]
    report = made(observed(tier("t", engines, stated=STATED), episodes=[hung]))
    assert (report.sizes[0].verdict, report.sizes[0].doubts) == ("right", ())


def test_a_limit_between_loads_far_apart_gives_the_fewest_replicas() -> None:
    far = [each for each in points(256.0) if not 4.0 < each.in_flight < 100.0]
    busy = replace(engine("a", busy=lambda _slot: 60.0), points=far)
    (size,) = made(observed(tier("t", [busy], stated=STATED))).sizes
    assert size.usable_requests_per_s == pytest.approx(max(each.requests_per_s for each in far))
    assert "loads between were not seen" in size.doubts[0]


def test_a_stated_model_and_gpu_give_memory_options_and_levers() -> None:
    model_and_gpu = Stated(
        model=named_model("meta-llama/Llama-3.1-8B"), gpu=gpu("h100-sxm"), tensor_parallel=1,
        version=(0, 32, 0),
    )  # fmt: skip
    engine_week = replace(engine("a"), config={"num_gpu_blocks": "26000", "block_size": "16",
                  "gpu_memory_utilization": "0.92", "cache_dtype": "auto"})  # fmt: skip
    stated = judged_by(stated=replace(model_and_gpu, gpus=1, usd_per_gpu_hour=3.0))
    report = made(observed(tier("t", [engine_week], stated=stated), recommended=[recommended("x")]))
    (size,) = report.sizes
    assert not size.relative
    assert sum(part.bytes for part in size.memory) == pytest.approx(size.gpu_memory_bytes)
    assert size.memory[0].name == "weights"
    assert size.options
    assert size.options[0].usd_per_hour is not None
    costs = [option.usd_per_hour or 0.0 for option in size.options]
    assert costs == sorted(costs)
    levers = {lever.id: lever for lever in size.levers}
    assert levers["kv-fp8"].figures[0].signal == "waiting", "what was recommended comes first"
    assert any("vLLM reports a KV cache" in note for note in size.notes)


def test_only_the_settings_that_are_missing_are_asked_for() -> None:
    stated = judged_by(stated=Stated(gpu=gpu("h100-sxm"), tensor_parallel=2, usd_per_gpu_hour=3.0))
    missing = made(observed(tier("t", [engine("a")], stated=stated))).sizes[0].missing
    assert "set model (or launch_file) for memory and cheaper launches" in missing, "has a price"


def test_a_launch_that_holds_few_requests_has_the_changes_that_size_lists() -> None:
    small = Stated(model=named_model("meta-llama/Llama-3.1-8B"), gpu=gpu("l4"), tensor_parallel=1,
                   version=(0, 32, 0))  # fmt: skip
    stated = judged_by(stated=replace(small, gpus=1, usd_per_gpu_hour=3.0))
    fp8 = changing(recommended("x"), "kv-fp8", "--kv-cache-dtype", "fp8 KV cache")
    (size,) = made(observed(tier("t", [engine("a")], stated=stated), recommended=[fp8])).sizes
    of_ledger, *of_size = size.levers
    assert of_ledger.id == "kv-fp8"
    assert of_size
    for lever in of_size:
        assert "--kv-cache-dtype" not in lever.summary, "one change is listed once"
        held = {figure.signal: figure for figure in lever.figures}["max_concurrency"]
        assert held.before is not None
        assert held.after is not None
        assert held.after > held.before


def test_the_workload_against_the_one_that_was_sized_for() -> None:
    table = lengths_table((300, 700, 900, 400), (500, 900, 1000, 600))
    sized_for = read_profile(
        SMALLEST.replace(SMALLEST[: SMALLEST.index("[traffic]")], f"{table}\n").replace(
            "_per_s = 120", "_per_s = 1.9"
        )
    )
    stated = replace(STATED, workload=sized_for)
    (work,) = made(observed(tier("t", [engine("a")], stated=stated))).workloads
    assert {drift.name: drift.state for drift in work.drift} == {
        "mean prompt": "ok", "prompt P95": "warning", "peak requests": "ok",
        "mean output": "warning", "output P95": "warning",
    }  # fmt: skip
    calls = replace(sized_for, session=SessionShape(calls=5, added_tokens=100))
    stated = replace(STATED, workload=calls)
    (work,) = made(observed(tier("t", [engine("a")], stated=stated))).workloads
    expected = {drift.name: drift.stated for drift in work.drift}
    assert "prompt P95" not in expected, "P95 of all calls is not known"
    assert expected["mean prompt"] > 1400
    assert work.archetype == "chat"
    (unstated,) = made(observed(tier("t", [engine("a")], stated=STATED))).workloads
    assert "report.profile" in unstated.drift_missing


def test_the_benchmark_is_held_against_production() -> None:
    ttft, gpu = made(observed(tier("t", [engine("a")], stated=STATED))).knees[0].benchmark
    assert ttft.state == "warning"
    assert gpu.state == "unknown"
    assert "benchmark.gpu_ratio" in gpu.missing
    rare = judged_by(benchmark={**STATED.profile.benchmark, "benchmark.requests_per_s": 1.0})
    ttft, _ = made(observed(tier("t", [engine("a")], stated=rare))).knees[0].benchmark
    assert (ttft.state, ttft.off) == ("unknown", None)
    assert "within 20% of 1 requests/s" in ttft.missing


def test_buckets_that_changed_with_a_version_are_said() -> None:
    first_engine, other = engine("a"), engine("b")
    first = other.spans[0]
    ttft = first.tallies["time_to_first_token_seconds"]
    kept = (1, 3, 7)
    coarse = replace(ttft, bounds=tuple(ttft.bounds[at] for at in kept),
                     counts=tuple(ttft.counts[at] for at in kept))  # fmt: skip
    changed = replace(first, tallies={**first.tallies, "time_to_first_token_seconds": coarse})
    other = replace(other, spans=[changed, *other.spans[1:]])
    report = made(observed(tier("t", [first_engine, other])))
    assert any("3 bounds" in note for note in report.data_quality.notes)
    assert report.slo[0].latencies[0].observations == pytest.approx(4.0 * 168 * HOUR_S)


def test_the_json_holds_every_figure_and_fits_its_schema() -> None:
    start_s = WEEK.from_s + 90
    report = made(
        observed(
            tier("<script>alert(1)</script>", []),
            tier("t", [engine("a")], [engine("a", BEFORE)], stated=STATED),
            episodes=[episode("kv_pressure", Severity.CRITICAL, start_s, start_s + 600)],
            recommended=[recommended("kv_pressure", "missed")],
        )
    )
    document = json.loads(render_json(report))
    validator: Any = Draft202012Validator(SCHEMA)
    errors = [error.message for error in validator.iter_errors(document)]
    assert not errors
    assert document["tiers"][0]["id"] == "<script>alert(1)</script>"
    assert document["slo"][1]["served_per_s"]["value"] == report.slo[1].served_per_s.value


def test_of_partial_answers_nothing_is_called_healthy_and_trouble_is_still_told() -> None:
    quiet = observed(tier("t", [engine("a")], stated=STATED))
    assert made(quiet).verdicts[0].health in ("ok", "info")
    (line,) = made(replace(quiet, partial=True)).verdicts
    assert line.health == "unknown"
    assert "partial" in line.health_text
    start_s = WEEK.from_s + 90
    sick = replace(
        quiet, episodes=[episode("kv_pressure", Severity.CRITICAL, start_s, start_s + 600)]
    )
    assert made(replace(sick, partial=True)).verdicts == made(sick).verdicts


@pytest.mark.parametrize(("hours", "health"), [(1, "unknown"), (16, "unknown"), (18, "ok")])
def test_a_tier_that_was_watched_for_an_hour_of_the_week_is_not_called_healthy(
    hours: int, health: str
) -> None:
    whole = engine("a")
    spans = [span if place < hours else Span() for place, span in enumerate(whole.spans)]
    line = made(observed(tier("t", [replace(whole, spans=spans)]))).verdicts[0]
    assert line.health.replace("info", "ok") == health
    assert ("of 7 days were watched" in line.health_text) == (health == "unknown")


def test_goodput_counts_late_gaps_where_an_itl_target_is_set() -> None:
    busy = engine("a", busy=lambda _slot: 3.0)
    targets = replace(STATED.profile.targets, itl_p99_s=0.01)
    report = made(observed(tier("t", [busy], stated=judged_by(targets=targets))))
    # Every gap is of 50 ms.
    assert report.slo[0].goodput_per_s.value == 0.0
    only_first = replace(STATED.profile.targets, itl_p99_s=None)
    report = made(observed(tier("t", [busy], stated=judged_by(targets=only_first))))
    assert report.slo[0].goodput_per_s.value == pytest.approx(3.0)


def test_a_tier_of_another_engine_is_told_in_its_words_and_not_sized_as_vllms() -> None:
    week = observed(
        tier("a", [engine("a.0", preempted_per_s=2.0)]),
        replace(tier("b", [engine("b.0", preempted_per_s=2.0)]), program="SGLang"),
    )
    of_vllm, of_sglang = (
        msgspec.json.encode((at.tables[place], at.verdicts[place], at.sizes[place])).decode()
        for at in (build(week, made_s=TO_S, version="0"),)
        for place in (0, 1)
    )
    assert "vLLM" in of_vllm
    assert not [word for word in ("vLLM", "--kv-cache-metrics", "preempts") if word in of_sglang]
    assert "not computed for SGLang" in of_sglang
    assert "retract" in of_sglang
