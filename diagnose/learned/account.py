"""The account of one engine's service: demand, work per request, speed at equal work. Pure.

An engine is a server with a demand, a work per request and a speed: its latency follows from them.
The account measures them and compares them with quiet times.

Speed is the time that this engine needs for a step of the same work, over the time that the step
takes. No model of the engine is assumed. Three things hold for each healthy engine and limit how
long a step of other work may take:

- A step with more work never takes less time.
- The time never grows faster than the work: twice the batch takes at most twice as long.
- One more sequence takes at most as long as a few prompt tokens, because a decode token needs the
  same arithmetic as a prompt token. Its context takes time as well, but reading the whole KV cache
  takes at most `READ_RATIO` times the step.

So a batch that grew, which slow steps bring about by Little's law, excuses slow steps only as far
as it can explain them. A load that was never seen makes the limits wide, and the speed unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from copy import copy
from math import exp, inf, log, log2, sqrt
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import astuple

from kneewatch.diagnose.account_signals import (
    ACCOUNT_SIGNALS,
    ANSWERS,
    CHANGED_FROM,
    COMPUTED,
    DEMAND,
    DRAFTS,
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
from kneewatch.diagnose.values import Signals, Values
from kneewatch.rules.formatting import clock
from kneewatch.rules.wire import to_ms

WORK_FACTORS = (PROMPTS, COMPUTED, ANSWERS, HITS, DRAFTS)
FACTORS = (DEMAND, PROMPTS, ANSWERS, HITS, DRAFTS)
"""The factors, beside the speeds, that a verdict names."""

SAMPLE_S = 10.0
"""A sample lasts so long, or as long as it takes to see `GAPS_MIN` tokens.

These times do not depend on the window: how fast an engine changes does not either.
"""

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

READ_RATIO = 8.0
TOKENS_A_SEQUENCE = 3.0
"""One more sequence in a step takes at most as long as this many computed prompt tokens."""

MARGIN, FEWEST_SHARE = 1.5, 0.2
"""Margin of the time per computed prompt token, which is a mean; and the least share of a prefill
that its tokens take, beside the step that it waits for."""

SPECULATES_FROM = 1.05
"""From this many tokens per sequence and step on, the engine speculates."""

REFERENCES_MAX = 12
SAMPLES_KEPT, NOISE_KEPT = 720.0, 40.0
"""A reference is the mean of about this many samples, and noise that of fewer; older ones fade."""

STEP_NOISE, PREFILL_NOISE = 0.06, 0.12
NOISE_WEIGHT, NOISE_MAX, FEW_DIFFERENCES = 4.0, 1.0, 6.0
BEYOND_NOISE, RANGE_NOISE = 2.0, 0.15
"""Speeds within this many standard deviations of quiet times count as unchanged; the share of the
limits' range that counts as one."""

KNOWN_UP_TO = 2.5
"""If the limits of a step's time are further apart than this ratio, and the time lies between
them, the speed is unknown."""

GIVEN_UP_MAX = 0.2
"""If clients give up a larger share of calls, the work is unknown: vLLM counts no prompt tokens of
a request that has no first token."""

UNDER_WAY_MIN = 0.2
"""From this share of uncounted prompt tokens on, a prefill is under way whose size is unknown."""

COUNT_MIN = 4.0
"""Fewest requests for a mean of them."""

SAMPLES_TOLD = 20
"""More samples are told as this many."""

USAGE_MIN = 0.005
"""A smaller KV usage counts as this one: a few blocks more or less are no work."""

HITS_MIN = 0.02
"""A smaller share of cached prompt tokens counts as none."""

FADE_SAMPLES = 240.0
"""Usual values of demand and work are means of about this many samples."""

YOUNG_S = 3600.0
"""For so long after the first quiet sample, that sample may be one of a slow engine."""

SAME_LOAD_UP_TO, STREAMS_LOST = 1.3, 0.5
HALF_MS_S, SQRT_2 = 0.0005, sqrt(2.0)


