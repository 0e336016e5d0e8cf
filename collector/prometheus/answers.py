"""What a Prometheus answers to a query. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""What a server sent: anything."""

Document = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value at the moment asked for."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Track:
    """One series' values over a range, oldest first: (unix seconds, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Answer:
    """An instant query's samples. With `warnings` the server itself says that some are missing."""

    samples: Sequence[Sample]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a range query's answer, from `from_s` to `to_s`, both in it."""

    from_s: float
    to_s: float
    tracks: Sequence[Track]
    warnings: tuple[str, ...] = ()


def samples_of(result: Json) -> list[Sample]:
    """The samples of a vector.

    Raises:
        ValueError: it is none.
    """
    try:
        return [Sample(row["metric"], float(row["value"][1])) for row in _rows(result)]
    except (KeyError, TypeError, IndexError) as exc:
        raise ValueError("the answer is no vector of samples") from exc


def tracks_of(result: Json) -> list[Track]:
    """The series of a matrix.

    Raises:
        ValueError: it is none.
    """
    try:
        return [
            Track(row["metric"], [(float(t_s), float(value)) for t_s, value in row["values"]])
            for row in _rows(result)
        ]
    except (KeyError, TypeError) as exc:
        raise ValueError("the answer is no matrix of series") from exc


def warnings_of(document: Document) -> tuple[str, ...]:
    """The warnings of an answer: a shard that is down, a store that did not answer."""
    said: Json = document.get("warnings")
    told = [str(one) for one in _rows(said or [])]
    if document.get("isPartial") is True:  # VictoriaMetrics' own word for it
        told.append("the server marks its answer as partial")
    return tuple(told)


def _rows(result: Json) -> list[Json]:
    if type(result) is not list:
        raise TypeError
    return result  # pyright: ignore[reportUnknownVariableType]
