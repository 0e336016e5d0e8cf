"""The strip: the worst health of all engines, as tall as it is bad."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.reports.triage.charts import Axis
from kneewatch.reports.triage.engine import COLUMNS, strip
from kneewatch.rules.rule import OK, STATES
from tests.reports.triage.views import interval

AXIS = Axis(0.0, 1200.0)


def made(
    *engines: list[tuple[str, float, float | None]],
) -> tuple[Mapping[str, str], str]:
    rows = [
        [
            interval("health", word, STATES.get(word, OK), start_s, end_s)
            for word, start_s, end_s in engine
        ]
        for engine in engines
    ]
    return strip(rows, AXIS)


def test_the_worst_engine_is_seen() -> None:
    turns = ("ok", 0.0, 600.0), ("critical", 600.0, 900.0), ("ok", 900.0, None)
    paths, words = made([("ok", 0.0, None)], [*turns])
    assert paths == {
        "ok": "M0 19h60v5h-60zM90 19h30v5h-30z",
        "critical": "M60 0h30v24h-30z",
    }
    assert words == "25% critical, 75% ok."


def test_what_was_not_watched_is_neither_fine_nor_bad() -> None:
    assert made([("ok", 600, None)])[1] == "50% ok, 50% not watched."
    assert made()[1] == "100% not watched."


def test_a_short_outage_is_seen_and_a_first_scrape_hides_nothing() -> None:
    paths, _ = made([("unknown", 0, 2), ("ok", 2, 700), ("critical", 700, 701), ("ok", 701, None)])
    assert paths["critical"] == "M70 0h1v24h-1z"
    assert "unknown" not in paths
    assert "unknown" in made([("ok", 0, 600), ("unknown", 600, None)])[0]


def test_a_strange_health_word_is_unknown() -> None:
    assert list(made([("splendid", 0, None)])[0]) == ["unknown"]


def test_thousands_of_intervals_stay_light() -> None:
    paths, _ = made([("ok" if n % 2 else "critical", n / 4, n / 4 + 0.25) for n in range(4800)])
    assert sum(map(len, paths.values())) < 30 * COLUMNS