class Work(Struct, frozen=True):
    """What an engine did in `seconds`: increases of its counters, and its mean KV usage.

    The fields from `tokens` on are the first of `Values.totals`, in the same order.
    """

    seconds: float
    usage: float
    tokens: float
    gaps_s: float
    gaps: float
    first_tokens: float
    steps: float
    prompt_tokens: float
    computed: float
    hits: float
    prefills_s: float
    prefills: float
    prefilled: float
    answers: float
    answer_tokens: float
    preemptions: float
    step_tokens: float

    @property
    def step(self) -> Step:
        """The mean decode step."""
        sequences = self.gaps + self.first_tokens
        step_s = self.gaps_s / self.gaps
        # Without a count of steps, their number and batch follow from Little's law.
        steps = self.steps or self.seconds / step_s
        return Step(
            step_s,
            max(1.0, sequences / self.steps if self.steps else self.gaps_s / self.seconds),
            max(USAGE_MIN, self.usage),
            (self.computed_tokens + self.uncounted_tokens) / steps,
            self.tokens / sequences,
        )

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens that no cache saved; before vLLM 0.16, all that missed the cache."""
        return self.computed or max(0.0, self.prompt_tokens - self.hits)

    @property
    def uncounted_tokens(self) -> float:
        """Prompt tokens in steps whose prefill has not ended: only then vLLM counts the prompt."""
        return max(0.0, self.step_tokens - self.tokens - self.prompt_tokens)

    def prefill(self, step: Step) -> Step | None:
        """The mean prefill beside such decode steps; None if too few ended."""
        if self.prefills < COUNT_MIN or not self.prefilled or not self.prefills_s:
            return None
        # Prefills that are under way at once wait for one another, partly in the queue. Alone each
        # takes between `1 / (1 + under_way)` and all of its time, and no longer than one ends.
        under_way = self.prefills_s / self.seconds
        took_s, each_s = self.prefills_s / self.prefills, self.seconds / self.prefills
        alone_s = min(each_s, took_s / sqrt(1 + under_way))
        tokens = self.prefilled / self.prefills
        return Step(alone_s, step.size, USAGE_MIN, tokens, step.tokens)


GAPS, FINISHED, ACCEPTED, FINISHED_PROMPTS = 2, 15, 16, 17
"""Indices of `Values.totals`: inter-token gaps, finished requests, accepted calls, prompt tokens of
finished requests. Those before finished requests are the fields of `Work`."""


class Step(NamedTuple):
    """A mean decode step or prefill: its time and its work.

    - `size`: sequences in the step's batch; of a prefill its computed tokens.
    - `beside`: share of the KV cache in use; of a prefill what runs beside it.
    - `prompt_tokens`: computed prompt tokens in a decode step.
    - `tokens`: tokens per sequence, above 1 where drafts are accepted.
    """

    took_s: float
    size: float
    beside: float
    prompt_tokens: float
    tokens: float


class Reference(Struct):
    """The mean of quiet steps of nearly the same work. `samples`: how many it stands on."""

    took_s: float
    size: float
    beside: float
    prompt_tokens: float
    tokens: float
    samples: float
    seen_s: float

    def add(self, step: Step, now_s: float) -> None:
        """Add a sample."""
        self.samples = min(self.samples + 1.0, SAMPLES_KEPT)
        share = 1.0 / self.samples
        self.took_s += share * (step.took_s - self.took_s)
        self.size += share * (step.size - self.size)
        self.beside += share * (step.beside - self.beside)
        self.prompt_tokens += share * (step.prompt_tokens - self.prompt_tokens)
        self.tokens += share * (step.tokens - self.tokens)
        self.seen_s = now_s

    def limits(self, step: Step, token_s: float | None, noise: float) -> tuple[float, float]:
        """The least and the most seconds that a step of this work may take, by this reference.

        `token_s` is the time per computed prompt token; None if unknown. `noise` is that of a
        sample.
        """
        own_s = self.took_s
        size, beside = step.size / self.size, step.beside / self.beside
        prompts = (1 + step.prompt_tokens) / (1 + self.prompt_tokens) if token_s is None else 1.0
        most_s = own_s * max(1.0, size, beside, prompts)
        least_s = own_s * min(1.0, size, beside, prompts)
        if token_s is not None:
            more_tokens = step.prompt_tokens - self.prompt_tokens
            sequences_s = TOKENS_A_SEQUENCE * token_s * (step.size - self.size)
            read_s = READ_RATIO * own_s * (step.beside - self.beside)
            most_s = min(most_s, own_s + max(0.0, sequences_s) + max(0.0, read_s))
            least_s = max(least_s, own_s + min(0.0, sequences_s) + min(0.0, read_s))
            most_s += token_s * max(0.0, more_tokens)
            least_s += token_s * min(0.0, more_tokens)
        if step.tokens > max(self.tokens, SPECULATES_FROM):
            most_s *= step.tokens / self.tokens  # longer drafts: longer steps with more tokens
        few = 1.0 + BEYOND_NOISE * noise / sqrt(self.samples)
        return least_s / few, most_s * few


class PaceState(Struct, frozen=True):
    """What a pace has learned, to be restored after a restart of the daemon."""

    references: tuple[Reference, ...] = ()
    samples: int = 0
    token_s: float | None = None
    since_s: float | None = None


class Speed(Struct, frozen=True):
    """Speed at equal work, 1 as in quiet times, and its error: half of the likely range.

    `samples`: number of quiet samples that it stands on.
    """

    ratio: float
    error: float
    samples: int


class Noise:
    """A standard deviation that is learned from differences; a prior counts as a few of them."""

    __slots__ = ("_samples", "_square")

    def __init__(self, prior: float) -> None:
        self._samples, self._square = NOISE_WEIGHT, prior * prior

    def add(self, difference: float) -> None:
        """Add a difference."""
        self._samples = min(self._samples + 1.0, NOISE_KEPT)
        square = min(NOISE_MAX, abs(difference)) ** 2
        self._square += (square - self._square) / self._samples

    @property
    def deviation(self) -> float:
        """The standard deviation; larger where it stands on few differences."""
        return sqrt(self._square * (1.0 + FEW_DIFFERENCES / self._samples))


class Pace:
    """Reference steps of an engine, and its speed compared with them."""

    def __init__(self, *, first_samples: int, noise: float) -> None:
        self._first_samples = first_samples
        self._references: dict[tuple[int, int, int], Reference] = {}
        self._quiet_noise, self._changes = Noise(noise), Noise(noise)
        self._before: float | None = None
        self._unsettled: deque[tuple[float, Step, float | None]] = deque()
        self.token_s: float | None = None
        """Mean seconds per computed prompt token, with a margin; None if unknown."""
        self.samples, self.since_s = 0, inf
        """Number of samples learned, and the time of the first."""

    def limits(self, step: Step, token_s: float | None = None) -> tuple[float, float] | None:
        """The least and the most seconds that a step of this work may take; None if unknown."""
        if self.samples < self._first_samples:
            return None
        least_s, most_s, noise = 0.0, inf, self._noise
        for reference in self._references.values():
            low_s, high_s = reference.limits(step, token_s, noise)
            if low_s > least_s:
                least_s = low_s
            if high_s < most_s:
                most_s = high_s
        if least_s > most_s:
            least_s = most_s = sqrt(least_s * most_s)
        return least_s, most_s

    def follow(self, speed_at_most: float) -> None:
        """Note how much the speed of a sample differs from that of the sample before."""
        if self._before is not None:
            self._changes.add(log(speed_at_most / self._before) / SQRT_2)
        self._before = speed_at_most

    @property
    def _noise(self) -> float:
        """Standard deviation of a sample's speed (of its logarithm).

        A machine whose speed wanders differs as much from sample to sample.
        """
        return max(self._quiet_noise.deviation, self._changes.deviation)

    def _noise_of(self, samples: int, range_: float) -> float:
        """Standard deviation of a mean of samples: what changes from one to the next becomes less.
        Limits that are far apart stay unsure."""
        steady = self._noise**2 - (1 - 1 / samples) * self._changes.deviation**2
        return sqrt(steady + (RANGE_NOISE * log(range_)) ** 2)

    def may_learn(self, took_s: float, limits_s: tuple[float, float] | None) -> bool:
        """Whether a sample with these limits belongs to quiet times.

        If its work was never seen, the most that it may take proves nothing: a batch that slow
        steps enlarged has such limits, too.
        """
        if limits_s is None:
            return True
        least_s, most_s = limits_s
        is_wide = 0.0 < KNOWN_UP_TO * least_s < most_s
        usual_s = sqrt(least_s * most_s) if is_wide else most_s
        return usual_s >= took_s * LEARNED_FROM * exp(-self._noise)

    def learn(self, step: Step, now_s: float, token_s: float | None = None) -> None:
        """Add a sample of quiet times; it counts once it has settled. The first ones count at once.

        `token_s`: the time per computed prompt token that a prefill shows.
        """
        self._unsettled.append((now_s, step, token_s))
        if self.samples < self._first_samples:
            self.settle(now_s)

    def settle(self, until_s: float) -> None:
        """Learn the samples up to this time: no trouble has followed them."""
        while self._unsettled and self._unsettled[0][0] <= until_s:
            t_s, step, token_s = self._unsettled.popleft()
            self._settle(step, t_s)
            if token_s is not None:
                before_s = token_s if self.token_s is None else self.token_s
                self.token_s = before_s + (token_s - before_s) / min(NOISE_KEPT, self.samples)

    def doubt(self) -> None:
        """Drop the samples that have not settled: trouble has followed them."""
        self._unsettled.clear()

    def state(self) -> PaceState:
        """What was learned."""
        references = tuple([copy(reference) for reference in self._references.values()])
        since_s = None if self.since_s == inf else self.since_s
        return PaceState(references, self.samples, self.token_s, since_s)

    def restore(self, state: PaceState) -> None:
        """Go on with what was learned before a restart of the daemon."""
        self._references = {key_of(reference): copy(reference) for reference in state.references}
        self.samples, self.token_s = state.samples, state.token_s
        self.since_s = inf if state.since_s is None else state.since_s

    def _settle(self, step: Step, now_s: float) -> None:
        self.samples += 1
        self.since_s = min(self.since_s, now_s)
        key = key_of(step)
        reference = self._references.get(key)
        if reference is None:
            if len(self._references) == REFERENCES_MAX:
                oldest = min(self._references, key=lambda each: self._references[each].seen_s)
                del self._references[oldest]
            self._references[key] = Reference(*step, 1.0, now_s)
            return
        self._quiet_noise.add(log(step.took_s / reference.took_s))
        reference.add(step, now_s)

    def forget(self) -> None:
        """Start anew: what was learned no longer holds."""
        self._references.clear()
        self._unsettled.clear()
        self.samples, self.since_s = 0, inf

    def speed(self, least: float, most: float, samples: int = 1) -> Speed | None:
        """The speed that lies between two limits, by so many samples; None if it is unknown.

        `least` is 0 without a lower limit. A speed of 1 that the limits allow is taken for 1.
        Otherwise the speed is at the nearer limit, or between them where even that is far off.
        Noise of quiet times is taken for 1, but not if the limits are far apart.
        """
        is_wide = most > KNOWN_UP_TO * least
        if least <= 1.0 <= most:
            if is_wide:
                return None
            ratio = 1.0
        elif most < 1.0:
            least = least or most / KNOWN_UP_TO  # no reference gives a lower limit
            towards_middle = min(1.0, max(0.0, (LEARNED_FROM - most) / 0.25))
            ratio = most * (least / most) ** (towards_middle / 2)
        else:
            ratio = least
        noise = self._noise_of(samples, most / least)
        beyond = max(0.0, abs(log(ratio)) / noise - BEYOND_NOISE)
        ratio **= min(1.0, 2 * beyond / BEYOND_NOISE)
        if is_wide and LEARNED_FROM <= ratio < CHANGED_FROM:
            return None
        error = max((most - least) / 2, ratio * noise)
        return Speed(ratio, min(error, ratio), self.samples)


def key_of(step: Step | Reference) -> tuple[int, int, int]:
    """Which steps count as nearly the same work."""
    return (
        round(2 * log2(step.size)),
        round(log2(1 + step.prompt_tokens) / 2),
        round(4 * log2(step.tokens)) if step.tokens > SPECULATES_FROM else 0,
    )


class AccountState(Struct, frozen=True):
    """What an account has learned, to be restored after a restart of the daemon.

    `usual`: samples and value of each factor. `slow_since_s`: None while the speed is usual.
    """

    steps: PaceState = PaceState()
    prefills: PaceState = PaceState()
    usual: Mapping[str, tuple[float, float]] = {}
    slow_since_s: float | None = None


class Usual:
    """The usual value of one factor: a mean of quiet samples."""

    __slots__ = ("_samples", "value")

    def __init__(self, samples: float = 0.0, value: float = 0.0) -> None:
        self._samples, self.value = samples, value

    @property
    def state(self) -> tuple[float, float]:
        """The number of samples and the value."""
        return self._samples, self.value

    def add(self, value: float) -> None:
        """Add a quiet sample."""
        self._samples = min(self._samples + 1.0, FADE_SAMPLES)
        self.value += (value - self.value) / self._samples

    def ratio(self, value: float | None) -> float | None:
        """A value over its usual value; None if either is unknown."""
        if value is None or self._samples < FIRST_SAMPLES or not self.value:
            return None
        return value / self.value


class Sample(NamedTuple):
    """One sample: its end, its work, its mean step, and the least and the most that may take."""

    t_s: float
    work: Work
    step: Step
    limits_s: tuple[float, float] | None

    @property
    def is_slow(self) -> bool:
        """Whether the step took longer than the most that it may take."""
        return self.limits_s is not None and self.step.took_s > self.limits_s[1]


class Account:
    """The account of one engine.

    It survives a restart of the server: the new process is compared with the old one.
    """

    def __init__(self) -> None:
        self._begun: tuple[float, tuple[float, ...]] | None = None
        self._usages: list[float] = []
        self._seated: deque[tuple[float, float]] = deque()
        self._recent: deque[Sample] = deque()
        self._works: deque[Work] = deque()
        self._steps = Pace(first_samples=FIRST_SAMPLES, noise=STEP_NOISE)
        self._prefills = Pace(first_samples=FIRST_PREFILLS, noise=PREFILL_NOISE)
        self._prefills_s = self._evicted_s = -inf
        self._usual = {key: Usual() for key in (DEMAND, STREAM, *WORK_FACTORS)}
        self._off_s: dict[str, float] = {}
        self.slow_since_s = inf
        """Since when the engine has been slow; inf while it is not."""
        self.is_slow = False
        """Whether the engine is slower than in quiet times: nothing is to be learned of it."""
        self.values: Signals = NOTHING_KNOWN
        """The account's signals; the same object while no sample ends and no request queues."""

    def restarted(self) -> None:
        """Another process answers now, or the clock was set back."""
        self._begun = None
        self._works.clear()
        self._pause()

    def _pause(self) -> None:
        self._recent.clear()
        self.values = NOTHING_KNOWN

    def unknown(self, now_s: float) -> list[str]:
        """A line with what the account cannot tell about the speed; empty if there is none."""
        since_s = self._steps.since_s
        if self.values.get(SPEED) is None:
            ratios = self._ratios()
            if ratios is None or ratios[0] >= CHANGED_FROM:
                return []
            return [f"{SPEED}: steps of the present work were not seen in quiet times"]
        if now_s - since_s >= YOUNG_S:
            return []
        at = clock(to_ms(since_s))[:5]
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
        if begun is None:
            self._begin(now_s, totals)
            return
        seconds = now_s - begun[0]
        if seconds < SAMPLE_S - HALF_MS_S:
            return
        # A page may count gaps without their seconds.
        timed = totals[GAPS - 1] > begun[1][GAPS - 1]
        if timed and totals[GAPS] - begun[1][GAPS] >= GAPS_MIN:
            usage = sum(self._usages) / len(self._usages)
            gained = [max(0.0, now - then) for now, then in zip(totals, begun[1], strict=True)]
            self._begin(now_s, totals)
            self._add(Work(seconds, usage, *gained[:FINISHED]), now_s, values.served_s)
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
        """Begin a sample."""
        self._begun, self._usages = (now_s, totals), self._usages[-1:]

    def _add(self, work: Work, now_s: float, served_s: float) -> None:
        step = work.step
        limits_s = self._steps.limits(step, self._prefills.token_s)
        if limits_s is not None:
            self._steps.follow(limits_s[1] / step.took_s)
        recent = self._recent
        recent.append(Sample(now_s, work, step, limits_s))
        while recent[0].t_s < now_s - KEPT_S:
            recent.popleft()
        speed = self._speed()
        if speed is not None and speed.ratio >= CHANGED_FROM:
            if self._is_full(now_s):
                self._steps.forget()  # what was learned was not this engine's best
            speed = None
        slow = speed is not None and speed.ratio < LEARNED_FROM
        quiet = not slow and served_s >= WARM_UP_S and not work.preemptions
        is_usual = self._steps.may_learn(step.took_s, limits_s)
        is_strange = speed is None and not is_usual
        quiet = quiet and is_usual
        if quiet:
            self._steps.learn(step, now_s)
        total = self._total(work)
        prefill = self._prefill_speed(total, quiet, now_s)
        for pace in (self._steps, self._prefills):
            if slow or is_strange or (prefill is not None and prefill.ratio < LEARNED_FROM):
                pace.doubt()
            else:
                pace.settle(now_s - SETTLED_S)
        self._compare(total, speed, prefill, now_s)

    def _total(self, work: Work) -> Work:
        """The sum of the newest samples: those of `KEPT_S`, and more where prefills are rare or
        take long. Its KV usage is not used."""
        works = self._works
        works.append(work)
        seconds = sum(each.seconds for each in works)
        prefills = sum(each.prefills for each in works)
        while len(works) > 1:
            seconds -= works[0].seconds
            prefills -= works[0].prefills
            few = seconds < KEPT_S - HALF_MS_S or prefills < COUNT_MIN
            if few and seconds < REQUESTS_KEPT_S:
                break
            works.popleft()
        return Work(*map(sum, zip(*[astuple(each) for each in works], strict=True)))

    def _ratios(self) -> tuple[float, float, int] | None:
        """The least and the most speed of the recent samples, each weighted by its tokens, and
        their number; None if unknown."""
        weighted = [
            (work.gaps * step.took_s, work.gaps * limits_s[0], work.gaps * limits_s[1])
            for _, work, step, limits_s in self._recent
            if limits_s is not None
        ]
        if not weighted or self._evicts():
            return None
        took_s, least_s, most_s = map(sum, zip(*weighted, strict=True))
        return least_s / took_s, most_s / took_s, len(weighted)

    def _evicts(self) -> bool:
        return any(sample.work.preemptions for sample in self._recent)

    def _speed(self) -> Speed | None:
        """The speed over the recent samples."""
        ratios = self._ratios()
        return None if ratios is None else self._steps.speed(*ratios)

    def _is_full(self, now_s: float) -> bool:
        """Whether the recent samples cover their time, and all of them were judged."""
        covered_s = now_s - self._recent[0].t_s + self._recent[0].work.seconds
        return covered_s >= KEPT_S - HALF_MS_S and all(each.limits_s for each in self._recent)

    def _prefill_speed(self, total: Work, quiet: bool, now_s: float) -> Speed | None:
        """The speed of the prefills of the recent samples. It is learned in quiet times."""
        step = total.step
        prefill = total.prefill(step)
        if self._evicts():
            self._evicted_s = now_s
        if prefill is None or now_s - self._evicted_s < SETTLED_S:
            return None  # an evicted request's prefill lasts until it is admitted again
        limits_s = self._prefills.limits(prefill, self._prefills.token_s)
        speed = None
        if limits_s is not None:
            most, least = limits_s[1] / prefill.took_s, limits_s[0] / prefill.took_s
            if now_s - self._prefills_s >= KEPT_S:
                self._prefills.follow(most)
            speed = self._prefills.speed(least, most)
            quiet = quiet and self._prefills.may_learn(prefill.took_s, (0.0, limits_s[1]))
        if quiet and now_s - self._prefills_s >= KEPT_S:
            self._prefills_s = now_s
            took_s = total.prefills_s / total.prefills
            own_s = max(took_s - step.took_s, FEWEST_SHARE * took_s)
            self._prefills.learn(prefill, now_s, MARGIN * own_s / prefill.prompt_tokens)
        return speed

    def _compare(
        self, total: Work, speed: Speed | None, prefill: Speed | None, now_s: float
    ) -> None:
        """Compare demand and work of the recent samples with their usual values."""
        present = _work_of(total)
        moved = {key: self._usual[key].ratio(value) for key, value in present.items()}
        if (present[HITS] or 0.0) < HITS_MIN and self._usual[HITS].value < HITS_MIN:
            moved[HITS] = None if present[HITS] is None else 1.0
        speeds = {
            SPEED: None if speed is None else speed.ratio,
            PREFILL_SPEED: None if prefill is None else prefill.ratio,
        }
        measured = [each for each in speeds.values() if each is not None]
        self.is_slow = min(measured) <= 1 / CHANGED_FROM if measured else self.is_slow
        self.slow_since_s = min(self.slow_since_s, now_s) if self.is_slow else inf
        streams = {STREAM: moved[STREAM] if speed is None else 1.0}  # all that is known of it
        self._mark({**speeds, **streams, **{key: moved[key] for key in FACTORS}}, now_s)
        if not self.is_slow:
            kept_apart = _streams_lost(moved)
            for key, value in present.items():
                if value is not None and key not in kept_apart:
                    self._usual[key].add(value)
        slow_s = [self._off_s[key] for key in speeds if key in self._off_s]
        since_s = min(slow_s or self._off_s.values(), default=None)
        self.values = {
            **_rounded({**speeds, SPEED_ERROR: None if speed is None else speed.error}, 0.05),
            **_rounded(moved, 0.1),
            STREAM_RATE: _two_digits(present[STREAM]),
            STREAM_USUAL: _two_digits(self._usual[STREAM].value or None),
            SPEED_SAMPLES: None if speed is None else float(min(speed.samples, SAMPLES_TOLD)),
            MOVED_FOR: None if since_s is None else 10.0 * round((now_s - since_s) / 10),
            SEATED: self._seated_avg(),
        }

    def accept(self) -> None:
        """Take the present speed and work as the usual ones."""
        self._steps.forget()
        self._prefills.forget()
        self._usual = {key: Usual() for key in self._usual}
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
            {key: usual.state for key, usual in self._usual.items()},
            None if self.slow_since_s == inf else self.slow_since_s,
        )

    def restore(self, state: AccountState) -> None:
        """Go on with what was learned before a restart of the daemon."""
        self._steps.restore(state.steps)
        self._prefills.restore(state.prefills)
        self._usual |= {key: Usual(*of) for key, of in state.usual.items() if key in self._usual}
        if state.slow_since_s is not None:
            self.slow_since_s, self.is_slow = state.slow_since_s, True

    def _mark(self, factors: Mapping[str, float | None], now_s: float) -> None:
        """Note since when each factor has been off its usual value. Unknown changes nothing."""
        slow = next((sample for sample in self._recent if sample.is_slow), self._recent[0])
        begun_s = now_s if self._off_s else slow.t_s - slow.work.seconds
        for name, ratio in factors.items():
            if ratio is not None and is_unchanged(ratio):
                self._off_s.pop(name, None)
            elif ratio is not None:
                self._off_s.setdefault(name, begun_s)


