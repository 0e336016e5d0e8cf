"""A fleet that lives, in a real Prometheus: operations page nobody, faults page once and end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.fleet.engines import FleetEngines
from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.agent.fleet.watch import names_of, states_of
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.fleet.inventory import LabelMap, Observed
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.reports.diagnosis_text import summary_words
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.agent.fleet.prometheus_fleet import QUICK, watched
from tests.collector.oracle import LOOPBACK, Prometheus, running
from tests.living_faults import (
    END_S,
    FROM_S,
    TO_S,
    WATCHED_S,
    Scene,
    Site,
    all_down,
    fleet_until,
    one_takes_all,
    overload,
    to_zero,
)
from tests.living_faults import FAULTS as PLANTED
from tests.living_fleet import (
    FAULTS,
    FAULTS_S,
    MIN_S,
    LivingFleet,
    addresses,
    annotated_pods,
    operated,
    with_faults,
)
from tests.living_player import PROFILE, Player
from tests.living_source import played
from tests.programs import require

CYCLE_S = 60.0


def living(scrape_s: int) -> LivingFleet:
    """A fleet whose life ends now, after an hour."""
    return LivingFleet(scrape_s=scrape_s, epoch_s=int(time.time()) // MIN_S * MIN_S - 60 * MIN_S)


@pytest.fixture
def server() -> Iterator[Prometheus]:
    with running(require("prometheus")) as started:
        yield started


@pytest.mark.parametrize("scrape_s", [15, 30, 60])
def test_operations_send_nothing(server: Prometheus, tmp_path: Path, scrape_s: int) -> None:
    fleet = operated(living(scrape_s))
    fleet.load(server, from_s=0, to_s=50 * MIN_S)
    player = Player(fleet, server, tmp_path)
    messages = [*player.play(8 * MIN_S, 29 * MIN_S), *player.play(38 * MIN_S, 50 * MIN_S)]
    assert messages == []


@pytest.mark.parametrize(("scrape_s", "within_s"), [(15, 180), (60, 360)])
def test_faults_during_operations_begin_and_end_once(
    server: Prometheus, tmp_path: Path, scrape_s: int, within_s: int
) -> None:
    fleet = with_faults(living(scrape_s))
    fleet.load(server, from_s=0, to_s=32 * MIN_S)
    messages = Player(fleet, server, tmp_path).play(6 * MIN_S, 32 * MIN_S)
    began = {
        (message.target.split("/")[1], message.id): message.t_s
        for message in messages
        if message.kind == "began"
    }
    assert began.keys() == set(FAULTS.items())
    assert [message for message in messages if message.kind == "ended" and message.how] == []
    for kind in ("began", "ended"):
        assert len([message for message in messages if message.kind == kind]) == len(began), kind
    slow = {key: t_s - FAULTS_S[0] for key, t_s in began.items() if t_s - FAULTS_S[0] > within_s}
    assert slow == {}


HARD = (
    *("crash-loop", "bad-release", "hung", "hung-idle", "pd-healthy", "batch", "batch-hung"),
    *("outage-after-scaling", "never-answers", "one-takes-all", "overload", "xid"),
    *("slow-replica", "two-at-once", "all-loop", "only-replica", "hung-and-down"),
    *("hung-in-roll", "overload-in-roll", "failing-and-hung"),
)
"""Faults that were silent, told twice or under another name, two at once; pools that are well."""


OTHERS = tuple(fault.name for fault in PLANTED if fault.name not in HARD)
MISSED = "overload", "slow-replica", "throttled", "two-at-once"
"""Faults that put latencies over their targets."""


@pytest.mark.parametrize(
    ("names", "every_s", "targets"),
    [
        (HARD, 15, Targets()),
        (OTHERS, 30, Targets(2.0, 0.1)),
        (MISSED, 15, Targets(2.0, 0.06)),
        (("throttled",), 15, Targets(2.0, 0.055)),  # the median of the slow one is 50 to 56 ms
        (("slow-replica", "throttled"), 60, Targets(2.0, 0.05)),
    ],
)
def test_faults_are_told_under_their_own_name(
    tmp_path: Path, names: tuple[str, ...], every_s: int, targets: Targets
) -> None:
    wrong = [
        (each.flaws, each.fault.name, each.first, each.began, each.worse, each.ended)
        for each in Scene.named(names, every_s=every_s).told(tmp_path, targets)[0]
        if each.flaws
    ]
    assert wrong == []


def test_faults_from_before_the_start_begin_and_end_once(tmp_path: Path) -> None:
    names = ("one-takes-all", "hung", "slow-replica", "overload", "two-at-once", "prefix-lost")
    scene = Scene.named(names, every_s=15)
    scene.from_s = FROM_S + 2 * MIN_S
    wrong = [
        (each.flaws, each.fault.name, each.first, each.began, each.worse, each.ended)
        for each in scene.told(tmp_path)[0]
        if each.flaws
    ]
    assert wrong == []


def test_faults_are_told_of_pods_that_older_scrape_configurations_name(tmp_path: Path) -> None:
    scene = Scene.named(("never-answers", "outage-after-scaling"), every_s=15)
    scene.fleet.labels_of = annotated_pods
    to_zero(Site(scene.fleet, "calm"))
    outcomes, told = scene.told(tmp_path)
    assert [(each.fault.name, each.flaws) for each in outcomes if each.flaws] == []
    assert scene.strangers(told) == []


def test_a_server_of_an_unknown_model_that_never_answers_is_named_after_its_job(
    tmp_path: Path,
) -> None:
    scene = Scene.named(("never-answers", "pd-healthy"), every_s=30)
    scene.fleet.labels_of = addresses
    _, told = scene.told(tmp_path)
    assert [(each.kind, each.target, each.id) for each in told] == [
        ("began", "fleet/vllm", "target_down"),
        ("ended", "fleet/vllm", "target_down"),
    ]


def test_the_queue_of_a_mended_router_is_ending_and_says_how_long(tmp_path: Path) -> None:
    fleet = fleet_until(END_S, every_s=15, seed=0)
    site = Site(fleet, "uneven")
    pool = site.deployment(6, per_replica_per_s=3.0)
    site.ails(pool.pods[1:], arrival_per_s=0.0)
    words: list[str] = []

    def follow(observed: Observed, verdict: FleetVerdict) -> None:
        if observed.t_s - fleet.epoch_s > TO_S + MIN_S:
            ill = [cause for cause in verdict.causes if cause.severity >= Severity.WARNING]
            words.extend(summary_words(cause, verdict.t_s) for cause in ill)

    _, told = played(fleet, tmp_path, [(WATCHED_S, 45 * MIN_S)], cycle_s=15, follow=follow)
    assert [(each.kind, each.id) for each in told] == [
        ("began", "replica_imbalance"),
        ("ended", "replica_imbalance"),
    ]
    drains = [text for text in words if "Its queue drains: " in text]
    assert len(drains) > 12
    assert all(text.startswith("Ending: ") for text in words), "the router is mended"


def seen(fleet: LivingFleet, server: Prometheus, t_s: float) -> FleetVerdict:
    """The diagnosis at a moment of a fleet's life, up to which it is loaded."""
    fleet.load(server, from_s=t_s - 40 * MIN_S, to_s=t_s)
    return watched(server, at_s=fleet.epoch_s + t_s)


