"""Conditions over signals, written once and compiled to Python and to PromQL. Pure.

A quantity is a number or unknown. A condition is true, false or unknown (Kleene's logic). A
comparison with an unknown quantity is unknown. `a & b` is false if either is false; `a | b` is true
if either is true. `assume` replaces unknown by true or false.

A PromQL expression can only return series or no series. So both compilers compile one side at a
time: where the condition is certainly true, or where it is certainly false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Protocol, TypeVar, cast

from msgspec import Struct

from kneewatch.rules.facts import EVERYWHERE, Holds, Moment, Read, Spelling, number

C = TypeVar("C")
T = TypeVar("T")


class Compiler(Protocol[C]):
    """Builds the compiled form of a condition from that of its parts."""

    def compare(self, left: Quantity, sign: str, right: Quantity) -> C:
        """A comparison of two known quantities."""
        ...

    def every(self, parts: Sequence[C]) -> C:
        """A conjunction of compiled parts."""
        ...

    def some(self, parts: Sequence[C]) -> C:
        """A disjunction of compiled parts."""
        ...

    def unless(self, part: C) -> C:
        """The negation of a compiled part."""
        ...

    def leaf(self, condition: Leaf, *, side: bool) -> C:
        """A condition with its own implementation; its negation if `side=False`."""
        ...


# --- quantities ---------------------------------------------------------------------------------


class Quantity:
    """A number, or unknown.

    `scalar`: in PromQL it is a plain number, not a series per engine. `positive`: whenever it is
    known, it is above zero.
    """

    __slots__ = ()
    scalar = False
    positive = False

    def source(self, scope: Scope) -> str:
        """A Python expression over `facts`; it evaluates to the value, or to None if unknown."""
        raise NotImplementedError

    def read(self) -> Read:
        """A function from `facts` to the value; it returns None if the value is unknown."""
        scope = Scope()
        return cast(Read, scope.function(self.source(scope)))

    def promql(self, to: Spelling) -> str | None:
        """The PromQL expression; None if PromQL cannot compute it."""
        raise NotImplementedError

    def __ge__(self, other: Quantity | float) -> Condition:
        return Compare(self, ">=", quantity(other))

    def __gt__(self, other: Quantity | float) -> Condition:
        return Compare(self, ">", quantity(other))

    def __le__(self, other: Quantity | float) -> Condition:
        return Compare(self, "<=", quantity(other))

    def __lt__(self, other: Quantity | float) -> Condition:
        return Compare(self, "<", quantity(other))

    def __add__(self, other: Quantity | float) -> Quantity:
        return Arithmetic(self, "+", quantity(other))

    def __sub__(self, other: Quantity | float) -> Quantity:
        return Arithmetic(self, "-", quantity(other))

    def __mul__(self, other: Quantity | float) -> Quantity:
        return Arithmetic(self, "*", quantity(other))

    def __rmul__(self, other: float) -> Quantity:
        return Arithmetic(quantity(other), "*", self)

    def __rsub__(self, other: float) -> Quantity:
        return Arithmetic(quantity(other), "-", self)

    def __radd__(self, other: float) -> Quantity:
        return Arithmetic(quantity(other), "+", self)

    def __truediv__(self, other: Quantity | float) -> Quantity:
        return Quotient(self, quantity(other))

    def __rtruediv__(self, other: float) -> Quantity:
        return Quotient(quantity(other), self)

    def otherwise(self, value: float) -> Quantity:
        """This quantity, but `value` wherever it is unknown."""
        return WithDefault(self, Number(value))

    def at_least(self, value: Quantity | float) -> Quantity:
        """The larger of this quantity and a number."""
        return AtLeast(self, quantity(value))

    @property
    def known(self) -> Condition:
        """The condition that this quantity has a value. Never unknown."""
        return Known(self)


def quantity(value: Quantity | float) -> Quantity:
    """Converts a plain number to a quantity; returns quantities unchanged."""
    return value if isinstance(value, Quantity) else Number(float(value))


class Number(Quantity, Struct, frozen=True):
    """A constant: a threshold, a weight or a factor."""

    scalar = True
    positive = True

    value: float

    def source(self, scope: Scope) -> str:
        return repr(self.value) if isfinite(self.value) else scope.name_of(self.value)

    def promql(self, to: Spelling) -> str | None:
        return number(self.value)


def _of_both(scope: Scope, left: Quantity, right: Quantity, of: str) -> str:
    """A Python expression of two quantities' values; None if either is unknown.

    `of` is the expression, with `{0}` and `{1}` for the two values.
    """
    (a, *left_checks), (b, *right_checks) = scope.checked(left), scope.checked(right)
    value = of.format(a, b)
    checks = [*left_checks, *right_checks]
    return f"({value} if {' and '.join(checks)} else None)" if checks else f"({value})"


def _both_in_promql(to: Spelling, left: Quantity, right: Quantity, spelled: str) -> str | None:
    a, b = left.promql(to), right.promql(to)
    return None if a is None or b is None else spelled.format(a, b)


class Arithmetic(Quantity, Struct, frozen=True):
    """A sum, difference or product; unknown if either operand is."""

    left: Quantity
    sign: str
    right: Quantity

    def source(self, scope: Scope) -> str:
        return _of_both(scope, self.left, self.right, f"{{0}} {self.sign} {{1}}")

    def promql(self, to: Spelling) -> str | None:
        return _both_in_promql(to, self.left, self.right, f"({{}} {self.sign} {{}})")


class Quotient(Quantity, Struct, frozen=True):
    """One quantity divided by another.

    Unknown if either is unknown, or if the divisor is not above zero.
    """

    left: Quantity
    right: Quantity

    def source(self, scope: Scope) -> str:
        return _of_both(scope, self.left, self.right, "({0} / {1} if {1} > 0 else None)")

    def promql(self, to: Spelling) -> str | None:
        divided = "({} / {})" if self.right.positive else "({} / ({} > 0))"
        return _both_in_promql(to, self.left, self.right, divided)


class AtLeast(Quantity, Struct, frozen=True):
    """The larger of a quantity and a number; unknown if the quantity is."""

    positive = True

    of: Quantity
    least: Quantity

    def source(self, scope: Scope) -> str:
        return _of_both(scope, self.of, self.least, "max({0}, {1})")

    def promql(self, to: Spelling) -> str | None:
        return _both_in_promql(to, self.of, self.least, "clamp_min({}, {})")


class WithDefault(Quantity, Struct, frozen=True):
    """A quantity, but a default number wherever it is unknown."""

    of: Quantity
    default: Number

    def source(self, scope: Scope) -> str:
        value, *checks = scope.checked(self.of)
        default = self.default.source(scope)
        return f"({value} if {checks[0]} else {default})" if checks else value

    def promql(self, to: Spelling) -> str | None:
        expr = self.of.promql(to)
        if expr == to.everywhere:
            return expr
        default = f"({to.everywhere} * 0)"
        if self.default.value:
            default = f"({default} + {number(self.default.value)})"
        return default if expr is None else f"({expr} or {default})"


# --- conditions ---------------------------------------------------------------------------------


class Condition:
    """True, false or unknown."""

    __slots__ = ()

    def compile(self, to: Compiler[C], *, side: bool = True) -> C:
        """Compiles the check that this condition is certainly true.

        With `side=False`, the check that it is certainly false.
        """
        raise NotImplementedError

    def python(self) -> Holds:
        """A function of `facts` that returns whether the condition is certainly true."""
        scope = Scope()
        return cast(Holds, scope.function(self.compile(ToPython(scope))))

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

    def compile(self, to: Compiler[C], *, side: bool = True) -> C:
        return to.compare(self.left, self.sign if side else OPPOSITE[self.sign], self.right)


class Every(Condition, Struct, frozen=True):
    """A conjunction: true if all parts are true, false if any part is false."""

    parts: tuple[Condition, ...]

    def compile(self, to: Compiler[C], *, side: bool = True) -> C:
        parts = [part.compile(to, side=side) for part in self.parts]
        return to.every(parts) if side else to.some(parts)


class Some(Condition, Struct, frozen=True):
    """A disjunction: true if any part is true, false if all parts are false."""

    parts: tuple[Condition, ...]

    def compile(self, to: Compiler[C], *, side: bool = True) -> C:
        parts = [part.compile(to, side=side) for part in self.parts]
        return to.some(parts) if side else to.every(parts)


class Not(Condition, Struct, frozen=True):
    """The negation; unknown stays unknown."""

    part: Condition

    def compile(self, to: Compiler[C], *, side: bool = True) -> C:
        return self.part.compile(to, side=not side)


class Assume(Condition, Struct, frozen=True):
    """A condition that counts as true, or as false, wherever it is unknown."""

    part: Condition
    unknown: bool

    def compile(self, to: Compiler[C], *, side: bool = True) -> C:
        if side == self.unknown:
            return to.unless(self.part.compile(to, side=not side))
        return self.part.compile(to, side=side)


class Constant(Condition, Struct, frozen=True):
    """Always true, or always false."""

    value: bool

    def compile(self, to: Compiler[C], *, side: bool = True) -> C:
        return to.every(()) if side == self.value else to.some(())


ALWAYS = Constant(True)


class Leaf(Condition):
    """A condition with its own code for Python and for PromQL."""

    __slots__ = ()

    def compile(self, to: Compiler[C], *, side: bool = True) -> C:
        return to.leaf(self, side=side)

    def source(self, scope: Scope, *, side: bool) -> str:
        """A Python expression over `facts` that is true if the condition is true.

        With `side=False`, it is true if the condition is false.
        """
        raise NotImplementedError

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        """The clause for the engines where the condition is true.

        With `side=False`, for the engines where it is false.
        """
        raise NotImplementedError


class Known(Leaf, Struct, frozen=True):
    """Whether a quantity has a value; never unknown."""

    of: Quantity

    def source(self, scope: Scope, *, side: bool) -> str:
        sign = "is not" if side else "is"
        return f"({self.of.source(scope)} {sign} None)"

    def promql(self, to: Spelling, *, side: bool) -> Clause:
        of = self.of.promql(to)
        clause = Clause() if of is None else Clause((of,))
        if of is not None and self.of.scalar:
            clause = Clause(everywhere=True)
        return clause if side else clause.negated


# --- the two compilers --------------------------------------------------------------------------


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

    def named(self, sources: Mapping[str, str]) -> Callable[[Moment], object]:
        """A function of `facts` that returns the values of several expressions, by name."""
        items = [f"{name!r}: {source}" for name, source in sources.items()]
        return self.function(f"{{{', '.join(items)}}}")


class ToPython(Struct, frozen=True):
    """Compiles conditions to Python expressions over `facts`."""

    scope: Scope

    def compare(self, left: Quantity, sign: str, right: Quantity) -> str:
        """An expression that is true if both values are known and the comparison holds."""
        (value, *checks), (bound, *bound_checks) = map(self.scope.checked, (left, right))
        return self.every([*checks, *bound_checks, f"{value} {sign} {bound}"])

    def every(self, parts: Sequence[str]) -> str:
        """An expression that is true if all parts are true."""
        return f"({' and '.join(parts)})" if parts else "True"

    def some(self, parts: Sequence[str]) -> str:
        """An expression that is true if at least one part is true."""
        return f"({' or '.join(parts)})" if parts else "False"

    def unless(self, part: str) -> str:
        """An expression that is true if the part is false."""
        return f"(not {part})"

    def leaf(self, condition: Leaf, *, side: bool) -> str:
        """The condition's own expression."""
        return condition.source(self.scope, side=side)


