"""A cause as PromQL: the condition under which it is possible (its gate), its severities, and the
log-odds of its terms. Pure."""

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
"""A PromQL expression that is 0 for every engine. It replaces a signal without a value."""

NO_DIALECT = Dialect(0.0)

Levels = tuple[tuple[Severity, str], ...]
"""Severities, worst first, each with the condition under which it applies. An empty condition
always applies."""


class Scored(Struct, frozen=True):
    """A piece of evidence as PromQL: the log-odds that it adds, and in `when` the condition under
    which it counts. An empty `when` means always."""

    value: str
    threshold: str | None
    weight: float
    when: str = ""
    below: bool = False


class CauseQuery(Struct, frozen=True):
    """A form of a cause as PromQL. It is concluded where `when` holds and its confidence is high
    enough.

    `start` is a number or an expression for the log-odds before evidence is added. `note` is the
    name of the form; empty if the cause has a single form. `for_s` is how long the cause must hold
    in seconds; None for the onset in its record. `needs` are recording rules that only `when`
    reads.
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
    """Whether this form explains no other causes."""

    @property
    def series(self) -> str:
        """The value of the label `cause` in the recorded series of the cause's confidence."""
        return f"{self.record.id}:{self.note}" if self.note else self.record.id


class Spelled(Spelling):
    """Spells conditions with signals that are not recorded as such, but given as PromQL
    expressions."""

    def __init__(
        self,
        series: Mapping[str, str],
        dialect: Dialect = NO_DIALECT,
        targets: Targets = NO_TARGETS,
    ) -> None:
        super().__init__(dialect, targets=targets)
        self._series = series

    def series(self, key: str) -> str | None:
        """The PromQL expression of a signal. None if there is none."""
        return self._series.get(key)


def scored(to: Spelling, term: Term) -> Scored | None:
    """A term as PromQL. None if PromQL cannot compute the term, or if its weight is 0."""
    value = ZERO if isinstance(term.value, Number) else term.value.promql(to)
    when = term.when.compile(ToPromQL(to))
    if value is None or when.nowhere or not term.weight.value:
        return None
    threshold = None if term.threshold is None else term.threshold.promql(to)
    if term.threshold is not None and threshold is None:
        return None
    return Scored(value, threshold, term.weight.value, when.vector, term.below)


def confidence(start: float | str, terms: Sequence[Scored], zero: str) -> str:
    """A PromQL expression for the confidence of a cause. `start` is a number or an expression for
    the log-odds before evidence is added.

    `zero` is an expression that is 0 for each subject (such as an engine) that is judged. Evidence
    is computed only for these subjects, so that Prometheus does no arithmetic on healthy engines.
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
