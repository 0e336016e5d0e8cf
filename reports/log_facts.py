"""Facts of a server's start-up log as text and JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kneewatch.diagnose.deployment.startup_log import LogFact

_UNITS = {"_gib": " GiB", "_s": " s", "_tokens": " tokens"}


def log_document(facts: Mapping[str, LogFact]) -> dict[str, Any]:
    """Each fact's value and the line that it was read from."""
    return {name: {"value": fact.value, "line": fact.line} for name, fact in facts.items()}


def log_words(facts: Mapping[str, LogFact]) -> str:
    """All facts in a sentence: from the log: version 0.19.1, weights 12.66 GiB, ..."""
    return "from the log: " + ", ".join(_words(name, fact) for name, fact in facts.items())


def _words(name: str, fact: LogFact) -> str:
    value = f"{fact.value:,}" if type(fact.value) is int else str(fact.value)
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)} {value}{unit}".replace("_", " ")
    return f"{name.replace('_', ' ')} {value}"
