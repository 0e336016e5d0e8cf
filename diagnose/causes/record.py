"""What a cause is: one literal record, from which Python and PromQL conclude alike. Pure.

A cause is concluded where the gate of one of its forms is surely true and the evidence carries it.
Confidence is a sum of log-odds: each term adds its weight times how far its value lies beyond its
threshold. What is unknown adds nothing; what a gate does with it, the gate says (`assume`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp
from string import Formatter
from typing import Any, cast

from kneewatch.diagnose.case import (
    CONCLUDED_FROM,
    DOUBTFUL_BELOW,
    Case,
    Cause,
    Evidence,
    Facts,
    strength,
)
from kneewatch.rules.conditions import ALWAYS, PYTHON, Clause, Condition, Leaf, Number, Quantity
from kneewatch.rules.facts import Holds, Read, Spelling
from kneewatch.rules.model import Severity
from kneewatch.rules.quantities import Signal

ONSET_S = 5.0
"""A cause is reported once it has been concluded for this long."""

CLEAR_S = 15.0
"""A cause ends once it has not been concluded for this long."""

Say = str | Callable[[Facts], str]
"""A sentence: a template whose fields are signals or the record's `words`, or a function."""


@dataclass(frozen=True, slots=True, eq=False)
class Sidecar(Quantity):
    """A quantity that only the sidecar can read, and why PromQL cannot."""

    of: Callable[[Facts], float | None]
    why: str

    def read(self) -> Read:
        return cast(Read, self.of)

    def promql(self, to: Spelling) -> str | None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class SidecarHolds(Leaf):
    """A condition that only the sidecar can read, and why PromQL cannot; false where it is
    unknown."""

    of: Callable[[Facts], bool]
    why: str

    def holds(self, *, side: bool) -> Holds:
        of = cast(Holds, self.of)
        return of if side else lambda facts: not of(facts)

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        return Clause() if side else Clause(everywhere=True)


@dataclass(frozen=True, slots=True)
class Finds(Leaf):
    """Whether a rule's finding stands, with its clear time; false where it is unknown."""

    rule: str

    def holds(self, *, side: bool) -> Holds:
        rule = self.rule

        def finds(facts: Facts) -> bool:
            return (facts.severity(rule) > Severity.OK) == side

        return cast(Holds, finds)

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        return Clause() if side else Clause(everywhere=True)


@dataclass(frozen=True, slots=True)
class Term:
    """A piece of evidence: `weight` times the strength of `value` against `threshold` (1 without
    one). Negative weights speak against the cause; a weight of 0 is told and counts for nothing.

    It counts where `when` is surely true. `below`: the further below its threshold, the stronger.
    `signal` names the evidence where the value is not a plain signal, `shown` is the number to
    print where that is not the value.
    """

    value: Quantity
    threshold: Quantity | None
    weight: Number
    say: Say
    when: Condition = ALWAYS
    below: bool = False
    signal: str | Callable[[Facts], str] = ""
    sidecar: str = ""
    """Why PromQL cannot see it; empty where it can."""

    def key(self, facts: Facts) -> str:
        """The signal that the evidence names."""
        if callable(self.signal):
            return self.signal(facts)
        return self.signal or (self.value.key if isinstance(self.value, Signal) else "")


def term(
    value: Quantity,
    threshold: Quantity | float | None,
    weight: float,
    say: Say,
    *,
    when: Condition = ALWAYS,
    below: bool = False,
    signal: str | Callable[[Facts], str] = "",
    sidecar: str = "",
) -> Term:
    """A term, with plain numbers as quantities."""
    bound = Number(float(threshold)) if isinstance(threshold, float | int) else threshold
    return Term(value, bound, Number(weight), say, when, below, signal, sidecar)


@dataclass(frozen=True, slots=True)
class Level:
    """A severity and when it applies."""

    severity: Severity
    when: Condition = ALWAYS


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which a cause shows. The first form whose gate holds is the one that is concluded.

    `start` are the log-odds before any evidence. Of `levels` the first that applies is the
    severity; the last one always does. `words` name quantities for templates. `name` tells the
    form's recorded series from those of the others, `summary` is its alert's text.
    `apart`: nothing follows from it now.
    """

    gate: Condition
    start: Number
    terms: tuple[Term, ...]
    levels: tuple[Level, ...]
    say: tuple[tuple[Condition, Say], ...]
    summary: str
    lever: Say
    guide: tuple[str, ...]
    action: str = ""
    """The alert's advice, where the lever is not one plain sentence."""
    name: str = ""
    words: tuple[tuple[str, Quantity], ...] = ()
    apart: Condition | None = None
    sidecar: str = ""
    """Why PromQL cannot conclude this form; empty where it can."""


