"""All rules that need no setting, in the order they are listed. Pure."""

from __future__ import annotations

from kneewatch.rules.library import features, guardrails, latency
from kneewatch.rules.library import gpu as hardware
from kneewatch.rules.library import kv_cache as memory
from kneewatch.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    *memory.RULES,
    *latency.RULES,
    *features.RULES,
    *guardrails.RULES,
    *hardware.RULES,
)
