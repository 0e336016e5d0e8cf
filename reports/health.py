"""The health states of engines in order, and when data is too old to show one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from kneewatch.diagnose.verdict import NO_STAGE, Verdict

RANKS: Mapping[str, int] = {"ok": 0, "info": 1, "unknown": 2, "warning": 3, "critical": 4}
"""Ranks of health states; the worst has the highest rank. Unknown ranks above info, because
somebody must look."""

WORST_FIRST = tuple(sorted(RANKS, key=lambda state: -RANKS[state]))

LATE_INTERVALS = 3.0
LATE_S = 15.0
"""Minimum age in seconds of data that is late. It must also be older than three scrape
intervals."""


def is_late(age_s: float, interval_s: float) -> bool:
    """Whether data of this age, scraped at this interval, is too old to describe the present."""
    return age_s > max(LATE_S, LATE_INTERVALS * interval_s)


def rank_of(health: str) -> int:
    """The rank of a health state; an unexpected word counts as unknown."""
    return RANKS.get(health, RANKS["unknown"])


def shown_health(health: str, *, late: bool) -> str:
    """The health state to show. Late data proves no health: ok and info become unknown, and so does
    an unexpected word."""
    is_proved = health in RANKS and not (late and RANKS[health] < RANKS["unknown"])
    return health if is_proved else "unknown"


def counted(healths: Iterable[str]) -> list[tuple[str, int]]:
    """The number of each health state, worst first; those that do not occur are left out."""
    counts = Counter(healths)
    return [(state, counts[state]) for state in WORST_FIRST if counts[state]]


def counted_words(healths: Iterable[str]) -> str:
    """The number of each health state as text, such as "1 critical, 3 ok"."""
    return ", ".join(f"{count} {state}" for state, count in counted(healths))


class SourceState(Struct, frozen=True):
    """The result of the newest run of a source.

    `joined` describes how GPUs were matched to the target, and whether the match is a guess. It is
    empty for the target's metrics page.
    """

    name: str
    t_s: float = field(name="t")
    success: bool
    duration_s: float
    error: str = ""
    joined: str = ""


def stage_unknown(verdict: Verdict) -> str:
    """Why the stage is unknown, as text; empty if it is known."""
    if verdict.stage.number is not None:
        return ""
    if not verdict.was_read:
        return verdict.judged_against.removeprefix("nothing: ")
    return next(
        (line.removeprefix(NO_STAGE) for line in verdict.unknown if line.startswith(NO_STAGE)),
        "required signals are unknown",
    )


def stage_known(verdict: Verdict) -> str:
    """The stage of the KV cascade in words, where it is known. At stage 0 the cache is fine, unless
    a cause is about it."""
    stage = verdict.stage
    if stage.number:
        return f"KV cache: stage {stage.number} of 4, {stage.name}"
    of_cache = any(cause.id.startswith("kv_") for cause in verdict.causes)
    return f"KV cache: {'no request is evicted' if of_cache else 'fine'}"
