"""The command: what may be asked for, where it goes, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from kneewatch.agent.console import NO_DATA
from kneewatch.agent.report.command import status
from tests.agent.running import Ended, Main
from tests.reports.weekly.page import examples
from tests.weeks import DAY_S, START_S

TO_S = START_S + 7 * DAY_S


def asked(main: Main, store: Path, *more: object) -> Ended:
    """A run over the made-up week."""
    return main("report", "--store", store, "--to", TO_S, "--slo-ttft", 5, *more)


def test_json_on_stdout(main: Main, made_store: Path) -> None:
    done = asked(main, made_store, "--format", "json")
    assert done.status == 1
    document = json.loads(done.out)
    assert document["schema"] == "kneewatch.report/1"
    assert document["compared"]["days"] == 7
    assert any(
        "nothing was watched in the period before" in notice for notice in document["notices"]
    )


def test_the_form_follows_the_file(main: Main, made_store: Path, tmp_path: Path) -> None:
    for name, begins in (("a.html", "<!"), ("a.json", "{"), ("a.md", "#")):
        assert asked(main, made_store, "--out", tmp_path / name).out == ""
        assert (tmp_path / name).read_text().lower().startswith(begins.lower())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "a.md"]


def test_filters_keep_one_tier_or_target(main: Main, made_store: Path) -> None:
    by_tier = json.loads(asked(main, made_store, "--format", "json", "--tier", "h200").out)
    assert [tier["id"] for tier in by_tier["tiers"]] == ["tiny on h200"]
    assert {incident["target"] for incident in by_tier["incidents"]} == {"tight-0"}
    by_target = json.loads(asked(main, made_store, "--format", "json", "--target", "shared-0").out)
    (tier,) = by_target["tiers"]
    assert [engine["target"] for engine in tier["engines"]] == ["shared-0"]
    assert by_target["filters"] == ["target shared-0"]


def test_a_single_scrape_is_data_and_no_engine_without_time_is_none() -> None:
    report = examples.fleet()
    once = replace(report, period=replace(report.period, covered_s=0.0))
    assert status(once) != NO_DATA
    nobody = tuple(replace(tier, engines=()) for tier in once.tiers)
    assert status(replace(once, tiers=nobody)) == NO_DATA


def test_a_quiet_day_is_fine(main: Main, made_store: Path) -> None:
    done = main("report", "--store", made_store, "--since", "1d", "--to", START_S + DAY_S,
                "--format", "json")  # fmt: skip
    assert done.status == 0
    assert json.loads(done.out)["incidents"] == []


def test_days_are_compared_with_the_days_before(main: Main, made_store: Path) -> None:
    since = ("--since", "3d", "--to", START_S + 7 * DAY_S, "--format", "json")
    document = json.loads(main("report", "--store", made_store, *since).out)
    assert document["compared"]["to_s"] == START_S + 4 * DAY_S
    (slo,) = [objective for objective in document["slo"] if objective["tier"] == "tiny on h200"]
    assert slo["served_per_s"]["before"] > 0
    alone = json.loads(main("report", "--store", made_store, *since, "--compare", "none").out)
    assert alone["compared"] is None
    assert alone["slo"][0]["served_per_s"]["before"] is None


def test_hours_are_those_of_the_time_zone(main: Main, made_store: Path) -> None:
    done = asked(main, made_store, "--format", "json", "--timezone", "Asia/Kolkata")
    document = json.loads(done.out)
    assert document["timezone"] == "Asia/Kolkata"
    hour = document["slo"][1]["hours"][0]
    assert (hour["weekday"], hour["hour"]) == (0, 5)


def test_an_end_without_a_zone_is_by_the_reports_clocks(main: Main, made_store: Path) -> None:
    given = ("--to", "2026-11-16", "--since", "1d", "--format", "json")
    for zone, offset_h in (("Europe/Berlin", 1), ("America/New_York", -5)):
        done = main("report", "--store", made_store, "--timezone", zone, *given)
        period = json.loads(done.out)["period"]
        assert period["to_s"] == TO_S - 3600 * offset_h
        assert period["from_s"] == TO_S - DAY_S - 3600 * offset_h
    done = main("report", "--store", made_store, "--timezone", "Asia/Tokyo",
                "--to", "2026-11-16T00:00:00Z", "--format", "json")  # fmt: skip
    assert json.loads(done.out)["period"]["to_s"] == TO_S, "a zone that is told counts"


def test_a_time_in_which_nothing_was_watched(main: Main, made_store: Path) -> None:
    done = main("report", "--store", made_store, "--to", START_S - DAY_S, "--format", "json")
    assert done.status == 2
    assert "nothing was watched" in json.loads(done.out)["notices"][0]
    assert f"no data in this period: {made_store}: " in done.err
    assert "; the history has data from " in done.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--target", "nobody"), "no such target in the history; it has chat-0"),
        (("--tier", "nothing"), "no such tier in that period; it has tiny on b200, tiny on h100"),
        (("--out", ""), "--out '': expected the name of a file"),
        (("--out", "/"), "--out /: expected the name of a file"),
        (("--timezone", "Mars/Olympus"), "report.timezone = 'Mars/Olympus' is not a time zone"),
        (("--compare", "soon"), "not a duration"),
        (("--gpu", "abacus"), "gpu"),
        (("--to", "1e30"), "time out of range"),
        (("--to", "0001-01-01"), "time out of range"),
        (("--since", "367d"), "a year (366d) at most"),
        (("--to", "soon"), "neither unix seconds nor"),
        (("--out", "/no/such/folder/x.html"), "cannot be written"),
        (("--report-profile", "none.toml"), "none.toml"),
    ],
)
def test_what_cannot_be_is_said(
    main: Main, made_store: Path, more: tuple[str, str], said: str
) -> None:
    done = asked(main, made_store, *more)
    assert done.status == 2
    assert said in done.err


def test_without_a_history_it_says_so(main: Main, tmp_path: Path) -> None:
    done = main("report", "--store", tmp_path / "none.db")
    assert done.status == 2
    assert "none.db" in done.err


def test_what_is_stated_of_a_target_counts_for_it(
    main: Main, made_store: Path, tmp_path: Path
) -> None:
    (tmp_path / "kneewatch.toml").write_text(
        """
        slo.ttft_p99_s = 5.0
        [[targets]]
        url = "http://127.0.0.1:1"
        name = "tight-0"
        gpu = "h200"
        tensor_parallel = 2
        slo.ttft_p99_s = 0.05
        """
    )
    done = asked(main, made_store, "--config", tmp_path / "kneewatch.toml", "--format", "json")
    document = json.loads(done.out)
    budgets = {
        objective["tier"]: objective["latencies"][0]["budget_s"] for objective in document["slo"]
    }
    assert budgets["tiny on h100"] == 5.0
    money = {cost["tier"]: cost for cost in document["money"]}
    assert money["tiny on h200"]["gpus"] == 2
    assert "h200" in money["tiny on h200"]["price_source"]
    assert money["tiny on h100"]["usd"]["value"] is None


def test_without_its_libraries_it_says_how_to_get_them(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    done = main("report")
    assert done.status == 2
    assert "pandas, not installed here. Try: pip install './WHEEL[report]'" in done.err
