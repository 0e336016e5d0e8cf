"""What an engine did in some time, by its counters: its steps, its prefills, its requests. Pure."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from msgspec import Struct

from kneewatch.collector.signals.expr import count_in
from kneewatch.diagnose.account_signals import (
    ANSWERS,
    COMPUTED,
    DEMAND,
    DRAFTS,
    HITS,
    PROMPTS,
    STREAM,
)
from kneewatch.diagnose.values import Signals, Values

COUNT_MIN = 4.0
"""Fewest requests for a mean of them."""

UNDER_WAY_MIN = 0.2
"""From this share of uncounted prompt tokens on, a prefill is under way whose size is unknown."""

RECOUNTED_MIN = 0.5
"""From this share on, the prompts of evicted requests are counted again: cached parts are not."""

MOST_OF_TIME, GAPS_A_STEP = 0.6, 2.0
"""A step without prompts takes at most so many median gaps: their median is known to a bucket."""


class DecodeStep(NamedTuple):
    """A mean decode step or prefill: its time and its work.

    - `size`: sequences in the step's batch; of a prefill those that decode beside it.
    - `beside`: share of the KV cache in use; of a prefill 0, which compares nothing.
    - `prompt_tokens`: computed prompt tokens in a decode step or of the prefill.
    - `tokens`: tokens per sequence, above 1 where drafts are accepted.
    """

    took_s: float
    size: float
    beside: float
    prompt_tokens: float
    tokens: float


class Work(Struct, frozen=True):
    """What an engine did in `seconds`: increases of its counters, its mean KV usage, and by how
    many requests its queue grew.

    The fields between `usage` and `queued` are the first of `Values.totals`, in the same order.
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
    queued: float = 0.0

    @property
    def step(self) -> DecodeStep:
        """The mean decode step; where answers have one token, a step that takes no time."""
        if not self.gaps or not self.gaps_s:
            return DecodeStep(0.0, 1.0, 0.0, 0.0, 1.0)
        sequences = self.gaps + self.first_tokens
        step_s = self.gaps_s / self.gaps
        # Without a count of steps, their number and batch follow from Little's law.
        steps = self.steps or self.seconds / step_s
        return DecodeStep(
            step_s,
            max(1.0, sequences / self.steps if self.steps else self.gaps_s / self.seconds),
            self.usage,
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

    @property
    def hides_recomputed(self) -> bool:
        """Whether steps compute the prompts of evicted requests again, and no counter shows it."""
        again = self.preemptions * self.prompt_tokens / max(1.0, self.first_tokens)
        return self.preemptions > 0.0 and self.uncounted_tokens < RECOUNTED_MIN * again

    def prefill(self, step: DecodeStep, gap_s: float | None) -> DecodeStep | None:
        """The mean prefill beside such decode steps, of which the median takes `gap_s`; None if too
        few ended, or if it is unknown how long they wait for blocks."""
        if self.prefills < COUNT_MIN or not self.prefills_s:
            return None
        request_tokens = self.computed_tokens / max(1.0, self.first_tokens)
        tokens = self.prefilled / self.prefills or request_tokens  # before vLLM 0.13
        least_s = self._least_prefill_s(gap_s)
        if self.preemptions:  # an evicted request's prefill lasts until it is admitted again
            alone_s = least_s
        else:
            # Prefills that are under way at once wait for one another, partly in the queue. Alone
            # each takes between `1 / (1 + under_way)` and all of its time, and no longer than one
            # ends.
            under_way = self.prefills_s / self.seconds
            took_s, each_s = self.prefills_s / self.prefills, self.seconds / self.prefills
            alone_s = max(least_s, min(each_s, took_s / sqrt(1 + under_way)))
        alone = DecodeStep(alone_s, step.size, 0.0, tokens, step.tokens)
        return alone if alone_s and tokens else None

    def _least_prefill_s(self, gap_s: float | None) -> float:
        """The least time of a mean prefill, while prompts take most of the engine's time; 0
        otherwise. It does not depend on how long requests wait."""
        tokens = max(self.computed_tokens, self.step_tokens - self.tokens)
        if gap_s is None or not self.steps or not tokens or self.hides_recomputed:
            return 0.0
        prompts_s = self.seconds - GAPS_A_STEP * gap_s * self.steps
        if not self.preemptions:  # otherwise requests run at any time
            prompts_s = min(prompts_s, self.prefills_s)
        if prompts_s < MOST_OF_TIME * self.seconds:
            return 0.0
        return prompts_s * self.prefilled / self.prefills / tokens

    @property
    def factors(self) -> dict[str, float | None]:
        """Requests/s that arrive, served or queued, and the work of a mean request; None where too
        few requests show it."""
        requests = self.first_tokens
        enough = requests >= COUNT_MIN and self.prompt_tokens > 0
        computed = self.computed_tokens
        under_way = self.uncounted_tokens > UNDER_WAY_MIN * self.prompt_tokens
        sequences = self.gaps + requests
        tokens = self.tokens / sequences if sequences else None
        return {
            DEMAND: (requests + max(0.0, self.queued)) / self.seconds
            if requests >= COUNT_MIN
            else None,
            PROMPTS: self.prompt_tokens / requests if enough else None,
            COMPUTED: computed / requests if enough and not under_way else None,
            ANSWERS: self.answer_tokens / self.answers if self.answers >= COUNT_MIN else None,
            HITS: max(0.0, 1 - computed / self.prompt_tokens) if enough else None,
            DRAFTS: tokens,
            STREAM: tokens * self.gaps / self.gaps_s
            if tokens is not None and self.gaps_s
            else None,
        }


GAPS, FIRST_TOKENS, PREFILLS, ANSWERED = 2, 3, 9, 11
FINISHED, ACCEPTED, FINISHED_PROMPTS = 15, 16, 17
"""Indices of `Values.totals`: inter-token gaps, first tokens, prefills, answers, finished requests,
accepted calls, prompt tokens of finished requests. Those before finished requests are the fields of
`Work`."""

SPEED_MARGIN = 2.0
"""Margin for the next prompt: long prompts prefill slower."""


def decoding(totals: tuple[float, ...] | None) -> float:
    """The number of requests that have a first token and have not ended, by `Values.totals`; those
    that were aborted are among them."""
    return 0.0 if totals is None else totals[FIRST_TOKENS] - totals[ANSWERED]


def prefill_explains(
    silent_s: float,
    before: tuple[float, ...],
    after: tuple[float, ...],
    prefill_s_per_token: float,
) -> bool:
    """Whether the prompts that were computed meanwhile took so long, at the mean speed before; true
    if that is unknown. `before` and `after` are `Values.totals`."""
    gained = [max(0.0, now - then) for now, then in zip(after, before, strict=True)]
    work = Work(silent_s, 0.0, *gained[:FINISHED])
    tokens = max(work.prompt_tokens, work.step_tokens - work.tokens)
    return not prefill_s_per_token or SPEED_MARGIN * tokens * prefill_s_per_token >= silent_s


# --- The balance of KV tokens: what enters with requests leaves with them -------------------------
#
# Every token in the KV cache was computed or found there for a request, and the page counts the
# tokens of requests that ended. What is in use beyond the tokens of requests in flight is held by
# something else: a transfer, a deferred request, or a leak. Blocks that only the prefix cache keeps
# count as free.


BLOCK_TOKENS = 16
"""Tokens of a KV block where the page has no number."""


class KvBalance:
    """The tokens of one engine's requests in flight, by counters since the process started.

    Errors go to one side: aborted requests and shared prefixes make them too many, so that less
    seems to be held. Aborted ones are forgotten when the engine is idle.
    """

    def __init__(self) -> None:
        self._gone_tokens = 0.0

    def unaccounted(self, values: Values, signals: Signals) -> float | None:
        """Share of the KV cache in use that requests in flight cannot explain; None if unknown."""
        usage, capacity = signals.get("kv_usage_ratio"), signals.get("kv_capacity_tokens")
        running = signals.get("running")
        if values.totals is None or usage is None or running is None or not capacity:
            return None
        work = Work(0.0, 0.0, *values.totals[:FINISHED])
        ended_prompts = values.totals[FINISHED_PROMPTS]
        if not work.step_tokens or (work.answers and not ended_prompts):
            return None
        # vLLM counts a prompt at its first token, and its computed part in each step before.
        taken = max(work.prompt_tokens + work.tokens, work.step_tokens + work.hits)
        in_flight = taken - ended_prompts - work.answer_tokens
        if running + (signals.get("waiting") or 0.0) == 0 or in_flight < self._gone_tokens:
            self._gone_tokens = in_flight
        # The last block of a request is partly filled.
        part_blocks = running * (count_in(values.config.get("block_size", "")) or BLOCK_TOKENS)
        owned = (in_flight - self._gone_tokens + part_blocks) / capacity
        return max(0.0, round(20 * (usage - owned)) / 20)  # in steps: the store keeps every change
