"""The lines of the screen: the list of engines and, for the selected engine, the verdict, stage,
charts, advice and reasons. Pure."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from unicodedata import combining, east_asian_width

from msgspec import Struct

from kneewatch.agent.watch.state import Kind, ScreenRow, Trail
from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Verdict
from kneewatch.reports.advice_text import Column, first_steps
from kneewatch.reports.diagnosis_text import CAUSE, INDENTS, SECTION, Style, body, footer, who
from kneewatch.reports.health import WORST_FIRST
from kneewatch.reports.lines import printable
from kneewatch.rules.cascade import FILLING_FROM_RATIO, QUEUE_SHARE_OF_RUNNING, TTFT_DRIFT
from kneewatch.rules.formatting import clock, date, duration, number, percent, span
from kneewatch.rules.library import rule_of
from kneewatch.rules.rule import Severity

# --- Characters, tones and lines of the screen ----------------------------------------------------
#
# Text from other machines is never interpreted as markup. A line is a sequence of pieces. Each
# piece has a tone, and the screen maps tones to colours.


UNIT = re.compile(r"(?<=\d) (?=%|(?:ms|s|min|h|days)\b)")
GLUE = "\u00a0"
"""A no-break space. It keeps a number and its unit together when lines are wrapped."""

Piece = tuple[str, str]
Line = tuple[Piece, ...]
"""Pieces of text, each with its tone: a key of TONES."""

TONES = {
    "": "",
    "ok": "green",
    "info": "cyan",
    "warning": "yellow",
    "critical": "bold red",
    "unknown": "magenta",
    "strong": "bold",
    "faint": "dim",
    "marked": "reverse",
    "bar": "cyan",
    "over": "red",
}
"""Styles in the terminal's 16 colours, which follow the user's theme."""

PLAIN_TONES = {
    **dict.fromkeys(TONES, ""),
    "critical": "bold",
    "warning": "bold",
    "strong": "bold",
    "faint": "dim",
    "marked": "reverse",
    "over": "bold",
}
"""Styles without colour. States are then shown by words alone."""


class Glyphs(Struct, frozen=True):
    """The characters to draw with. `bars` are ordered from the lowest bar to a full cell."""

    bars: str
    bound: str
    rule: str
    cut: str
    marker: str
    at_most: str
    unicode: bool

    def clean(self, text: str) -> str:
        """The text without control characters. Characters that the terminal cannot show are
        replaced."""
        text = printable(text)
        return text if self.unicode else text.encode("ascii", "replace").decode()

    def fit(self, text: str, width: int) -> str:
        """The text in exactly `width` cells. If the text is longer, its middle is cut out."""
        text = self.clean(text)
        if cells(text) > width:
            head = _beginning(text, (width - cells(self.cut)) // 2)
            tail_cells = width - cells(head) - cells(self.cut)
            text = head + self.cut + _beginning(text[::-1], tail_cells)[::-1]
        return text + " " * (width - cells(text))

    def folded(self, text: str, width: int, *, indent: int = 0, more: int = 2) -> list[str]:
        """The text wrapped into lines of at most `width` cells. The first line is indented by
        `indent`, later lines by `indent` plus `more`.

        If the width is too small for the indent, it is raised so that one character fits.
        """
        text = self.clean(text)
        if cells(text) > len(text):
            width = max(width // 2, indent + more + 8)  # characters of two cells: wrapped early
        width = max(width, indent + more + 1)  # without room for a character textwrap never ends
        lines = textwrap.wrap(
            UNIT.sub(GLUE, text),
            width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + more),
            break_on_hyphens=False,
        )
        return [line.replace(GLUE, " ") for line in lines]


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "┄", "─", "…", "▶", "≤", unicode=True)
ASCII = Glyphs("_.:-=+*#", "-", "-", "~", ">", "<=", unicode=False)


def glyphs_for(environ: Mapping[str, str], encoding: str) -> Glyphs:
    """The characters that the terminal can show: Unicode if the locale is UTF-8, else ASCII.

    LC_CTYPE=C.UTF-8 is ignored, because Python itself sets it in the C locale.
    """
    if encoding.lower().replace("-", "") != "utf8" or environ.get("TERM") == "linux":
        return ASCII
    locales = [environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    if locales[1] == "C.UTF-8":
        locales[1] = None
    locale = next((name for name in locales if name), "C")
    return UNICODE if "utf" in locale.lower() else ASCII


def cells(text: str) -> int:
    """The width of a text in terminal columns."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def toned(lines: Iterable[str], tone: str = "") -> list[Line]:
    """Convert lines of plain text to lines with a single tone."""
    return [((line, tone),) for line in lines]


