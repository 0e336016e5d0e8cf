"""A tier of a fleet, and an engine in it: verdicts and causes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import isfinite
from statistics import median

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.fleet.inventory import Group, Labels, Member, Observed, Readings
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.rules.rule import IN_BOUNDS, Finding, Severity, State
from kneewatch.rules.wire import written

# --- One engine of a fleet ------------------------------------------------------------------------


class Engine(Struct, frozen=True):
    """One engine of a fleet.

    - `verdict`: the judge's newest verdict; None if no page of the engine could be rebuilt.
    - `values`: the verdict's known signals, and those of the last hour and of the process; sorted.
    - `gpus`: figures of the GPUs of its replica.
    - `config`: the labels of cache_config_info.
    - `image`: its container's image; empty if unknown.
    """

    member: Member
    verdict: Verdict | None
    values: Readings
    gpus: Readings = field(default_factory=dict[str, float])
    config: Labels = field(default_factory=dict[str, str])
    image: str = ""

    @property
    def stage(self) -> int | None:
        """The number of the cascade's stage; None if unknown."""
        return None if self.verdict is None else self.verdict.stage.number

    @property
    def causes(self) -> Sequence[Cause]:
        """The engine's own causes, ranked."""
        return () if self.verdict is None else self.verdict.causes

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings whose threshold is crossed."""
        findings = () if self.verdict is None else self.verdict.findings
        return [finding for finding in findings if finding.state not in IN_BOUNDS]

    @property
    def severity(self) -> Severity:
        """The worst severity of causes, stage and findings; ok without a verdict."""
        return Severity.OK if self.verdict is None else self.verdict.severity

    @property
    def health(self) -> State:
        """ok, info, warning, critical or unknown."""
        return "unknown" if self.verdict is None else self.verdict.health

    def get(self, signal: str) -> float | None:
        return self.values.get(signal)

    @property
    def in_flight(self) -> float | None:
        """Requests running (the window's mean if known) plus queued; None if running is unknown."""
        running = self.values.get("running_avg", self.values.get("running"))
        return None if running is None else running + self.values.get("waiting", 0.0)


def engine_of(member: Member, verdict: Verdict) -> Engine:
    """An engine of which only the verdict is known."""
    values = {key: value for key, value in verdict.values.items() if value is not None}
    return Engine(member, verdict, values)


def engines_of(observed: Observed) -> list[Engine]:
    """All engines of a fleet, with their verdicts."""
    return [_engine(member, observed) for member in observed.shape.members]


def _engine(member: Member, observed: Observed) -> Engine:
    verdict = observed.verdicts.get(member.key)
    of_judge: Mapping[str, float | None] = {} if verdict is None else verdict.values
    signals = {**of_judge, **observed.values.get(member.key, {})}
    values: dict[str, float] = {}
    for key in _in_order(tuple(signals)):
        value = signals[key]
        if value is not None and isfinite(value):
            values[key] = value
    return Engine(
        member,
        verdict,
        values,
        observed.gpus.get(member.key, {}),
        observed.configs.get(member.key, {}),
        observed.images.get(member.key, ""),
    )


@lru_cache(maxsize=256)
def _in_order(keys: tuple[str, ...]) -> Sequence[str]:
    """The keys, sorted. Engines of one kind have the same ones, scrape after scrape."""
    return sorted(keys)


# --- A tier: its engines and its causes -----------------------------------------------------------


def middle(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None if there are none."""
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


class FleetCause(Cause, frozen=True, kw_only=True, omit_defaults=True):
    """A cause on a fleet.

    - `pool`: the pool that the cause is on.
    - `tier`: the tier of the pool; null if the cause is on the whole pool.
    - `replicas`: the replicas that show the cause.
    """

    pool: str = written("")
    tier: str | None = written(None)
    replicas: tuple[str, ...] = written(())

    def of_server(self) -> Cause:
        """The cause as that of one server, without pool and replicas."""
        return Cause(**{name: getattr(self, name) for name in Cause.__struct_fields__})


def of_fleet(cause: Cause, pool: str, tier: str, replicas: Iterable[str]) -> FleetCause:
    """The cause, shown by these replicas."""
    return FleetCause(**asdict(cause), pool=pool, tier=tier, replicas=tuple(replicas))


def place(pool: str, tier: str | None, role: str | None = None) -> str:
    """The name of a pool or tier in reports: `pool on tier (role)`."""
    where = f"{pool or '?'} on {tier}" if tier else pool or "?"
    return f"{where} ({role})" if role else where


class Tier(Struct, frozen=True):
    """Replicas of one pool on one GPU type.

    `tier` is empty if no label names it; `role` is empty if the replicas both prefill and decode.
    """

    pool: str
    tier: str
    role: str
    engines: tuple[Engine, ...]
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
        return place(self.pool, self.tier, self.role)

    @property
    def group(self) -> Group:
        """The tier's key in `Past`."""
        return self.pool, self.tier, self.role

    @property
    def replicas(self) -> int:
        return len({engine.member.replica for engine in self.engines})

    @property
    def engines_each(self) -> int | None:
        """Data-parallel engines per replica; None if replicas differ."""
        counts = set(Counter(engine.member.replica for engine in self.engines).values())
        return counts.pop() if len(counts) == 1 else None


def engine_causes(tier: Tier, t_s: float) -> list[FleetCause]:
    """The causes that single engines of the tier have at `t_s`, one per cause id.

    Each has the worst engine's text and the number of engines that show it.
    """
    by_id: dict[str, list[tuple[Cause, str]]] = {}
    for engine in tier.engines:
        for cause in engine.causes:
            # Detected at the newest scrape is detected now.
            if engine.verdict is not None and cause.seen_s == engine.verdict.t_s:
                cause = replace(cause, seen_s=t_s)
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
    return of_fleet(cause, tier.pool, tier.tier, (name for _, name in rows))


def closed(case: Case, pool: str, tier: str, engines: Sequence[Engine]) -> FleetCause | None:
    """The cause of a case about some engines of a pool; None if its confidence is too low."""
    cause, names = case.close(), (engine.member.name for engine in engines)
    return None if cause is None else of_fleet(cause, pool, tier, names)
