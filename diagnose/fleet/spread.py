"""A signal over the engines of one tier: worst, spread and count beside any mean. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kneewatch.diagnose.fleet.judging import Engine


@dataclass(frozen=True, slots=True)
class Spread:
    """One signal over several engines. `worst` names the engine with the greatest value, or the
    least where less is worse; `unknown` engines have none and are in no other figure."""

    signal: str
    count: int
    unknown: int
    least: float
    median: float
    mean: float
    most: float
    worst: str

    @property
    def worst_value(self) -> float:
        """The value of the worst engine."""
        return self.least if self.signal in LESS_IS_WORSE else self.most


LESS_IS_WORSE = frozenset({"prefix_hit_ratio", "generation_tokens_per_s"})


def spread(signal: str, engines: Sequence[Engine]) -> Spread | None:
    """A signal's spread; None where no engine has a value."""
    rows = [(value, e.member.name) for e in engines if (value := e.get(signal)) is not None]
    if not rows:
        return None
    values = [value for value, _ in rows]
    _, worst = min(rows) if signal in LESS_IS_WORSE else max(rows)
    return Spread(
        signal,
        len(rows),
        len(engines) - len(rows),
        min(values),
        median(values),
        fmean(values),
        max(values),
        worst,
    )


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