def spread(left: Line, right: Line, width: int) -> Line:
    """A line with `left` at the left edge and `right` at the right edge. If there is no space for
    both, `right` is dropped."""
    used = sum(cells(text) for text, _ in (*left, *right))
    if used + 2 > width:
        return left
    return (*left, (" " * (width - used), ""), *right)


def _beginning(text: str, width: int) -> str:
    used = 0
    for at, character in enumerate(text):
        used += cells(character)
        if used > width:
            return text[:at]
    return text


# --- The list of engines --------------------------------------------------------------------------


WORDS = {"critical": "CRITICAL", "warning": "WARNING", "unknown": "UNKNOWN"}
"""Words for states of health that the list shows in capitals."""

VERDICT_CELLS, STAGE_CELLS, CAUSE_CELLS = 8, 12, 18
FULL_FROM, CAUSES_FROM = 76, 52
"""Minimum widths in columns: for stage names and latencies in the list, and for causes."""

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

Stages of the KV cache: 0 steady, 1 filling, 2 evicting, 3 queueing,
4 collapsing. In charts, columns above the bound are red (or bold); empty
columns have no value.

Exit status by the last state: 0 ok, 1 warning or critical, 2 no data.
"""


def header(
    rows: Sequence[ScreenRow], *, where: str, clock: str, paused: bool, width: int, glyphs: Glyphs
) -> Line:
    """The header: the number of engines in each state, the source of the data, and the time."""
    health = Counter(row.health for row in rows)
    pieces: list[Piece] = [("kneewatch ", "strong")]
    pieces += [(f" {health[word]} {word}", word) for word in WORST_FIRST if health[word]]
    if where:
        pieces.append((f"  {glyphs.clean(where)}", "faint"))
    mark: Line = ((" PAUSED ", "marked"), ("  ", "")) if paused else ()
    return spread(tuple(pieces), (*mark, (clock, "")), width)


def heads(width: int, *, first: int, last: int, count: int) -> Line:
    """The column heads of the list. If not all rows fit the screen, they include the range of
    visible rows."""
    engines = "engine" if last - first + 1 >= count else f"{first}-{last} of {count}"
    parts = [f" {'state':{VERDICT_CELLS}}", f"{engines:{_name_cells(width)}}"]
    parts.append(f"{'stage':{STAGE_CELLS}}" if width >= FULL_FROM else "st")
    parts += [f"{'first cause':{CAUSE_CELLS}}"] if width >= CAUSES_FROM else []
    parts += [f"{head:>{cells_wide}}" for _, head, cells_wide, _ in _numbers(width)]
    return ((" ".join(parts), "faint"),)


def line_of(row: ScreenRow, *, width: int, selected: bool, glyphs: Glyphs) -> Line:
    """An engine's line in the list."""
    diagnosis = row.diagnosis
    stage = diagnosis.stage if diagnosis else UNKNOWN_STAGE
    number_text = "?" if stage.number is None else str(stage.number)
    values: Mapping[str, float | None] = diagnosis.values if diagnosis else {}
    name = row.name.removeprefix("http://").removeprefix("https://")
    parts = [f"{number_text:<2}"]
    if width >= FULL_FROM:
        stage_text = "?" if stage.number is None else f"{stage.number} {stage.name}"
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


def _first(row: ScreenRow) -> str:
    """The first cause of an engine, or the reason why there is none."""
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
    """The line that lists the keys. `plays`: include the keys for the speed of recordings."""
    return ((SPEED_KEYS if plays else KEYS, "faint"),)


def title_cells(width: int) -> int:
    """The width of the title in the line above the details."""
    return width - 26


def rule(title: str, *, below: int, focused: bool, width: int, glyphs: Glyphs) -> Line:
    """The line above the details: the engine's name, whether the pane has the focus, and the number
    of lines below the screen."""
    title_width = title_cells(width)
    title = glyphs.clean(title)
    shown = title if cells(title) <= title_width else glyphs.fit(title, title_width)
    more = f" {below} more below " if below > 0 else ""
    left = f"{2 * glyphs.rule} {shown} "
    fill = max(0, width - cells(left) - len(more) - 2)
    tone = "strong" if focused else "faint"
    end = 2 * glyphs.rule
    return ((left + fill * glyphs.rule, tone), (more, "strong" if more else ""), (end, tone))


# --- The selected engine in lines: verdict, stage, charts, advice and reasons ---------------------