def test_a_gpu_fault_seen_at_the_start_is_not_dated_before_it(server: Prometheus) -> None:
    fleet = living(15)
    planted = next(fault for fault in PLANTED if fault.name == "xid")
    planted.plant(Site(fleet, "xid"))
    fleet_diagnosis = seen(fleet, server, FROM_S + 3 * MIN_S)
    (cause,) = (cause for cause in fleet_diagnosis.causes if cause.id == "gpu_fault")
    assert cause.since_s is not None
    assert cause.since_s >= fleet.epoch_s + FROM_S


def summaries(fleet_diagnosis: FleetVerdict) -> list[tuple[str, str]]:
    """The severity and the summary of each cause of absence."""
    return [
        (cause.severity.word, cause.summary)
        for cause in fleet_diagnosis.causes
        if cause.id == "target_down"
    ]


def noted(fleet_diagnosis: FleetVerdict, text: str) -> list[str]:
    return [note for note in fleet_diagnosis.notes if text in note]


def test_queries_do_not_grow_with_the_pods(server: Prometheus) -> None:
    fleet = living(15)
    for namespace, replicas in (("few", 2), ("many", 12)):
        fleet.pool("Deployment", namespace, replicas)
    fleet.load(server, from_s=0.0, to_s=20.0 * MIN_S)
    asked: list[int] = []
    with PrometheusSource(f"http://{LOOPBACK}:{server.port}", QUICK) as source:
        for name in ("few", "many"):
            engines = FleetEngines(PROFILE)
            config = FleetConfig(f'namespace="{name}"', LabelMap(), profile=PROFILE)
            for t_s in (19.75 * MIN_S, 20.0 * MIN_S):  # the first cycle reads the past
                at = replace(config, at_s=fleet.epoch_s + t_s)
                now = observe(source, at, engines)
            asked.append(now.load.queries)
            assert {verdict.t_s for verdict in now.verdicts.values()} == {now.t_s}
    assert asked[0] == asked[1]