@dataclass(frozen=True)
class CauseRecord:
    """A cause: what it is called, how it is concluded, and what follows from it.

    `explains` are the causes that are reported under it. `covers` are rules whose findings say no
    more than it does. `moves` are the families of signals that are not normal while it stands:
    their baselines are not learned then. `symptoms` are those of the guide's list that show while
    it stands. `levers` are ids of changes (diagnose/recommend), best first. `enough` is the signal
    that a change must be predicted to bring to 0. `sidecar` says why PromQL cannot conclude it.
    """

    id: str
    title: str
    means: str
    forms: tuple[Form, ...] = ()
    judge: Callable[[Facts], Cause | None] | None = None
    explains: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    symptoms: tuple[str, ...] = ()
    levers: tuple[str, ...] = ()
    enough: str = ""
    onset_s: Number = field(default=Number(ONSET_S))
    clear_s: Number = field(default=Number(CLEAR_S))
    fleet: bool = False
    capacity: bool = False
    """Whether it says that the fleet was too small for its load, for a while."""
    queues: bool = False
    """Whether requests queue for capacity because of it."""
    sidecar: str = ""

    @cached_property
    def examine(self) -> Callable[[Facts], Cause | None]:
        """The cause as its evidence has it; None where it is not concluded."""
        if self.judge is not None:
            return self.judge
        forms = [Examiner(self, form) for form in self.forms]

        def examined(facts: Facts) -> Cause | None:
            for form in forms:
                if form.gate(facts):
                    return form.cause(facts)
            return None

        return examined

    @cached_property
    def stands(self) -> Callable[[Facts], bool]:
        """Whether it is concluded, without the words."""
        if self.judge is not None:
            judge = self.judge
            return lambda facts: judge(facts) is not None
        forms = [Examiner(self, form) for form in self.forms]

        def stands(facts: Facts) -> bool:
            """Whoever concludes a cause without a form knows what would end it."""
            for form in forms:
                if form.gate(facts):
                    return form.confidence(facts) >= CONCLUDED_FROM
            return not forms

        return stands


class Examiner:
    """A form, compiled to Python."""

    def __init__(self, record: CauseRecord, form: Form) -> None:
        self._id, self._form = record.id, form
        self.gate: Holds = form.gate.compile(PYTHON)
        self._terms = [_Compiled(term) for term in form.terms]
        self._levels = [(level.severity, level.when.compile(PYTHON)) for level in form.levels]
        self._say = [(when.compile(PYTHON), _sentence(say, form)) for when, say in form.say]
        self._lever = _sentence(form.lever, form)
        self._apart = form.apart.compile(PYTHON) if form.apart is not None else None

    def _log_odds(self, facts: Facts) -> float:
        log_odds = self._form.start.value
        for term in self._terms:
            value = term.value(facts)
            if value is not None and term.when(facts):
                log_odds += term.weight * term.strength(facts, value)
        return log_odds

    def confidence(self, facts: Facts) -> float:
        """The chance that the cause stands, where the gate does; 0 to 1."""
        return 1 / (1 + exp(-self._log_odds(facts)))

    def cause(self, facts: Facts) -> Cause | None:
        """The cause with its evidence; None where that does not carry it."""
        confidence = self.confidence(facts)
        if confidence < CONCLUDED_FROM:
            return None
        severity = next(severity for severity, applies in self._levels if applies(facts))
        if confidence < DOUBTFUL_BELOW:
            severity = Severity.INFO
        evidence: list[Evidence] = []
        against: list[Evidence] = []
        for term in self._terms:
            value = term.value(facts)
            if value is None or not term.when(facts):
                continue
            side = evidence if term.weight >= 0 else against
            threshold = None if term.threshold is None else term.threshold(facts)
            text = _said(term.term.say, facts, self._form, value)
            side.append(Evidence(term.term.key(facts), value, threshold, text))
        return Cause(
            self._id,
            round(confidence, 2),
            severity,
            next(say(facts) for applies, say in self._say if applies(facts)),
            tuple(evidence),
            tuple(against),
            self._form.guide,
            self._lever(facts),
            apart=self._apart is not None and self._apart(facts),
        )


class _Compiled:
    """A term, compiled to Python."""

    __slots__ = ("below", "term", "threshold", "value", "weight", "when")

    def __init__(self, term: Term) -> None:
        self.term, self.below = term, term.below
        self.value: Read = term.value.read()
        self.threshold: Read | None = None if term.threshold is None else term.threshold.read()
        self.weight = term.weight.value
        self.when: Holds = term.when.compile(PYTHON)

    def strength(self, facts: Facts, value: float) -> float:
        """How much the value says, 0 to 1."""
        bound = None if self.threshold is None else self.threshold(facts)
        return strength(value, bound, below=self.below)


def weigh(case: Case, terms: Sequence[Term], facts: Facts) -> None:
    """Adds terms to a case that a function concludes; PromQL compiles the same terms."""
    for each in terms:
        compiled = _Compiled(each)
        value = compiled.value(facts)
        if value is None or not compiled.when(facts):
            continue
        threshold = None if compiled.threshold is None else compiled.threshold(facts)
        text = each.say if isinstance(each.say, str) else each.say(facts)
        text = _WORDS.vformat(text, (), _Named({**facts.values, "value": value}))
        key = each.key(facts)
        case.weigh(key, value, threshold, compiled.weight, text, below=each.below)


# --- sentences ----------------------------------------------------------------------------------


class _Words(Formatter):
    """Numbers as people read them: `%` percent, `ms` milliseconds, `s` seconds, else a count."""

    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401 - as its base
        if value is None:
            return "unknown"
        match format_spec:
            case "%":
                return f"{100 * value:.0f}%"
            case ".1%":
                return f"{100 * value:.1f}%"
            case "ms":
                return f"{1000 * value:.0f} ms"
            case "s":
                return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
            case _:
                return str(super().format_field(value, format_spec or ".0f"))


_WORDS = _Words()


class _Named(dict[str, float | None]):
    """The signals of a moment by name; one that is not there is unknown."""

    def __missing__(self, key: str) -> None:
        return None


def _said(say: Say, facts: Facts, form: Form, value: float | None = None) -> str:
    if not isinstance(say, str):
        return say(facts)
    if "{" not in say:
        return say
    names = _Named(facts.values)
    names["value"] = value
    for name, quantity in form.words:
        names[name] = quantity.read()(facts)
    return _WORDS.vformat(say, (), names)


def _sentence(say: Say, form: Form) -> Callable[[Facts], str]:
    return lambda facts: _said(say, facts, form)