NOTHING_KNOWN: Mapping[str, float | None] = dict.fromkeys(ACCOUNT_SIGNALS)


def _work_of(total: Work) -> dict[str, float | None]:
    """Requests/s and the work of a mean request; None where too few requests show it."""
    requests = total.first_tokens
    enough = requests >= COUNT_MIN and total.prompt_tokens > 0
    computed = total.computed_tokens
    under_way = total.uncounted_tokens > UNDER_WAY_MIN * total.prompt_tokens
    tokens = total.tokens / (total.gaps + requests)
    return {
        DEMAND: requests / total.seconds if requests >= COUNT_MIN else None,
        PROMPTS: total.prompt_tokens / requests if enough else None,
        COMPUTED: computed / requests if enough and not under_way else None,
        ANSWERS: total.answer_tokens / total.answers if total.answers >= COUNT_MIN else None,
        HITS: max(0.0, 1 - computed / total.prompt_tokens) if enough else None,
        DRAFTS: tokens,
        STREAM: tokens * total.gaps / total.gaps_s if total.gaps_s else None,
    }


def _streams_lost(moved: Signals) -> Collection[str]:
    """The factors that are not learned, because streams lost half of their speed at an equal load:
    speculation was lost, for example."""
    same_load = all(
        (ratio := moved[key]) is not None and ratio <= SAME_LOAD_UP_TO for key in (DEMAND, COMPUTED)
    )
    stream = moved[STREAM]
    lost = same_load and stream is not None and stream <= STREAMS_LOST
    return (STREAM, DRAFTS) if lost else ()


def _two_digits(per_s: float | None) -> float | None:
    """A rate with two digits: the store keeps every change."""
    return None if per_s is None else float(f"{per_s:.2g}")


def _rounded(values: Signals, step: float) -> dict[str, float | None]:
    """Values in steps: no more digits are known, and the store keeps every change."""
    return {
        key: None if value is None else round(round(value / step) * step, 2)
        for key, value in values.items()
    }
