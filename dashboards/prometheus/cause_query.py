"""A cause as PromQL: its gate, its severities, and the log-odds of its terms one by one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kneewatch.collector.signals.expr import Dialect
from kneewatch.dashboards.prometheus.rule_group import Record
from kneewatch.diagnose.causes.record import CauseRecord, Term
from kneewatch.rules.conditions import Number, ToPromQL
from kneewatch.rules.facts import NO_TARGETS, Spelling, Targets, number, recorded
from kneewatch.rules.rule import Severity

ZERO = f"({recorded('running')} * 0)"
"""0 for every engine, in place of a signal without a value."""

NO_DIALECT = Dialect(0.0)

Levels = tuple[tuple[Severity, str], ...]
"""Severities and when each applies, worst first; an empty condition always does."""


class Scored(Struct, frozen=True):
    """A piece of evidence: what it adds to the log-odds, where `when` holds (always, where that is
    empty)."""

    value: str
    threshold: str | None
    weight: float
    when: str = ""
    below: bool = False


class CauseQuery(Struct, frozen=True):
    """A form of a cause as PromQL: concluded where `when` holds and its confidence is high enough.

    `start` are the log-odds that the terms are added to, a number or an expression. `note` is the
    form's name, empty for a cause's only form. `for_s` is how long it must hold in seconds, None
    for the cause's onset. `needs` are records that `when` reads and nothing else does.
    """

    record: CauseRecord
    when: str
    terms: tuple[Scored, ...]
    start: float | str
    levels: Levels
    summary: str
    lever: str
    note: str = ""
    for_s: float | None = None
    needs: tuple[Record, ...] = ()
    apart: bool = False
    """Whether no other cause is attributed to it in this form."""

    @property
    def series(self) -> str:
        """The `cause` label of its recorded confidence."""
        return f"{self.record.id}:{self.note}" if self.note else self.record.id


class Spelled(Spelling):
    """Signals that are PromQL expressions of their own: GPU boards, engines against their peers."""

    def __init__(
        self,
        series: Mapping[str, str],
        dialect: Dialect = NO_DIALECT,
        targets: Targets = NO_TARGETS,
    ) -> None:
        super().__init__(dialect, targets=targets)
        self._series = series

    def series(self, key: str) -> str | None:
        """The expression of a signal; None where there is none."""
        return self._series.get(key)


def scored(to: Spelling, term: Term) -> Scored | None:
    """A term as PromQL; None where PromQL cannot compute it, or its weight is 0."""
    value = ZERO if isinstance(term.value, Number) else term.value.promql(to)
    when = term.when.compile(ToPromQL(to))
    if value is None or when.nowhere or not term.weight.value:
        return None
    threshold = None if term.threshold is None else term.threshold.promql(to)
    if term.threshold is not None and threshold is None:
        return None
    return Scored(value, threshold, term.weight.value, when.vector, term.below)


def confidence(start: float | str, terms: Sequence[Scored], zero: str) -> str:
    """The confidence of a cause whose log-odds start at `start`, a number or an expression.

    `zero` is an expression that is 0 for each subject that is judged: evidence is weighed for no
    other subject, so that Prometheus does no arithmetic on healthy engines.
    """
    begin = start if isinstance(start, str) else number(start)
    summed = " + ".join([f"({zero} + {begin})", *(_added(term, zero) for term in terms)])
    return f"1 / (1 + exp(-1 * ({summed})))"


def _added(term: Scored, zero: str) -> str:
    weighed = f"{number(term.weight)} * {_strength(term, zero)}"
    if term.when:
        weighed = f"({weighed}) and ({term.when})"
    return f"(({weighed}) or {zero})"


def _strength(term: Scored, zero: str) -> str:
    value = f"(({term.value}) and {zero})"
    if term.threshold is None:
        return f"({value} * 0 + 1)"
    if term.below:
        return f"clamp_max(0.5 * ({term.threshold}) / {value}, 1)"
    return f"clamp(0.5 * {value} / ({term.threshold}), 0, 1)"
