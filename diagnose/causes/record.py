"""Cause records: a cause is defined once, as data, and compiled to Python. Pure.

A cause is concluded if the gate of one of its forms is true and its confidence is high enough.
Confidence is a sum of log-odds: each term adds its weight times its strength, which says how far a
value is beyond its threshold. Unknown values add nothing. In a gate, `assume` decides what unknown
counts as.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from string import Formatter
from typing import Any, cast

from msgspec import Struct, field

from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM, TABLES, Case, Facts, chance, strength
from kneewatch.rules.conditions import (
    ALWAYS,
    Condition,
    Number,
    Quantity,
    Scope,
    Some,
    first_of,
    nodes,
)
from kneewatch.rules.facts import Holds, Read
from kneewatch.rules.formatting import about, duration, percent, rate, singular, stated_duration
from kneewatch.rules.quantities import Live, Recent
from kneewatch.rules.rule import FAMILIES, QUEUE_RULES, Severity

ONSET_S = 5.0
"""A cause is reported after it has been concluded for this long."""

CLEAR_S = 15.0
"""A cause ends after it has not been concluded for this long."""

Words = Sequence[tuple[str, Read]]
"""Quantities that sentences refer to by name, compiled to Python."""

Say = str | Callable[[Facts], str]
"""A sentence: a function, or a template whose fields are signals or the record's `words`."""


class Computed(Quantity, Struct, frozen=True, eq=False):
    """A quantity that a function of the facts computes."""

    of: Callable[[Facts], float | None]
    means: str
    """The quantity in words, for the documentation."""

    def source(self, scope: Scope) -> str:
        return f"{scope.name_of(self.of)}(facts)"


class Tested(Condition, Struct, frozen=True, eq=False):
    """A condition that a function of the facts tests; false if unknown."""

    of: Callable[[Facts], bool]
    means: str
    """The condition in words, for the documentation."""

    def source(self, scope: Scope, *, side: bool = True) -> str:
        return f"({'' if side else 'not '}{scope.name_of(self.of)}(facts))"


class Finds(Condition, Struct, frozen=True):
    """Whether a rule's finding is active, including its clear time; false if unknown."""

    rule: str

    def source(self, scope: Scope, *, side: bool = True) -> str:
        return f"(bool(facts.severity({self.rule!r})) is {side})"


class Term(Struct, frozen=True, dict=True):
    """A piece of evidence: `weight` times the strength of `value` against `threshold`.

    The strength is 1 without a threshold. A negative weight is evidence against the cause; weight 0
    is listed without effect on confidence. The term counts only while `when` is certainly true.
    `below`: lower values are stronger evidence. `signal` names the evidence if that is not the
    first signal of `value`.
    """

    value: Quantity
    threshold: Quantity | None
    weight: Number
    say: Say
    when: Condition = ALWAYS
    below: bool = False
    signal: str | Callable[[Facts], str] = ""

    @cached_property
    def counted(self) -> Callable[[Facts], tuple[float, float | None] | None]:
        """Its value and threshold; None while it does not count. One function, because calls are
        most of what a scrape costs."""
        scope = Scope()
        value, *checks = scope.checked(self.value)
        checks.append(self.when.source(scope))
        bound = "None" if self.threshold is None else self.threshold.source(scope)
        source = f"({value}, {bound}) if {' and '.join(checks)} else None"
        return cast("Callable[[Facts], tuple[float, float | None] | None]", scope.function(source))

    def key(self, facts: Facts) -> str:
        """The signal that the evidence is listed under."""
        if callable(self.signal):
            return self.signal(facts)
        return self.signal or self._first_signal

    @cached_property
    def _first_signal(self) -> str:
        signals = (node.key for node in nodes(self.value) if isinstance(node, Live | Recent))
        return next(signals, "")


def term(
    value: Quantity,
    threshold: Quantity | float | None,
    weight: float,
    say: Say,
    *,
    when: Condition = ALWAYS,
    below: bool = False,
    signal: str | Callable[[Facts], str] = "",
) -> Term:
    """A term from quantities or plain numbers."""
    bound = Number(float(threshold)) if isinstance(threshold, float | int) else threshold
    return Term(value, bound, Number(weight), say, when, below, signal)


