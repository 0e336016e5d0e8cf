"""Evaluates the arithmetic that `size` prints."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable

from kneewatch.diagnose.sizing.arithmetic import Step

UNITS = {
    "GiB": 2.0**30, "MiB": 2.0**20,
    "GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1.0, "TB/s": 1e12, "GB/s": 1e9, "s": 1.0,
    "ms": 1e-3, "%": 0.01, "hours": 3600.0, "MB/s": 1e6, "KB/s": 1e3, "B/s": 1.0,
}  # fmt: skip
NUMBER = re.compile(
    r"(?<![\w.])(\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)"
    r"(?: ?(GiB|MiB|[GMK]?B/s|TB/s|[GMK]?B|ms|s|%|hours)(?!\w))?"
)
ASIDE = re.compile(
    r" \((?:[\d,]+(?: \+ [\d,]+)? tokens|fp8|auto[^)]*\))\)| at [\d.,]+ in flight"
    r"| of rank \d+ in 16 bit|\b(requests/s²?|tokens|GPUs?)| /s²?(?=\)|$)"
)
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda over, under: over / under,
    ast.Pow: math.pow,
}
FUNCTIONS: dict[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "exp": math.exp,
    "ln": math.log,
}


def evaluated(text: str, shifts: dict[int, float]) -> float:
    """The value of printed arithmetic whose numbers are shifted, by their place in the text.

    Raises:
        ValueError, SyntaxError: the text is not arithmetic alone.
    """
    places = iter(range(99))

    def of(match: re.Match[str]) -> str:
        number = float(match[1].replace(",", "")) + shifts.get(next(places), 0.0)
        return repr(number * UNITS[match[2] or "B"])

    return _value(
        ast.parse(NUMBER.sub(of, text).replace(" x ", " * ").replace("^", "**"), mode="eval").body
    )


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(float(number)):
            return number
        case ast.UnaryOp(ast.USub(), of):
            return -_value(of)
        case ast.BinOp(left, of, right):
            return OPERATORS[type(of)](_value(left), _value(right))
        case ast.Call(ast.Name(name), arguments) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(_value, arguments))
        case _:
            raise ValueError(ast.unparse(node))


def half_digit(number: str) -> float:
    """The largest error of a printed number: half a unit of its fourth digit or last decimal."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    value = float(mantissa)
    decimals = len(mantissa.partition(".")[2])
    digits = 10.0 ** (math.floor(math.log10(value)) - 3) if value else 0.0
    return 0.5 * max(digits, 10.0**-decimals if decimals else 0.0) * 10.0 ** int(exponent or 0)


def difference(step: Step) -> tuple[float, float]:
    """How far a step's result is from its arithmetic, and how far rounding allows it to be."""
    text = ASIDE.sub("", step.values.partition(" = ")[0].partition(", ridge")[0]).strip()
    value = evaluated(text, {})
    printed = NUMBER.match(step.result.removeprefix("-"))
    assert printed, step.result
    result = (
        (-1.0 if step.result.startswith("-") else 1.0)
        * float(printed[1].replace(",", ""))
        * UNITS[printed[2] or "B"]
    )
    allowed = 0.005 if printed[2] == "%" else half_digit(printed[1]) * UNITS[printed[2] or "B"]
    for place, number in enumerate(NUMBER.finditer(text)):
        error = half_digit(number[1])
        allowed += max(abs(evaluated(text, {place: by}) - value) for by in (error, -error))
    return abs(value - result), 1.001 * allowed


def differing(lines: Iterable[Step]) -> tuple[list[str], int]:
    """The steps whose result is not that of their arithmetic, and how many could be evaluated."""
    wrong: list[str] = []
    read = 0
    for step in lines:
        try:
            off, allowed = difference(step)
        except (ValueError, SyntaxError):
            continue  # a choice or a list: no arithmetic
        read += 1
        if off > allowed:
            wrong.append(f"{step.line()} (off by {off:g}, rounding allows {allowed:g})")
    return wrong, read
