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

WINDOW_S = 60.0
Rate = Callable[[float], float]


@dataclass(slots=True)
class _Request:
    held: float
    left: float


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

    def step(self, arrivals_per_s: float) -> None:
        """A quarter of a second."""
        gap_s = self.rng.expovariate(arrivals_per_s)
        while gap_s < STEP_S:
            gap_s += self.rng.expovariate(arrivals_per_s)
            self.waiting.append(
                _Request(self.rng.gammavariate(4, self.prompt / 4),
                         self.rng.gammavariate(2, self.output / 2))
            )  # fmt: skip
        grown = self.tokens_per_s * STEP_S
        for request in self.running:
            request.held += grown
            request.left -= grown
        self.running = [request for request in self.running if request.left > 0]
        while self.waiting and self.used + self.waiting[0].held <= 0.98 * self.capacity:
            self.running.append(self.waiting.pop(0))
        while self.used > self.capacity:
            self.waiting.insert(0, self.running.pop())
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
    window: list[tuple[float, float, float]] = []
    steps_per_scrape = round(SCRAPE_S / STEP_S)
    for scrape in range(round(for_s / SCRAPE_S)):
        now_s = scrape * SCRAPE_S
        for step in range(steps_per_scrape):
            cache.step(rate(now_s + step * STEP_S))
        window.append((cache.used / cache.capacity, len(cache.running), len(cache.waiting)))
        window[: -round(WINDOW_S / SCRAPE_S)] = []
        count = len(window)
        values = {
            "kv_usage_avg_ratio": sum(one[0] for one in window) / count,
            "kv_usage_max_ratio": max(one[0] for one in window),
            "running_avg": sum(one[1] for one in window) / count,
            "waiting_by_capacity": float(len(cache.waiting)),
        }
        yield now_s + SCRAPE_S, values, cache.preempted


def run(rate: Rate, *, for_s: float, seed: int, capacity: float = 60_000.0) -> Outcome:
    """A run under a load, forecast as the sidecar does."""
    forecaster = KvForecaster(window_s=WINDOW_S)
    forecast_s: float | None = None
    alarmed_s, last_s = 0.0, float("-inf")
    for now_s, values, preempted in scrapes(Cache(capacity, Random(seed)), rate, for_s):
        if preempted:
            return Outcome(now_s, forecast_s, alarmed_s, now_s)
        if forecaster.update(now_s, values)["kv_exhausted_in_s"] is not None:
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


def main() -> None:
    """Print lead times on ramps and false forecasts on steady loads."""
    for minutes in (10, 20, 40):
        runs = [run(ramp(2.0, 9.0, 60.0 * minutes), for_s=7200, seed=seed) for seed in range(12)]
        leads = sorted(one.lead_s for one in runs if one.lead_s is not None)
        missed = sum(1 for one in runs if one.exhausted_s is not None and one.lead_s is None)
        print(
            f"ramp over {minutes} min: median lead {median(leads) if leads else 0:.0f} s, "
            f"from {leads[0] if leads else 0:.0f} to {leads[-1] if leads else 0:.0f} s, "
            f"{missed} of {len(runs)} not foreseen"
        )
    for per_s in (1.5, 3.0, 4.5):
        runs = [run(steady(per_s), for_s=6 * 3600, seed=seed) for seed in range(4)]
        hours = sum(one.lasted_s for one in runs) / 3600
        alarmed = sum(one.alarmed_s for one in runs)
        print(f"steady {per_s:g}/s: a forecast stood for {alarmed:.0f} s in {hours:.0f} h")


if __name__ == "__main__":
    main()