class Form(Struct, frozen=True, kw_only=True):
    """One way in which a cause shows. The first form whose gate is true is used.

    - `start`: the log-odds before any evidence.
    - `levels`: the first of these severities whose condition is true stands in place of `severity`.
    - `instead`: the first sentence whose condition is true stands in place of `say`.
    - `words`: quantities that the texts may use, by name.
    - `summary`: what the form means, in one sentence, if the cause has several.
    - `guide`: sections of the sizing guide, if not those of the cause.
    - `apart`: while this is true, the cause explains no other cause.
    - `root`: this form explains the causes in the record's `heads`, and none of its `levers` helps.
    """

    gate: Condition
    start: Number = Number(0.0)
    terms: tuple[Term, ...]
    levels: tuple[tuple[Severity, Condition], ...] = ()
    severity: Severity = Severity.WARNING
    instead: tuple[tuple[Condition, Say], ...] = ()
    say: Say
    lever: Say
    summary: str = ""
    guide: tuple[str, ...] = ()
    words: tuple[tuple[str, Quantity], ...] = ()
    apart: Condition | None = None
    root: bool = False


class CauseRecord(Struct, frozen=True, dict=True):
    """The definition of a cause; the head of causes.toml explains most fields. `unusual` limits
    `moves`."""

    id: str
    title: str
    forms: tuple[Form, ...] = ()
    judge: Callable[[Facts], Cause | None] | None = None
    explains: tuple[str, ...] = ()
    disproves: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    guide: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    unusual: Condition = ALWAYS
    levers: tuple[str, ...] = ()
    enough: str = ""
    onset_s: Number = field(default=Number(ONSET_S))
    clear_s: Number = field(default=Number(CLEAR_S))
    over: Condition | None = None
    """If this is true, the cause has certainly ended; it ends without a clear time."""
    outlasts: bool = False
    fleet: bool = False
    capacity: bool = False
    queues: bool = False
    slows_tokens: bool = False

    @property
    def gate(self) -> Condition:
        """Whether to examine the cause: one of its forms has a true gate, or it has no forms."""
        return Some(tuple(form.gate for form in self.forms)) if self.forms else ALWAYS

    @cached_property
    def is_unusual(self) -> Holds:
        """`unusual`, compiled to a function of facts."""
        return self.unusual.python()

    @cached_property
    def _examiners(self) -> tuple[Examiner, ...]:
        return tuple(Examiner(self, form) for form in self.forms)

    def examine(self, facts: Facts) -> Cause | None:
        """The cause with its evidence; None if it is not concluded."""
        if self.judge is not None:
            return self.judge(facts)
        form = self._form(facts)
        return None if form is None else form.cause(facts)

    def stands(self, facts: Facts) -> bool:
        """Whether the cause is concluded; its texts are not built. True for causes without
        forms."""
        if self.judge is not None:
            return self.judge(facts) is not None
        form = self._form(facts)
        return not self.forms if form is None else form.confidence(facts) >= CONCLUDED_FROM

    def _form(self, facts: Facts) -> Examiner | None:
        for form in self._examiners:  # a generator would cost as much as most gates
            if form.gate(facts):
                return form
        return None


DECLARED = dict(TABLES)
"""The tables of causes.toml by the cause's id, in the order in which causes rank."""

_GROUPS = DECLARED.pop("groups") | {"queue_rules": QUEUE_RULES, "families": FAMILIES}


_LISTS = ("guide", "explains", "disproves", "heads", "covers", "moves", "levers")


def listed(ids: Sequence[str]) -> tuple[str, ...]:
    """A list of causes.toml with its groups replaced by their ids."""
    return tuple(
        each
        for name in ids
        for each in (listed(_GROUPS[name[1:]]) if name.startswith("*") else (name,))
    )


