"""The list of engines, and the lines around it: header, rule, keys, help. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kneewatch.agent.watch.glyphs import Glyphs, Line, Piece, cells, spread
from kneewatch.agent.watch.state import RANK, Row
from kneewatch.reports.formatting import duration, number, percent, span

WORDS = {"critical": "CRITICAL", "warning": "WARNING", "unknown": "UNKNOWN"}
"""Health in the list where it is not in lower case."""

VERDICT_CELLS, STAGE_CELLS, CAUSE_CELLS = 8, 12, 18
FULL_FROM, CAUSES_FROM = 76, 52
"""Narrower lists omit stage names and latencies, then causes."""

NUMBERS: tuple[tuple[str, str, int, Callable[[float], str]], ...] = (
    ("kv_usage_ratio", "KV", 5, percent),
    ("waiting", "wait", 5, number),
    ("ttft_p99_s", "TTFT99", 7, duration),
)
NUMBERS_NARROW = 2

KEYS = "q quit  arrows select  space scroll  tab pane  enter zoom  p pause  ? help"
SPEED_KEYS = "q quit  arrows select  space scroll  enter zoom  p pause  + - speed  ? help"

HELP = """\
up down, j k       select an engine; in the details: scroll
tab                go from the list to the details and back
enter              the details alone; again or escape: back
pgup pgdn, space   scroll the details
home, g            follow the worst engine as the order changes
p                  pause the screen and recordings
+ -                play recordings faster or slower
? or h             this help
q, ctrl-c          quit

Engines are listed worst first: CRITICAL, WARNING, UNKNOWN, info, ok. The
details are those of the worst engine until you select another. UNKNOWN: the
engine cannot be read, or has sent no data for too long.

Stages of the KV cascade: 0 steady, 1 filling, 2 evicting, 3 queueing,
4 collapsing. In charts, columns above the bound are red (or bold); empty
columns have no value.

Exit status by the last state: 0 ok, 1 warning or critical, 2 no data.
"""


def header(
    rows: Sequence[Row], *, where: str, clock: str, paused: bool, width: int, glyphs: Glyphs
) -> Line:
    """The header: engines by state, the source, and the time."""
    health = Counter(row.health for row in rows)
    pieces: list[Piece] = [("kneewatch ", "strong")]
    pieces += [(f" {health[word]} {word}", word) for word in RANK if health[word]]
    if where:
        pieces.append((f"  {glyphs.clean(where)}", "faint"))
    mark: Line = ((" PAUSED ", "marked"), ("  ", "")) if paused else ()
    return spread(tuple(pieces), (*mark, (clock, "")), width)


def heads(width: int, *, first: int, last: int, count: int) -> Line:
    """The column heads of the list, with the visible range where not all rows fit."""
    engines = "engine" if last - first + 1 >= count else f"{first}-{last} of {count}"
    parts = [f" {'state':{VERDICT_CELLS}}", f"{engines:{_name_cells(width)}}"]
    parts.append(f"{'stage':{STAGE_CELLS}}" if width >= FULL_FROM else "st")
    parts += [f"{'first cause':{CAUSE_CELLS}}"] if width >= CAUSES_FROM else []
    parts += [f"{head:>{cells_wide}}" for _, head, cells_wide, _ in _numbers(width)]
    return ((" ".join(parts), "faint"),)


def line_of(row: Row, *, width: int, selected: bool, glyphs: Glyphs) -> Line:
    """An engine's line in the list."""
    diagnosis = row.diagnosis
    stage = diagnosis.stage if diagnosis else None
    values: Mapping[str, float | None] = diagnosis.values if diagnosis else {}
    name = row.name.removeprefix("http://").removeprefix("https://")
    parts = [f"{stage.number if stage else '?':<2}"]
    if width >= FULL_FROM:
        stage_text = f"{stage.number} {stage.name}" if stage else "?"
        parts = [f"{stage_text:{STAGE_CELLS}}"]
    if width >= CAUSES_FROM:
        parts.append(glyphs.fit(_first(row), CAUSE_CELLS))
    for key, _, cells_wide, formatted in _numbers(width):
        value = values.get(key)
        parts.append(f"{'-' if value is None else formatted(value):>{cells_wide}}")
    return (
        (glyphs.marker if selected else " ", "strong"),
        (f"{WORDS.get(row.health, row.health):{VERDICT_CELLS}}", row.health),
        (" ", ""),
        (glyphs.fit(name, _name_cells(width)), "marked" if selected else ""),
        (" " + " ".join(parts), ""),
    )


def _first(row: Row) -> str:
    """An engine's first cause, or why there is none."""
    if row.stale:
        return f"no data for {span(row.quiet_s)}"
    if row.diagnosis is None:
        return "no scrape yet"
    return row.diagnosis.headline or "-"


def _numbers(width: int) -> Sequence[tuple[str, str, int, Callable[[float], str]]]:
    return NUMBERS if width >= FULL_FROM else NUMBERS[:NUMBERS_NARROW]


def _name_cells(width: int) -> int:
    used = 1 + VERDICT_CELLS + 1 + sum(1 + cells_wide for _, _, cells_wide, _ in _numbers(width))
    used += 1 + (STAGE_CELLS if width >= FULL_FROM else 2)
    used += 1 + CAUSE_CELLS if width >= CAUSES_FROM else 0
    return max(8, width - used)


def keys(*, plays: bool) -> Line:
    """The line of keys; `plays`: with the speed keys for recordings."""
    return ((SPEED_KEYS if plays else KEYS, "faint"),)


def title_cells(width: int) -> int:
    """The width of a rule's title."""
    return width - 26


def rule(title: str, *, below: int, focused: bool, width: int, glyphs: Glyphs) -> Line:
    """The line above the details: the engine's name, the focus, and lines below the screen."""
    title_width = title_cells(width)
    title = glyphs.clean(title)
    shown = title if cells(title) <= title_width else glyphs.fit(title, title_width)
    more = f" {below} more below " if below > 0 else ""
    left = f"{2 * glyphs.rule} {shown} "
    fill = max(0, width - cells(left) - len(more) - 2)
    tone = "strong" if focused else "faint"
    end = 2 * glyphs.rule
    return ((left + fill * glyphs.rule, tone), (more, "strong" if more else ""), (end, tone))
