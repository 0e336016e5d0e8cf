"""The account of one engine's service: demand, work per request, speed at equal work. Pure.

An engine is a server with a demand, a work per request and a speed: its latency follows from them.
The account measures them (learned/work.py) and compares them with quiet times (learned/pace.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from math import exp, inf, log, sqrt
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import astuple, replace

from kneewatch.collector.window import HALF_MS_S
from kneewatch.diagnose.account_signals import (
    ACCOUNT_SIGNALS,
    ANSWERS,
    CHANGED_FROM,
    COMPUTED,
    DEMAND,
    DRAFTS,
    GIVEN_UP_MAX,
    HITS,
    LEARNED_FROM,
    MOVED_FOR,
    PREFILL_SPEED,
    PROMPTS,
    SEATED,
    SPEED,
    SPEED_ERROR,
    SPEED_SAMPLES,
    STREAM,
    STREAM_RATE,
    STREAM_USUAL,
    WARM_UP_S,
    is_unchanged,
)
from kneewatch.diagnose.learned.pace import WIDE_FROM, Pace, PaceState, Speed, StepLimits
from kneewatch.diagnose.learned.work import COUNT_MIN, FINISHED, GAPS, PREFILLS, DecodeStep, Work
from kneewatch.diagnose.values import Signals, Values
from kneewatch.rules.baseline import Samples
from kneewatch.rules.formatting import clock
from kneewatch.rules.wire import to_ms

WORK_FACTORS = (PROMPTS, COMPUTED, ANSWERS, HITS, DRAFTS)

FACTORS = (DEMAND, PROMPTS, ANSWERS, HITS, DRAFTS)
"""The factors, beside the speeds, that a verdict names."""

SAMPLE_S = 10.0
"""A sample lasts so long, or as long as it takes to see `GAPS_MIN` tokens."""

GAPS_MIN = 20.0

SILENT_S, LONGEST_S = 60.0, 300.0
"""After so much time without a sample nothing is known; a sample that takes longer is dropped."""

KEPT_S = 30.0
"""The speed is that of the samples that ended within so much time."""

REQUESTS_KEPT_S = 1800.0
"""Requests are counted over as much time, where fewer than `COUNT_MIN` end within `KEPT_S`."""

SETTLED_S = 60.0
"""A sample is learned if no trouble follows within so much time."""

FIRST_SAMPLES, FIRST_PREFILLS = 8, 2
"""As many samples are learned before any is judged."""

MARGIN, FEWEST_SHARE = 1.5, 0.2
"""Margin of the time per computed prompt token, which is a mean; and the least share of a prefill
that its tokens take, beside the step that it waits for."""

TOKEN_LEAST, PROMPT_AT_MOST = 0.75, 0.2
"""The share of the least time per prompt token that a step surely takes for one more; unless a
prefill takes more than this share of a sample, which may count a part of it only."""

BUSY_MAX = 0.75
"""For the wait of prompts for one another, they never take a larger share of the engine's time."""

STEP_NOISE, PREFILL_NOISE = 0.06, 0.12

SAMPLES_TOLD = 20
"""More samples are told as this many."""

HITS_MIN = 0.02
"""A smaller share of cached prompt tokens counts as none."""

USUAL_EVERY_S = 30.0
"""Usual values of demand and work are medians of samples this far apart, of the newest two hours.
The baselines of latency, which they explain, are learned with them."""

USUAL_SAMPLES_MIN = SLOW_SAMPLES = 3
SLOW_PREFILLS = 4

AGED_FROM = 0.5
"""The growing contexts of requests that all began a minute ago or earlier explain such a speed."""

YOUNG_S = 3600.0
"""For so long after the first quiet sample, that sample may be one of a slow engine."""

SAME_LOAD_UP_TO, STREAMS_LOST = 1.3, 0.5

CHANCE = 1.5
"""Deviations of rates and of mean lengths that are within chance."""

HALF_STEP = 0.03
"""Speeds are said in steps of 0.05."""


class AccountState(Struct, frozen=True):
    """What an account has learned, to be restored after a restart of the daemon. `usual`: samples
    and value of each factor. `slow_since_s`, `slow`: None while the speed is usual."""

    steps: PaceState = PaceState()
    prefills: PaceState = PaceState()
    usual: Mapping[str, tuple[float, float]] = {}
    slow_since_s: float | None = None
    slow: Speed | None = None


