"""`/probe/{target}`: 503 only while an engine is hung, and never because kneewatch is blind."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.api.service import probe
from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.agent.api.serving import asking, served, service_of, settings_of, state_of
from tests.agent.fleet.prometheus_fleet import saw
from tests.diagnose.fleet.example_fleets import fleet, verdict
from tests.incidents import rebuilt, without_progress
from tests.incidents.incident import NOTHING, Incident, said
from tests.programs import require
from tests.reports.diagnoses import HEALTHY, NOW_S

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "kubernetes.md"
URL = "http://gpu-7:8000"
STALLED = Cause(
    id="engine_stalled", confidence=0.9, severity=Severity.CRITICAL, summary="", lever=""
)
HUNG = replace(HEALTHY, health="critical", causes=(replace(STALLED, seen_s=NOW_S),))


def probed(*diagnoses: Verdict, path: str = f"/probe/{URL}", age_s: float = 0.0) -> int:
    state = state_of(URL, *diagnoses, t_s=NOW_S - age_s)
    with asking(service_of(state)) as client:
        return client.get(path).status_code


def test_a_hung_engine_fails_its_probe_and_that_of_all_targets() -> None:
    assert probed(HUNG) == 503
    assert probed(HEALTHY, HUNG) == 503, "one of a data-parallel server's engines"
    assert probed(HUNG, path="/probe") == 503
    assert probed(HUNG, path="/probe/http%3A%2F%2Fgpu-7%3A8000") == 503


@pytest.mark.parametrize(
    ("diagnosis", "age_s", "path"),
    [
        pytest.param(HEALTHY, 0.0, f"/probe/{URL}", id="healthy"),
        pytest.param(HUNG, 300.0, f"/probe/{URL}", id="not scraped lately"),
        pytest.param(HUNG, 0.0, "/probe/http://gpu-8:8000", id="not watched"),
        pytest.param(
            replace(HUNG, causes=[replace(STALLED, severity=Severity.INFO)]),
            0.0, f"/probe/{URL}", id="perhaps a long prefill",
        ),
        pytest.param(
            replace(HUNG, causes=[replace(STALLED, seen_s=NOW_S - 10)]),
            0.0, f"/probe/{URL}", id="ending",
        ),
        pytest.param(
            replace(HUNG, causes=[replace(STALLED, id="kv_pressure")]),
            0.0, f"/probe/{URL}", id="a fault that a restart does not end",
        ),
    ],
)  # fmt: skip
def test_all_else_passes(diagnosis: Verdict, age_s: float, path: str) -> None:
    assert probed(diagnosis, age_s=age_s, path=path) == 200


def test_a_server_that_starts_passes() -> None:
    starting = state_of(URL, t_s=NOW_S, cycles=0, failures=9, failing=9)
    for service in (service_of(names=[URL]), service_of(starting)):
        with asking(service) as client:
            assert client.get(f"/probe/{URL}").status_code == 200
            assert client.get("/probe").status_code == 200


def test_the_documented_probe_restarts_only_a_hung_engine() -> None:
    """Its command exits with 0 where kneewatch is down too."""
    require("curl")
    (command,) = re.findall(r'command: \[sh, -c, "(.+)"\]', GUIDE.read_text())

    def exits(url: str) -> int:
        line = command.replace("http://127.0.0.1:9877", url)
        return subprocess.run(["sh", "-c", line], check=False, timeout=20).returncode

    with served(service_of(state_of(URL, HUNG))) as server:
        assert exits(server.url) == 1
        down = server.url
    with served(service_of(state_of(URL, HEALTHY))) as server:
        assert exits(server.url) == 0
    assert exits(down) == 0


def test_a_replica_of_a_fleet_has_a_probe_until_prometheus_is_away() -> None:
    watch = FleetWatch("http://127.0.0.1:1", settings_of(), "")
    engines = {("prod/m", "r0"): [HEALTHY], ("prod/m", "r1"): [HUNG]}
    now = FleetMoment.of(replace(verdict(*fleet(2)), t_s=NOW_S), engines, Targets(), 30.0)
    saw(watch, now, seen_s=NOW_S)
    for away_s, status in ((0.0, 503), (600.0, 200)):
        service = replace(service_of(fleet=watch), clock=lambda t_s=NOW_S + away_s: t_s)
        with asking(service) as client:
            assert client.get("/probe/fleet/prod/m/r1").status_code == status
            assert client.get("/probe/fleet/prod/m/r0").status_code == 200


def test_no_token_and_no_rate_limit_make_a_probe_fail() -> None:
    limited = settings_of(http__requests_per_s=1.0)
    with asking(service_of(state_of(URL, HEALTHY), settings=limited)) as client:
        assert {client.get(f"/probe/{URL}").status_code for _ in range(50)} == {200}


def failed(diagnoses: Sequence[Verdict]) -> list[bool]:
    """Whether the probe fails, at each verdict."""
    fails: list[bool] = []
    for diagnosis in diagnoses:
        service = replace(
            service_of(state_of(URL, diagnosis, t_s=diagnosis.t_s)),
            clock=lambda t_s=diagnosis.t_s: t_s,
        )
        fails.append(probe(service, URL).status_code == 503)
    return fails


def test_a_real_server_whose_core_was_frozen() -> None:
    given = rebuilt.diagnoses("lab_frozen_core")
    fails = failed(given)
    case = rebuilt.cases()["lab_frozen_core"]
    begun_s = given[0].t_s
    assert not any(fails[: next(i for i, d in enumerate(given) if d.t_s - begun_s > 60)])
    assert any(
        fail
        for fail, diagnosis in zip(fails, given, strict=True)
        if case.from_s <= diagnosis.t_s - begun_s <= case.to_s
    )


@pytest.mark.parametrize("incident", without_progress.INCIDENTS, ids=lambda incident: incident.name)
def test_long_prefills_are_not_restarted(incident: Incident) -> None:
    fails = failed(said(incident).diagnoses)
    assert any(fails) == (incident.first_cause == "engine_stalled")
    assert incident.first_cause != NOTHING or not any(fails)
