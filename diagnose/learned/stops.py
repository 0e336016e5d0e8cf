"""Stops of an engine: requests run, no token comes, and no prefill explains it. Pure."""

from __future__ import annotations

from math import inf

from kneewatch.diagnose.account_signals import STOP_DUE, STOPPED, STOPS_EVERY
from kneewatch.diagnose.learned.work import ANSWERED, FINISHED, FIRST_TOKENS, Work

STOP_MIN_S = 10.0
"""Shorter pauses are not counted."""

SPEED_MARGIN = 2.0
"""Margin for the next prompt: long prompts prefill slower."""

OVERDUE, APART_MAX_S = 1.3, 600.0
"""Stops recur until the next one is overdue by this ratio; stops that are further apart do not."""


class Stops:
    """The last two stops of one engine."""

    def __init__(self) -> None:
        self._begun_s = -inf
        self._apart_s = inf
        self._lasts_s = 0.0

    def note(self, begun_s: float, lasts_s: float) -> None:
        """A stop has ended, which began at `begun_s`."""
        self._apart_s, self._begun_s = begun_s - self._begun_s, begun_s
        self._lasts_s = lasts_s

    def values(self, now_s: float) -> dict[str, float | None]:
        """Seconds between the last two stops, the share of time that they take, and seconds until
        the next one is due; None where they do not recur."""
        due_s, apart_s = self._begun_s + self._apart_s - now_s, self._apart_s
        if apart_s > APART_MAX_S or -due_s > (OVERDUE - 1.0) * apart_s:
            return dict.fromkeys((STOPS_EVERY, STOPPED, STOP_DUE))
        return {STOPS_EVERY: apart_s, STOPPED: self._lasts_s / apart_s, STOP_DUE: due_s}


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
