"""The balance of KV tokens: what enters with requests leaves with them. Pure.

Every token in the KV cache was computed or found there for a request, and the page counts the
tokens of requests that ended. What is in use beyond the tokens of requests in flight is held by
something else: a transfer, a deferred request, or a leak. Blocks that only the prefix cache keeps
count as free.
"""

from __future__ import annotations

from kneewatch.collector.signals.expr import count_in
from kneewatch.diagnose.learned.work import FINISHED, FINISHED_PROMPTS, Work
from kneewatch.diagnose.values import Signals, Values

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