# A function for several conditions or quantities, because a call of its own for each would take
# longer than most of them.


def each_holds(conditions: Mapping[str, Condition]) -> Callable[[Moment], dict[str, bool]]:
    """A function that takes facts (a `Moment`) and returns which conditions are certainly true."""
    scope = Scope()
    sources = {name: when.compile(ToPython(scope)) for name, when in conditions.items()}
    return cast("Callable[[Moment], dict[str, bool]]", scope.named(sources))


def each_value(quantities: Mapping[str, Quantity]) -> Callable[[Moment], dict[str, float | None]]:
    """A function that takes facts (a `Moment`) and returns the value of each quantity, by name.

    A value is None if it is unknown.
    """
    scope = Scope()
    sources = {name: of.source(scope) for name, of in quantities.items()}
    return cast("Callable[[Moment], dict[str, float | None]]", scope.named(sources))


def first_of(cases: Iterable[tuple[T, Condition]]) -> Callable[[Moment], T]:
    """A function that takes facts and returns the value of the first case whose condition is true.

    The last case must always be true.
    """
    scope = Scope()
    sources = [
        f"{scope.name_of(value)} if {condition.compile(ToPython(scope))}"
        for value, condition in cases
    ]
    return cast("Callable[[Moment], T]", scope.function(" else ".join([*sources, "None"])))


