"""Cause records: one literal definition of a cause, compiled to Python and to PromQL. Pure.

A cause is concluded where the gate of one of its forms is true and its confidence is high enough.
Confidence is a sum of log-odds: each term adds its weight times how far its value lies beyond its
threshold. Unknown values add nothing; a gate states what unknown counts as (`assume`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from string import Formatter

from msgspec import Struct, field

from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM, Case, Cause, Facts, chance, strength
from kneewatch.rules.conditions import (
    ALWAYS,
    Clause,
    Condition,
    Leaf,
    Number,
    Quantity,
    Scope,
    Some,
    first_of,
)
from kneewatch.rules.facts import Holds, Read, Spelling
from kneewatch.rules.formatting import duration, percent
from kneewatch.rules.quantities import Signal
from kneewatch.rules.rule import Severity

ONSET_S = 5.0
"""A cause is reported once it has been concluded for this long."""

CLEAR_S = 15.0
"""A cause ends once it has not been concluded for this long."""

Words = Sequence[tuple[str, Read]]
"""Quantities that sentences name, compiled to Python."""

Say = str | Callable[[Facts], str]
"""A sentence: a template whose fields are signals or the record's `words`, or a function."""


class Sidecar(Quantity, Struct, frozen=True, eq=False):
    """A quantity that only the sidecar can read, and why PromQL cannot."""

    of: Callable[[Facts], float | None]
    why: str
    means: str
    """The quantity in words, for the documentation."""

    def source(self, scope: Scope) -> str:
        return f"{scope.name_of(self.of)}(facts)"

    def promql(self, to: Spelling) -> str | None:
        return None


class SidecarHolds(Leaf, Struct, frozen=True, eq=False):
    """A condition that only the sidecar can read, and why PromQL cannot; false where it is
    unknown."""

    of: Callable[[Facts], bool]
    why: str
    means: str
    """The condition in words, for the documentation."""

    def source(self, scope: Scope, *, side: bool) -> str:
        return f"({'' if side else 'not '}{scope.name_of(self.of)}(facts))"

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        return Clause() if side else Clause(everywhere=True)


class Finds(Leaf, Struct, frozen=True):
    """Whether a rule's finding is active, clear time included; false where it is unknown."""

    rule: str

    def source(self, scope: Scope, *, side: bool) -> str:
        return f"((facts.severity({self.rule!r}) > {int(Severity.OK)}) is {side})"

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        return Clause() if side else Clause(everywhere=True)


class Term(Struct, frozen=True):
    """A piece of evidence: `weight` times the strength of `value` against `threshold` (1 without
    one). Negative weights speak against the cause; weight 0 is listed without effect on confidence.

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


class Level(Struct, frozen=True):
    """A severity and when it applies."""

    severity: Severity
    when: Condition = ALWAYS


class Form(Struct, frozen=True):
    """One way in which a cause shows. The first form whose gate holds is the one that is concluded.

    `start` is the log-odds before any evidence. The severity is that of the first of `levels` that
    applies; the last one always does. `words` are quantities that the texts may use, by name.
    `summary` is the alert's text, `name` part of the names of the recorded series. While `apart`
    holds, the cause explains no other cause. A `root` explains the record's `heads`.
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
    root: bool = False
    sidecar: str = ""
    """Why PromQL cannot conclude this form; empty where it can."""


class CauseRecord(Struct, frozen=True, dict=True):
    """A cause: what it is called, how it is concluded, and what follows from it.

    `explains` are the causes that are reported under it. `heads` are causes that explain it, but
    are reported under it, with all that they explain, where its form is a root. `covers` are rules
    whose findings say no more than it does. `moves` are the families of signals that are not normal
    while it stands and `unusual` holds: their baselines are not learned then. `symptoms` are those
    of the guide's list that show while it stands. `levers` are ids of changes (diagnose/recommend),
    best first. `enough` is the signal that a change must be predicted to bring to 0. `sidecar` says
    why PromQL cannot conclude it.
    """

    id: str
    title: str
    means: str
    forms: tuple[Form, ...] = ()
    judge: Callable[[Facts], Cause | None] | None = None
    explains: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    unusual: Condition = ALWAYS
    symptoms: tuple[str, ...] = ()
    levers: tuple[str, ...] = ()
    enough: str = ""
    onset_s: Number = field(default=Number(ONSET_S))
    clear_s: Number = field(default=Number(CLEAR_S))
    over: Condition | None = None
    """Where this holds the cause has surely ended, and its clear time is not waited for."""
    outlasts: bool = False
    """Whether it stays, for OUTLASTS_S at most (engine/diagnosis.py), while a cause that it
    explains is concluded."""
    fleet: bool = False
    capacity: bool = False
    """Whether it says that the fleet was too small for its load, for a while."""
    queues: bool = False
    """Whether requests queue for capacity because of it."""
    slows_tokens: bool = False
    """Whether it makes tokens slow on a healthy node: its replica is a `bad_node` only where the
    GPU runs at a low clock."""
    sidecar: str = ""

    @property
    def gate(self) -> Condition:
        """Whether to examine it: the gate of one of its forms holds, or it has no forms."""
        return Some(tuple(form.gate for form in self.forms)) if self.forms else ALWAYS

    @cached_property
    def is_unusual(self) -> Holds:
        """`unusual`, compiled."""
        return self.unusual.python()

    @cached_property
    def _examiners(self) -> tuple[Examiner, ...]:
        return tuple(Examiner(self, form) for form in self.forms)

    def examine(self, facts: Facts) -> Cause | None:
        """The cause with its evidence; None where it is not concluded."""
        if self.judge is not None:
            return self.judge(facts)
        form = self._form(facts)
        return None if form is None else form.cause(facts)

    def stands(self, facts: Facts) -> bool:
        """Whether it is concluded, without building its texts; true for causes without forms."""
        if self.judge is not None:
            return self.judge(facts) is not None
        form = self._form(facts)
        return not self.forms if form is None else form.confidence(facts) >= CONCLUDED_FROM

    def _form(self, facts: Facts) -> Examiner | None:
        for form in self._examiners:  # a generator would cost as much as most gates
            if form.gate(facts):
                return form
        return None


