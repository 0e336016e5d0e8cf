"""How far engines are kept apart: files outside their folders that name a flag, a metric or a log
line of one engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kneewatch.collector.engines.engine_kind import engine_kinds

ROOT = Path(__file__).parents[1]
ROOMS = ("agent", "collector", "dashboards", "diagnose", "reports", "rules")
ENGINES = "collector/engines"

FLAGS = {flag for kind in engine_kinds() for flag in kind.flags}
OTHER_FLAGS = {own for kind in engine_kinds() for flag, own in kind.flags.items() if own != flag}
AMBIGUOUS = {"--context-length", "--page-size", "--parallel", "--batch-size"}
"""Flags that other programs have as well."""

PREFIXES = {f"{prefix}[a-z]" for kind in engine_kinds() for prefix in kind.prefixes}
LOG_LINES = {
    *(re.escape(sign) for kind in engine_kinds() for sign in kind.log_signs),
    *(re.escape(failure) for kind in engine_kinds() for failure in kind.log_failures.values()),
}

NAMING: dict[str, tuple[set[str], set[str]]] = {
    # Tables whose texts are told in the flags of each engine.
    "vLLM's flags": (
        set(map(re.escape, FLAGS)),
        {
            "collector/signals/vllm.toml",
            "dashboards/prometheus/alerts.toml",
            "reports/weekly/guide_tables.toml",
            "rules/rules.toml",
        },
    ),
    "flags of other engines": (set(map(re.escape, OTHER_FLAGS - AMBIGUOUS)), set()),
    # The exported alerts are vLLM's; a router has vLLM's names, and is told apart by two.
    "vLLM's metrics": (
        {r"\bvllm:[a-z]"},
        {
            "collector/names/vllm_resolver.py",
            "collector/signals/routers.toml",
            "dashboards/prometheus/alerts.toml",
        },
    ),
    "metrics of other engines": ({rf"\b{prefix}" for prefix in PREFIXES}, set()),
    "log lines of other engines": (LOG_LINES, set()),
}
"""Words as regular expressions, and the files that have them. Take a file out when it is freed."""


@pytest.mark.parametrize("name", NAMING)
def test_no_module_names_what_one_engine_has(name: str) -> None:
    words, files = NAMING[name]
    pattern = re.compile("|".join(sorted(words)))
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".toml", ".j2") and pattern.search(path.read_text("utf-8"))
    }
    assert {each for each in found if not each.startswith(ENGINES)} == files
