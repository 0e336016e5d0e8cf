"""Conditions over signals, compiled to Python functions. Pure.

A quantity is a number or unknown. A condition is true, false or unknown (Kleene's logic). A
comparison with an unknown quantity is unknown. `a & b` is false if either is false; `a | b` is true
if either is true. `assume` replaces unknown by true or false.

One side is compiled at a time: where the condition is certainly true, or where it is certainly
false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from math import isfinite
from typing import TypeVar, cast

from msgspec import Struct

from kneewatch.rules.facts import Holds, Moment, Read

T = TypeVar("T")


# --- quantities ---------------------------------------------------------------------------------


class Quantity:
    """A number, or unknown."""

    __slots__ = ()

    def source(self, scope: Scope) -> str:
        """A Python expression over `facts`; it evaluates to the value, or to None if unknown."""
        raise NotImplementedError

    def read(self) -> Read:
        """A function from `facts` to the value; it returns None if the value is unknown."""
        scope = Scope()
        return cast(Read, scope.function(self.source(scope)))

    def __ge__(self, other: Quantity | float) -> Condition:
        return Compare(self, ">=", quantity(other))

    def __gt__(self, other: Quantity | float) -> Condition:
        return Compare(self, ">", quantity(other))

    def __le__(self, other: Quantity | float) -> Condition:
        return Compare(self, "<=", quantity(other))

    def __lt__(self, other: Quantity | float) -> Condition:
        return Compare(self, "<", quantity(other))

    def __add__(self, other: Quantity | float) -> Quantity:
        return Formula("{0} + {1}", (self, quantity(other)))

    def __sub__(self, other: Quantity | float) -> Quantity:
        return Formula("{0} - {1}", (self, quantity(other)))

    def __mul__(self, other: Quantity | float) -> Quantity:
        return Formula("{0} * {1}", (self, quantity(other)))

    def __rmul__(self, other: float) -> Quantity:
        return Formula("{0} * {1}", (quantity(other), self))

    def __rsub__(self, other: float) -> Quantity:
        return Formula("{0} - {1}", (quantity(other), self))

    def __radd__(self, other: float) -> Quantity:
        return Formula("{0} + {1}", (quantity(other), self))

    def __truediv__(self, other: Quantity | float) -> Quantity:
        return Formula(QUOTIENT, (self, quantity(other)))

    def __rtruediv__(self, other: float) -> Quantity:
        return Formula(QUOTIENT, (quantity(other), self))

    def otherwise(self, value: float) -> Quantity:
        """This quantity, but `value` wherever it is unknown."""
        return FirstOf((self, Number(value)))

    def at_least(self, value: Quantity | float) -> Quantity:
        """The larger of this quantity and a number."""
        return Formula(LARGER, (self, quantity(value)))

    def root(self) -> Quantity:
        """The square root; unknown unless this quantity is above zero."""
        return Formula(SQUARE_ROOT, (self,))

    @property
    def known(self) -> Condition:
        """The condition that this quantity has a value. Never unknown."""
        return Known(self)


def quantity(value: Quantity | float) -> Quantity:
    """Converts a plain number to a quantity; returns quantities unchanged."""
    return value if isinstance(value, Quantity) else Number(float(value))


class Number(Quantity, Struct, frozen=True):
    """A constant: a threshold, a weight or a factor."""

    value: float

    def source(self, scope: Scope) -> str:
        return repr(self.value) if isfinite(self.value) else scope.name_of(self.value)


QUOTIENT = "({0} / {1} if {1} > 0 else None)"
LARGER = "max({0}, {1})"
SQUARE_ROOT = "({0}**0.5 if {0} > 0 else None)"


class Formula(Quantity, Struct, frozen=True):
    """A Python expression of quantities, which it names as `{0}` and `{1}`; unknown if any of them
    is."""

    form: str
    parts: tuple[Quantity, ...]

    def source(self, scope: Scope) -> str:
        values, checks = list[str](), list[str]()
        for part in self.parts:
            value, *check = scope.checked(part)
            values.append(value)
            checks += check
        value = self.form.format(*values)
        return f"({value} if {' and '.join(checks)} else None)" if checks else f"({value})"


class FirstOf(Quantity, Struct, frozen=True):
    """The first known one of several quantities."""

    options: tuple[Quantity, ...]

    def source(self, scope: Scope) -> str:
        *options, value = [option.source(scope) for option in self.options]
        for option in reversed(options):
            name = scope.variable()
            value = f"({name} if ({name} := {option}) is not None else {value})"
        return value


# --- conditions ---------------------------------------------------------------------------------


class Condition:
    """True, false or unknown."""

    __slots__ = ()

    def source(self, scope: Scope, *, side: bool = True) -> str:
        """A Python expression over `facts` that is true if the condition is certainly true.

        With `side=False`, it is true if the condition is certainly false.
        """
        raise NotImplementedError

    def python(self) -> Holds:
        """A function of `facts` that returns whether the condition is certainly true."""
        scope = Scope()
        return cast(Holds, scope.function(self.source(scope)))

    def __and__(self, other: Condition) -> Condition:
        return Every((*parts_of(Every, self), *parts_of(Every, other)))

    def __or__(self, other: Condition) -> Condition:
        return Some((*parts_of(Some, self), *parts_of(Some, other)))

    def __invert__(self) -> Condition:
        return Not(self)

    def assume(self, *, unknown: bool) -> Condition:
        """This condition, with true or false in place of unknown."""
        return Assume(self, unknown)


def parts_of(kind: type[Every | Some], condition: Condition) -> tuple[Condition, ...]:
    """The operands of a condition of this kind; for any other condition, only the condition
    itself."""
    return condition.parts if isinstance(condition, kind) else (condition,)


OPPOSITE = {">=": "<", ">": "<=", "<=": ">", "<": ">="}


class Compare(Condition, Struct, frozen=True):
    """A comparison of two quantities; unknown if either quantity is."""

    left: Quantity
    sign: str
    right: Quantity

    def source(self, scope: Scope, *, side: bool = True) -> str:
        sign = self.sign if side else OPPOSITE[self.sign]
        (value, *checks), (bound, *bound_checks) = map(scope.checked, (self.left, self.right))
        return _all([*checks, *bound_checks, f"{value} {sign} {bound}"])


class Every(Condition, Struct, frozen=True):
    """A conjunction: true if all parts are true, false if any part is false."""

    parts: tuple[Condition, ...]

    def source(self, scope: Scope, *, side: bool = True) -> str:
        parts = [part.source(scope, side=side) for part in self.parts]
        return _all(parts) if side else _any(parts)


class Some(Condition, Struct, frozen=True):
    """A disjunction: true if any part is true, false if all parts are false."""

    parts: tuple[Condition, ...]

    def source(self, scope: Scope, *, side: bool = True) -> str:
        parts = [part.source(scope, side=side) for part in self.parts]
        return _any(parts) if side else _all(parts)


ALWAYS = Every(())


def _all(parts: Sequence[str]) -> str:
    """A Python expression that is true if all parts are."""
    return f"({' and '.join(parts)})" if parts else "True"


def _any(parts: Sequence[str]) -> str:
    """A Python expression that is true if at least one part is."""
    return f"({' or '.join(parts)})" if parts else "False"


class Not(Condition, Struct, frozen=True):
    """The negation; unknown stays unknown."""

    part: Condition

    def source(self, scope: Scope, *, side: bool = True) -> str:
        return self.part.source(scope, side=not side)


class Assume(Condition, Struct, frozen=True):
    """A condition that counts as true, or as false, wherever it is unknown."""

    part: Condition
    unknown: bool

    def source(self, scope: Scope, *, side: bool = True) -> str:
        if side == self.unknown:
            return f"(not {self.part.source(scope, side=not side)})"
        return self.part.source(scope, side=side)


class Known(Condition, Struct, frozen=True):
    """Whether a quantity has a value; never unknown."""

    of: Quantity

    def source(self, scope: Scope, *, side: bool = True) -> str:
        sign = "is not" if side else "is"
        return f"({self.of.source(scope)} {sign} None)"


class Check(Condition, Struct, frozen=True):
    """Whether a condition has held for `for_s`, and for at least two scrapes.

    A rule is a check with one bound on one signal (rule.py).

    With `stretch`, a shorter window shortens the duration. A longer one does not lengthen it: what
    it shows has lasted. The condition reads the streak `name`; a single scrape to the contrary does
    not end a streak. Without a streak the condition is false, never unknown.
    """

    name: str
    of: Condition
    for_s: Number
    stretch: bool = True

    def source(self, scope: Scope, *, side: bool = True) -> str:
        least_s = f"{self.for_s.source(scope)}{' * min(1.0, facts.scale)' if self.stretch else ''}"
        return f"((facts.streaks_s.get({self.name!r}, -1.0) >= {least_s}) is {side})"


# --- the compiled functions ---------------------------------------------------------------------


class Scope:
    """The names used in one compiled function: its variables and the objects that it refers to.

    Records are compiled to one piece of source text instead of nested functions: calling a function
    takes longer than most of them compute.
    """

    def __init__(self) -> None:
        self._objects: dict[str, object] = {}
        self._signals: dict[str, str] = {}
        self._variables = 0

    def variable(self) -> str:
        """A new variable."""
        self._variables += 1
        return f"v{self._variables}"

    def signal(self, key: str) -> str:
        """The variable that holds a signal's value."""
        return self._signals.setdefault(key, f"s{len(self._signals)}")

    def checked(self, of: Quantity) -> list[str]:
        """One or two Python expressions for a quantity.

        The first is the quantity's value. The second checks that the value is known; a plain number
        has no check. The check assigns the variable that the first expression names, so evaluate
        the check first.
        """
        value = of.source(self)
        if isinstance(of, Number):
            return [value]
        if value.isidentifier():
            return [value, f"{value} is not None"]
        name = self.variable()
        return [name, f"({name} := {value}) is not None"]

    def name_of(self, value: object) -> str:
        """A name for an object that the compiled function refers to."""
        name = f"object{len(self._objects)}"
        self._objects[name] = value
        return name

    def function(self, source: str) -> Callable[[Moment], object]:
        """A function of `facts` that evaluates this Python expression.

        The expression is generated from records only, never from user input.
        """
        reads = [f"{name} = value_of({key!r})" for key, name in self._signals.items()]
        body = "; ".join(["value_of = facts.values.get", *reads, f"return {source}"])
        exec(f"def compiled(facts): {body}", self._objects)
        return cast("Callable[[Moment], object]", self._objects["compiled"])


