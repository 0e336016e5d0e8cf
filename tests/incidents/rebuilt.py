"""Incidents rebuilt from public threads, and recordings of a real vLLM: a table of `make
accuracy`.

`tests/fixtures/incidents/expected.json` says for each capture which causes may come first (null:
nothing at warning or worse) between two times, in seconds from the capture's start.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.format import Entry, entry_of
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import WINDOW_S, Severity
from tests.incidents.messages import Sent, first_message

FOLDER = Path(__file__).parents[1] / "fixtures" / "incidents"
SUFFIX = ".jsonl.xz"
RIGHT_FROM = 0.8
"""Share of the judged scrapes in which a wanted cause must come first."""

WINDOWS_S = (WINDOW_S, 15.0, 30.0, 120.0)
"""The default window, and others that users set."""

CALM_S = 110.0
"""No incident begins earlier than this after its capture's start."""


class Case(Struct, frozen=True, rename={"from_s": "from", "to_s": "to", "begins_s": "begins"}):
    """What is expected of a capture. `mild`: a note is enough. `never`: causes that are wrong at
    warning or worse. `page`: a default install must send a message before `to_s`, or none; None:
    only the verdict at the default window is judged. `wrong`: why it is wrong today."""

    want: tuple[str, ...] | None
    from_s: float
    to_s: float
    mild: bool = False
    page: bool | None = False
    never: tuple[str, ...] = ()
    begins_s: float = CALM_S
    wrong: str = ""

    @property
    def least(self) -> Severity:
        """The least severity of the first cause."""
        return Severity.INFO if self.mild else Severity.WARNING


class Said(Struct, frozen=True):
    """What was said of a capture: the judged scrapes, and those before the incident begins."""

    name: str
    case: Case
    judged: Sequence[Verdict]
    before: Sequence[Verdict]
    message: Sent | None = None

    @property
    def untrue(self) -> set[str]:
        """The causes of `never` that were said."""
        given = (cause for each in self.judged for cause in each.causes)
        loud = {str(cause.id) for cause in given if cause.severity >= Severity.WARNING}
        return loud.intersection(self.case.never)

    @property
    def share(self) -> float:
        """Share of the judged scrapes that are right."""
        right = [self._is_right(diagnosis) for diagnosis in self.judged]
        return sum(right) / len(right) if right else 0.0

    def _is_right(self, diagnosis: Verdict) -> bool:
        if self.case.want is None:
            return diagnosis.severity < Severity.WARNING
        first = diagnosis.causes[0] if diagnosis.causes else None
        return (
            first is not None and first.id in self.case.want and first.severity >= self.case.least
        )

    @property
    def early(self) -> str:
        """The first thing said at warning or worse before the incident begins; empty if none."""
        loud = [diagnosis for diagnosis in self.before if diagnosis.severity >= Severity.WARNING]
        return worded(loud[0]) if loud else ""

    @property
    def wrong_message(self) -> str:
        """What is wrong with the message; empty if nothing is."""
        if self.case.page is None:
            return ""
        if not self.case.page:
            return f"sends {self.message}" if self.message is not None else ""
        in_time = self.message is not None and self.message.after_s <= self.case.to_s
        return "" if in_time else "sends no message"

    @property
    def right(self) -> bool:
        """Whether the capture was told right, and nothing was said too early."""
        enough = 1.0 if self.case.want is None else RIGHT_FROM
        return self.share >= enough and not self.early and not self.untrue


def worded(diagnosis: Verdict) -> str:
    """The first cause with its severity; without causes the health."""
    if not diagnosis.causes or diagnosis.causes[0].severity < diagnosis.severity:
        return f"{diagnosis.headline or '-'} {diagnosis.health}"
    return f"{diagnosis.causes[0].id} {diagnosis.causes[0].severity.word}"


def cases() -> dict[str, Case]:
    """Expected verdicts by name of the capture."""
    import msgspec

    return msgspec.convert(json.loads((FOLDER / "expected.json").read_text()), dict[str, Case])


def entries(name: str) -> Iterator[Entry]:
    """The scrapes of a capture."""
    with lzma.open(FOLDER / f"{name}{SUFFIX}") as file:
        for line in file:
            entry = entry_of(line)
            assert isinstance(entry, Entry)
            yield entry


def diagnoses(name: str, profile: Profile | None = None) -> list[Verdict]:
    """Every diagnosis of a capture's first engine, oldest first."""
    stream = TargetStream(name, profile or Profile(), Limits())
    return [stream.replay(entry)[0] for entry in entries(name)]


def said(name: str, case: Case, given: Sequence[Verdict]) -> Said:
    """What was said of a capture."""
    begun_s = given[0].t_s
    return Said(
        name,
        case,
        [each for each in given if case.from_s <= each.t_s - begun_s <= case.to_s],
        [each for each in given if each.t_s - begun_s < min(case.begins_s, case.from_s)],
        first_message(given),
    )


def table(every: Sequence[Said]) -> str:
    """A row per capture, and how many were told right."""
    lines = [
        f"{'capture':18}{'wanted first':48}{'ok':4}{'share':>6}  {'message':28}said first (scrapes)"
    ]
    for row in every:
        wanted = "nothing at warning" if row.case.want is None else "/".join(row.case.want)
        counts = Counter(map(worded, row.judged)).most_common(3)
        words = ", ".join(f"{cause} {count}" for cause, count in counts)
        early = f"; too early: {row.early}" if row.early else ""
        early += f"; untrue: {', '.join(sorted(row.untrue))}" if row.untrue else ""
        mark = "yes" if row.right else "NO"
        sent = f"{row.message or '-'!s}" + (" (WRONG)" if row.wrong_message else "")
        lines.append(
            f"{row.name:18}{wanted[:46]:48}{mark:4}{row.share:6.2f}  {sent:28}{words}{early}"
        )
    faults = [row for row in every if row.case.want is not None]
    quiet = [row for row in every if row.case.want is None]
    lines += [
        "",
        f"rebuilt incidents told right: {sum(row.right for row in faults)} of {len(faults)}",
        f"healthy ones without a warning: {sum(row.right for row in quiet)} of {len(quiet)}",
        "messages of a default install as an engineer on call wants them: "
        f"{sum(not row.wrong_message for row in every)} of {len(every)}",
    ]
    return "\n".join(lines)


def report(only: Sequence[str] = ()) -> str:
    """The table of all captures, or of those that are named, at each window."""
    expected: Mapping[str, Case] = cases()
    tables = [
        table(
            [
                said(name, case, diagnoses(name, Profile(window_s=window_s)))
                for name, case in expected.items()
                if (not only or name in only) and (case.page is not None or window_s == WINDOW_S)
            ]
        )
        for window_s in WINDOWS_S
    ]
    return "\n\n".join(
        f"window {window_s:.0f} s\n{rows}" for window_s, rows in zip(WINDOWS_S, tables, strict=True)
    )


if __name__ == "__main__":
    print(report(sys.argv[1:]))
