"""Resolutions, added-up histograms, and the times that are worth a closer look."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from msgspec.structs import replace

from kneewatch.agent.report.prometheus.inventory import TargetScrapes, TierEngine
from kneewatch.agent.report.prometheus.period import by_engine
from kneewatch.agent.report.prometheus.queries import (
    BEGUN,
    ERRORS,
    GENERATED_TOKENS,
    LATE,
    OPEN,
    PREEMPTED,
    Rows,
    Steps,
    hour_runs,
    resolution,
    steps,
    unit_s,
)
from kneewatch.agent.report.prometheus.suspect_spans import (
    DOWN,
    FAILING,
    HIDDEN,
    NEVER,
    PREEMPTING,
    QUEUED,
    STALLED,
    TOO_LATE,
    FleetSpan,
    SuspectSpan,
    empty_spans,
    moments,
    restart_spans,
    silent_spans,
    slow_spans,
    suspect_spans,
    worst_spans,
)
from kneewatch.agent.report.series import (
    POINT_SIGNALS,
    Floats,
    Increases,
    Signals,
    counted,
    signal_spans,
)
from kneewatch.collector.scrape_history import Column
from kneewatch.collector.signals.table import TTFT
from kneewatch.diagnose.fleet.inventory import label_map, shape_of
from kneewatch.reports.weekly.measures import (
    KV_USAGE,
    LEVELS,
    PREEMPTIONS,
    RUNNING,
    WAITING,
    merged_levels,
)
from kneewatch.reports.weekly.observed import SERVING, Level, grid
from kneewatch.rules.rule import DAY_S, HOUR_S
from tests.diagnose.fleet.example_fleets import pod, shaped

TO_S = 1_795_262_400.0
NAN = math.nan


@pytest.mark.parametrize(
    ("engines", "days", "scrape_s", "zone", "step_s"),
    [
        pytest.param(10, 7, 15.0, "UTC", 60.0, id="few engines: a minute"),
        pytest.param(10, 7, 60.0, "UTC", 120.0, id="two scrapes at least"),
        pytest.param(100, 7, 15.0, "UTC", 300.0, id="100 x 604,800 s / 400,000 = 151 s"),
        pytest.param(1000, 7, 15.0, "UTC", 1800.0, id="1,512 s"),
        pytest.param(1000, 28, 15.0, "UTC", 3600.0, id="never more than an hour"),
        pytest.param(1000, 28, 15.0, "Asia/Kathmandu", 900.0, id="hours that begin at :15"),
    ],
)
def test_the_step_grows_with_the_fleet_and_the_time(
    engines: int, days: int, scrape_s: float, zone: str, step_s: float
) -> None:
    period = grid(TO_S - days * DAY_S, TO_S, zone)
    chosen = resolution(period, engines=engines, scrape_s=scrape_s, window_s=60.0)
    assert chosen.step_s == step_s
    at = steps(period, step_s)
    assert at.last_s == TO_S
    assert at.begins_s[0] == period.from_s


def test_hours_are_asked_for_in_runs_of_equal_length() -> None:
    runs = hour_runs(grid(TO_S - 3 * HOUR_S - 600, TO_S + 1200, "UTC").slots)
    assert [(run.step_s, run.count) for run in runs] == [(600.0, 1), (3600.0, 3), (1200.0, 1)]
    assert runs[1].first_s == TO_S - 2 * HOUR_S
    assert (unit_s(DAY_S), unit_s(HOUR_S)) == (3600.0, 60.0)


def row(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values)


EDGES_S = np.array([TO_S, TO_S + HOUR_S, TO_S + 2 * HOUR_S])


def gained(rows: Mapping[tuple[str, str], Floats]) -> Increases:
    """The counters of two hours, from their increases by part and group."""
    columns = {Column(TTFT, (("group", group),), part): row for (part, group), row in rows.items()}
    return Increases([counted(columns, EDGES_S[:-1], EDGES_S[1:])], restarts_s=())


def test_a_histogram_has_the_buckets_of_its_hour() -> None:
    first, second = gained(
        {
            ("0.5", "a"): row(4.0, NAN),
            ("1.0", "a"): row(3.9, 5.0),
            ("+Inf", "a"): row(6.0, 8.0),
            ("sum", "a"): row(2.0, 9.0),
        }
    ).tallies(TTFT, EDGES_S)
    assert first is not None
    assert second is not None
    assert (first.bounds, first.counts) == ((0.5, 1.0, math.inf), (4.0, 4.0, 6.0))
    assert (second.bounds, second.counts, second.sum) == ((1.0, math.inf), (5.0, 8.0), 9.0)
    assert gained({}).tallies(TTFT, EDGES_S) == [None, None]
    partly = gained({("0.5", "a"): row(1.0, 1.0)})
    assert partly.tallies(TTFT, EDGES_S) == [None, None], "without +Inf nothing is whole"


def test_groups_are_added_and_a_group_that_is_not_there_gains_nothing() -> None:
    both = gained({("count", "a"): row(1.0, NAN), ("count", "b"): row(2.0, 3.0)})
    increase = both.between((TTFT, "count"), EDGES_S)
    assert increase is not None
    assert increase.tolist() == [3.0, 3.0]
    later = gained({("count", "a"): row(NAN, 4.0), ("count", "b"): row(NAN, 3.0)})
    assert later.times.tolist() == [pytest.approx(EDGES_S[1]), EDGES_S[2]]
    increase = later.between((TTFT, "count"), EDGES_S)
    assert increase is not None
    assert increase.tolist() == [0.0, 7.0]


def test_a_step_with_a_restart_gains_what_the_server_says() -> None:
    steps_s = np.arange(TO_S, TO_S + 360.0, 60.0, dtype=np.float64)
    column = Column(PREEMPTIONS, ())
    restart_s = TO_S + 150.0
    parts = [counted({column: row(3, 3, 5, 2, 2)}, steps_s[:-1], steps_s[1:], [restart_s])]
    increases = Increases(parts, restarts_s=[restart_s])
    increase = increases.between((PREEMPTIONS, ""), steps_s)
    assert increase is not None
    assert increase.tolist() == [3.0, 3.0, 5.0, 2.0, 2.0]


def test_the_hottest_engine_is_not_hidden_by_the_mean() -> None:
    def levels(begins_s: Floats, **known: Floats) -> list[dict[str, Level]]:
        keys = dict.fromkeys((*LEVELS, *POINT_SIGNALS))
        values = {key: known.get(key, np.full(len(begins_s), NAN)) for key in keys}
        values["running_avg"] = known[RUNNING]
        spans = signal_spans(Signals(begins_s, values, HOUR_S), EDGES_S)
        watched.append([span.watched_s for span in spans])
        idle.append([span.idle_s for span in spans])
        return [dict(span.levels) for span in spans]

    watched: list[list[float]] = []
    idle: list[list[float]] = []
    sums = levels(EDGES_S[:1], running=row(2.0))
    other = levels(
        EDGES_S[:2], running=row(10.0, 0.0), waiting=row(0.0, 0.0), kv_usage_ratio=row(0.5, 0.1)
    )
    sums = [merged_levels(hour) for hour in zip(sums, other, strict=True)]
    first, second = (hour[RUNNING] for hour in sums)
    assert (first.mean, first.high, first.top, first.known_s) == (6.0, 10.0, 10.0, 7200.0)
    assert (second.mean, second.known_s) == (0.0, 3600.0)
    assert watched == [[3600.0, 0.0], [3600.0, 3600.0]]
    assert idle == [[0.0, 0.0], [0.0, 3600.0]]
    assert [KV_USAGE + SERVING in hour for hour in sums] == [True, False]


def test_a_gpu_is_its_pods_before_its_nodes() -> None:
    series = [
        {"pod": "chat-0", "namespace": "prod", "instance": "n0:8000"},
        {"pod": "chat-1", "namespace": "prod", "instance": "n1:8000"},
        {"pod": "chat-2", "namespace": "prod", "instance": "n2:8000"},
    ]
    rows: Rows = {
        tuple(labels.items()): values
        for labels, values in (
            ({"exported_pod": "chat-0", "exported_namespace": "prod", "Hostname": "n0"}, row(0.2)),
            ({"exported_pod": "other", "exported_namespace": "dev", "Hostname": "n0"}, row(0.9)),
            ({"Hostname": "n1", "gpu": "0"}, row(0.4)),
            ({"Hostname": "n1", "gpu": "1"}, row(0.6)),
            ({"Hostname": "n1", "gpu": "2"}, row(NAN)),
        )
    }
    by_key = by_engine(rows, shape_of(series, label_map({}, "default")).members)
    assert {key: values.tolist() for key, values in by_key.items()} == {
        ("n0:8000",): [0.2],
        ("n1:8000",): [0.5],
    }


AT = Steps(TO_S + 60.0, 60.0, 6)


def scraped(up: Floats) -> TargetScrapes:
    """A target that is scraped four times a minute."""
    return TargetScrapes(up, (1 - up) * 4, 15.0)


@pytest.mark.parametrize(
    ("values", "up", "why", "from_step", "to_step"),
    [
        ({PREEMPTED: row(0, 0, 9, 0, 9, 0)}, None, PREEMPTING, 2, 5),
        ({RUNNING: row(*[4.0] * 6), GENERATED_TOKENS: row(9, 0, 0, 0, 9, 9)}, None, STALLED, 1, 4),
        (
            {RUNNING: row(4, 4, 0, 0, 0, 4), GENERATED_TOKENS: row(9, 9, 0, 0, 0, 9),
             OPEN: row(44, 44, 41, 46, 52, 44)},
            None, HIDDEN, 3, 5,
        ),
        ({RUNNING: row(*[8.0] * 6), WAITING: row(0, 0, 0, 0, 2, 2)}, None, QUEUED, 4, 6),
        ({BEGUN: row(*[100.0] * 6), LATE: row(99, 99, 80, 99, 99, 99)}, None, TOO_LATE, 2, 3),
        ({BEGUN: row(*[100.0] * 6), ERRORS: row(0, 1, 4, 30, 5, 0) / 60}, None, FAILING, 3, 5),
        ({}, row(1, 1, 0.5, 0, 1, 1), DOWN, 2, 4),
    ],
)  # fmt: skip
def test_a_sign_of_trouble(
    values: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]],
    up: np.ndarray[tuple[int], np.dtype[np.float64]] | None,
    why: str,
    from_step: int,
    to_step: int,
) -> None:
    (suspect,) = suspect_spans(values, AT, None if up is None else scraped(up))
    assert (suspect.why, suspect.from_s, suspect.to_s) == (
        why,
        TO_S + 60 * from_step,
        TO_S + 60 * to_step,
    )


def test_calm_and_unknown_are_no_trouble_and_signs_that_overlap_are_one() -> None:
    calm = {
        RUNNING: row(*[8.0] * 6),
        GENERATED_TOKENS: row(*[99.0] * 6),
        PREEMPTED: row(0, 1, 0, NAN, 0, 2),
    }
    assert suspect_spans(calm, AT, scraped(row(*[1.0] * 6))) == []
    both = {
        RUNNING: row(*[8.0] * 6),
        WAITING: row(0, 0, 9, 9, 9, 0),
        PREEMPTED: row(0, 0, 0, 9, 0, 0),
    }
    (suspect,) = suspect_spans(both, AT, None)
    assert (suspect.why, suspect.from_s, suspect.to_s) == (PREEMPTING, TO_S + 120, TO_S + 300)


@pytest.mark.parametrize(
    ("up", "downs"),
    [
        pytest.param(row(NAN, 0, 0.5, 1, 1, 1), 0, id="loading before its first scrape"),
        pytest.param(row(1, 1, 1, 1, 0.5, NAN), 0, id="terminating, then gone"),
        pytest.param(row(1, 1, 1, 0.5, 0, NAN), 1, id="down, then gone"),
        pytest.param(row(NAN, NAN, 0.5, 0.5, NAN, NAN), 0, id="lived for less than a step"),
        pytest.param(row(0, 0.5, NAN, NAN, NAN, NAN), 1, id="never well since before the period"),
        pytest.param(row(1, 1, 1, 1, 1, 0.5), 0, id="stopped answering just now"),
        pytest.param(row(NAN, 0, 1, 0, 1, 1), 1, id="down once it had served"),
        pytest.param(row(0, 0, 1, 1, 1, 1), 1, id="down since before the period"),
        pytest.param(row(1, 1, 1, 0, 0, 0), 1, id="still down at the end of the period"),
    ],
)
def test_loading_and_terminating_are_no_outage(up: Floats, downs: int) -> None:
    assert len(suspect_spans({}, AT, scraped(up))) == downs


def test_a_pod_that_kubernetes_deletes_is_down_only_before_that() -> None:
    up = row(1, 0, 0, 0, 0, NAN)
    down = replace(scraped(up), deleted=row(NAN, NAN, NAN, 1, 1, NAN))
    (span,) = suspect_spans({}, AT, down)
    assert (span.from_s, span.to_s) == (TO_S + 60, TO_S + 180)
    deleted = replace(scraped(up), deleted=row(NAN, 1, 1, 1, 1, NAN))
    assert suspect_spans({}, AT, deleted) == []
    earlier = replace(scraped(up), deleted=row(1, NAN, NAN, NAN, NAN, NAN))
    (span,) = suspect_spans({}, AT, replace(earlier, up=row(1, 1, 0, 0, 0, NAN)))
    assert span.from_s == TO_S + 120, "the pod of this name before it was deleted"


def test_a_target_that_loads_for_hours_is_down() -> None:
    at = Steps(TO_S + 1800.0, 1800.0, 5)
    assert suspect_spans({}, at, scraped(row(NAN, 0, 0, 0, 1))) != []


def test_the_harm_of_a_sign_counts_requests_late_preempted_queued_and_not_served() -> None:
    late = {BEGUN: row(*[100.0] * 6), LATE: row(99, 99, 80, 99, 99, 99)}
    assert [span.harm_requests for span in suspect_spans(late, AT, None)] == [20.0]
    queued = {RUNNING: row(*[8.0] * 6), WAITING: row(0, 0, 9, 30, 0, 0), PREEMPTED: row(*[5.0] * 6)}
    assert [span.harm_requests for span in suspect_spans(queued, AT, None)] == [60.0]
    up = scraped(row(1, 1, 0.5, 0, 1, 1))
    down = suspect_spans({BEGUN: row(50, 50, NAN, NAN, 50, 50)}, AT, up)
    assert [span.harm_requests for span in down] == [75.0]


def test_harm_decides_what_is_replayed_and_signs_that_only_a_replay_explains_have_half() -> None:
    rollouts = [SuspectSpan(DOWN, 0.0, 60.0, 15) for _ in range(100)]
    late = SuspectSpan(TOO_LATE, 0.0, 60.0, 1, harm_requests=500.0)
    queue = SuspectSpan(QUEUED, 0.0, 60.0, 1, harm_requests=3.0)
    outage = SuspectSpan(DOWN, 0.0, 60.0, 1, harm_requests=4.0)
    spans = [*rollouts, late, queue, outage]
    assert worst_spans(spans, most=4)[:3] == [100, 102, 101]
    many = [SuspectSpan(DOWN, 0.0, 60.0, 1, harm_requests=9.0)] * 10 + [queue]
    assert 10 in worst_spans(many, most=4)
    assert sorted(worst_spans(spans, most=200)) == list(range(103))


def test_a_pool_is_empty_where_no_engine_of_it_has_series() -> None:
    running = {
        ("a0",): row(4, 4, NAN, NAN, NAN, NAN),
        ("a1",): row(NAN, NAN, NAN, NAN, 4, 4),
        ("b0",): row(NAN, NAN, 4, 4, NAN, NAN),
        ("c0",): row(4, NAN, NAN, 4, 4, 4),
        ("c1",): row(NAN, 4, 4, 4, 4, 4),
    }
    pools = {"a": [("a0",), ("a1",)], "b": [("b0",)], "c": [("c0",), ("c1",)], "d": [("d0",)]}
    assert empty_spans(pools, running, AT) == [
        FleetSpan("a", None, TO_S + 120, TO_S + 240, False, (TO_S + 240, TO_S + 240)),
        FleetSpan("b", None, TO_S + 240, TO_S + 360, True, (TO_S + 360, TO_S + 360)),
    ]


def test_a_target_that_never_answers_is_judged_once_it_should_serve() -> None:
    at = Steps(TO_S + 60.0, 60.0, 30)
    nothing, failing = [NAN] * 10, [0.0] * 20
    up = {
        ("job", "a"): row(*nothing, *failing),
        ("job", "b"): row(*nothing, *failing[1:], 0.5),
        ("job", "c"): row(*nothing, *failing[:5], *nothing, *nothing[:5]),
        ("job", "d"): row(*[NAN] * 30),
    }
    (span,) = silent_spans(up, at)
    assert (span.pool, span.engine, span.causes, span.goes_on) == ("job a", None, NEVER, True)
    assert (span.from_s, span.to_s) == (TO_S + 600, TO_S + 1800)
    assert span.judged_s == (TO_S + 1560, TO_S + 1740)


def test_a_replica_is_slow_beside_its_peers_at_the_same_load_for_five_minutes() -> None:
    engines = [
        TierEngine(member, "m", "") for member in shaped([pod(name) for name in "abcd"]).members
    ]
    usual, slow = row(*[0.02] * 6), row(0.02, *[0.05] * 5)

    def found(*itl: Floats, busy: float = 60.0, of: int = 4) -> list[FleetSpan]:
        means = {engine.key: means_s for engine, means_s in zip(engines, itl, strict=False)}
        begun = {e.key: row(*[busy if e is engines[0] else 60.0] * 6) for e in engines}
        return slow_spans(engines[:of], means, begun, AT)

    assert found(slow, usual, usual, usual) == [
        FleetSpan(
            engines[0].member.pool,
            engines[0],
            TO_S + 60,
            TO_S + 360,
            goes_on=True,
            judged_s=(TO_S + 210, TO_S + 285),
        )
    ]
    assert found(slow, usual, usual, usual, busy=90.0) == []
    assert found(row(0.02, 0.02, *[0.05] * 4), usual, usual, usual) == []
    assert found(slow, usual, of=2) == []
    assert found(slow, usual, usual, row(*[NAN] * 6))[0].engine is engines[0]
    assert found(slow, usual, row(*[NAN] * 6), row(*[NAN] * 6)) == []


def test_restarts_of_a_pool_are_judged_together_and_one_alone_is_not() -> None:
    a, b, c = (TierEngine(each, "m", "") for each in shaped([pod(n) for n in "abc"]).members)
    starts = [(0.0, a), (300.0, b), (800.0, a), (5000.0, c)]
    spans = list(restart_spans(starts))
    assert [(span.engine, span.from_s, span.to_s) for span in spans] == [
        (a, 0.0, 860.0),
        (b, 0.0, 860.0),
    ]
    assert list(restart_spans([(0.0, c), (5000.0, c)])) == []
    early = replace(spans[0], judged_s=(100.0, 300.0))
    assert [(t_s, len(of)) for t_s, of in moments([*spans, early])] == [(300.0, 1), (1040.0, 2)]
    early = replace(early, judged_s=(100.0, 900.0))
    assert [(t_s, len(of)) for t_s, of in moments([*spans, early])] == [(900.0, 3)]


@pytest.mark.parametrize(
    ("begun", "others", "seen"),
    [
        pytest.param(120.0, 0.0, True, id="it gets all"),
        pytest.param(120.0, 60.0, False, id="others get some"),
        pytest.param(30.0, 0.0, False, id="all is little"),
    ],
)
def test_a_replica_that_gets_all_requests_is_judged(
    begun: float, others: float, seen: bool
) -> None:
    engines = [
        TierEngine(member, "m", "") for member in shaped([pod(name) for name in "abc"]).members
    ]
    itl_s = {engine.key: row(*[0.02] * 6) for engine in engines}
    first, *rest = (engine.key for engine in engines)
    counts = {first: row(*[begun] * 6), **{key: row(*[others] * 6) for key in rest}}
    assert [span.engine is engines[0] for span in slow_spans(engines, itl_s, counts, AT)] == (
        [True] if seen else []
    )
