"""What became of recommendations: followed or not, and whether they did what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kneewatch.agent.store.reader import Reader
from kneewatch.agent.store.records import Cycle, Retention
from kneewatch.agent.store.writer import Store
from kneewatch.collector.scrape_history import Restart
from kneewatch.diagnose.engine_history import PastAdvice
from kneewatch.diagnose.recommend.advice import Advice, Value
from kneewatch.diagnose.recommend.advice import FlagChange as Flag
from kneewatch.diagnose.recommend.past_advice import (
    ChangeDocument,
    config_shows,
    outcome_of,
    signals_show_change,
)
from tests.agent.store.factories import EVER, START_S, counted, cycle, diagnosis, settle
from tests.waiting import PATIENCE_S

STEP_S = 20.0
HOUR_S = 3600.0


def change(flag: str, before: Value, after: Value) -> ChangeDocument:
    return {"flag": flag, "from": before, "to": after}


@pytest.mark.parametrize(
    ("change_document", "config", "is_shown"),
    [
        (change("--kv-cache-dtype", "auto", "fp8"), {"cache_dtype": "fp8"}, True),
        (change("--kv-cache-dtype", "auto", "fp8"), {"cache_dtype": "auto"}, False),
        (change("--kv-cache-dtype", "auto", "fp8"), {}, False),
        (
            change("--num-gpu-blocks-override", 160, 320),
            {"num_gpu_blocks_override": "320"},
            True,
        ),
        (
            change("--gpu-memory-utilization", 0.9, 0.95),
            {"gpu_memory_utilization": "0.950"},
            True,
        ),
        (change("--enable-prefix-caching", None, True), {"enable_prefix_caching": "True"}, True),
        (
            change("--no-enable-prefix-caching", True, None),
            {"enable_prefix_caching": "True"},
            True,
        ),
        (change("--kv-cache-memory-bytes", 5, None), {"kv_cache_memory_bytes": "None"}, True),
        (change("--max-num-seqs", 128, 14), {"cache_dtype": "fp8"}, False),
    ],
)
def test_labels_show_a_change(
    change_document: ChangeDocument, config: Mapping[str, str], is_shown: bool
) -> None:
    shows = config_shows(change_document["flag"], change_document["to"], config)
    assert (shows is True) is is_shown
    label_known = change_document["flag"] != "--max-num-seqs" and bool(config)
    assert (shows is not None) is label_known


@pytest.mark.parametrize(
    ("change_document", "before", "after", "is_evident"),
    [
        (change("--max-loras", 2, 4), {"lora_max": 2.0}, {"lora_max": 4.0}, True),
        (change("--max-loras", 2, 4), {"lora_max": 2.0}, {"lora_max": 2.0}, False),
        (
            change("--speculative-config", "{}", None),
            {"spec_draft_tokens_per_s": 9.0},
            {"spec_draft_tokens_per_s": None},
            True,
        ),
        (
            change("--speculative-config", "{}", None),
            {"spec_draft_tokens_per_s": 9.0},
            {"spec_draft_tokens_per_s": 8.0},
            False,
        ),
        (
            change("--max-num-seqs", 128, 14),
            {"running_max": 20.0},
            {"running_max": 14.0, "waiting_avg": 16.0},
            True,
        ),
        (
            change("--max-num-seqs", 128, 14),
            {"running_max": 20.0},
            {"running_max": 14.0, "waiting_avg": 0.0},
            False,  # a quiet server would look the same
        ),
        (change("--max-num-seqs", 14, 32), {"running_max": 14.0}, {"running_max": 30.0}, True),
        (change("--max-num-seqs", 14, 32), {"running_max": 14.0}, {"running_max": 14.0}, False),
        (change("--enable-chunked-prefill", None, True), {}, {}, False),
        (change("replicas", 1, 2), {}, {}, False),
    ],
)
def test_signals_show_a_change_that_no_label_shows(
    change_document: ChangeDocument,
    before: dict[str, float | None],
    after: dict[str, float | None],
    is_evident: bool,
) -> None:
    assert signals_show_change(change_document, before, after) is is_evident


PREDICTED = {"kv_usage_ratio": 0.78, "preemption_per_s": 0.0, "usd_per_hour": 3.0}
BEFORE = {"kv_usage_avg_ratio": 0.98, "preemption_per_s": 4.7}


@pytest.mark.parametrize(
    ("after", "word"),
    [
        ({"kv_usage_avg_ratio": 0.80, "preemption_per_s": 0.0}, "kept"),
        ({"kv_usage_avg_ratio": 0.40, "preemption_per_s": 0.0}, "kept"),  # better than predicted
        ({"kv_usage_avg_ratio": 0.97, "preemption_per_s": 0.0}, "missed"),
        ({"kv_usage_avg_ratio": 0.80, "preemption_per_s": 1.0}, "missed"),
        ({"kv_usage_avg_ratio": 0.80, "preemption_per_s": 9.0}, "worsened"),
        ({"kv_usage_avg_ratio": 0.80}, "kept"),
        ({"kv_usage_avg_ratio": None}, "applied"),
    ],
)
def test_a_prediction_is_held_against_what_was_measured(
    after: dict[str, float | None], word: str
) -> None:
    fate, shown = outcome_of({"predicted": PREDICTED}, BEFORE, after)
    assert fate == word
    measured = [value for value in after.values() if value is not None]
    assert sorted(shown.values()) == sorted(measured)


def test_what_was_predicted_to_rise_is_not_worse_for_rising() -> None:
    fate, _ = outcome_of(
        {"predicted": {"queue_wait_s": 5.0}}, {"queue_mean_s": 0.8}, {"queue_mean_s": 5.3}
    )
    assert fate == "kept"


@pytest.mark.parametrize(
    ("now_s", "word"),
    [
        pytest.param(0.051, "kept", id="as before"),
        pytest.param(0.080, "worsened", id="every token comes later"),
        pytest.param(None, "kept", id="not measured"),
    ],
)
def test_harm_that_nobody_predicted_is_harm(now_s: float | None, word: str) -> None:
    document = {"predicted": {"queue_wait_s": 0.5}}
    before = {"queue_mean_s": 2.0, "itl_mean_s": 0.050}
    fate, measured = outcome_of(document, before, {"queue_mean_s": 0.5, "itl_mean_s": now_s})
    assert fate == word
    assert ("itl_s" in measured) == (word == "worsened")


def fp8(predicted: Mapping[str, float] = PREDICTED) -> Advice:
    return advised("kv-fp8", Flag("--kv-cache-dtype", "auto", "fp8"), predicted)


def advised(name: str, flag: Flag, predicted: Mapping[str, float]) -> Advice:
    return Advice(
        id=name,
        cause="kv_pressure",
        changes=(flag,),
        summary="-",
        predicted=predicted,
        cost_usd_per_hour=None,
        checks=(),
        risk="-",
        verify=(),
        guide=(),
    )


class Life:
    """A server's hours, and the store that sees them."""

    def __init__(self, path: Path) -> None:
        self.path, self.now_s = path, START_S
        self.open()
        self.config: Mapping[str, str] = {"cache_dtype": "auto"}
        self._restarts = False
        self.started_s = START_S - 60

    def open(self) -> None:
        self.store = Store.open(self.path, retention=Retention(), clock=lambda: self.now_s)

    def restarts(self, **config: str) -> None:
        """The server is started anew, with these labels."""
        self.config, self._restarts = config, True

    def lasts(self, hours: float, values: Mapping[str, float], *recommendations: Advice) -> None:
        """So many hours pass in which the server is like this."""
        busy = {"running_avg": 20.0, "waiting_avg": 10.0, "running_max": 22.0, **values}
        for at in range(round(hours * HOUR_S / STEP_S)):
            self.now_s += STEP_S
            verdict = diagnosis(self.now_s, values=busy, recommendations=recommendations)
            restart = Restart(self.now_s, "new") if self._restarts else None
            self._restarts = False
            config, started_s = dict(self.config), self.started_s
            raw = counted(float(at))
            self.put(cycle(verdict, raw=raw, config=config, started_s=started_s, restart=restart))

    def put(self, scrape: Cycle) -> None:
        self.store.put(scrape)
        settle(self.store)

    def ends(self) -> list[PastAdvice]:
        """What the store then says of the recommendations."""
        self.store.close(PATIENCE_S)
        assert self.store.stats().last_error == ""
        reader = Reader(self.path)
        recommendations = reader.recommendations(**EVER)
        reader.close()
        return recommendations