def test_a_replica_that_stops_answering_is_a_note_for_a_minute(server: Prometheus) -> None:
    fleet = living(15)
    chat = fleet.pool("Deployment", "chat", 3)
    chat.pods[0].silent_s = 60.0 * 20
    fleet_diagnosis = seen(fleet, server, 20.5 * MIN_S)
    assert summaries(fleet_diagnosis) == []
    assert len(noted(fleet_diagnosis, "stopped answering")) == 1


def test_a_pod_that_kubernetes_deletes_is_never_down(server: Prometheus) -> None:
    fleet = living(15)
    chat = fleet.pool("Deployment", "chat", 3)
    leaving, crashed = chat.pods[:2]
    leaving.silent_s = crashed.silent_s = 20.0 * MIN_S
    deleted = {"namespace": "chat", "pod": leaving.name}
    fleet.state("kube_pod_deletion_timestamp", lambda t_s: t_s, **deleted)
    fleet_diagnosis = seen(fleet, server, 25 * MIN_S)
    assert summaries(fleet_diagnosis) == [
        ("critical", f"1 of 3 replicas is down (scrapes fail): {crashed.name}.")
    ]
    assert {cause.since_s for cause in fleet_diagnosis.causes} == {fleet.epoch_s + 20.0 * MIN_S}
    assert len(noted(fleet_diagnosis, f"1 replica terminating: {leaving.name}")) == 1


def test_a_server_that_never_answers_is_down_after_patience(server: Prometheus) -> None:
    fleet = living(15)
    chat = fleet.pool("Deployment", "chat", 3)
    (stuck,) = chat.begin(10 * MIN_S, 1, load_s=9e9)
    early, late = (10 + 14) * MIN_S, (10 + 16) * MIN_S
    ((severity, text),) = summaries(seen(fleet, server, early))
    assert severity == "info"
    assert text.startswith("1 replica has not answered since ")
    assert f": {stuck.name}; should serve by " in text
    fleet.load(server, from_s=early + 15, to_s=late)
    ((severity, text),) = summaries(watched(server, at_s=fleet.epoch_s + late))
    assert severity == "critical"
    assert text.startswith("1 replica has not answered since")


def test_a_pool_with_a_down_and_a_late_replica_names_both(server: Prometheus) -> None:
    fleet = living(15)
    chat = fleet.pool("Deployment", "chat", 3)
    chat.pods[0].crashes = [(20.0 * MIN_S, 9e9)]
    (stuck,) = chat.begin(5 * MIN_S, 1, load_s=9e9)
    ((severity, text),) = summaries(seen(fleet, server, 25 * MIN_S))
    assert severity == "critical"
    assert text.startswith(
        f"1 of 3 replicas is down (scrapes fail): {chat.pods[0].name}. 1 replica has "
    )
    assert text.endswith(f": {stuck.name}.")


def test_patience_follows_the_starts_that_were_seen(server: Prometheus) -> None:
    fleet = living(15)
    chat = fleet.pool("Deployment", "chat", 3)
    chat.begin(-20 * MIN_S, 1, load_s=20 * MIN_S)
    chat.begin(0, 1, load_s=9e9)
    ((severity, _),) = summaries(seen(fleet, server, 20 * MIN_S))
    assert severity == "info"


def test_a_target_of_another_kind_is_not_a_server_that_loads(server: Prometheus) -> None:
    fleet = living(15)
    fleet.pool("Deployment", "chat", 3)
    beside = {"namespace": "chat", "job": "chat/vllm"}
    for pod, up in (("redis-0", 1.0), ("cache-0", 0.0)):
        fleet.state("up", lambda _t_s, up=up: up, pod=pod, instance=pod, **beside)  # type: ignore[misc]
    fleet_diagnosis = seen(fleet, server, 30 * MIN_S)
    assert summaries(fleet_diagnosis) == []
    assert noted(fleet_diagnosis, "cache-0") == []


