"""What is said about a fleet at one moment. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kneewatch.diagnose.case import Cause
from kneewatch.diagnose.fleet.judging import Engine
from kneewatch.diagnose.fleet.spread import Spread


@dataclass(frozen=True, slots=True)
class FleetCause:
    """A cause, the pool or tier that it is about, and the replicas that show it."""

    cause: Cause
    pool: str
    tier: str
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tier:
    """Replicas of one pool on one kind of GPU. `tier` is empty where nothing names it, `role` where
    they both prefill and decode."""

    pool: str
    tier: str
    role: str
    engines: tuple[Engine, ...]
    spreads: tuple[Spread, ...]

    @property
    def name(self) -> str:
        """How reports call it."""
        where = f"{self.pool or '?'} on {self.tier}" if self.tier else self.pool or "?"
        return f"{where} ({self.role})" if self.role else where

    @property
    def replicas(self) -> int:
        """How many replicas it has."""
        return len({engine.member.replica for engine in self.engines})

    @property
    def engines_each(self) -> int | None:
        """Data-parallel engines of each replica; None where replicas differ."""
        counts = set(Counter(engine.member.replica for engine in self.engines).values())
        return counts.pop() if len(counts) == 1 else None


def names_of(engines: Sequence[Engine]) -> tuple[str, ...]:
    """Their names."""
    return tuple(engine.member.name for engine in engines)
