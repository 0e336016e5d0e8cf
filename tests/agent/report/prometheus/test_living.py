"""The report of a fleet that lives: it names the faults that were planted, and no rollout."""

from __future__ import annotations

import json

import pytest

from kneewatch.agent.fleet.presence import DEFAULT_PATIENCE_S
from tests.agent.running import Main
from tests.collector.oracle import LOOPBACK, running
from tests.living_faults import (
    FROM_S,
    Site,
    bad_release,
    crash_loop,
    failing,
    hung_idle,
    never_answers,
)
from tests.living_fleet import FAULTS, FAULTS_S, MIN_S, LivingFleet, with_faults
from tests.programs import require

END_S = 1_795_262_400
MINUTES = 32
NEAR_S = 90.0
BESIDE = {
    "loop": ("engine_restarted", crash_loop),
    "release": ("engine_restarted", bad_release),
    "errors": ("requests_failing", failing),
    "hidden": ("engine_stalled", hung_idle),
    "never": ("target_down", never_answers),
}


def test_the_report_names_the_planted_faults_and_no_rollout(main: Main) -> None:
    fleet = with_faults(LivingFleet(scrape_s=30, epoch_s=END_S - MINUTES * MIN_S))
    for name, (_, plant) in BESIDE.items():
        plant(Site(fleet, name))
    faults = FAULTS | {name: cause for name, (cause, _) in BESIDE.items()}
    with running(require("prometheus")) as server:
        fleet.load(server, from_s=0, to_s=MINUTES * MIN_S)
        done = main(
            "report", "--prometheus", f"http://{LOOPBACK}:{server.port}", "--since",
            f"{MINUTES}m", "--to", END_S, "--compare", "none", "--slo-ttft", 1,
            "--fleet-queries-per-s", 1000, "--format", "json",
        )  # fmt: skip
    assert done.status == 1, done.err
    report = json.loads(done.out)
    assert report["notices"] == []
    named = {
        (row["tier"].split(" on ")[0].removeprefix("m-"), row["cause"])
        for row in report["incidents"]
    }
    assert named == set(faults.items())
    assert len(report["incidents"]) == len(faults)
    late = next(row for row in report["incidents"] if row["cause"] == "admission_limit")
    assert (len(late["replicas"]), late["replicas_present"]) == (4, 4)
    present = {tier["model"]: tier["engines_present"] for tier in report["tiers"]}
    few = {"m-big": 3, "m-errors": 3, "m-never": 3}
    assert present == {**{f"m-{name}": 4 for name in faults}, **few}
    peaks = {
        row["tier"].removeprefix("m-").split(" ")[0]: row["peak_requests_per_s"]
        for row in report["sizes"]
    }
    assert peaks["late"] == pytest.approx(4 * 14.0, rel=0.1), "asked; 43 were served"
    assert peaks["code"] == pytest.approx(4 * 2.0, rel=0.25), "what drains after a hang came before"
    assert [row["replicas_needed"] for row in report["sizes"] if "m-late" not in row["tier"]] == [
        None
    ] * (len(faults) - 1), "no replicas for a fault"
    down = {
        row["target"]: row["start_s"] - fleet.epoch_s - FAULTS_S[0]
        for row in report["incidents"]
        if row["cause"] == "target_down"
    }
    never_s = down.pop("never/m-never")
    assert never_s == pytest.approx(FROM_S - DEFAULT_PATIENCE_S - FAULTS_S[0], abs=NEAR_S)
    assert down.keys() == {fleet.pools[0].pods[0].name, "lost/m-lost"}
    assert all(abs(late_s) <= NEAR_S for late_s in down.values()), down