@pytest.mark.parametrize("wanted", [None, 0.0, 3.0])
def test_a_pool_without_replicas_is_critical_unless_none_is_wanted(
    server: Prometheus, wanted: float | None
) -> None:
    fleet = living(15)
    fleet.pool("Deployment", "chat", 3).vanish(20 * MIN_S)
    labels = {"namespace": "chat", "deployment": "chat"}
    fleet.state("kube_deployment_spec_replicas", lambda _t_s: wanted, **labels)
    fleet_diagnosis = seen(fleet, server, 30 * MIN_S)
    if wanted == 0:
        assert summaries(fleet_diagnosis) == []
        assert noted(fleet_diagnosis, "chat/m-chat is scaled to zero")
    else:
        ((severity, text),) = summaries(fleet_diagnosis)
        assert severity == "critical"
        assert text.startswith("All 3 replicas of chat/m-chat are gone since ")
        assert text.endswith("the model is not served.")


def test_a_model_that_is_renamed_in_its_deployment_is_a_note(server: Prometheus) -> None:
    fleet = living(15)
    fleet.pool("Deployment", "chat", 3, model="m-old").vanish(22 * MIN_S)
    fleet.pool("Deployment", "chat", 3, model="m-new", at_s=20 * MIN_S)
    fleet_diagnosis = seen(fleet, server, 30 * MIN_S)
    assert summaries(fleet_diagnosis) == []
    assert noted(
        fleet_diagnosis, "chat/m-old is no longer served: its workload now serves chat/m-new"
    )


def test_a_pool_that_is_replaced_may_load_for_ten_minutes(server: Prometheus) -> None:
    fleet = living(15)
    chat = fleet.pool("Deployment", "chat", 3)
    chat.vanish(20 * MIN_S)
    chat.begin(21 * MIN_S, 3, load_s=9e9)
    ((severity, text),) = summaries(seen(fleet, server, 25 * MIN_S))
    assert (severity, text.endswith("3 replicas loading in its place.")) == ("info", True)
    fleet.load(server, from_s=25.25 * MIN_S, to_s=32 * MIN_S)
    ((severity, _),) = summaries(watched(server, at_s=fleet.epoch_s + 32 * MIN_S))
    assert severity == "critical", "long before a start may take 15 min"


def test_nothing_is_gone_before_a_restarted_prometheus_has_scraped(server: Prometheus) -> None:
    fleet = living(15)
    fleet.pool("Deployment", "chat", 3)
    fleet.gap(10 * MIN_S, 30 * MIN_S)
    fleet_diagnosis = seen(fleet, server, 29.9 * MIN_S)
    assert summaries(fleet_diagnosis) == []
    assert fleet_diagnosis.health == "unknown"
    assert noted(fleet_diagnosis, "whether its replicas are gone is unknown")


def test_a_tier_keeps_its_name_while_its_pool_is_out(server: Prometheus) -> None:
    fleet = living(15)
    fleet.pool("Deployment", "chat", 3).vanish(20 * MIN_S)
    fleet_diagnosis = seen(fleet, server, 22 * MIN_S)
    states = states_of(fleet_diagnosis, interval_s=CYCLE_S)
    before = frozenset({"fleet", "fleet/chat/m-chat on H100", "fleet/other/m on H100"})
    after = names_of(fleet_diagnosis, states, before)
    assert after == {"fleet", "fleet/chat/m-chat", "fleet/chat/m-chat on H100"}


def test_the_advice_for_a_pool_is_a_flag_before_replicas_and_stays(tmp_path: Path) -> None:
    fleet = living(15)
    overload(Site(fleet, "busy"))
    one_takes_all(Site(fleet, "uneven"))
    all_down(Site(fleet, "away", ((FROM_S, FROM_S + 3 * MIN_S),)))  # its burst at the end is served
    player, _ = played(fleet, tmp_path, [(22 * MIN_S, TO_S)], cycle_s=15)
    assert {advice.pool for _, advice in player.advised if advice.changes} == {"busy/m-busy"}
    last = [advice for t_s, advice in player.advised if t_s == TO_S]
    assert [advice.id for advice in last] == ["max-num-seqs-up", "replicas"]
    sizes: dict[str, list[object]] = {}
    for t_s, advice in player.advised:
        if t_s >= FROM_S + 90.0:  # from then on the window has only the overload
            sizes.setdefault(advice.id, []).append(advice.changes[0].after)
    assert len(set(sizes["replicas"])) == 1
    assert len(set(sizes["max-num-seqs-up"])) <= 2  # what arrives and its bursts, however many wait
    seats = sizes["max-num-seqs-up"][-1]
    assert isinstance(seats, int)
    assert 64 < seats <= 120  # about 80 run at once; 3 deviations of bursts are 27
