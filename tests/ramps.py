"""Made-up loads on a made-up KV cache: how early exhaustion is forecast, and how often in vain.

Requests arrive at random (Poisson), hold a prompt's tokens at once and one more each step, and are
admitted in order while their prompt fits; a full cache throws the newest out. It is exhausted at
the first scrape with a queue or a preemption. `python -m tests.ramps` prints the figures of `make
accuracy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log
from random import Random
from statistics import median

from msgspec import Struct, field

from kneewatch.diagnose.learned.kv_forecast import AHEAD_S, KvForecaster

STEP_S = 0.25
SCRAPE_S = 5.0
BROKEN_S = 60.0
"""A forecast that was silent for longer had been taken back."""

WINDOW_S = 60.0
DAY_S = 86_400.0
Rate = Callable[[float], float]


class _Request(Struct):
    held: float
    left: float


class Cache(Struct):
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

    def step(self, arrivals_per_s: float) -> None:
        """A quarter of a second."""
        self.now_s += STEP_S
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


class Outcome(Struct, frozen=True):
    """A run: when the cache was first exhausted, and since when that had been forecast.

    `alarmed_s` is the time over which a forecast within the horizon stood, `false_s` the part of it
    after which the cache was not exhausted for twice the horizon; `lasted_s` the whole run's.
    """

    exhausted_s: float | None
    forecast_s: float | None
    alarmed_s: float
    lasted_s: float
    false_s: float = 0.0
    errors_s: tuple[float, ...] = ()
    """Forecast less true seconds, of the forecasts within the horizon before exhaustion."""
    arrivals: tuple[int, ...] = ()
    """Requests admitted before each scrape, until exhaustion."""

    @property
    def lead_s(self) -> float | None:
        """Seconds from the forecast to exhaustion; None where either is missing."""
        if self.exhausted_s is None or self.forecast_s is None:
            return None
        return self.exhausted_s - self.forecast_s


def scrapes(
    cache: Cache, rate: Rate, for_s: float
) -> Iterator[tuple[float, dict[str, float], bool]]:
    """Scrapes of a run: time, the window's values, whether requests are queued or were preempted
    since the scrape before."""
    window: list[tuple[float, int]] = []
    steps_per_scrape, kept = round(SCRAPE_S / STEP_S), round(WINDOW_S / SCRAPE_S)
    for scrape in range(round(for_s / SCRAPE_S)):
        now_s = scrape * SCRAPE_S
        preempted = cache.preempted
        for step in range(steps_per_scrape):
            cache.step(rate(now_s + step * STEP_S))
        usage, running = cache.used / cache.capacity, len(cache.running)
        window.append((usage, running))
        del window[: -kept - 1]
        count = len(window)
        values = {
            "kv_usage_ratio": usage,
            "kv_usage_avg_ratio": sum(row[0] for row in window) / count,
            "kv_usage_max_ratio": max(row[0] for row in window),
            "running": float(running),
            "running_avg": sum(row[1] for row in window) / count,
            "waiting_by_capacity": float(len(cache.waiting)),
        }
        yield now_s + SCRAPE_S, values, bool(cache.waiting) or cache.preempted > preempted


class Answers(Struct, frozen=True):
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
    """A run under a load until the cache is exhausted, forecast as the sidecar does."""
    forecaster = KvForecaster(window_s=WINDOW_S)
    cache = Cache(
        answers.capacity, Random(seed), answers.tokens_per_s, answers.prompt, answers.output
    )
    forecast_s: float | None = None
    last_s, forecasts = float("-inf"), list[tuple[float, float]]()
    arrivals, admitted = list[int](), 0
    for now_s, values, is_exhausted in scrapes(cache, rate, for_s):
        arrivals.append(cache.admitted - admitted)
        admitted = cache.admitted
        if is_exhausted:
            errors = [left - (now_s - at_s) for at_s, left in forecasts if now_s - at_s <= AHEAD_S]
            false = sum(now_s - at_s > 2 * AHEAD_S for at_s, _ in forecasts)
            stood = now_s - last_s <= BROKEN_S
            return Outcome(
                now_s,
                forecast_s if stood else None,
                SCRAPE_S * len(forecasts),
                now_s,
                SCRAPE_S * false,
                tuple(errors),
                tuple(arrivals),
            )
        left_s = forecaster.update(now_s, values, arrivals=arrivals[-1])["kv_exhausted_in_s"]
        if left_s is not None and left_s <= AHEAD_S:
            forecasts.append((now_s, left_s))
            if forecast_s is None or now_s - last_s > BROKEN_S:
                forecast_s = now_s
            last_s = now_s
    alarmed_s = SCRAPE_S * len(forecasts)
    return Outcome(None, forecast_s, alarmed_s, for_s, alarmed_s)


def oracle_lead_s(outcome: Outcome, *, per_s: float, growth_per_s2: float) -> float:
    """Seconds from when an oracle can see a ramp to exhaustion.

    It has the rate before the ramp and how fast the rate will climb, and lacks only the moment at
    which the ramp begins: the likeliest beginning must be e^x times likelier than none, which
    random arrivals reach once in e^x scrapes at most; here once a day.
    """
    bound = log(DAY_S / SCRAPE_S)
    evidence = list[float]()
    for at, count in enumerate(outcome.arrivals):
        evidence.append(0.0)
        for begun in range(at + 1):
            more = growth_per_s2 * SCRAPE_S * (at - begun + 0.5)
            evidence[begun] += count * log(1 + more / per_s) - more * SCRAPE_S
        if max(evidence) >= bound:
            return (outcome.exhausted_s or 0.0) - SCRAPE_S * (at + 1)
    return 0.0


def ramp(start: float, end: float, over_s: float, *, quiet_s: float = 900.0) -> Rate:
    """A steady load that then climbs."""

    def rate(now_s: float) -> float:
        climbed = min(1.0, max(0.0, (now_s - quiet_s) / over_s))
        return start + (end - start) * climbed

    return rate


def steady(per_s: float) -> Rate:
    """A load that stays."""
    return lambda _now_s: per_s


RAMPS_S = ((60.0, 16), (120.0, 16), (380.0, 16), (1800.0, 12), (14_400.0, 8))
"""How long a load climbs from 20% of the cache to 130%, and how often."""

STEADY = (0.3, 0.5, 0.65)


ORACLE_UP_TO_S = 400.0
"""Of longer ramps an oracle can see any horizon ahead; what it cannot foresee is the peak."""


def _row(answers: Answers, over_s: float, runs: int) -> str:
    before, after = answers.rate_for(0.2), answers.rate_for(1.3)
    outcomes = [
        run(ramp(before, after, over_s), for_s=900 + over_s + 1200, seed=seed, answers=answers)
        for seed in range(runs)
    ]
    leads = sorted(outcome.lead_s or 0.0 for outcome in outcomes if outcome.exhausted_s is not None)
    errors = sorted(error_s for outcome in outcomes for error_s in outcome.errors_s)
    off = f"{median(errors):+.0f} s" if errors else "-"
    false_s = sum(outcome.false_s for outcome in outcomes)
    oracle = "-"
    if over_s <= ORACLE_UP_TO_S:
        growth = (after - before) / over_s
        seen = [oracle_lead_s(outcome, per_s=before, growth_per_s2=growth) for outcome in outcomes]
        oracle = f"{median(seen):.0f} s"
    return (
        f"{answers.name:20}{over_s:>8.0f} s{median(leads):>10.0f} s{leads[0]:>7.0f} s"
        f"{leads[-1]:>7.0f} s{off:>12}{false_s:>8.0f} s{oracle:>10}"
    )


def report() -> str:
    """Lead times on ramps and false forecasts on steady loads."""
    heads = f"{'lead':>12}{'from':>9}{'to':>9}{'error':>12}{'false':>10}{'oracle':>10}"
    lines = [f"{'KV cache filled by':20}{'ramp':>10}{heads}"]
    lines += [_row(answers, *ramps) for answers in (CHAT, REASONING) for ramps in RAMPS_S]
    for answers in (CHAT, REASONING):
        for ratio in STEADY:
            rate = steady(answers.rate_for(ratio))
            outcomes = [run(rate, for_s=4 * 3600, seed=seed, answers=answers) for seed in range(2)]
            hours = sum(outcome.lasted_s for outcome in outcomes) / 3600
            false_s = sum(outcome.false_s for outcome in outcomes)
            lines.append(
                f"{answers.name}, a load that stays at {ratio:.0%}: a false forecast stood for "
                f"{false_s:.0f} s in {hours:.1f} h"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
