"""One engine of a fleet: its verdict, and what a metrics system knows about it besides. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite

from msgspec import Struct, field

from kneewatch.diagnose.fleet.inventory import Labels, Member, Observed, Readings
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.rules.rule import IN_BOUNDS, Finding, Severity, State


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
        found = () if self.verdict is None else self.verdict.findings
        return [finding for finding in found if finding.state not in IN_BOUNDS]

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
