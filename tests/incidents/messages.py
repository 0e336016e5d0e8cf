"""The first message that a default install sends about an engine: at critical."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity

RESTARTING = frozenset({"target_down", "engine_restarted"})
"""Causes of a server that is away: messages about them are not about the incident."""


class Sent(Struct, frozen=True):
    """A message: seconds from the first diagnosis, and the cause; `kv_pressure` for a stage of the
    cascade."""

    after_s: float
    cause: str

    def __str__(self) -> str:
        return f"{self.after_s:.0f} s {self.cause}"


def first_message(diagnoses: Sequence[Verdict]) -> Sent | None:
    """The first message; None if none is sent. Receivers get causes and stages, not findings."""
    for each in diagnoses:
        grave = [cause.id for cause in each.causes if cause.severity >= Severity.CRITICAL]
        if (each.stage.severity or Severity.OK) >= Severity.CRITICAL:
            grave.append("kv_pressure")
        told = [cause for cause in grave if cause not in RESTARTING]
        if told:
            return Sent(each.t_s - diagnoses[0].t_s, told[0])
    return None
