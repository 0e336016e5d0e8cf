"""Made-up loads on a made-up KV cache: how early exhaustion is forecast, and how often in vain.

Requests arrive at random (Poisson), hold a prompt's tokens at once and one more each step, and are
admitted in order while their prompt fits; a full cache throws the newest out. `python -m
tests.ramps` prints the figures of `make accuracy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from statistics import median

from kneewatch.diagnose.learned.forecast import KvForecaster

STEP_S = 0.25
SCRAPE_S = 5.0
BROKEN_S = 60.0
"""A forecast that was silent for longer had been taken back."""

NEAR_S = 300.0
WINDOW_S = 60.0
Rate = Callable[[float], float]


@dataclass(slots=True)
class _Request:
    held: float
    left: float
    arrived_s: float


@dataclass(slots=True)
class Cache:
    """A KV cache with requests in it. `tokens_per_s` is one request's decode speed."""

    capacity: float
    rng: Random
    tokens_per_s: float = 25.0
    prompt: float = 600.0
    output: float = 300.0
    running: list[_Request] = field(default_factory=list[_Request])
    waiting: list[_Request] = field(default_factory=list[_Request])
    preempted: int = 0
    now_s: float = 0.0
    admitted: int = 0
    ended: int = 0
    lasted_s: float = 0.0
    """Of all requests that ended, the sum of their seconds."""

    def step(self, arrivals_per_s: float) -> None:
        """A quarter of a second."""
        self.now_s += STEP_S
        gap_s = self.rng.expovariate(arrivals_per_s)
        while gap_s < STEP_S:
            gap_s += self.rng.expovariate(arrivals_per_s)
            self.waiting.append(
                _Request(self.rng.gammavariate(4, self.prompt / 4),
                         self.rng.gammavariate(2, self.output / 2), self.now_s)
            )  # fmt: skip
        grown = self.tokens_per_s * STEP_S
        for request in self.running:
            request.held += grown
            request.left -= grown
            if request.left <= 0:
                self.ended += 1
                self.lasted_s += self.now_s - request.arrived_s
        self.running = [request for request in self.running if request.left > 0]
        used = self.used
        while self.waiting and used + self.waiting[0].held <= 0.98 * self.capacity:
            used += self.waiting[0].held
            self.running.append(self.waiting.pop(0))
            self.admitted += 1
        while used > self.capacity:
            self.waiting.insert(0, self.running.pop())
            used -= self.waiting[0].held
            self.preempted += 1

    @property
    def used(self) -> float:
        """Tokens held."""
        return sum(request.held for request in self.running)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: when requests were first thrown out, and since when that had been forecast.

    `alarmed_s` is the time over which a forecast stood, `lasted_s` the whole run's.
    """

    exhausted_s: float | None
    forecast_s: float | None
    alarmed_s: float
    lasted_s: float
    errors_s: tuple[float, ...] = ()
    """Forecast less true seconds, of the forecasts within NEAR_S of the first preemption."""

    @property
    def lead_s(self) -> float | None:
        """Seconds from the forecast to the first preemption; None where either is missing."""
        if self.exhausted_s is None or self.forecast_s is None:
            return None
        return self.exhausted_s - self.forecast_s


def scrapes(
    cache: Cache, rate: Rate, for_s: float
) -> Iterator[tuple[float, dict[str, float], int]]:
    """Scrapes of a run: time, the window's values, preemptions so far."""
    window: list[tuple[float, int, int, int, float]] = []
    steps_per_scrape, kept = round(SCRAPE_S / STEP_S), round(WINDOW_S / SCRAPE_S)
    for scrape in range(round(for_s / SCRAPE_S)):
        now_s = scrape * SCRAPE_S
        for step in range(steps_per_scrape):
            cache.step(rate(now_s + step * STEP_S))
        usage, running = cache.used / cache.capacity, len(cache.running)
        window.append((usage, running, cache.admitted, cache.ended, cache.lasted_s))
        del window[: -kept - 1]
        count, first, span_s = len(window), window[0], SCRAPE_S * max(1, len(window) - 1)
        ended = cache.ended - first[3]
        values = {
            "kv_usage_ratio": usage,
            "kv_usage_avg_ratio": sum(row[0] for row in window) / count,
            "kv_usage_max_ratio": max(row[0] for row in window),
            "running": float(running),
            "running_avg": sum(row[1] for row in window) / count,
            "waiting_by_capacity": float(len(cache.waiting)),
            "arrival_per_s": (cache.admitted - first[2]) / span_s,
            "completed_per_s": ended / span_s,
        }
        if ended:
            values["e2e_mean_s"] = (cache.lasted_s - first[4]) / ended
        yield now_s + SCRAPE_S, values, cache.preempted


