"""`?at=` and `?since=`: how things were, as it is told of any moment."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kneewatch.agent.api.service import INTERVALS_MAX, EngineInterval, Service
from kneewatch.agent.api.triage import LINES, past
from kneewatch.agent.store.records import StoredEngine
from kneewatch.collector.errors import KneewatchError
from kneewatch.diagnose.change import Interval
from kneewatch.reports.diagnosis_text import Style, text
from kneewatch.rules.rule import Severity
from tests.agent.api.memory_history import HOUR_S, Remembered, reader
from tests.agent.api.serving import (
    SICK_NAME,
    SICK_STATE,
    WELL_STATE,
    asking,
    service_of,
    state_of,
)
from tests.agent.api.test_triage import JSON, TRIAGE, told
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK


@pytest.fixture
def service() -> Service:
    """Two targets with an hour's history; now both are well."""
    now = state_of(SICK_NAME, HEALTHY), WELL_STATE
    return service_of(*now, names=["r9"], reader=reader(SICK_STATE, WELL_STATE))


def test_a_past_moment_as_json(service: Service) -> None:
    with asking(service) as client:
        triage = told(client, f"{TRIAGE}?at=-30m")
    assert triage["t"] == NOW_S - 1800
    assert [target["target"] for target in triage["targets"]] == [SICK_NAME, "r1"]
    assert [target["health"] for target in triage["targets"]] == ["critical", "ok"]
    assert [target["t"] for target in triage["targets"]] == [NOW_S - 1800] * 2
    assert triage["watching"] == triage["pending"] == []


def test_one_target_at_a_past_moment(service: Service) -> None:
    with asking(service) as client:
        triage = told(client, f"{TRIAGE}/{SICK_NAME}?at=2026-11-21T00:00:00Z")
    assert [target["target"] for target in triage["targets"]] == [SICK_NAME]


def test_a_past_moment_is_told_by_the_same_words_as_now(service: Service) -> None:
    with asking(service) as client:
        plain = client.get(f"{TRIAGE}?at=-30m").text
        marked = client.get(f"{TRIAGE}?at=-30m", accept="text/markdown").text
    then = replace(SICK, target=SICK_NAME, t_s=NOW_S - 1800)
    assert plain.startswith("2026-11-20 23:36:40 UTC (the past): 1 critical, 1 ok\n")
    assert text([then], Style(docs_url="/docs")) in plain
    assert marked.startswith("# 2026-11-20 23:36:40 UTC (the past): 1 critical")


def test_the_intervals_since_a_moment(service: Service) -> None:
    with asking(service) as client:
        triage = told(client, f"{TRIAGE}?since=-2h")
        plain = client.get(f"{TRIAGE}/{SICK_NAME}?since=-2h").text
        marked = client.get(f"{TRIAGE}?since=-2h&format=markdown").text
    assert triage["since"] == NOW_S - 7200
    assert {target["target"] for target in triage["targets"]} == {SICK_NAME, "r1"}
    assert triage["targets"][0]["health"] == "ok"
    assert triage["intervals"][0] == {
        "target": SICK_NAME, "model": "llama", "engine": "0", "kind": "stage", "id": "3",
        "severity": "critical", "start": NOW_S - HOUR_S, "end": NOW_S - HOUR_S + 60,
        "last": NOW_S - HOUR_S + 60, "ended": "ended",
    }  # fmt: skip
    assert triage["intervals"][-1]["end"] is None
    assert "since 2026-11-20 22:06:40 UTC:\n" in plain
    assert "23:06:40 UTC to 2026-11-20 23:07:40 UTC (60 s): stage 3 queueing (critical)" in plain
    assert "00:06:10 UTC to now (30 s): kv_pressure (warning)" in plain
    assert "\n- 2026-11-20 23:06:40 UTC to 2026-11-20 23:07:40 UTC (60 s): stage 3" in marked


def test_what_ended_later_still_went_on_then(service: Service) -> None:
    with asking(service) as client:
        at_s = NOW_S - HOUR_S + 30
        triage = told(client, f"{TRIAGE}/{SICK_NAME}?at={at_s:.0f}&since=-1m")
    (stage,) = [interval for interval in triage["intervals"] if interval["kind"] == "stage"]
    assert stage["end"] is None
    assert stage["ended"] == ""
    assert triage["since"] == at_s - 60


def test_a_quiet_past_is_told_as_such(service: Service) -> None:
    with asking(service) as client:
        plain = client.get(f"{TRIAGE}?at=-40m&since=-1m").text
    assert "no stored data of that time" in plain


def test_before_the_history_is_404_and_says_where_it_begins(service: Service) -> None:
    with asking(service) as client:
        missing = client.get(f"{TRIAGE}?at=-3d")
        other = client.get(f"{TRIAGE}/r9?at=-1h")
        unknown = client.get(f"{TRIAGE}/nope?at=-1h")
    assert missing.status_code == other.status_code == unknown.status_code == 404
    assert missing.json()["detail"] == (
        "nothing is stored of that moment; the history begins at 2026-11-20 23:06:40 UTC and "
        "ends at 2026-11-21 00:06:40 UTC"
    )
    assert other.json()["detail"] == "nothing is stored yet"
    assert "no such target" in unknown.json()["detail"]


def test_a_target_that_is_no_longer_watched_has_its_past() -> None:
    with asking(service_of(WELL_STATE, reader=reader(SICK_STATE))) as client:
        triage = told(client, f"{TRIAGE}/{SICK_NAME}?at=-30m")
        now = client.get(f"{TRIAGE}/{SICK_NAME}")
    assert triage["targets"][0]["target"] == SICK_NAME
    assert now.status_code == 404


class Broken(Remembered):
    """A history that cannot be read."""

    def engines(self, target: str | None = None) -> Any:  # noqa: ANN401
        """Not today."""
        raise KneewatchError("database disk image is malformed: /var/lib/secret/kneewatch.db")


def test_a_history_that_cannot_be_read_is_503_without_its_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with asking(service_of(WELL_STATE, reader=Broken())) as client:
        failed = client.get(f"{TRIAGE}?at=-1h", accept=JSON)
        page = client.get("/triage")
        now = client.get(TRIAGE)
    assert failed.status_code == 503
    assert "secret" not in failed.text + page.text
    assert "/var/lib/secret" in caplog.text
    assert "No history is stored, or it cannot be read" in page.text
    assert now.status_code == 200


ENGINE = StoredEngine(1, "r1", "llama", "0", "", {}, 0.0, 0.0)


def intervals(count: int) -> list[EngineInterval]:
    """Warnings of one second each."""
    return [
        (
            ENGINE,
            Interval("health", "warning", Severity.WARNING, n, n + 1.0, n + 1.0, "ended", 1),
        )
        for n in range(count)
    ]


def test_a_long_past_is_cut_to_the_newest_and_says_so() -> None:
    told_text = past("text", intervals(LINES + 5), since_s=0, t_s=LINES + 10.0)
    assert "5 earlier rows are not shown (?format=json)" in told_text
    assert told_text.count("health warning") == LINES
    assert INTERVALS_MAX > LINES


def test_hostile_names_of_the_past_are_text() -> None:
    interval = replace(intervals(1)[0][1], id="[a](b)", kind="cause")
    hostile = (replace(ENGINE, target="<b>\x1b[31m|`x`"), interval)
    assert "\x1b" not in past("text", [hostile], since_s=0, t_s=10.0)
    marked = past("markdown", [hostile], since_s=0, t_s=10.0)
    assert "\\<b\\>" in marked
    assert "\\[a\\](b)" in marked