class Examiner:
    """A form, compiled to Python."""

    def __init__(self, record: CauseRecord, form: Form) -> None:
        self._id, self._form = record.id, form
        self.gate: Holds = form.gate.python()

    # The rest is compiled when the gate holds first: most gates never do.

    @cached_property
    def _terms(self) -> Terms:
        return Terms(self._form.terms, self._words)

    @cached_property
    def _words(self) -> Words:
        return [(name, quantity.read()) for name, quantity in self._form.words]

    @cached_property
    def _severity(self) -> Callable[[Facts], Severity]:
        return first_of((level.severity, level.when) for level in self._form.levels)

    @cached_property
    def _say(self) -> Callable[[Facts], Say]:
        return first_of((say, when) for when, say in self._form.say)

    @cached_property
    def _apart(self) -> Holds | None:
        return None if self._form.apart is None else self._form.apart.python()

    def confidence(self, facts: Facts) -> float:
        """The cause's confidence, 0 to 1, where the gate holds."""
        return chance(self._terms.log_odds(facts, self._form.start.value))

    def cause(self, facts: Facts) -> Cause | None:
        """The cause with its evidence; None where the confidence is too low."""
        if self.confidence(facts) < CONCLUDED_FROM:
            return None
        words = self._words
        case = Case(
            self._id,
            _said(self._say(facts), words, facts),
            _said(self._form.lever, words, facts),
            self._form.guide,
            self._severity(facts),
            log_odds=self._form.start.value,
            apart=self._apart is not None and self._apart(facts),
            root=self._form.root,
        )
        self._terms.weigh(case, facts)
        return case.close()


class Terms:
    """Terms, compiled to Python; `words` name quantities for their sentences."""

    def __init__(self, terms: Sequence[Term], words: Words = ()) -> None:
        self._terms, self._words = [_Compiled(term) for term in terms], words

    def log_odds(self, facts: Facts, start: float) -> float:
        """`start` plus the log-odds of all terms."""
        log_odds = start
        for term in self._terms:
            value = term.value(facts)
            if value is not None and term.when(facts):
                log_odds += term.weight * strength(value, term.bound(facts), below=term.below)
        return log_odds

    def weigh(self, case: Case, facts: Facts) -> None:
        """Add all terms to a case as evidence."""
        for term in self._terms:
            value = term.value(facts)
            if value is not None and term.when(facts):
                text = _said(term.term.say, self._words, facts, value)
                key, bound = term.term.key(facts), term.bound(facts)
                case.weigh(key, value, bound, term.weight, text, below=term.below)


class _Compiled:
    """A term, compiled to Python."""

    __slots__ = ("below", "bound", "term", "value", "weight", "when")

    def __init__(self, term: Term) -> None:
        self.term, self.below = term, term.below
        self.value: Read = term.value.read()
        self.bound: Read = _unbounded if term.threshold is None else term.threshold.read()
        self.weight = term.weight.value
        self.when: Holds = term.when.python()


def _unbounded(_: object) -> None:
    return None


# --- sentences ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _parts(template: str) -> tuple[tuple[str, str | None, str], ...]:
    """A template's pieces: text, then the name of a number and its format (None: no number)."""
    return tuple((text, name, form or "") for text, name, form, _ in Formatter().parse(template))


def _shown(value: float | None, form: str) -> str:
    """A number for people: `%` a ratio in percent, `s` a duration, else a count."""
    if value is None:
        return "unknown"
    match form:
        case "%":
            return percent(value)
        case "s":
            return duration(value)
        case _:
            return format(value, form or ".0f")


def _said(
    say: Say,
    words: Words,
    facts: Facts,
    value: float | None = None,
) -> str:
    if not isinstance(say, str):
        return say(facts)
    if "{" not in say:
        return say
    named = {"value": value} | {name: read(facts) for name, read in words}
    return "".join(
        text
        if name is None
        else text + _shown(named[name] if name in named else facts.values.get(name), form)
        for text, name, form in _parts(say)
    )
