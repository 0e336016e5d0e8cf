"""The track record and the data's quality as Markdown. Pure."""

from __future__ import annotations

from kneewatch.reports.weekly.model import TrackRow, WeeklyReport
from kneewatch.reports.weekly.page.headline import ROWS_MOST
from kneewatch.reports.weekly.page.markdown_lines import code, flags, rows, sections, text
from kneewatch.reports.weekly.page.moments import Calendar
from kneewatch.reports.weekly.page.telling import FATES, followed, points, share
from kneewatch.reports.weekly.trust import EngineChange, TargetQuality
from kneewatch.reports.words import number, quantity

Lines = list[str]


def track_record(report: WeeklyReport, calendar: Calendar) -> Lines:
    """What was advised and what came of it."""
    record = report.track_record
    if not record.made and not record.rows:
        return ["Nothing was advised in this time, and nothing advised before was followed."]
    heads = ("Recommendation", "Where", "Told", "What came of it", "Predicted against measured")
    return sections(
        [followed(record)],
        rows(heads, (_followed(row, calendar) for row in record.rows[:ROWS_MOST])),
        _left_out(len(record.rows)),
    )


def _followed(row: TrackRow, calendar: Calendar) -> tuple[str, ...]:
    made = row.advice
    return (
        f"{text(made.summary)} {flags(made.changes)}",
        f"{text(row.target)}, engine {text(row.engine)}",
        calendar.moment(made.first_s),
        text(FATES.get(made.fate, ("unknown", made.fate))[1]),
        "; ".join(
            f"{code(one.signal)} {quantity(one.signal, one.predicted)} against "
            f"{quantity(one.signal, one.measured)} ({points(one.off_ratio, '')})"
            for one in row.comparisons
        ),
    )


def data_quality(report: WeeklyReport, calendar: Calendar) -> Lines:
    """How far the report can be trusted, and how its figures are computed."""
    quality = report.data_quality
    return sections(
        *([text(note)] for note in quality.notes),
        rows(
            ("Target", "Watched", "Scrapes", "Failed", "Gaps"),
            (_watched(one, calendar) for one in quality.targets[:ROWS_MOST]),
        ),
        _left_out(len(quality.targets)),
        rows(
            ("When", "Where", "What"),
            (_changed(one, calendar) for one in quality.changes[:ROWS_MOST]),
        ),
        _left_out(len(quality.changes)),
        rows(
            ("Never known", "Why"),
            ((code(one.signal), text(one.why)) for one in quality.unknown[:ROWS_MOST]),
        ),
        _left_out(len(quality.unknown)),
        [text(report.noise_test)],
        rows(
            ("Figure", "How", "Guide"),
            (
                (text(one.figure), text(one.how), text(", ".join(one.guide)))
                for one in quality.methods
            ),
        ),
    )


def _watched(one: TargetQuality, calendar: Calendar) -> tuple[str, ...]:
    gaps = [
        f"{calendar.stretch(gap.from_s, gap.to_s)} {text(gap.why)}".strip() for gap in one.gaps
    ] + ([f"{one.gaps_left_out} more"] if one.gaps_left_out else [])
    return (
        text(one.target),
        share(one.watched_ratio),
        number(one.scrapes),
        number(one.failed),
        "; ".join(gaps) or "none",
    )


def _changed(one: EngineChange, calendar: Calendar) -> tuple[str, ...]:
    made = (
        f"{code(made.key)} {text(made.before) or '-'} → {text(made.after) or '-'}"
        for made in one.differences
    )
    return (
        calendar.moment(one.t_s),
        f"{text(one.target)}, engine {text(one.engine)}",
        f"{text(one.what)} {'; '.join(made)}",
    )


def _left_out(count: int) -> Lines:
    return [f"{count - ROWS_MOST} more: the JSON has them all."] if count > ROWS_MOST else []
