"""`make mutations`: doubles and halves each weight, threshold and duration of the records in turn.

Each must change a stored verdict. Prints what survives, and how many were tried.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import asdict, replace

from kneewatch.diagnose.causes.record import CauseRecord, Form, Term
from kneewatch.diagnose.ranking import EXAMINED
from kneewatch.rules.conditions import Number
from tests.contract import golden

GUARDS_BELOW = 1e-6
"""Smaller numbers keep a division from zero; they judge nothing."""

WORDS_ONLY = {"say", "instead", "words", "summary", "lever", "guide"}
"""Fields of a form and a term that judge nothing."""


class Mutation(Struct, frozen=True):
    """Another value for one number, wherever records have that very number. Records that share a
    condition share its numbers: one verdict of one of them must become another."""

    records: list[CauseRecord]
    number: Number
    factor: float
    place: str

    def __str__(self) -> str:
        value = self.number.value
        ids = ", ".join(record.id for record in self.records)
        return f"{ids}: {self.place} {value:g} -> {value * self.factor:g}"

    def mutants(self) -> Iterator[CauseRecord]:
        """The records with the other number."""
        for record in self.records:
            yield put(record, self.number, Number(self.number.value * self.factor))


def numbers(root: object, place: str = "") -> Iterator[tuple[str, Number]]:
    """Every number that judges, with the place where it stands first; one that is 0 is the same
    doubled."""
    if isinstance(root, Number):
        if abs(root.value) > GUARDS_BELOW:
            yield place, root
    elif isinstance(root, tuple):
        for at, part in enumerate(cast("tuple[object, ...]", root)):
            yield from numbers(part, f"{place}.{at}")
    elif isinstance(root, Struct):
        skipped = WORDS_ONLY if isinstance(root, Form | Term) else set[str]()
        if isinstance(root, Term) and root.weight.value == 0:
            return
        for name, part in asdict(root).items():
            if name not in skipped:
                yield from numbers(part, f"{place}.{name}")


def put(root: Any, old: Number, new: Number) -> Any:  # noqa: ANN401 - any part of a record
    """The same with another number wherever that very number stands."""
    if root is old:
        return new
    if isinstance(root, tuple):
        return tuple(put(part, old, new) for part in cast("tuple[object, ...]", root))
    if not isinstance(root, Struct):
        return root
    parts = asdict(root)
    filled = {name: put(part, old, new) for name, part in parts.items()}
    same = all(filled[name] is parts[name] for name in parts if not isinstance(parts[name], tuple))
    tuples = (name for name in parts if isinstance(parts[name], tuple))
    return root if same and all(filled[n] == parts[n] for n in tuples) else replace(root, **filled)


def mutations() -> Iterator[Mutation]:
    """All of all records that are concluded from forms."""
    found: dict[int, Mutation] = {}
    for record in EXAMINED:
        if not record.forms:
            continue
        for place, number in numbers(record):
            first = found.setdefault(id(number), Mutation([], number, 1.0, place))
            if record not in first.records:
                first.records.append(record)
    for each in found.values():
        for factor in (0.5, 2.0):
            yield replace(each, factor=factor)


def caught(mutant: CauseRecord) -> bool:
    """Whether a stored verdict of the record is another one with the mutant."""
    for name, store in golden.read().items():
        if name.partition(":")[0] == mutant.id and golden.differs(mutant, name, store):
            return True
    return False


def survivors() -> tuple[list[Mutation], int]:
    """The mutations that no stored verdict catches, and how many there are in all."""
    tried = list(mutations())
    return [each for each in tried if not any(map(caught, each.mutants()))], len(tried)


def main() -> None:
    """Print the count, and each survivor."""
    left, tried = survivors()
    for each in left:
        print(f"survives: {each}")
    print(f"{tried} mutations of the records (each number doubled and halved): {len(left)} survive")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