# A function for several conditions or quantities, because a call of its own for each would take
# longer than most of them.


def those_that_hold(
    conditions: Mapping[str, Condition],
) -> Callable[[Moment], tuple[str, ...]]:
    """A function that takes facts (a `Moment`) and returns the names of the conditions that are
    certainly true, in order."""
    scope = Scope()
    names, chosen = scope.name_of(tuple(conditions)), scope.name_of(compress)
    holds = "".join(f"{condition.source(scope)}, " for condition in conditions.values())
    return cast(
        "Callable[[Moment], tuple[str, ...]]",
        scope.function(f"(*{chosen}({names}, ({holds})),)"),
    )


def each_value(quantities: Mapping[str, Quantity]) -> Callable[[Moment], dict[str, float | None]]:
    """A function that takes facts (a `Moment`) and returns the value of each quantity, by name.

    A value is None if it is unknown.
    """
    scope = Scope()
    items = [f"{name!r}: {of.source(scope)}" for name, of in quantities.items()]
    return cast(
        "Callable[[Moment], dict[str, float | None]]", scope.function(f"{{{', '.join(items)}}}")
    )


def first_of(cases: Iterable[tuple[T, Condition]], otherwise: T) -> Callable[[Moment], T]:
    """A function that takes facts and returns the value of the first case whose condition is true;
    `otherwise` if none is."""
    scope = Scope()
    sources = [f"{scope.name_of(value)} if {when.source(scope)}" for value, when in cases]
    source = " else ".join([*sources, scope.name_of(otherwise)])
    return cast("Callable[[Moment], T]", scope.function(source))


# --- the parts of a condition -------------------------------------------------------------------


def nodes(root: object) -> Iterator[object]:
    """Yields a record, quantity or condition and all its parts, depth first."""
    ahead = [root]
    while ahead:
        node = ahead.pop()
        yield node
        if isinstance(node, tuple):
            ahead += reversed(cast("tuple[object, ...]", node))
        elif isinstance(node, Struct):
            ahead += [getattr(node, name) for name in reversed(node.__struct_fields__)]