class Clause(Struct, frozen=True):
    """PromQL for the engines where a condition holds.

    These are the engines in at least one of the `options` (with `everywhere`: all engines), except
    the engines in any of `without`.
    """

    options: tuple[str, ...] = ()
    everywhere: bool = False
    without: tuple[str, ...] = ()

    @property
    def nowhere(self) -> bool:
        """Whether the clause holds for no engine."""
        return not self.options and not self.everywhere

    @property
    def negated(self) -> Clause:
        """The clause for all other engines."""
        if self.nowhere:
            return Clause(everywhere=True)
        if self.everywhere and not self.without:
            return Clause()
        return Clause(everywhere=True, without=(self.vector,))

    @property
    def vector(self) -> str:
        """The PromQL expression; empty if the clause holds for all engines."""
        if self.everywhere and not self.without:
            return ""
        start = EVERYWHERE if self.everywhere else " or ".join(self.options)
        if len(self.options) > 1 and self.without:
            start = f"({start})"
        return start + "".join(f" unless {enclosed(part)}" for part in self.without)


def enclosed(text: str) -> str:
    """An expression in parentheses; unchanged if it already has them."""
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return text if at == len(text) - 1 and sign == ")" and text[0] == "(" else f"({text})"
    return f"({text})"


class ToPromQL:
    """Compiles conditions to PromQL."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling

    def compare(self, left: Quantity, sign: str, right: Quantity) -> Clause:
        """The engines for which the comparison holds."""
        left_expr, right_expr = left.promql(self.spelling), right.promql(self.spelling)
        return (
            Clause()
            if left_expr is None or right_expr is None
            else Clause((f"({left_expr} {sign} {right_expr})",))
        )

    def every(self, parts: Sequence[Clause]) -> Clause:
        """The engines for which all clauses hold.

        Plain clauses are joined by `and`; each negated clause follows with `unless`.
        """
        if any(part.nowhere for part in parts):
            return Clause()
        there = [part.vector if len(part.options) == 1 and not part.without else f"({part.vector})"
                 for part in parts if not part.everywhere]  # fmt: skip
        without = tuple(dict.fromkeys(text for part in parts if part.everywhere
                                      for text in part.without))  # fmt: skip
        if not there:
            return Clause(everywhere=True, without=without)
        return Clause((" and ".join(there),), without=without)

    def some(self, parts: Sequence[Clause]) -> Clause:
        """The engines for which at least one clause holds."""
        able = [part for part in parts if not part.nowhere]
        if any(part.everywhere and not part.without for part in able):
            return Clause(everywhere=True)
        options: list[str] = []
        for part in able:
            options.extend([part.vector] if part.without or part.everywhere else part.options)
        return Clause(tuple(f"({text})" if " and " in text or " unless " in text else text
                            for text in options))  # fmt: skip

    def unless(self, part: Clause) -> Clause:
        """The engines for which the clause does not hold."""
        return part.negated

    def leaf(self, condition: Leaf, *, side: bool) -> Clause:
        """The condition's own clause."""
        return condition.promql(self.spelling, side=side)


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
