"""What became of a recommendation: seen, measured at load, judged."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kneewatch.diagnose.recommend.fate import LAPSES_S, Fate, FateBook
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation

BEFORE = {"num_gpu_blocks_override": "160", "cache_dtype": "auto"}
AFTER = {"num_gpu_blocks_override": "1024", "cache_dtype": "auto"}
INCIDENT = {
    "arrival_per_s": 4.0,
    "preemption_per_s": 3.6,
    "kv_usage_avg_ratio": 0.98,
    "kv_capacity_tokens": 5088.0,
    "waiting_avg": 40.0,
    "ttft_mean_s": 30.0,
    "itl_mean_s": 0.05,
}
WELL = {
    **INCIDENT,
    "preemption_per_s": 0.0,
    "kv_usage_avg_ratio": 0.7,
    "kv_capacity_tokens": 32736.0,
    "waiting_avg": 0.0,
    "ttft_mean_s": 0.4,
}


def blocks(identity: str = "kv-blocks", flag: str = "--num-gpu-blocks-override") -> Recommendation:
    return Recommendation(
        id=identity,
        cause="kv_pressure",
        changes=(Change(flag, 160, 1024),),
        summary="",
        predicted={
            "kv_capacity_tokens": 32736,
            "kv_usage_ratio": 0.76,
            "preemption_per_s": 0.0,
        },
        cost_usd_per_hour=0.0,
        checks=(),
        risk="",
        verify=(),
        guide=("7.4",),
    )


class Engine:
    """An engine that is scraped every 5 s."""

    def __init__(self) -> None:
        self.book, self.now_s = FateBook(window_s=60.0), 1000.0

    def scrape(
        self,
        values: Mapping[str, float],
        config: Mapping[str, str],
        *,
        told: tuple[Recommendation, ...] = (),
        causes: tuple[str, ...] = (),
        restarted: bool = False,
        for_s: float = 5.0,
    ) -> list[Fate]:
        """The fates that so many seconds of the same scrape have changed."""
        changed: list[Fate] = []
        for _ in range(max(1, round(for_s / 5))):
            changed += self.book.take(
                self.now_s,
                recommendations=told,
                values=values,
                config=config,
                causes=causes,
                restarted=restarted,
            )
            restarted = False
            self.now_s += 5.0
        return changed

    def incident(self, *told: Recommendation) -> None:
        """A minute of trouble."""
        self.scrape(INCIDENT, BEFORE, told=told, causes=("kv_pressure",), for_s=60)


@pytest.mark.parametrize(
    ("after", "causes", "verdict", "says"),
    [
        pytest.param(WELL, (), "kept", "as promised", id="as predicted"),
        pytest.param(
            {**WELL, "preemption_per_s": 1.0}, (), "missed", "preemption_per_s 3.6 -> 1, promised 0",
            id="better than before, worse than promised",
        ),
        pytest.param(
            WELL, ("kv_pressure",), "missed", "kv_pressure goes on", id="the cause goes on"
        ),
        pytest.param(
            {**WELL, "kv_capacity_tokens": 16000.0}, (), "missed", "kv_capacity_tokens",
            id="half the capacity",
        ),
        pytest.param(
            {**WELL, "itl_mean_s": 0.2}, (), "worsened", "itl_s 0.05 -> 0.2",
            id="what nobody promised got worse",
        ),
    ],
)  # fmt: skip
def test_verdict_after_the_change(
    after: Mapping[str, float], causes: tuple[str, ...], verdict: str, says: str
) -> None:
    engine = Engine()
    engine.incident(blocks())
    (applied,) = engine.scrape(after, AFTER, restarted=True, causes=causes)
    assert (applied.verdict, applied.certain) == ("applied", True)
    (judged,) = engine.scrape(after, AFTER, causes=causes, for_s=600)
    assert judged.verdict == verdict
    assert says in judged.text
    assert judged.measured["kv_capacity_tokens"] == after["kv_capacity_tokens"]
    assert judged.before["preemption_per_s"] == 3.6


def test_a_quiet_night_proves_nothing() -> None:
    engine = Engine()
    engine.incident(blocks())
    engine.scrape(WELL, AFTER, restarted=True)
    assert engine.scrape({**WELL, "arrival_per_s": 0.5}, AFTER, for_s=3600) == []
    (judged,) = engine.scrape(WELL, AFTER, for_s=600)
    assert judged.verdict == "kept"


def test_an_unchanged_restart_follows_nothing() -> None:
    engine = Engine()
    engine.incident(blocks())
    assert engine.scrape(WELL, BEFORE, restarted=True, for_s=1200) == []


def test_one_that_nobody_follows_lapses() -> None:
    engine = Engine()
    engine.incident(blocks())
    engine.now_s += LAPSES_S
    (lapsed,) = engine.scrape(WELL, BEFORE)
    assert lapsed.verdict == "lapsed"
    engine.incident(blocks())
    (again,) = engine.scrape(WELL, AFTER, restarted=True)
    assert again.verdict == "applied"


def test_a_flag_that_no_page_shows_is_a_guess() -> None:
    engine = Engine()
    engine.incident(blocks("seats", "--max-num-seqs"), blocks("queue", "--max-num-queued-reqs"))
    (applied,) = engine.scrape(WELL, BEFORE, restarted=True)
    assert (applied.made.id, applied.certain) == ("seats", False)
    assert "cannot show it" in applied.text


def test_what_is_shown_beats_a_guess() -> None:
    engine = Engine()
    engine.incident(blocks("seats", "--max-num-seqs"), blocks())
    (applied,) = engine.scrape(WELL, AFTER, restarted=True)
    assert applied.made.id == "kv-blocks"


def test_replicas_are_not_seen_on_a_page() -> None:
    engine = Engine()
    engine.incident(blocks("replicas", "replicas"))
    assert engine.scrape(WELL, BEFORE, restarted=True, for_s=1200) == []


def test_fates_go_on_after_the_program_restarts() -> None:
    engine = Engine()
    engine.incident(blocks())
    (applied,) = engine.scrape(WELL, AFTER, restarted=True)
    engine.book = FateBook(window_s=60.0, fates=(applied,))
    (judged,) = engine.scrape(WELL, AFTER, for_s=600)
    assert judged.verdict == "kept"
