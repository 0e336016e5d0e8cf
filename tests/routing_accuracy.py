"""Whether `routing_dilution` is right on simulated pools: a part of `make accuracy`.

Usage: python -m tests.routing_accuracy [SEED]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from statistics import median

from msgspec import Struct

from kneewatch.rules.rule import Severity
from tests.diagnose.fleet.example_fleets import Row, pod, verdict
from tests.simulator.routed import (
    BAD_CHANGES,
    CHANGES,
    Routed,
    RoutedCase,
    RoutedMoment,
    cases,
    play,
)

IN_TIME_S = 180.0
"""A change that harms must be reported within this time."""

HARMED_FROM = 1.5
"""Prompt tokens are computed this many times as often: replicas are harmed."""

LOST = ("routing_dilution", "prefix_reuse_lost")


class RoutingVerdict(Struct, frozen=True):
    """What was reported on one pool, by seconds since the change: the worst severity of each
    cause of lost hits."""

    routed: Routed
    severities: Sequence[tuple[float, dict[str, Severity]]]

    def warned_after_s(self, cause: str) -> float | None:
        """When a cause was first at warning or worse; None for never."""
        return next(
            (t_s for t_s, by in self.severities if by.get(cause, Severity.OK) >= Severity.WARNING),
            None,
        )

    @property
    def worst(self) -> Severity:
        """The worst severity of `routing_dilution`."""
        return max(by.get("routing_dilution", Severity.OK) for _, by in self.severities)

    @property
    def harmed(self) -> bool:
        """Whether routing was changed so that replicas compute clearly more."""
        return self.routed.case.change in BAD_CHANGES and self.routed.harm >= HARMED_FROM

    @property
    def right(self) -> bool:
        """Whether harm was reported in time; without a change of routing, whether none was."""
        after_s = self.warned_after_s("routing_dilution")
        if self.harmed:
            return after_s is not None and after_s <= IN_TIME_S
        return after_s is None or self.routed.case.change in BAD_CHANGES


def judged(case: RoutedCase, seed: int) -> RoutingVerdict:
    """Play and judge one pool."""
    routed = play(case, seed)
    return RoutingVerdict(
        routed, [(moment.after_s, severities(routed, moment)) for moment in routed.moments]
    )


def severities(routed: Routed, moment: RoutedMoment) -> dict[str, Severity]:
    """The causes of lost hits at one moment, explained ones as their root cause."""
    rows: list[Row] = [(pod(name), values) for name, values in moment.values.items()]
    group = ("prod/m", "", "")
    fleet_verdict = verdict(
        *rows,
        usual={} if routed.usual is None else {group: routed.usual},
        recent={group: {"prompt_tokens_mean": routed.lengths}} if routed.lengths else {},
    )
    return {cause.id: cause.severity for cause in fleet_verdict.causes if cause.id in LOST}


def table(verdicts: Iterable[RoutingVerdict]) -> str:
    """A row for each kind of change."""
    rows: dict[str, list[RoutingVerdict]] = {}
    for row in verdicts:
        rows.setdefault(kind_of(row.routed.case), []).append(row)
    lines = [
        f"{'routing':58}{'pools':>6}{'harmed':>8}{'in time':>9}{'median':>8}{'critical':>10}"
        f"{'warned':>8}{'unharmed, warned':>18}{'prompts blamed':>16}"
    ]
    for kind, group in rows.items():
        harmed = [row for row in group if row.harmed]
        others = [row for row in group if not row.harmed]
        delays_s = [
            s for row in harmed if (s := row.warned_after_s("routing_dilution")) is not None
        ]
        lines.append(
            f"{kind:58}{len(group):>6}{len(harmed):>8}{sum(row.right for row in harmed):>9}"
            f"{f'{median(delays_s):.0f} s' if delays_s else '-':>8}"
            f"{sum(row.worst == Severity.CRITICAL for row in group):>10}"
            f"{sum(row.worst >= Severity.WARNING for row in group):>8}"
            f"{sum(row.worst >= Severity.WARNING for row in others):>18}"
            f"{sum(row.warned_after_s('prefix_reuse_lost') is not None for row in group):>16}"
        )
    return "\n".join(lines)


def kind_of(case: RoutedCase) -> str:
    """What a case is, in words."""
    if case.change:
        return CHANGES[case.change]
    router = "round robin" if case.router == "round robin" else "good routing"
    return f"always {router}{', past unknown' if case.young else ''}"


def confusion(verdicts: Sequence[RoutingVerdict]) -> str:
    """Precision and recall of `routing_dilution` at warning or worse."""
    warned = [row for row in verdicts if row.worst >= Severity.WARNING]
    harmed = [row for row in verdicts if row.harmed]
    founded = [row for row in warned if row.routed.case.change in BAD_CHANGES]
    in_time = sum(row.right for row in harmed)
    return (
        f"routing_dilution at warning: {len(warned)} pools, {len(founded)} of them with changed "
        f"routing; {in_time} of {len(harmed)} harmed pools reported within {IN_TIME_S:.0f} s"
    )


def report(seed: int = 1) -> str:
    """The table over all cases."""
    verdicts = [judged(case, seed) for case in cases()]
    return f"{table(verdicts)}\n{confusion(verdicts)}"


if __name__ == "__main__":
    print(report(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