class StepSample(NamedTuple):
    """One sample: its end, its work, its mean step, and the least and the most that may take."""

    t_s: float
    work: Work
    step: DecodeStep
    limits: StepLimits | None

    @property
    def is_slow(self) -> bool:
        """Whether the step took longer than the most that it may take."""
        return self.limits is not None and self.step.took_s > self.limits.most_s

    @property
    def is_fast(self) -> bool:
        """Whether it shows that the engine is not slow."""
        return self.limits is not None and self.limits.least_s >= LEARNED_FROM * self.step.took_s


class Account:
    """The account of one engine; a new process of the server is compared with the old one."""

    def __init__(self) -> None:
        self._begun: tuple[float, tuple[float, ...]] | None = None
        self._waiting = self._waiting_begun = 0.0
        self._usages: list[float] = []
        self._seated: deque[tuple[float, float]] = deque()
        self._recent: deque[StepSample] = deque()
        self._works: deque[Work] = deque()
        self._steps = Pace(first_samples=FIRST_SAMPLES, noise=STEP_NOISE, creeps=True)
        self._prefills = Pace(first_samples=FIRST_PREFILLS, noise=PREFILL_NOISE)
        self._prefills_s = -inf
        self._slow_prefills: deque[tuple[float, float, float]] = deque(maxlen=2 * SLOW_PREFILLS)
        self._slow: Speed | None = None
        self._began_s = inf
        self._usual = {key: Samples() for key in (DEMAND, STREAM, *WORK_FACTORS)}
        self._usual_s = -inf
        self._to_learn: Signals = {}
        self._off_s: dict[str, tuple[float, float]] = {}
        self.slow_since_s = inf
        """Since when the engine has been slow; inf while it is not."""
        self.is_slow = False
        """Whether the engine is slower than in quiet times: nothing is to be learned of it."""
        self.values: Signals = NOTHING_KNOWN
        """The account's signals; the same object while no sample ends and no request queues."""

    def restarted(self) -> None:
        """Another process answers now, or the clock was set back."""
        self._begun = self._slow = None
        self._works.clear()
        self._pause()

    def _pause(self) -> None:
        self._recent.clear()
        self.values = NOTHING_KNOWN

    @property
    def is_kept_apart(self) -> bool:
        """Whether steps are not learned, because they are slow or may be."""
        return self.is_slow or bool(self._steps.unsure)

    def unknown(self, now_s: float) -> list[str]:
        """A line with what the account cannot tell about the speed; empty if there is none."""
        if self.values.get(SPEED) is None:
            if any(sample.work.hides_recomputed for sample in self._recent):
                return [f"{SPEED}: preempted requests are computed again, and no metric counts it"]
            ratios = self._ratios()
            if ratios is None or ratios[0] >= CHANGED_FROM:
                return []
            return [f"{SPEED}: steps of the present work were not seen in quiet times"]
        if now_s - self._steps.since_s >= YOUNG_S:
            return []
        at = clock(to_ms(self._steps.since_s))[:5]
        return [
            f"{SPEED}: compared with times since {at} only; an engine that is slow from its start "
            "on looks as usual"
        ]

    def update(self, now_s: float, values: Values) -> None:
        """Take a scrape into account."""
        totals, begun = values.totals, self._begun
        if totals is None:
            return
        self._seat(now_s, values.signals)
        if (values.signals.get("given_up_ratio") or 0.0) > GIVEN_UP_MAX:
            self.restarted()
            return
        self._usages.append(values.signals.get("kv_usage_ratio") or 0.0)
        self._waiting = values.signals.get("waiting") or 0.0
        if begun is None:
            self._begin(now_s, totals)
            return
        seconds = now_s - begun[0]
        if seconds < SAMPLE_S - HALF_MS_S:
            return
        # A page may count gaps without their seconds.
        timed = totals[GAPS - 1] > begun[1][GAPS - 1]
        gaps, prefills = (totals[at] - begun[1][at] for at in (GAPS, PREFILLS))
        if (timed and gaps >= GAPS_MIN) or (not gaps and prefills >= COUNT_MIN):
            usage = sum(self._usages) / len(self._usages)
            queued = self._waiting - self._waiting_begun
            gained = [max(0.0, now - then) for now, then in zip(totals, begun[1], strict=True)]
            self._begin(now_s, totals)
            counted = [*gained[:FINISHED], queued]
            self._add(Work(seconds, usage, *counted), now_s, values)
        elif seconds > SILENT_S:
            if self._recent and now_s - self._recent[-1].t_s > SILENT_S:
                self._pause()
            if seconds > LONGEST_S:
                self._begin(now_s, totals)

    def _seat(self, now_s: float, signals: Signals) -> None:
        """Note the running requests while requests queue: how many the engine admits."""
        seated = self._seated
        if (signals.get("waiting_by_capacity") or 0.0) >= 1.0:
            seated.append((now_s, signals.get("running") or 0.0))
            while seated[0][0] < now_s - KEPT_S:
                seated.popleft()
        elif seated:
            seated.clear()
        else:
            return
        self.values = {**self.values, SEATED: self._seated_avg()}

    def _seated_avg(self) -> float | None:
        running = [each for _, each in self._seated]
        return round(sum(running) / len(running), 2) if running else None

    def _begin(self, now_s: float, totals: tuple[float, ...]) -> None:
        self._begun, self._usages = (now_s, totals), self._usages[-1:]
        self._waiting_begun = self._waiting

    def _add(self, work: Work, now_s: float, values: Values) -> None:
        total = self._total(work)
        quiet = values.served_s >= WARM_UP_S and not work.preemptions
        if work.gaps:
            self._add_step(work, now_s)
            gap_s = values.signals.get("itl_p50_s")
        else:
            self._recent.clear()  # answers of one token show no decode steps
            gap_s = None
        prefill, sample = self._prefill_speed(total, now_s, gap_s)
        speed = self._held(self._ratios(), aged=now_s - self._began_s > SILENT_S)
        if speed is not None and speed.ratio >= CHANGED_FROM:
            covered_s = now_s - self._recent[0].t_s + self._recent[0].work.seconds
            if covered_s >= KEPT_S - HALF_MS_S and all(each.limits for each in self._recent):
                self._steps.forget()  # what was learned was not this engine's best
            speed = None
        doubtful = any(each is not None and each.ratio < LEARNED_FROM for each in (speed, prefill))
        if self._recent:
            *_, step, limits = self._recent[-1]
            is_usual = self._slow is None and self._steps.may_learn(step.took_s, limits)
            if speed is not None and not is_usual and speed.ratio >= LEARNED_FROM:
                speed = None  # a batch that slow steps enlarged may have hidden them
            is_fast = all(each.is_fast for each in self._recent)
            if speed is not None and (is_fast or self._is_slow_throughout()):
                self._steps.judge_unsure(self._prefills.token_s, is_usual=is_fast)
            elif quiet and speed is None and not is_usual and not self._recent[-1].is_slow:
                self._steps.learn_unsure(step, now_s)
            doubtful = doubtful or (speed is None and not is_usual)
            quiet = quiet and is_usual and (speed is None or speed.ratio >= LEARNED_FROM)
            if quiet:
                self._steps.learn(step, now_s)
        if quiet and sample is not None:
            self._prefills_s = now_s
            self._prefills.learn(sample[0], now_s, *sample[1:])
        for pace in (self._steps, self._prefills):
            if doubtful:
                pace.doubt()
            else:
                pace.settle(now_s - SETTLED_S)
        self._compare(total, speed, prefill, now_s)

    def _add_step(self, work: Work, now_s: float) -> None:
        """Keep the sample's mean decode step, and how long it may take."""
        recent, step = self._recent, work.step
        limits = self._steps.limits(step, self._prefills.token_s, self._token_least_s(work))
        if limits is not None and limits.most_s < WIDE_FROM * limits.least_s:
            self._steps.follow(limits.most_s / step.took_s)
        recent.append(StepSample(now_s, work, step, limits))
        while recent[0].t_s < now_s - KEPT_S:
            recent.popleft()
        self._began_s = now_s if work.first_tokens else min(self._began_s, now_s)

    def _token_least_s(self, work: Work) -> float:
        """The least seconds per computed prompt token of this work. Prompts that are longer than
        those that were timed are taken to cost no more."""
        pace, tokens = self._prefills, work.computed_tokens
        if work.prefills_s > PROMPT_AT_MOST * work.prefills * work.seconds:
            return 0.0
        longer = work.first_tokens * pace.prompt_tokens / tokens if tokens else 0.0
        return TOKEN_LEAST * pace.token_least_s * min(1.0, longer)

    def _total(self, work: Work) -> Work:
        """The sum of the newest samples: those of `KEPT_S`, and more where prefills are rare or
        take long. Its KV usage is not used."""
        works = self._works
        works.append(work)
        seconds = sum(each.seconds for each in works)
        prefills = sum(each.prefills for each in works)
        first_tokens = sum(each.first_tokens for each in works)
        while len(works) > 1:
            seconds -= works[0].seconds
            prefills -= works[0].prefills
            first_tokens -= works[0].first_tokens
            few = seconds < KEPT_S - HALF_MS_S or min(prefills, first_tokens) < COUNT_MIN
            if few and seconds < REQUESTS_KEPT_S:
                break
            works.popleft()
        return Work(*map(sum, zip(*[astuple(each) for each in works], strict=True)))

    def _ratios(self) -> tuple[float, float, int] | None:
        """The least and the most speed of the recent samples, each weighted by its tokens, and
        their number; None if unknown."""
        weighted = [
            (work.gaps * step.took_s, work.gaps * limits.least_s, work.gaps * limits.most_s)
            for _, work, step, limits in self._recent
            if limits is not None
        ]
        if not weighted or any(sample.work.hides_recomputed for sample in self._recent):
            return None
        took_s, least_s, most_s = map(sum, zip(*weighted, strict=True))
        return least_s / took_s, most_s / took_s, len(weighted)

    def _held(self, ratios: tuple[float, float, int] | None, *, aged: bool) -> Speed | None:
        """The speed over the recent samples. Where its limits alone do not tell it: as it was when
        it was told best, while nothing shows that this is over; unknown once its limits reach
        further above 1 than below.

        Unknown if all requests are `aged` and steps take up to twice as long: contexts grow with
        each token.
        """
        if ratios is None:
            return None
        least, most, samples = ratios
        speed, slow = self._steps.speed(least, most, samples), self._slow
        is_noise = speed is not None and most < LEARNED_FROM <= speed.ratio
        surely = least * exp(self._steps.noise) if is_noise else least
        if slow and surely > slow.ratio:
            slow = None
        if aged and slow is None and AGED_FROM <= most < 1.0:
            return None
        if speed and speed.ratio < LEARNED_FROM and self._is_slow_throughout():
            is_below = slow is not None and speed.ratio + speed.error / 2 < slow.ratio
            slow = speed if slow is None or is_below or speed.error <= slow.error else slow
        self._slow = slow
        if slow is None or slow is speed:
            return speed
        if least * most > 1.0:
            return None
        return replace(slow, error=max(slow.error, min(slow.ratio, (most - least) / 2)))

    def _is_slow_throughout(self) -> bool:
        """Whether each recent sample is slow: a single one may mix two loads."""
        return len(self._recent) >= SLOW_SAMPLES and all(each.is_slow for each in self._recent)

    def _prefill_speed(
        self, total: Work, now_s: float, gap_s: float | None
    ) -> tuple[Speed | None, tuple[DecodeStep, float, float] | None]:
        """The speed of the prefills of the recent samples, beside decode steps of which the median
        takes `gap_s`; and a prefill that may be learned, with the most and the least seconds per
        token."""
        step = total.step
        prefill = total.prefill(step, gap_s)
        if prefill is None:
            return None, None
        took_s, alone_s = prefill.took_s, prefill.took_s * self._share_alone(total)
        limits = self._prefills.limits(prefill, self._prefills.token_s)
        is_due = now_s - self._prefills_s >= KEPT_S
        speed, may_learn = None, True
        if limits is not None:
            # How much of the time prompts waited for one another is an estimate from above.
            most, least = limits.most_s / alone_s, limits.least_s / took_s
            if is_due:
                self._prefills.follow(most)
            if total.prefilled:
                speed = self._of_prefills(least, most, now_s, total.seconds)
            may_learn = self._prefills.may_learn(alone_s, limits)
        if not (may_learn and is_due):
            return speed, None
        mean_s = total.prefills_s / total.prefills
        own_s, tokens = mean_s - step.took_s, prefill.prompt_tokens
        # Those under way at once take turns: none is slowed by more than their number.
        least_s = max(0.0, own_s) / (1 + total.prefills_s / total.seconds)
        return speed, (
            prefill,
            MARGIN * max(own_s, FEWEST_SHARE * mean_s) / tokens,
            least_s / tokens,
        )

    def _of_prefills(self, least: float, most: float, now_s: float, every_s: float) -> Speed | None:
        """The speed of prefills with these limits; after several slow ones in a row at most that
        of their mean: times vary, but not to one side only."""
        slow, speed = self._slow_prefills, self._prefills.speed(least, most)
        if most >= LEARNED_FROM:
            slow.clear()
        elif not slow or now_s - slow[-1][0] >= every_s:
            slow.append((now_s, least or most / 2, most))
        if len(slow) >= SLOW_PREFILLS:
            _, low, high = (sum(column) / len(slow) for column in zip(*slow, strict=True))
            mean = Speed(sqrt(low * high), (high - low) / 2, self._prefills.samples)
            if least > mean.ratio:
                slow.clear()  # faster than that: it is over, or ends
            elif speed is None or mean.ratio < speed.ratio:
                return mean
        return speed

    def _share_alone(self, total: Work) -> float:
        """Share of its time that a prefill would take if as few prompt tokens were computed as
        usual: prefills wait for one another, as in any queue by the reciprocal of the free time."""
        token_s = self._prefills.token_s
        usual = (self._usual_value(DEMAND) or 0.0) * (self._usual_value(COMPUTED) or 0.0)
        if token_s is None or not usual:
            return 1.0
        growth = beyond_chance(total.computed_tokens / total.seconds / usual, total.first_tokens)
        busy, usual_busy = (min(BUSY_MAX, usual * each * token_s) for each in (growth, 1.0))
        return min(1.0, (1.0 - busy) / (1.0 - usual_busy))

    def _compare(
        self, total: Work, speed: Speed | None, prefill: Speed | None, now_s: float
    ) -> None:
        """Compare demand and work of the recent samples with their usual values."""
        present = total.factors
        usual = {key: self._usual_value(key) for key in present}
        moved = {
            key: now / then if now is not None and (then := usual[key]) else None
            for key, now in present.items()
        }
        # Prompts are not estimated: those that came explain how long their first tokens take.
        for key, requests in ((DEMAND, total.first_tokens), (ANSWERS, total.answers)):
            if (ratio := moved[key]) is not None:
                moved[key] = beyond_chance(ratio, requests)
        if (present[HITS] or 0.0) < HITS_MIN and (usual[HITS] or 0.0) < HITS_MIN:
            moved[HITS] = None if present[HITS] is None else 1.0
        speeds = {
            SPEED: None if speed is None else speed.ratio,
            PREFILL_SPEED: None if prefill is None else prefill.ratio,
        }
        shown = {key: _rounded(ratio, 0.05) for key, ratio in speeds.items()}
        measured = [each for each in shown.values() if each is not None]
        self.is_slow = min(measured) <= 1 / CHANGED_FROM if measured else self.is_slow
        self.slow_since_s = min(self.slow_since_s, now_s) if self.is_slow else inf
        streams = {STREAM: moved[STREAM] if speed is None else 1.0}  # all that is known of it
        self._mark({**speeds, **streams, **{key: moved[key] for key in FACTORS}}, now_s)
        if not self.is_slow:
            kept_apart = _kept_apart(moved, speed)
            self._to_learn = {key: now for key, now in present.items() if key not in kept_apart}
            if len(self._usual[DEMAND]) < USUAL_SAMPLES_MIN:
                self.learn_usual(now_s)
        slow_s = [self._off_s[key] for key in speeds if key in self._off_s]
        since_s, _ = min(slow_s or self._off_s.values(), default=(None, None))
        self.values = {
            **shown,
            SPEED_ERROR: None if speed is None else _error(speed),
            **{key: _rounded(ratio, 0.1) for key, ratio in moved.items()},
            STREAM_RATE: _two_digits(present[STREAM]),
            STREAM_USUAL: _two_digits(usual[STREAM]),
            SPEED_SAMPLES: None if speed is None else float(min(speed.samples, SAMPLES_TOLD)),
            MOVED_FOR: None if since_s is None else 10.0 * round((now_s - since_s) / 10),
            SEATED: self._seated_avg(),
        }

    def _usual_value(self, key: str) -> float | None:
        """The usual value of a factor; None if unknown."""
        samples = self._usual[key]
        return samples.median() if len(samples) >= USUAL_SAMPLES_MIN else None

    def learn_usual(self, now_s: float, *, answers: bool = True) -> None:
        """Learn demand and work of the newest samples, at a time at which TTFT is learned.

        `answers`: whether their lengths are those of quiet times.
        """
        if now_s - self._usual_s < USUAL_EVERY_S or not self._to_learn:
            return
        self._usual_s = now_s
        for key, value in self._to_learn.items():
            if value is not None and (answers or key != ANSWERS):
                self._usual[key].add(value)
        self._to_learn = {}

    def accept_work(self) -> None:
        """Take the present demand and work as the usual ones."""
        self._usual = {key: Samples() for key in self._usual}

    def accept(self) -> None:
        """Take the present speed and work as the usual ones."""
        self._slow = None
        self._steps.forget()
        self._prefills.forget()
        self.accept_work()
        for sample in self._recent:
            self._steps.learn(sample.step, sample.t_s)
        self._steps.settle(inf)
        self._off_s.clear()
        self.slow_since_s, self.is_slow = inf, False

    def state(self) -> AccountState:
        """What was learned."""
        return AccountState(
            self._steps.state(),
            self._prefills.state(),
            {
                key: (float(len(usual)), usual.median())
                for key, usual in self._usual.items()
                if len(usual)
            },
            None if self.slow_since_s == inf else self.slow_since_s,
            self._slow,
        )

    def restore(self, state: AccountState) -> None:
        """Go on with what was learned before a restart of the daemon."""
        self._steps.restore(state.steps)
        self._prefills.restore(state.prefills)
        self._slow = state.slow
        for key in self._usual.keys() & state.usual.keys():
            samples, value = state.usual[key]
            for _ in range(int(samples)):
                self._usual[key].add(value)
        if state.slow_since_s is not None:
            self.slow_since_s, self.is_slow = state.slow_since_s, True

    def _mark(self, factors: Mapping[str, float | None], now_s: float) -> None:
        """Note since when each factor has been off its usual value. Unknown changes nothing, nor
        does a return between two bursts."""
        recent = self._recent
        slow = next((sample for sample in recent if sample.is_slow), recent[0] if recent else None)
        begun_s = now_s if self._off_s or slow is None else slow.t_s - slow.work.seconds
        for name, ratio in factors.items():
            since_s, last_s = self._off_s.get(name, (begun_s, -inf))
            if ratio is not None and not is_unchanged(ratio):
                self._off_s[name] = since_s, now_s
            elif ratio is not None and now_s - last_s >= KEPT_S:
                self._off_s.pop(name, None)