PRESSED: dict[str, float] = {"kv_usage_avg_ratio": 0.98, "preemption_per_s": 4.7}
RELIEVED: dict[str, float] = {"kv_usage_avg_ratio": 0.77, "preemption_per_s": 0.0}


def test_a_recommendation_that_is_followed_and_right_is_kept(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.5, PRESSED, fp8())
    told_s = life.now_s
    life.restarts(cache_dtype="fp8")
    life.lasts(0.4, RELIEVED)
    (advice,) = life.ends()
    assert (advice.outcome, advice.first_s, advice.last_s) == ("kept", START_S + STEP_S, told_s)
    assert advice.applied_s == told_s + STEP_S
    assert advice.recommendation.predicted == PREDICTED
    assert advice.measured == pytest.approx({"kv_usage_ratio": 0.77, "preemption_per_s": 0.0})
    assert advice.recommendation.id == "kv-fp8"


def test_one_that_made_it_worse_is_told_so(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.3, PRESSED, fp8())
    life.restarts(cache_dtype="fp8")
    life.lasts(0.4, {"kv_usage_avg_ratio": 0.99, "preemption_per_s": 9.0})
    (advice,) = life.ends()
    assert advice.outcome == "worsened"


def test_a_quiet_night_proves_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.3, PRESSED, fp8())
    life.restarts(cache_dtype="fp8")
    quiet = {"running_avg": 1.0, "waiting_avg": 0.0, "kv_usage_avg_ratio": 0.02}
    life.lasts(3.0, quiet)
    life.store.close(PATIENCE_S)
    (advice,) = Reader(life.path).recommendations(**EVER)
    assert advice.outcome == "applied"
    life.open()
    life.lasts(1.2, PRESSED)
    (advice,) = life.ends()
    assert advice.outcome == "missed", "the morning tells, over a restart of the daemon"


