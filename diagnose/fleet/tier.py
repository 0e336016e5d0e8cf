"""A tier: its engines, the distribution of each signal over them, and its causes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.fleet.engine import Engine
from kneewatch.diagnose.fleet.inventory import Group
from kneewatch.diagnose.verdict import Cause


class Spread(Struct, frozen=True):
    """Statistics of one signal over several engines.

    `worst` is the name of the engine with the greatest value, or with the least if less is worse.
    `unknown` is the number of engines without a value.
    """

    signal: str
    count: int
    unknown: int
    least: float
    median: float
    mean: float
    most: float
    worst: str

    @property
    def worst_value(self) -> float:
        """The value of the worst engine."""
        return self.least if self.signal in LESS_IS_WORSE else self.most


LESS_IS_WORSE = frozenset({"prefix_hit_ratio", "generation_tokens_per_s"})


def spread(signal: str, engines: Sequence[Engine]) -> Spread | None:
    """A signal's distribution over the engines; None if no engine has a value."""
    rows = [(value, e.member.name) for e in engines if (value := e.get(signal)) is not None]
    if not rows:
        return None
    values = [value for value, _ in rows]
    _, worst = min(rows) if signal in LESS_IS_WORSE else max(rows)
    return Spread(
        signal,
        len(rows),
        len(engines) - len(rows),
        min(values),
        median(values),
        fmean(values),
        max(values),
        worst,
    )


def middle(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None if there are none."""
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


class FleetCause(Struct, frozen=True):
    """A cause, with its pool or tier and the replicas that show it."""

    cause: Cause
    pool: str
    tier: str
    replicas: tuple[str, ...]


class Tier(Struct, frozen=True):
    """Replicas of one pool on one GPU type.

    `tier` is empty if no label names it; `role` is empty if the replicas both prefill and decode.
    """

    pool: str
    tier: str
    role: str
    engines: tuple[Engine, ...]
    spreads: tuple[Spread, ...]
    medians: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """Medians that were computed so far, by signal: each engine is compared with them."""

    def median(self, signal: str) -> float | None:
        """A signal's median over the engines; None if none has a value."""
        if signal not in self.medians:
            self.medians[signal] = middle(engine.get(signal) for engine in self.engines)
        return self.medians[signal]

    def gpu_median(self, key: str) -> float | None:
        """The median of a figure of the engines' GPUs; None if none has a value."""
        name = f"gpus:{key}"
        if name not in self.medians:
            self.medians[name] = middle(engine.gpus.get(key) for engine in self.engines)
        return self.medians[name]

    @property
    def name(self) -> str:
        """The tier's name in reports: `pool on tier (role)`."""
        where = f"{self.pool or '?'} on {self.tier}" if self.tier else self.pool or "?"
        return f"{where} ({self.role})" if self.role else where

    @property
    def group(self) -> Group:
        """The tier's key in `Past`."""
        return self.pool, self.tier, self.role

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len({engine.member.replica for engine in self.engines})

    @property
    def engines_each(self) -> int | None:
        """Data-parallel engines per replica; None if replicas differ."""
        counts = set(Counter(engine.member.replica for engine in self.engines).values())
        return counts.pop() if len(counts) == 1 else None


def engine_causes(tier: Tier) -> list[FleetCause]:
    """The causes that single engines of the tier have, one per cause id.

    Each has the worst engine's text and the number of engines that show it.
    """
    by_id: dict[str, list[tuple[Cause, str]]] = {}
    for engine in tier.engines:
        for cause in engine.causes:
            by_id.setdefault(cause.id, []).append((cause, engine.member.name))
    return [_counted(tier, rows) for rows in by_id.values()]


def _counted(tier: Tier, rows: Sequence[tuple[Cause, str]]) -> FleetCause:
    rows = sorted(rows, key=lambda row: (-row[0].severity, -row[0].confidence, row[1]))
    worst, name = rows[0]
    summary = worst.summary
    if len(tier.engines) > 1:
        summary = f"{len(rows)} of {len(tier.engines)} engines, worst {name}: {summary}"
    explained = dict.fromkeys(other for cause, _ in rows for other in cause.explains)
    cause = replace(worst, summary=summary, explains=tuple(explained))
    return FleetCause(cause, tier.pool, tier.tier, tuple(name for _, name in rows))


def closed(case: Case, pool: str, tier: str, engines: Sequence[Engine]) -> FleetCause | None:
    """The cause of a case about some engines of a pool; None if its confidence is too low."""
    cause, names = case.close(), tuple(engine.member.name for engine in engines)
    return None if cause is None else FleetCause(cause, pool, tier, names)