@dataclass(frozen=True, slots=True)
class Answers:
    """A cache and what its requests are like, in tokens, and a request's decode speed."""

    name: str
    capacity: float = 60_000.0
    prompt: float = 600.0
    output: float = 300.0
    tokens_per_s: float = 25.0

    def rate_for(self, demand_ratio: float) -> float:
        """Requests/s that ask for so much of the cache in the mean."""
        held, lasts_s = self.prompt + 0.75 * self.output, self.output / self.tokens_per_s
        return demand_ratio * self.capacity / held / lasts_s


CHAT = Answers("answers of 12 s")
REASONING = Answers("answers of 75 s", 120_000.0, 800.0, 3000.0, 40.0)


def run(rate: Rate, *, for_s: float, seed: int, answers: Answers = CHAT) -> Outcome:
    """A run under a load, forecast as the sidecar does."""
    forecaster = KvForecaster(window_s=WINDOW_S)
    cache = Cache(
        answers.capacity, Random(seed), answers.tokens_per_s, answers.prompt, answers.output
    )
    forecast_s: float | None = None
    alarmed_s, last_s, said = 0.0, float("-inf"), list[tuple[float, float]]()
    for now_s, values, preempted in scrapes(cache, rate, for_s):
        if preempted:
            errors = [left_s - (now_s - at_s) for at_s, left_s in said if now_s - at_s <= NEAR_S]
            stood = now_s - last_s <= BROKEN_S
            return Outcome(now_s, forecast_s if stood else None, alarmed_s, now_s, tuple(errors))
        left_s = forecaster.update(now_s, values)["kv_exhausted_in_s"]
        if left_s is not None:
            said.append((now_s, left_s))
            alarmed_s += SCRAPE_S
            if forecast_s is None or now_s - last_s > BROKEN_S:
                forecast_s = now_s
            last_s = now_s
    return Outcome(None, forecast_s, alarmed_s, for_s)


def ramp(start: float, end: float, over_s: float, *, quiet_s: float = 900.0) -> Rate:
    """A steady load that then climbs."""

    def rate(now_s: float) -> float:
        climbed = min(1.0, max(0.0, (now_s - quiet_s) / over_s))
        return start + (end - start) * climbed

    return rate


def steady(per_s: float) -> Rate:
    """A load that stays."""
    return lambda _now_s: per_s


RAMPS_S = ((60.0, 8), (120.0, 8), (380.0, 8), (1800.0, 6), (14_400.0, 3))
"""How long a load climbs from 20% of the cache to 130%, and how often."""

STEADY = (0.3, 0.5, 0.65)


def _row(answers: Answers, over_s: float, runs: int) -> str:
    rate = ramp(answers.rate_for(0.2), answers.rate_for(1.3), over_s)
    outcomes = [
        run(rate, for_s=900 + over_s + 1200, seed=seed, answers=answers) for seed in range(runs)
    ]
    leads = sorted(outcome.lead_s or 0.0 for outcome in outcomes if outcome.exhausted_s is not None)
    errors = sorted(error_s for outcome in outcomes for error_s in outcome.errors_s)
    off = f"{median(errors):+.0f} s" if errors else "-"
    return (
        f"{answers.name:20}{over_s:>8.0f} s{median(leads):>10.0f} s{leads[0]:>7.0f} s"
        f"{leads[-1]:>7.0f} s{off:>12}"
    )


def report() -> str:
    """Lead times on ramps and false forecasts on steady loads."""
    lines = [f"{'KV cache filled by':20}{'ramp':>10}{'lead':>12}{'from':>9}{'to':>9}{'error':>12}"]
    lines += [_row(answers, *ramps) for answers in (CHAT, REASONING) for ramps in RAMPS_S]
    for answers in (CHAT, REASONING):
        for ratio in STEADY:
            rate = steady(answers.rate_for(ratio))
            outcomes = [run(rate, for_s=4 * 3600, seed=seed, answers=answers) for seed in range(2)]
            hours = sum(outcome.lasted_s for outcome in outcomes) / 3600
            alarmed_s = sum(outcome.alarmed_s for outcome in outcomes)
            lines.append(
                f"{answers.name}, a load that stays at {ratio:.0%}: a forecast stood for "
                f"{alarmed_s:.0f} s in {hours:.1f} h"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
