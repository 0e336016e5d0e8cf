"""Budgets of the code's size: what is counted, and that a figure above its budget fails."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

from tests.house import CAUSES, ROOMS, VERDICT, Module, broken, budgets, figures, modules

ROOT = Path(__file__).parent.parent
CODE = '''"""A module's docstring
of two lines."""

# A comment.
from kneewatch.diagnose.causes import ranking


class Outer:
    """A docstring."""

    class Inner:
        text = """a string
        that is code"""
'''


def house() -> list[Module]:
    """Sizing reaches a cause through a module between them; the engine reaches both."""
    return [
        Module("kneewatch.diagnose.sizing.load", "from kneewatch.diagnose import style\n"),
        Module("kneewatch.diagnose.style", CODE),
        Module(f"{CAUSES}.ranking", "from kneewatch.rules.rule import Rule\n\nX = 1\n"),
        Module("kneewatch.rules.rule", "from os import path\n\n\nclass Rule: ...\n"),
        Module(VERDICT, "def judge():\n    from kneewatch.diagnose.causes.ranking import X\n"),
    ]


def test_figures() -> None:
    figure = figures(house())
    assert figure["code lines of diagnose"] == 1 + 5 + 2 + 2
    assert figure["code lines of rules"] == 2
    assert figure["code lines"] == 12
    assert figure["modules"] == 5
    assert figure["classes"] == 3
    assert figure["reach of a cause"] == 4
    assert figure["reach from page to verdict"] == 3 + 4
    assert figure["modules of causes that sizing imports"] == 2 - 1


def test_figures_of_modules_that_import_each_other() -> None:
    names = ("kneewatch.rules.first", f"{CAUSES}.second")
    first, second = (
        Module(name, f"from {other} import X\n")
        for name, other in zip(names, reversed(names), strict=True)
    )
    assert figures([first, second])["reach of a cause"] == 2


def test_a_figure_above_its_budget_fails() -> None:
    figure = figures(house())
    assert not broken(figure, figure)
    for name, value in figure.items():
        (line,) = broken(figure, {**figure, name: value - 1})
        assert line.startswith(f"{name}: {value:,}, over")
        (line,) = broken(figure, {other: n for other, n in figure.items() if other != name})
        assert line == f"{name}: no budget in pyproject.toml"


def test_every_budget_limits_a_figure() -> None:
    limits = budgets(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    assert list(limits) == list(figures([]))


def test_no_docstring_of_a_short_function_repeats_its_code() -> None:
    assert not [line for module in modules(ROOT) for line in module.repeating_docstrings]


def test_every_module_says_whether_it_touches_the_world() -> None:
    """Files, sockets and the clock are the I/O edge's; all else is pure, and says so."""
    silent = [
        path.relative_to(ROOT)
        for room in ROOMS
        for path in (ROOT / room).rglob("[!_]*.py")
        if not re.search(
            r"\bPure\b|I/O\s+edge", ast.get_docstring(ast.parse(path.read_text())) or ""
        )
    ]
    assert not silent


def test_a_docstring_that_repeats_its_code_is_found() -> None:
    code = """
class Tier:
    def engines(self) -> list[str]:
        '''The engines of the tier.'''
        return self._engines

    def age_s(self, now_s: float) -> float:
        '''Seconds since the newest scrape.'''
        return now_s - self._t_s
"""
    found = [*Module("kneewatch.diagnose.tier", code).repeating_docstrings]
    assert found == ["kneewatch.diagnose.tier.engines: The engines of the tier."]


def test_a_duration_is_stated_in_one_module() -> None:
    """The same name with the same number in two modules is one fact that is spelled twice."""
    stated: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules(ROOT):
        for node in module.tree.body:
            match node:
                case ast.Assign([ast.Name(name)], ast.Constant(float() | int() as value)):
                    if name.endswith("_S"):
                        stated[name.lstrip("_"), repr(float(value))].append(module.name)
                case _:
                    pass
    assert {fact: names for fact, names in stated.items() if len(names) > 1} == {}