CELL_LADDER_S = (1, 2, 3, 4, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
"""Possible lengths of time per chart column, in seconds."""

SCRAPES_IN_CELL = 1.5
RECENT = 9
"""Number of newest scrapes from which the usual scrape interval is computed."""

ROOM = 1.25
"""The top of a chart as a multiple of its bound: the bound is then visible before a value exceeds
it."""


class ChartSpan(Struct, frozen=True):
    """The time that charts show: `columns` columns of `cell_s` seconds each, ending at `end_s`."""

    columns: int
    cell_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds from the first column to the last."""
        return self.columns * self.cell_s


def chart_span(times_s: Sequence[float], columns: int) -> ChartSpan:
    """The span that shows the whole history, with the shortest possible columns.

    A column is longer than the scrape interval, so that no column is empty by chance.
    """
    if not times_s:
        return ChartSpan(columns, CELL_LADDER_S[0], 0.0)
    length_s, end_s = times_s[-1] - times_s[0], times_s[-1]
    apart_s = sorted(b - a for a, b in pairwise(times_s[-RECENT:]))
    usual_s = apart_s[len(apart_s) // 2] if apart_s else 0.0
    least_s = max(SCRAPES_IN_CELL * usual_s, length_s / columns)
    cell_s = next((cell for cell in CELL_LADDER_S if cell >= least_s), CELL_LADDER_S[-1])
    return ChartSpan(columns, cell_s, end_s)


def cells_of(
    times_s: Sequence[float], values: Sequence[float], over: ChartSpan
) -> list[float | None]:
    """The largest value in each column; None if the column has no value. Shape: (columns,).

    Columns begin at multiples of their length, so that a value stays in the same column as time
    passes.
    """
    largest: list[float | None] = [None] * over.columns
    last = math.floor(over.end_s / over.cell_s)
    for t_s, value in zip(reversed(times_s), reversed(values), strict=True):
        at = over.columns - 1 - (last - math.floor(t_s / over.cell_s))
        if at < 0:
            break
        if not math.isnan(value):
            before = largest[at]
            largest[at] = value if before is None else max(before, value)
    return largest


def chart(
    values: Sequence[float | None], *, rows: int, top: float, bound: float | None, glyphs: Glyphs
) -> list[Line]:
    """A bar chart of `rows` lines, the top line first. Bars above the bound are marked. Columns
    without a value are empty."""
    steps = len(glyphs.bars)
    bound_row = None if bound is None else min(rows - 1, int(bound / top * rows))
    lines: list[Line] = []
    for row in range(rows - 1, -1, -1):
        pieces: list[Piece] = []
        for value in values:
            whole = 0 if value is None else round(value / top * rows * steps)
            level = 0 if value is None else min(rows * steps, max(1, whole)) - row * steps
            if level > 0:
                over = bound is not None and value is not None and value > bound
                piece = glyphs.bars[min(level, steps) - 1], "over" if over else "bar"
            elif row == bound_row and rows > 1:
                piece = glyphs.bound, "faint"
            else:
                piece = " ", ""
            _join(pieces, piece)
        lines.append(tuple(pieces))
    return lines


def top_of(values: Sequence[float | None], bound: float | None, *, least: float) -> float:
    highest = max((value for value in values if value is not None), default=0.0)
    return max(highest, least, ROOM * (bound or 0.0))


def _join(pieces: list[Piece], piece: Piece) -> None:
    if pieces and pieces[-1][1] == piece[1]:
        pieces[-1] = (pieces[-1][0] + piece[0], piece[1])
    else:
        pieces.append(piece)


# --- Details of the selected engine ---------------------------------------------------------------


GAP = 2

CHART_NUMBERS: tuple[Column, ...] = (
    ("arrival_per_s", "arrivals {}/s", number),
    ("generation_tokens_per_s", "tokens {}/s", number),
)


class Screen(Struct, frozen=True):
    """The size of the screen, the characters to draw with, and the address of the pages about
    causes."""

    width: int
    chart_rows: int
    glyphs: Glyphs
    docs_url: str = ""


_ChartSpec = tuple[str, str, Callable[[float], str], float | None, float]
"""A chart: its signal, title, format, bound and the least value at its top."""


def details(row: ScreenRow, trail: Trail, frame: Screen) -> list[Line]:
    """The lines about one engine: charts, what to do, and the text of its diagnosis."""
    diagnosis = row.diagnosis
    lines = _head(row, frame)
    if diagnosis is None:
        return lines
    lines += _charts(diagnosis, trail, frame)
    for cause in diagnosis.causes[:1]:
        for label, words, flags in first_steps(diagnosis, cause):
            lines += _fold(frame, f"{label}: {flags or words}", "strong")
    severities = (cause.severity.word for cause in diagnosis.causes)
    for kind, words in (*body(diagnosis, Style(docs_url=frame.docs_url)), *footer(diagnosis)):
        tone = next(severities) if kind == CAUSE else ""
        if kind in (CAUSE, SECTION):
            lines.append(())
        indent, more = INDENTS[kind]
        lines += _fold(frame, words, tone, indent=indent, more=more)
    return lines


def _fold(
    frame: Screen, text: str, tone: str = "", *, indent: int = 0, more: int = 2
) -> list[Line]:
    return toned(frame.glyphs.folded(text, frame.width, indent=indent, more=more), tone)


def _head(row: ScreenRow, frame: Screen) -> list[Line]:
    glyphs, diagnosis = frame.glyphs, row.diagnosis
    verdict: Line = ((row.health.upper(), row.health),)
    if diagnosis is None:
        waiting = row.note or "waiting for the first scrape"
        return [(*verdict, ("  ", ""), (glyphs.clean(row.name), "strong")), *_fold(frame, waiting)]
    if diagnosis.causes:
        first = diagnosis.causes[0]
        verdict = (*verdict, ("  ", ""), (glyphs.clean(first.id), "strong"))
    as_of = f"{date(diagnosis.t_s)} {clock(diagnosis.t_s)} UTC"
    lines = [spread(verdict, ((as_of, "faint"),), frame.width)]
    if cells(glyphs.clean(who(diagnosis))) > title_cells(frame.width):
        lines += _fold(frame, who(diagnosis))
    if row.stale:
        lines += _fold(
            frame, f"no data for {span(row.quiet_s)}: this state is out of date", "warning"
        )
    if row.note:
        lines += _fold(frame, row.note, "" if row.kind is Kind.RECORDING else "warning")
    return lines


def _charts(diagnosis: Verdict, trail: Trail, frame: Screen) -> list[Line]:
    over = chart_span(trail.times_s, max(8, (frame.width - 2 * GAP) // 3))
    drawn = [_drawn(spec, diagnosis, trail, over, frame) for spec in _chart_specs(diagnosis)]
    gap: Piece = (" " * GAP, "")
    lines: list[Line] = [
        (*left, gap, *middle, gap, *right) for left, middle, right in zip(*drawn, strict=True)
    ]
    numbers = [
        words.format("-" if (value := diagnosis.values.get(key)) is None else shown(value))
        for key, words, shown in CHART_NUMBERS
    ]
    line = frame.glyphs.fit("   ".join(numbers), min(frame.width, 40)).rstrip()
    charted: Line = ((f"charts: {span(over.length_s)}", "faint"),)
    return [*lines, spread(((line, ""),), charted, frame.width)] if diagnosis.values else lines


def _chart_specs(diagnosis: Verdict) -> tuple[_ChartSpec, ...]:
    values = diagnosis.values
    running = values.get("running")
    # The largest queue that does not yet count for stage 3.
    queue = None if running is None else ceil(max(2.0, QUEUE_SHARE_OF_RUNNING * running)) - 1.0
    stated = _threshold(diagnosis, "KV-FULL", Severity.INFO)
    full = FILLING_FROM_RATIO if stated is None else stated
    return (
        ("kv_usage_ratio", "KV", percent, full, 1.0),
        ("waiting", "waiting", number, queue, 4.0),
        ("ttft_p99_s", "TTFT P99", duration, ttft_bound_s(diagnosis), 0.001),
    )


def _threshold(diagnosis: Verdict, rule: str, severity: Severity) -> float | None:
    """The threshold of a rule for a severity. None if the findings do not include the rule."""
    findings = (finding for finding in diagnosis.findings if finding.rule == rule)
    return next((rule_of(finding).threshold(severity) for finding in findings), None)


def ttft_bound_s(diagnosis: Verdict) -> float | None:
    """The bound for TTFT P99 in seconds: the target; without a target, three times the baseline.
    None if both are unknown.

    The baseline is the present TTFT P99 divided by its drift.
    """
    target_s = _threshold(diagnosis, "TTFT-P99", Severity.WARNING)
    if target_s is not None:
        return target_s
    value, drift = (diagnosis.values.get(f"ttft_p99_{key}") for key in ("s", "drift_ratio"))
    return TTFT_DRIFT * value / drift if value and drift else None


def _drawn(
    spec: _ChartSpec, diagnosis: Verdict, trail: Trail, over: ChartSpan, frame: Screen
) -> list[Line]:
    key, name, formatted, limit, least = spec
    value = diagnosis.values.get(key)
    value_text = "-" if value is None else formatted(value)
    beyond = value is not None and limit is not None and value > limit
    title = frame.glyphs.fit(f"{name} {value_text}", over.columns).rstrip()
    bound = "" if limit is None else f"{frame.glyphs.at_most} {formatted(limit)}"
    bound = bound if len(title) + 1 + len(bound) <= over.columns else ""
    title_line: Line = (
        (title, "over" if beyond else "strong"),
        (bound.rjust(over.columns - len(title)), "faint"),
    )
    shown = cells_of(trail.times_s, trail.values[key], over)
    top = top_of(shown, limit, least=least)
    if key == "kv_usage_ratio":
        top = 1.0
    rows = frame.chart_rows
    return [title_line, *chart(shown, rows=rows, top=top, bound=limit, glyphs=frame.glyphs)]
