"""Evidence as PromQL: the log-odds of diagnose/case.py, term by term. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.dashboards.prometheus.model import number, recorded

ZERO = f"({recorded('running')} * 0)"
"""Nothing, for every engine: what stands in for a signal that has no value."""


@dataclass(frozen=True, slots=True)
class Term:
    """A piece of evidence: what `Case.weigh` adds. It counts where `when` holds (always, where
    that is empty)."""

    value: str
    threshold: str | None
    weight: float
    when: str = ""
    below: bool = False


def confidence(start: float | str, terms: Sequence[Term], zero: str = ZERO) -> str:
    """The confidence of a cause whose log-odds start at `start`, a number or an expression.

    `zero` is nothing for each of what is judged: engines, unless told.
    """
    begin = start if isinstance(start, str) else number(start)
    summed = " + ".join([f"({zero} + {begin})", *(_told(term, zero) for term in terms)])
    return f"1 / (1 + exp(-1 * ({summed})))"


def value(key: str) -> str:
    """A signal, nothing where it has no value."""
    return f"({recorded(key)} or {ZERO})"


def _told(term: Term, zero: str) -> str:
    strength = _strength(term)
    weighed = f"{number(term.weight)} * {strength}"
    if term.when:
        weighed = f"({weighed}) and ({term.when})"
    return f"(({weighed}) or {zero})"


def _strength(term: Term) -> str:
    if term.threshold is None:
        return f"(({term.value}) * 0 + 1)"
    if term.below:
        return f"clamp_max(0.5 * ({term.threshold}) / ({term.value}), 1)"
    return f"clamp(0.5 * ({term.value}) / ({term.threshold}), 0, 1)"