NOTHING_KNOWN: Mapping[str, float | None] = dict.fromkeys(ACCOUNT_SIGNALS)


def _kept_apart(moved: Signals, speed: Speed | None) -> Collection[str]:
    """The factors that are not learned. Streams lost half of their speed at an equal load, because
    speculation was lost, for example; or they are slower, and the engine's speed is unknown."""
    same_load = all(
        (ratio := moved[key]) is not None and ratio <= SAME_LOAD_UP_TO for key in (DEMAND, COMPUTED)
    )
    stream = moved[STREAM]
    if stream is None:
        return ()
    if same_load and stream <= STREAMS_LOST:
        return (STREAM, DRAFTS)
    return (STREAM,) if speed is None and stream <= 1 / CHANGED_FROM else ()


def beyond_chance(ratio: float, requests: float) -> float:
    """The ratio of two rates, or of two mean lengths, as far as chance does not explain it in so
    many requests: 1 up to `CHANCE` standard deviations, unchanged from twice as many on.
    """
    if ratio <= 0.0:
        return ratio
    moved = log(ratio)
    deviations = abs(moved) / log(1.0 + 1.0 / sqrt(max(1.0, requests)))
    return exp(moved * min(1.0, max(0.0, deviations / CHANCE - 1.0)))


def _two_digits(per_s: float | None) -> float | None:
    """A rate with two digits: the store keeps every change."""
    return None if per_s is None else float(f"{per_s:.2g}")


def _rounded(ratio: float | None, step: float) -> float | None:
    """A ratio in steps: no more digits are known, and the store keeps every change. Below two
    steps, one digit, because a ratio of 0 would say that nothing is left."""
    if ratio is None or ratio >= 2 * step:
        return None if ratio is None else round(round(ratio / step) * step, 2)
    return min(1.0, max(0.01, float(f"{ratio:.1g}"))) if ratio > 0 else 0.0


def _error(speed: Speed) -> float:
    """The error of a speed in its steps, with what rounding to them adds."""
    return max(_rounded(speed.error, 0.05) or 0.0, round(min(HALF_STEP, speed.ratio / 2), 2))
