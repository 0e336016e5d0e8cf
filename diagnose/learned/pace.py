"""The speed of an engine at equal work, from steps of quiet times. Pure.

Speed is the time that this engine needs for a step of the same work, over the time that it takes.
Three things hold for each healthy engine and limit how long a step of other work may take:

- A step with more work never takes less time.
- The time never grows faster than the work: twice the batch takes at most twice as long.
- One more sequence takes at most as long as a few prompt tokens, which need the same arithmetic;
  reading the whole KV cache for its context takes at most `READ_RATIO` times the step.

So a batch that grew, which slow steps bring about by Little's law, excuses them only as far as it
can explain them. A load that was never seen makes the limits wide, and the speed unknown.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from math import exp, inf, log, log2, sqrt
from operator import mul
from typing import NamedTuple

from msgspec import Struct

from kneewatch.diagnose.account_signals import CHANGED_FROM, LEARNED_FROM
from kneewatch.diagnose.learned.work import DecodeStep

READ_RATIO = 8.0

TOKENS_A_SEQUENCE = 3.0
"""One more sequence in a step takes at most as long as this many computed prompt tokens."""

SPECULATES_FROM = 1.05
"""From this many tokens per sequence and step on, the engine speculates."""

REFERENCES_MAX = 12

SAMPLES_KEPT, NOISE_KEPT = 720.0, 40.0
"""A reference is the mean of about this many samples, and noise that of fewer; older ones fade."""

SLOWER_SHARE = 0.6
"""Weight of a sample that is slower than its reference: an engine that slows down over an hour must
not become its own reference, and none is faster than it can be."""

NOISE_WEIGHT, NOISE_MAX, FEW_DIFFERENCES = 4.0, 1.0, 6.0

FASTER_WEIGHT = 1.22
"""Weight of faster samples for the noise, because slower ones count up to one deviation only."""

BEYOND_NOISE, RANGE_NOISE = 2.0, 0.15
"""Speeds within this many standard deviations of quiet times count as unchanged; the share of the
limits' range that counts as one."""

KNOWN_FROM, WIDE_FROM = 0.75, 1.6
"""The speed is unknown if its limits allow 1 and less than the first, and are further apart than
the second ratio. A step that may be slower than the first is not learned."""

KNOWN_UP_TO = 2.5
"""Without a lower limit, a slow step is at most this ratio from its limit."""

SQRT_2 = sqrt(2.0)

LINE_NOISE, LINE_BENDS = 0.03, 0.05
"""A reference is off the line by this share of its time, and by more for each doubling of the batch
between it and the step."""

LINE_FREE = 3.0
"""A line through references has so many free numbers."""

STEEPER = 1.5
"""Beyond the largest batch and the most prompt tokens that were seen, one more takes at most this
many times as long as before."""


class Reference(Struct):
    """The mean of quiet steps of nearly the same work. `samples`: how many it stands on."""

    took_s: float
    size: float
    beside: float
    prompt_tokens: float
    tokens: float
    samples: float
    seen_s: float

    def add(self, step: DecodeStep, now_s: float, slower_share: float) -> None:
        """Add a sample, with `slower_share` of its weight if it is slower."""
        self.samples = min(self.samples + 1.0, SAMPLES_KEPT)
        share = 1.0 / self.samples
        slower = slower_share if step.took_s > self.took_s else 1.0
        self.took_s += slower * share * (step.took_s - self.took_s)
        self.size += share * (step.size - self.size)
        self.beside += share * (step.beside - self.beside)
        self.prompt_tokens += share * (step.prompt_tokens - self.prompt_tokens)
        self.tokens += share * (step.tokens - self.tokens)
        self.seen_s = now_s

    def weight(self, step: DecodeStep, noise: float) -> float:
        """How much it counts in the line at a step: less with few samples, and the less its batch
        is like the step's."""
        bends = LINE_NOISE + LINE_BENDS * abs(log2(self.size / step.size))
        return 1.0 / (self.took_s**2 * (noise**2 / self.samples + bends**2))

    def limits(
        self,
        step: DecodeStep | Reference,
        token_s: float | None,
        noise: float,
        token_least_s: float = 0.0,
    ) -> tuple[float, float]:
        """The least and the most seconds that a step of this work may take, by this reference, with
        `token_least_s` to `token_s` for a computed prompt token (None: unknown) and the `noise` of
        a sample."""
        own_s = self.took_s
        growth = step.size * own_s / (self.size * step.took_s) if step.took_s else 1.0
        size, more_read = step.size / self.size, READ_RATIO * (step.beside - self.beside)
        beside = 1.0 + more_read / max(1.0, READ_RATIO * self.beside)
        prompts = (1 + step.prompt_tokens) / (1 + self.prompt_tokens) if token_s is None else 1.0
        most_s = own_s * max(1.0, size, beside, prompts)
        least_s = own_s * min(1.0, size, beside, prompts)
        if token_s is not None:
            more_tokens = step.prompt_tokens - self.prompt_tokens
            sequences_s = TOKENS_A_SEQUENCE * token_s * (step.size - self.size)
            read_s = own_s * more_read
            most_s = min(
                most_s, max(own_s + max(0.0, sequences_s) + max(0.0, read_s), own_s * growth)
            )
            least_s = max(least_s, own_s + min(0.0, sequences_s) + min(0.0, read_s))
            most_s += token_s * max(0.0, more_tokens)
            least_s += token_s * min(0.0, more_tokens) + token_least_s * max(0.0, more_tokens)
        if step.tokens > max(self.tokens, SPECULATES_FROM):
            most_s *= step.tokens / self.tokens  # longer drafts: longer steps with more tokens
        few = 1.0 + BEYOND_NOISE * noise / sqrt(self.samples)
        return least_s / few, most_s * few


