"""Recommendations as the page shows them: what to type, what moves, what to check. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.reports.advice import NUMBERS, change_words


@dataclass(frozen=True, slots=True)
class Moved:
    """A number before and after; a dash where it is not known."""

    label: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ChangeView:
    """A recommendation. `command` is what to type, empty where no change sets a flag.

    `instead` are the flags that it takes the place of, `besides` changes that are not typed (a flag
    to drop, replicas), `words` all changes, `doubt` that they do not suffice alone.
    """

    key: str
    summary: str
    command: str
    instead: str
    besides: tuple[str, ...]
    words: tuple[str, ...]
    numbers: tuple[Moved, ...]
    cost: str
    doubt: str
    checks: Sequence[str]
    verify: Sequence[str]
    risk: str
    unknown: Sequence[str]
    guide: Sequence[str]

    @property
    def title(self) -> str:
        """The changes in a line; the advice where nothing is changed."""
        return ", ".join(self.words) or self.summary


def change_view(made: Recommendation, key: str = "") -> ChangeView:
    """A recommendation as the page shows it; `key` names it there."""
    demand = made.predicted.get("kv_demand_ratio", 0.0)
    return ChangeView(
        key,
        made.summary,
        command(made.changes),
        ", ".join(words for change in made.changes if (words := _was(change))),
        tuple(_told(change) for change in made.changes if not _typed(change)),
        tuple(map(_told, made.changes)),
        tuple(_numbers(made)),
        _cost(made.cost_usd_per_hour),
        "Not enough alone." if demand > KV_TARGET_RATIO else "",
        made.checks,
        made.verify,
        made.risk,
        made.unknown,
        made.guide,
    )


def command(changes: Sequence[Change]) -> str:
    """The flags to put on the server's command line, quoted for a shell; "" where there are
    none."""
    return " ".join(word for change in changes for word in _typed(change))


def _typed(change: Change) -> list[str]:
    if not change.flag.startswith("--") or change.after is None:
        return []
    if change.after is True:
        return [shlex.quote(change.flag)]
    if change.after is False:
        return [shlex.quote(f"--no-{change.flag[2:]}")]
    value = f"{change.after:g}" if isinstance(change.after, float) else str(change.after)
    return [shlex.quote(change.flag), shlex.quote(value)]


def _told(change: Change) -> str:
    return change_words(change).replace(" -> ", " → ")


def _was(change: Change) -> str:
    """The flag as it is now, where it has a value and another one takes its place."""
    if not _typed(change) or change.before is None or isinstance(change.before, bool):
        return ""
    return " ".join(_typed(Change(change.flag, None, change.before)))


def _numbers(made: Recommendation) -> list[Moved]:
    """The numbers that move, in the order that advice has them."""
    found: list[Moved] = []
    for key, label, told in NUMBERS:
        then, now = made.predicted.get(key), made.before.get(key)
        if then is None:
            continue
        row = Moved(label, "-" if now is None else told(now), told(then))
        if row.before != row.after:
            found.append(row)
    return found


def _cost(usd_per_hour: float | None) -> str:
    if usd_per_hour is None:
        return "not known"
    return f"{usd_per_hour:+,.2f} USD an hour" if usd_per_hour else "nothing extra"
