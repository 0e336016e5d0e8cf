"""How far engines are kept apart: files outside their folders that name a flag of one engine."""

from __future__ import annotations

from pathlib import Path

from kneewatch.collector.engines.engine_kind import engine_kinds

ROOT = Path(__file__).parents[1]
ROOMS = ("agent", "collector", "dashboards", "diagnose", "reports", "rules")
ENGINES = "collector/engines"
AT_MOST = {"vllm": 4, "other": 0}
"""Most files for each engine. Lower it when a file is freed of its engine."""


def naming(words: set[str]) -> list[str]:
    """Files outside the engines' folders with one of these words."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text("utf-8")
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".toml")
    }
    return sorted(
        name
        for name, text in texts.items()
        if not name.startswith(ENGINES) and any(word in text for word in words)
    )


def test_no_module_more_names_a_flag_of_vllms() -> None:
    flags = {flag for kind in engine_kinds() for flag in kind.flags}
    assert len(found := naming(flags)) <= AT_MOST["vllm"], found


def test_no_module_names_a_flag_of_another_engine() -> None:
    flags = {own for kind in engine_kinds() for flag, own in kind.flags.items() if own != flag}
    shared = {"--context-length", "--page-size", "--parallel", "--batch-size"}
    assert len(found := naming(flags - shared)) <= AT_MOST["other"], found