References = dict[tuple[int, int, int], Reference]
"""References by their kind of steps."""


class StepLimits(NamedTuple):
    """The least and the most seconds that a step may take, and the most that it usually takes."""

    least_s: float
    most_s: float
    usual_s: float


class PaceState(Struct, frozen=True):
    """What a pace has learned, to be restored after a restart of the daemon."""

    references: tuple[Reference, ...] = ()
    samples: int = 0
    token_s: float | None = None
    since_s: float | None = None
    token_least_s: float = 0.0
    prompt_tokens: float = 0.0


class Speed(Struct, frozen=True):
    """Speed at equal work, 1 as in quiet times, its error (half of the likely range), and the
    number of quiet samples that it stands on."""

    ratio: float
    error: float
    samples: int


class Noise:
    """A standard deviation that is learned from differences; a prior counts as a few of them."""

    __slots__ = ("_samples", "_square")

    def __init__(self, prior: float) -> None:
        self._samples, self._square = NOISE_WEIGHT, prior * prior

    def add(self, difference: float) -> None:
        self._samples = min(self._samples + 1.0, NOISE_KEPT)
        square = min(NOISE_MAX, abs(difference)) ** 2
        self._square += (square - self._square) / self._samples

    @property
    def deviation(self) -> float:
        """The standard deviation; larger where it stands on few differences."""
        return sqrt(self._square * (1.0 + FEW_DIFFERENCES / self._samples))