def test_a_load_that_does_not_come_back_is_not_looked_for_for_ever(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.3, PRESSED, fp8())
    life.restarts(cache_dtype="fp8")
    life.lasts(0.1, {"running_avg": 1.0, "waiting_avg": 0.0})
    life.now_s += 26 * HOUR_S
    life.lasts(0.1, {"running_avg": 1.0, "waiting_avg": 0.0})
    life.lasts(0.5, RELIEVED)
    (advice,) = life.ends()
    assert (advice.outcome, advice.measured) == ("applied", {}), (
        "nobody knows what else has changed"
    )


def test_a_restart_without_the_change_follows_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.3, PRESSED, fp8(), advised("seats", Flag("--max-num-seqs", 128, 14), {}))
    life.restarts(cache_dtype="auto")
    life.lasts(0.5, RELIEVED)
    assert [recommendation.outcome for recommendation in life.ends()] == ["open", "open"]


def test_seats_are_seen_in_the_batch(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    seats = advised("seats", Flag("--max-num-seqs", 128, 14), {"preemption_per_s": 0.0})
    life.lasts(0.3, PRESSED, seats)
    life.restarts(cache_dtype="auto")
    pinned = {"running_avg": 14.0, "running_max": 14.0, "waiting_avg": 16.0}
    life.lasts(0.5, {**RELIEVED, **pinned})
    (advice,) = life.ends()
    assert advice.outcome == "kept"
    assert advice.measured == {"preemption_per_s": 0.0}


def test_a_change_that_is_taken_back_before_it_was_measured_is_open_again(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.3, PRESSED, fp8())
    life.restarts(cache_dtype="fp8")
    life.lasts(0.1, RELIEVED)
    life.restarts(cache_dtype="auto")
    life.lasts(0.5, PRESSED)
    (advice,) = life.ends()
    assert (advice.outcome, advice.applied_s) == ("open", None)


def test_what_is_told_no_more_lapses_after_a_day(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.1, PRESSED, fp8())
    life.lasts(0.1, RELIEVED)
    life.now_s += 25 * HOUR_S
    life.lasts(0.1, RELIEVED)
    (advice,) = life.ends()
    assert advice.outcome == "lapsed"
    assert advice.last_s == pytest.approx(START_S + 0.1 * HOUR_S)


def test_one_told_again_is_the_same_one(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.1, PRESSED, fp8())
    life.lasts(0.1, RELIEVED)
    life.store.close(PATIENCE_S)
    life.open()
    life.lasts(0.1, PRESSED, fp8({"kv_usage_ratio": 0.6}))
    (advice,) = life.ends()
    assert (advice.first_s, advice.last_s) == (START_S + STEP_S, life.now_s)
    assert advice.recommendation.predicted == {"kv_usage_ratio": 0.6}, "the newest numbers"


def test_configurations_and_starts_are_kept(tmp_path: Path) -> None:
    life = Life(tmp_path / "store.db")
    life.lasts(0.05, {})
    first_s = START_S + STEP_S
    life.restarts(cache_dtype="fp8")
    life.lasts(0.05, {})
    changed_s = life.now_s - 0.05 * HOUR_S + STEP_S
    life.store.close(PATIENCE_S)
    life.open()
    life.lasts(0.05, {})
    life.store.close(PATIENCE_S)
    life.open()
    life.started_s += 500
    life.lasts(0.05, {})
    life.ends()
    reader = Reader(life.path)
    first, second, third = reader.configs(1, **EVER)
    assert (first.t_s, first.before, first.after) == (first_s, {}, {"cache_dtype": "auto"})
    assert (second.t_s, second.restart) == (changed_s, "new")
    assert (second.before, second.after) == ({"cache_dtype": "auto"}, {"cache_dtype": "fp8"})
    assert third.restart == "the process has a new start time"
    assert [c.t_s for c in reader.configs(1, from_s=changed_s, to_s=changed_s)] == [changed_s]
    reader.close()
