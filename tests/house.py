"""Budgets of the code's size, kept in pyproject.toml: `make check` prints them and fails over one.

Counted are code lines (without docstrings, comments and blank lines) and modules of each room, all
classes, and reach: the lines of all modules that a module imports, directly or not. A budget is
raised only with a reason in the commit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ROOMS = ("agent", "collector", "dashboards", "diagnose", "reports", "rules")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
SHORT_LINES, STEM = 3, 4
PLAIN = re.compile(r"(?!.*\bNone\b)[A-Za-z_' ,.-]+")
"""A docstring of one line without figures, code, reasons or what an absent value means."""

FILLERS = {"the", "and", "for", "not", "all", "this", "that", "with", "from", "each", "its", "are"}

CAUSES, RANKING = "kneewatch.diagnose.causes", "kneewatch.diagnose.ranking"
VERDICT = "kneewatch.diagnose.engine.target_monitor"
"""What makes a verdict of a page."""

SIZING = ("kneewatch.agent.size_command", "kneewatch.diagnose.sizing")


@dataclass(frozen=True)
class Module:
    """A module's text by its dotted name."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """All lines."""
        return self.text.count("\n")

    @property
    def code_lines(self) -> int:
        """Lines that are neither docstring nor comment nor blank."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        rows = {
            row
            for token in tokens
            if token.type not in LAYOUT
            for row in range(token.start[0], token.end[0] + 1)
        }
        return len(rows - self._docstring_rows)

    @property
    def classes(self) -> int:
        """Classes, nested ones included."""
        return sum(isinstance(node, ast.ClassDef) for node in ast.walk(self.tree))

    @property
    def repeating_docstrings(self) -> Iterator[str]:
        """Docstrings of functions of up to three lines that only have words of the code itself."""
        for owner in ast.walk(self.tree):
            for node in owner.body if isinstance(owner, ast.Module | ast.ClassDef) else ():
                if not isinstance(node, ast.FunctionDef) or not node.body[1:]:
                    continue
                text, body = ast.get_docstring(node) or "", node.body[1:]
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
                if lines > SHORT_LINES or not PLAIN.fullmatch(text):
                    continue
                code = f"{getattr(owner, 'name', '')} {node.name} {ast.unparse(node)}"
                code = code.replace(text, "").lower()
                words = set(re.findall(r"[a-z]{3,}", text.lower())) - FILLERS
                if all(word[:STEM] in code for word in words):
                    yield f"{self.name}.{node.name}: {text}"

    @property
    def imports(self) -> set[str]:
        """What it imports from, and what could be a module among the names it imports."""
        return {
            name
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        }

    @property
    def _docstring_rows(self) -> set[int]:
        return {
            row
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }


def modules(root: Path) -> list[Module]:
    """All modules of the rooms below a folder."""
    return [
        Module(dotted_name(path.relative_to(root)), path.read_text())
        for room in ROOMS
        for path in sorted((root / room).rglob("*.py"))
    ]


def dotted_name(path: Path) -> str:
    """How a file is imported."""
    parts = ("kneewatch", *path.with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def reaches(named: Mapping[str, Module]) -> dict[str, set[str]]:
    """The modules that each module imports, directly or not."""
    direct = {name: module.imports & named.keys() for name, module in named.items()}
    direct.get(RANKING, set()).update(below(CAUSES, named))  # it imports what the folder holds
    reached: dict[str, set[str]] = {}
    for name in named:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            new = direct[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[name] = seen
    return reached


def below(package: str, names: Iterable[str]) -> list[str]:
    """A package and its modules among names."""
    return [name for name in names if name == package or name.startswith(f"{package}.")]


def figures(every: Iterable[Module]) -> dict[str, int]:
    """What the budgets limit, by the budget's name."""
    named = {module.name: module for module in every}
    reach = reaches(named)

    def reached_lines(name: str) -> int:
        return sum(named[other].lines for other in reach[name])

    sizing = {other for part in SIZING for name in below(part, named) for other in reach[name]}
    rooms = {
        f"code lines of {room}": sum(
            named[name].code_lines for name in below(f"kneewatch.{room}", named)
        )
        for room in ROOMS
    }
    return {
        **rooms,
        "code lines": sum(rooms.values()),
        "modules": len(named),
        "classes": sum(module.classes for module in named.values()),
        "reach of a cause": max((reached_lines(name) for name in below(CAUSES, named)), default=0),
        "reach from page to verdict": reached_lines(VERDICT) if VERDICT in named else 0,
        "modules of causes that sizing imports": len(below(CAUSES, sizing)),
    }


def budgets(pyproject: Mapping[str, Any]) -> dict[str, int]:
    """The limits by name."""
    return dict(pyproject["tool"]["house"])


def broken(figure: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """A line for each figure above its budget, and for each that has none."""
    return [
        f"{name}: {value:,}, over the budget of {limits[name]:,}"
        if name in limits
        else f"{name}: no budget in pyproject.toml"
        for name, value in figure.items()
        if name not in limits or value > limits[name]
    ]


def main() -> None:
    """Print each figure with its budget; exit with 1 if one is above it."""
    limits = budgets(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    figure = figures(modules(ROOT))
    for name, value in figure.items():
        print(f"{value:>7,} of {limits.get(name, 0):>7,}  {name}")
    over = broken(figure, limits)
    if over:
        sys.exit("\n".join(over))


if __name__ == "__main__":
    main()
