"""What is said about a fleet at one moment. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kneewatch.diagnose.case import Cause
from kneewatch.diagnose.fleet.judging import Engine
from kneewatch.diagnose.fleet.observed import Observed
from kneewatch.diagnose.fleet.spread import Spread
from kneewatch.rules.model import Severity

if TYPE_CHECKING:
    # They are made of what is here.
    from kneewatch.diagnose.fleet.advice import FleetAdvice
    from kneewatch.diagnose.fleet.sizing import TierSize
    from kneewatch.diagnose.fleet.split import Split


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


@dataclass(frozen=True, slots=True)
class FleetDiagnosis:
    """The verdict on a fleet: causes best first, engines worst first.

    `lost` says since when and why there is no newer answer, empty where there is none to miss.
    `notes` say what could not be judged, and what else a reader must know. `sizes` are in the order
    of `tiers`; `splits` are of those that prefill and decode apart.
    """

    observed: Observed
    tiers: tuple[Tier, ...]
    engines: tuple[Engine, ...]
    causes: tuple[FleetCause, ...]
    notes: tuple[str, ...]
    sizes: tuple[TierSize, ...]
    advice: tuple[FleetAdvice, ...]
    splits: tuple[Split, ...] = ()
    lost: str = ""

    @property
    def severity(self) -> Severity:
        """The worst of causes and engines."""
        found = [*(one.cause.severity for one in self.causes), *(e.severity for e in self.engines)]
        return max(found, default=Severity.OK)

    @property
    def partial(self) -> bool:
        """Whether some of the answer is missing: nothing that is not seen is healthy."""
        return bool(self.observed.warnings or self.observed.failed)

    @property
    def health(self) -> str:
        """One word; an engine that cannot be read and an answer that is partial are not ok. Of what
        was seen before and no more nothing is said."""
        if self.lost:
            return "unknown"
        blind = self.partial or any(engine.health == "unknown" for engine in self.engines)
        if (blind or not self.engines) and self.severity < Severity.WARNING:
            return "unknown"
        return self.severity.word


def names_of(engines: Sequence[Engine]) -> tuple[str, ...]:
    """Their names."""
    return tuple(engine.member.name for engine in engines)