def cause(
    cause_id: str,
    *forms: Form,
    judge: Callable[[Facts], Cause | None] | None = None,
    unusual: Condition = ALWAYS,
    over: Condition | None = None,
    **declared: Any,  # noqa: ANN401 - fields of the table
) -> CauseRecord:
    """The record of a cause: how it is concluded, and its table, here or in causes.toml."""
    table: dict[str, Any] = {**DECLARED.get(cause_id, {}), **declared}
    table |= {key: listed(table[key]) for key in _LISTS if key in table}
    table |= {key: Number(table[key]) for key in ("onset_s", "clear_s") if key in table}
    return CauseRecord(id=cause_id, forms=forms, judge=judge, unusual=unusual, over=over, **table)


class Examiner:
    """A form, compiled to Python."""

    def __init__(self, record: CauseRecord, form: Form) -> None:
        self._id, self._form, self._guide = record.id, form, form.guide or record.guide
        self.gate: Holds = form.gate.python()

    # The rest is compiled when the gate holds first: most gates never do.

    @cached_property
    def _words(self) -> Words:
        return [(name, quantity.read()) for name, quantity in self._form.words]

    @cached_property
    def _severity(self) -> Callable[[Facts], Severity]:
        return first_of(self._form.levels, self._form.severity)

    @cached_property
    def _say(self) -> Callable[[Facts], Say]:
        return first_of(((say, when) for when, say in self._form.instead), self._form.say)

    @cached_property
    def _apart(self) -> Holds | None:
        return None if self._form.apart is None else self._form.apart.python()

    def confidence(self, facts: Facts) -> float:
        """The cause's confidence, 0 to 1, if the gate is true."""
        return chance(log_odds(self._form.terms, facts, self._form.start.value))

    def cause(self, facts: Facts) -> Cause | None:
        """The cause with its evidence; None if its confidence is too low."""
        if self.confidence(facts) < CONCLUDED_FROM:  # its texts would be built in vain
            return None
        words = self._words
        case = Case(
            self._id,
            _said(self._say(facts), words, facts),
            _said(self._form.lever, words, facts),
            self._severity(facts),
            log_odds=self._form.start.value,
            apart=self._apart is not None and self._apart(facts),
            root=self._form.root,
            guide=self._guide,
        )
        weigh(self._form.terms, case, facts, words)
        return case.close()


def log_odds(terms: Sequence[Term], facts: Facts, start: float) -> float:
    """`start` plus the log-odds of all terms."""
    for each in terms:
        if (value_and_bound := each.counted(facts)) is not None:
            start += each.weight.value * strength(*value_and_bound, below=each.below)
    return start


def weigh(terms: Sequence[Term], case: Case, facts: Facts, words: Words = ()) -> None:
    """Add all terms to a case as evidence. `words` are the named quantities that their sentences
    use."""
    for each in terms:
        if (value_and_bound := each.counted(facts)) is not None:
            value, bound = value_and_bound
            text = _said(each.say, words, facts, value)
            case.weigh(each.key(facts), value, bound, each.weight.value, text, below=each.below)


# --- sentences ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _parts(template: str) -> tuple[tuple[str, str | None, str], ...]:
    """A template's pieces: a text, then the name and format of a number (None: no number)."""
    return tuple((text, name, form or "") for text, name, form, _ in Formatter().parse(template))


def _shown(name: str, value: float | None, form: str) -> str:
    """A number for users: `%` formats a ratio in percent, `s` a duration, `requests/s` a rate,
    anything else a count. Targets are shown as they were set, measured durations are rounded."""
    if value is None:
        return "unknown"
    match form:
        case "%":
            return percent(value)
        case "s":
            return stated_duration(value) if name.endswith("target_s") else duration(value)
        case ".2g":
            return about(value)
        case _ if form.endswith("/s"):
            return rate(value, form.removesuffix("/s"))
        case _:
            return format(value, form or ",.0f")


def _said(say: Say, words: Words, facts: Facts, value: float | None = None) -> str:
    if not isinstance(say, str):
        return singular(say(facts))
    if "{" not in say:
        return say
    named = {"value": value} | {name: read(facts) for name, read in words}
    return singular(
        "".join(
            text
            if name is None
            else text + _shown(name, named[name] if name in named else facts.values.get(name), form)
            for text, name, form in _parts(say)
        )
    )