class Pace:
    """Reference steps of an engine, and its speed compared with them.

    `creeps`: steps that take longer and longer are told. The times of prefills vary too much.
    """

    def __init__(self, *, first_samples: int, noise: float, creeps: bool = False) -> None:
        self._first_samples, self._creeps = first_samples, creeps
        self._references: References = {}
        self.unsure: References = {}
        """Samples that are neither learned nor dropped: it is unknown whether they are slow."""
        self._quiet_noise, self._changes = Noise(noise), Noise(noise)
        self._before: float | None = None
        self._unsettled: deque[tuple[float, DecodeStep, float | None, float]] = deque()
        self.token_s: float | None = None
        """Mean seconds per computed prompt token, with a margin; None if unknown."""
        self.token_least_s, self.prompt_tokens = 0.0, 0.0
        """The same at least, without the wait for other prompts; and the mean computed prompt
        tokens of the prefills that both are measured with."""
        self.samples, self.since_s = 0, inf
        """Number of samples learned, and the time of the first."""

    def limits(
        self, step: DecodeStep, token_s: float | None = None, token_least_s: float = 0.0
    ) -> StepLimits | None:
        """What a step of this work may take; None if unknown."""
        if self.samples < self._first_samples:
            return None
        least_s, usual_s, most_s = self._line_limits(step)
        noise = self.noise
        for reference in self._references.values():
            low_s, high_s = reference.limits(step, token_s, noise, token_least_s)
            if low_s > least_s:
                least_s = low_s
            if high_s < most_s:
                most_s = high_s
        if least_s > most_s:
            least_s = most_s = sqrt(least_s * most_s)
        if not self._creeps:
            usual_s = most_s
        elif least_s:
            usual_s = min(usual_s, least_s * LEARNED_FROM / KNOWN_FROM)
        for reference in self.unsure.values():
            most_s = max(least_s, min(most_s, reference.limits(step, token_s, noise)[1]))
        return StepLimits(least_s, most_s, min(usual_s, most_s))

    def _line_limits(self, step: DecodeStep) -> tuple[float, float, float]:
        """The least, the usual and the most seconds of a step by the line through the references:
        by what one more sequence and one more prompt token took this engine in quiet times.

        Weighted least squares with the line's error; beyond the largest work seen, the most allows
        for a steeper line.
        """
        kind, noise = key_of(step)[2], self._quiet_noise.deviation
        alike = [each for key, each in self._references.items() if key[2] == kind]
        if not alike:
            return 0.0, inf, inf
        weights = [each.weight(step, noise) for each in alike]
        rows = [(each.took_s, each.size, each.prompt_tokens, each.beside) for each in alike]
        whole = sum(weights)
        took_s, size, prompts, beside = (
            sum(map(mul, weights, column)) / whole for column in zip(*rows, strict=True)
        )
        # As long as nothing else is known, time may grow as fast as the work.
        sizes, prompts_2 = (size / took_s) ** 2, ((1.0 + prompts) / took_s) ** 2
        both = by_size = by_prompts = off = 0.0
        for weight, (each_s, each_size, each_prompts, _) in zip(weights, rows, strict=True):
            each_s -= took_s
            each_size -= size
            each_prompts -= prompts
            sizes += weight * each_size**2
            prompts_2 += weight * each_prompts**2
            both += weight * each_size * each_prompts
            by_size += weight * each_size * each_s
            by_prompts += weight * each_prompts * each_s
            off += weight * each_s**2
        square = sizes * prompts_2 - both**2
        size_s = (prompts_2 * by_size - both * by_prompts) / square
        prompt_s = (sizes * by_prompts - both * by_size) / square
        more, longer = step.size - size, step.prompt_tokens - prompts
        own_s = took_s + size_s * more + prompt_s * longer
        unsure = (prompts_2 * more**2 - 2 * both * more * longer + sizes * longer**2) / square
        fit = LINE_FREE + max(0.0, off - size_s * by_size - prompt_s * by_prompts)
        fit /= max(LINE_FREE, float(len(alike)))
        unsure_s = BEYOND_NOISE * sqrt(fit * (1.0 / whole + unsure))
        more -= max(each.size for each in alike) - size
        longer -= max(each.prompt_tokens for each in alike) - prompts
        steeper_s = max(0.0, size_s) * max(0.0, more) + max(0.0, prompt_s) * max(0.0, longer)
        more_read = max(0.0, step.beside - step.size * beside / size)
        usual_s = own_s * (1.0 + READ_RATIO * more_read) + unsure_s
        if usual_s <= 0.0:  # the line does not reach so little work
            return 0.0, inf, inf
        return max(0.0, own_s - unsure_s), usual_s, usual_s + (STEEPER - 1.0) * steeper_s

    def follow(self, speed_at_most: float) -> None:
        """Note how much the speed of a sample differs from that of the sample before."""
        if self._before is not None:
            self._changes.add(log(speed_at_most / self._before) / SQRT_2)
        self._before = speed_at_most

    @property
    def noise(self) -> float:
        """Standard deviation of a sample's speed (of its logarithm), also if that wanders."""
        return max(self._quiet_noise.deviation, self._changes.deviation)

    def _noise_of(self, samples: int, range_: float) -> float:
        """Standard deviation of a mean of samples: what changes from one to the next becomes less.
        Limits that are far apart stay unsure."""
        steady = self.noise**2 - (1 - 1 / samples) * self._changes.deviation**2
        return sqrt(steady + (RANGE_NOISE * log(range_)) ** 2)

    def may_learn(self, took_s: float, limits: StepLimits | None) -> bool:
        """Whether a sample with these limits belongs to quiet times. The most that it may take
        proves nothing: a batch that slow steps enlarged has such limits, too."""
        return limits is None or limits.usual_s >= took_s * LEARNED_FROM * exp(-self.noise)

    def learn(
        self,
        step: DecodeStep,
        now_s: float,
        token_s: float | None = None,
        token_least_s: float = 0.0,
    ) -> None:
        """Add a sample of quiet times, with the most and the least time per computed prompt token
        that a prefill shows. It counts once it has settled; the first ones count at once."""
        self._unsettled.append((now_s, step, token_s, token_least_s))
        if self.samples < self._first_samples:
            self.settle(now_s)

    def learn_unsure(self, step: DecodeStep, now_s: float) -> None:
        """Add a sample of work that was never seen. Slow steps may have brought it about: steps of
        such work take no longer, but perhaps less."""
        if (reference := self.unsure.get(key_of(step))) is not None:
            reference.add(step, now_s, SLOWER_SHARE)
        else:
            _keep(self.unsure, Reference(*step, 1.0, now_s))

    def judge_unsure(self, token_s: float | None, *, is_usual: bool) -> None:
        """Learn or drop the unsure samples: it shows now whether the engine is as fast as ever.
        Those that contradict what was learned mix two loads."""
        learned, noise = [*self._references.values()], self.noise
        unsure, self.unsure = self.unsure, {}
        for each in unsure.values() if is_usual else ():
            if all(
                each.took_s <= other.limits(each, token_s, noise)[1]
                and other.took_s >= each.limits(other, token_s, noise)[0]
                for other in learned
            ):
                _keep(self._references, each)

    def settle(self, until_s: float) -> None:
        """Learn the samples up to this time: no trouble has followed them."""
        while self._unsettled and self._unsettled[0][0] <= until_s:
            t_s, step, token_s, token_least_s = self._unsettled.popleft()
            self._settle(step, t_s)
            if token_s is not None:
                before_s = token_s if self.token_s is None else self.token_s
                share = 1.0 / min(NOISE_KEPT, self.samples)
                self.token_s = before_s + share * (token_s - before_s)
                self.token_least_s += share * (token_least_s - self.token_least_s)
                self.prompt_tokens += share * (step.prompt_tokens - self.prompt_tokens)

    def doubt(self) -> None:
        """Drop the samples that have not settled: trouble has followed them."""
        self._unsettled.clear()

    def state(self) -> PaceState:
        references = tuple([copy(reference) for reference in self._references.values()])
        since_s = None if self.since_s == inf else self.since_s
        times = self.token_s, since_s, self.token_least_s, self.prompt_tokens
        return PaceState(references, self.samples, *times)

    def restore(self, state: PaceState) -> None:
        """Go on with what was learned before a restart of the daemon."""
        self._references = {key_of(reference): copy(reference) for reference in state.references}
        self.samples, self.token_s = state.samples, state.token_s
        self.token_least_s, self.prompt_tokens = state.token_least_s, state.prompt_tokens
        self.since_s = inf if state.since_s is None else state.since_s

    def _settle(self, step: DecodeStep, now_s: float) -> None:
        self.samples += 1
        self.since_s = min(self.since_s, now_s)
        reference = self._references.get(key_of(step))
        if reference is None:
            _keep(self._references, Reference(*step, 1.0, now_s))
            return
        slower_by = log(step.took_s / reference.took_s)
        noise = self._quiet_noise
        if self._creeps:
            # What only becomes slower is no noise. Faster samples make up for what is left out.
            slower_by = min(FASTER_WEIGHT * slower_by, slower_by, noise.deviation)
        noise.add(slower_by)
        reference.add(step, now_s, SLOWER_SHARE if self._creeps else 1.0)

    def forget(self) -> None:
        """Start anew: what was learned no longer holds."""
        self._references.clear()
        self.unsure.clear()
        self._unsettled.clear()
        self.samples, self.since_s = 0, inf

    def speed(self, least: float, most: float, samples: int = 1) -> Speed | None:
        """The speed that lies between two limits, by so many samples; None if it is unknown.

        `least` is 0 without a lower limit. A speed of 1 that the limits allow is taken for 1.
        Otherwise the speed is at the nearer limit, or between them where even that is far off.
        Noise of quiet times is taken for 1, but not if the limits are far apart.
        """
        is_wide = least < min(KNOWN_FROM, most / WIDE_FROM)
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


def _keep(references: References, reference: Reference) -> None:
    """Add a reference. A night of few requests brings many kinds of steps: the day's must outlast
    it, so those with the fewest samples are forgotten, then the oldest."""
    if len(references) == REFERENCES_MAX:
        least = min(references.items(), key=lambda item: (item[1].samples, item[1].seen_s))
        del references[least[0]]
    references.setdefault(key_of(reference), reference)


def key_of(step: DecodeStep | Reference) -> tuple[int, int, int]:
    """Which steps count as nearly the same work."""
    return (
        round(2 * log2(step.size)),
        round(log2(1 + step.prompt_tokens) / 2),
        round(4 * log2(step.tokens)) if step.tokens > SPECULATES_FROM else 0,
    )
