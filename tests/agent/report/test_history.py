"""The history in bulk is the history as it is read one by one."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from kneewatch.agent.report.history import History, ReportRequest
from kneewatch.agent.store.reader import Reader
from kneewatch.dashboards.prometheus.rule_group import SUMMED_COUNTERS
from kneewatch.reports.weekly.measures import LEVELS
from kneewatch.reports.weekly.observed import Grid, TierStated
from kneewatch.reports.weekly.verdict import HEALTHY, ROUTER
from tests.agent.running import run
from tests.agent.store.factories import COLUMNS, cycle, diagnosis, written
from tests.weeks import START_S


def test_a_part_of_the_time_is_a_part_of_all(made_store: Path) -> None:
    history, reader, seen = History(made_store), Reader(made_store), 0
    for engine in reader.engines():
        from_s = START_S + 2.3 * 86_400.0  # the restart of chat-0, and none of the others
        span = {"from_s": from_s, "to_s": from_s + 10_000.0}
        whole = history.signal_arrays(engine.id, LEVELS, from_s=0.0, to_s=math.inf)
        inside = (whole.times >= span["from_s"]) & (whole.times <= span["to_s"])
        bulk = history.signal_arrays(engine.id, LEVELS, **span)
        single = reader.signals(engine.id, LEVELS, **span)
        seen += len(bulk.times)
        assert len(bulk.times) < len(whole.times)
        assert bulk.times.tolist() == list(single.times) == whole.times[inside].tolist()
        for key in LEVELS:
            wanted = whole.values[key][inside]
            for values in (bulk.values[key], np.array(single.values[key])):
                assert np.array_equal(values, wanted, equal_nan=True)
        scrapes = reader.scrapes(engine.target, **span)
        assert list(scrapes.times) == list(history.scrapes(engine.target, **span).times)
        assert all(span["from_s"] <= t_s <= span["to_s"] for t_s in scrapes.times)
    assert seen
    history.close()
    reader.close()


def test_what_is_not_there_is_empty(made_store: Path) -> None:
    history = History(made_store)
    span = {"from_s": 0.0, "to_s": 1.0}
    assert len(history.signal_arrays(1, LEVELS, **span).times) == 0
    assert not [
        counter
        for counter in history.counter_arrays(1, SUMMED_COUNTERS, **span)
        if len(counter.times)
    ]
    assert len(history.scrapes("unknown", **span).times) == 0
    history.close()


@pytest.mark.parametrize("key", ["no_such_signal"])
def test_a_signal_that_nobody_has_is_unknown(made_store: Path, key: str) -> None:
    history = History(made_store)
    series = history.signal_arrays(1, [key], from_s=START_S, to_s=START_S + 86_400.0)
    assert len(series.times) > 0
    assert np.isnan(series.values[key]).all()
    history.close()


def test_a_counter_that_no_open_scrape_has_is_left_out(tmp_path: Path) -> None:
    first, second = COLUMNS[:2]
    raws = [((first, second), (math.nan, value)) for value in (3.0, 5.0)]
    path = tmp_path / "store.db"
    written(path, *(cycle(diagnosis(100.0 + 70 * at), raw=raw) for at, raw in enumerate(raws)))
    with closing(History(path)) as history:
        metrics = {first.metric, second.metric}
        (counters,) = history.counter_arrays(1, metrics, from_s=0.0, to_s=200.0)
    assert counters.columns == (second,)
    assert (counters.times.tolist(), counters.values.tolist()) == ([100.0, 170.0], [[3.0, 5.0]])


def test_a_tier_proposes_what_all_its_engines_met(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    proposed = {"a": (1.2, 0.05), "b": (0.8, 0.06), "c": None}
    written(path, *(
        cycle(replace(diagnosis(3000.0 + at, target=name), proposed=targets and {
            "ttft_p99_s": targets[0], "itl_p99_s": targets[1]}))
        for at in (0.0, 300.0) for name, targets in proposed.items()
    ))  # fmt: skip
    done = run("report", "--store", path, "--since", "1h", "--to", 3600, "--format", "json",
               cwd=tmp_path)  # fmt: skip
    (slo,) = json.loads(done.out)["slo"]
    assert slo["budget"]["missing"].endswith(
        "quiet hours suggest TTFT P99 1.2 s, ITL P99 60 ms: set slo.ttft_p99_s = 1.2 and "
        "slo.itl_p99_s = 0.06"
    )


@pytest.mark.parametrize("beside", [(), ("a",)])
def test_a_healthy_router_is_reported_as_a_router(tmp_path: Path, beside: tuple[str, ...]) -> None:
    path = tmp_path / "store.db"
    written(path, *(
        cycle(replace(diagnosis(100.0 + 50 * at, target=name), program=program))
        for at in range(70)
        for name, program in (("r", "vllm-router"), *((each, None) for each in beside))
    ))  # fmt: skip
    done = run("report", "--store", path, "--since", "1h", "--to", 3600, "--format", "json",
               cwd=tmp_path)  # fmt: skip
    document = json.loads(done.out)
    (verdict,) = (each for each in document["verdicts"] if "router" in each["tier"])
    assert (done.status, verdict["health"], verdict["health_text"]) == (0, "ok", HEALTHY)
    assert verdict["size_text"] == verdict["money_text"] == ROUTER
    assert [tier["is_router"] for tier in document["tiers"]] == [*(False for _ in beside), True]
    assert not any("nothing was watched in this" in notice for notice in document["notices"])


def test_engines_of_one_model_are_tiers_apart_and_a_router_is_none(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    programs = {"a": None, "b": "SGLang", "r": "vllm-router"}
    written(path, *(
        cycle(replace(diagnosis(100.0 + at, target=name), program=program))
        for at in (0.0, 10.0) for name, program in programs.items()
    ))  # fmt: skip
    grid = Grid(0.0, 3600.0, "UTC", (), ())
    with closing(History(path)) as history:
        members = history.members(ReportRequest(grid, None, lambda _name: TierStated()))
    tiers = {member.engine.target: (member.tier, member.counts) for member in members}
    model = tiers["a"][0]
    assert tiers == {"a": (model, True), "b": (f"{model} on SGLang", True),
                     "r": (f"{model} on vllm-router", False)}  # fmt: skip
