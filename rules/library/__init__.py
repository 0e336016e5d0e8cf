"""All rules that need no setting, in the order they are listed. Pure."""

from __future__ import annotations

from kneewatch.rules.library import features, guardrails, hardware, latency, memory
from kneewatch.rules.model import Rule

RULES: tuple[Rule, ...] = (
    *memory.RULES,
    *latency.RULES,
    *features.RULES,
    *guardrails.RULES,
    *hardware.RULES,
)
