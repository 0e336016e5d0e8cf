"""The hard cases with latency targets, and cases without quiet times: `make accuracy`'s sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import asdict, replace

from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.hard_judging import Incident, Judged, healthy, judge, said
from tests.simulator.cases import Case
from tests.simulator.page import START_S
from tests.simulator.sweeps import LOST, SWEPT_MACHINES
from tests.target_levels import UNREACHABLE, loose, middle

WITH_TARGETS = ("one fault", "two faults")
"""Groups that are judged with targets as well, on the machines that are swept."""

BESIDE_TARGETS = {"prefill_bound": ("slo_conflict",)}
"""What is as right first where both targets are missed: long prompts and decode share the steps, so
that what helps one does hurt the other."""

HEADS_WITHIN_S = 60.0
CRITICAL_WAIT_S = 60.0
QUEUES = frozenset({"queue_saturation", "admission_limit"})


class Headed(Struct, frozen=True):
    """Whether a root cause heads the verdict while a queue grows under it.

    `after_s`: from the fault to the first scrape that it heads; `first`, `explains`, `critical`:
    of the scrapes from a minute on, and for the last two of those in which the queue's wait is a
    minute and more, those that it heads, whose queue it explains, and in which it is
    critical.
    """

    case: Case
    after_s: float | None
    first: tuple[int, int]
    explains: tuple[int, int]
    critical: tuple[int, int]
    said: str

    @property
    def right(self) -> bool:
        """Whether it heads the verdict in time and for good, with the queue and its severity."""
        counts = (self.first, self.explains, self.critical)
        return all(count == of and of > 0 for count, of in counts)


def headed(case: Case, diagnoses: Sequence[Verdict]) -> Headed:
    """What heads the verdict on a case whose queue grows."""
    begun = [d for d in diagnoses if d.t_s - START_S > case.begins_s]
    heads = [d for d in begun if _head(d) in case.wanted]
    late = [d for d in begun if d.t_s - START_S >= case.begins_s + HEADS_WITHIN_S]
    long = [d for d in late if _wait_s(d) >= CRITICAL_WAIT_S]
    explains = sum(_head(d) in case.wanted and bool(QUEUES & {*d.causes[0].explains}) for d in long)
    critical = sum(
        _head(d) in case.wanted and d.causes[0].severity == Severity.CRITICAL for d in long
    )
    return Headed(
        case,
        heads[0].t_s - START_S - case.begins_s if heads else None,
        (sum(_head(d) in case.wanted for d in late), len(late)),
        (explains, len(long)),
        (critical, len(long)),
        ", ".join(dict.fromkeys(_head(d) for d in late)),
    )


def _head(diagnosis: Verdict) -> str:
    return diagnosis.causes[0].id if diagnosis.causes else "-"


def _wait_s(diagnosis: Verdict) -> float:
    """A newcomer's wait, by Little's law."""
    served_per_s = diagnosis.values.get("completed_per_s") or 1e-9
    return (diagnosis.values.get("waiting") or 0.0) / served_per_s


def is_swept(case: Case) -> bool:
    """Whether a case is judged with targets as well."""
    return case.group in WITH_TARGETS and case.machine in SWEPT_MACHINES


def with_targets(incident: Incident, diagnoses: Sequence[Verdict]) -> Iterator[Judged]:
    """Verdicts on a case at each level of targets; `diagnoses` are those without."""
    case, own = incident.case, incident.case.faults[0].targets
    accepted = frozenset(name for cause in case.wanted for name in BESIDE_TARGETS.get(cause, ()))
    incident = replace(incident, case=replace(case, accepted=accepted))
    levels = {
        "loose": loose(healthy(case, diagnoses)),
        "median": middle(diagnoses),
        **UNREACHABLE,
    }
    for level, targets in levels.items():
        if not _lacks(targets, own):
            yield judge(incident, list(said(incident, targets)), level=level, targets=targets)


def _lacks(targets: Targets, own: Targets) -> bool:
    """Whether a target is lacking without which the fault is none."""
    return any(
        needed is not None and asdict(targets)[signal] is None
        for signal, needed in asdict(own).items()
    )


def levels_table(judged: Sequence[Judged]) -> str:
    """For each group and level how many cases are right."""
    heads = ("right", "first right", "of", "wrong causes", "early warnings")
    lines = [f"{'cases':14}{'targets':18}" + "".join(f"{head:>16}" for head in heads)]
    for group in WITH_TARGETS:
        for level in dict.fromkeys(verdict.level for verdict in judged):
            rows = [
                verdict
                for verdict in judged
                if verdict.case.group == group and verdict.level == level
            ]
            cells = (
                sum(verdict.right_and_first for verdict in rows),
                sum(verdict.first_right for verdict in rows),
                len(rows),
                sum(len(verdict.wrong) for verdict in rows),
                sum(bool(verdict.early) for verdict in rows),
            )
            lines.append(f"{group:14}{level:18}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def by_cause_and_level(judged: Sequence[Judged]) -> str:
    """For each cause and level how many of the cases with it are right, of how many."""
    levels = list(dict.fromkeys(verdict.level for verdict in judged))
    lines = [f"{'planted':24}" + "".join(f"{level:>18}" for level in levels)]
    for cause in sorted({cause for verdict in judged for cause in verdict.case.wanted}):
        cells = list[str]()
        for level in levels:
            rows = [
                verdict
                for verdict in judged
                if cause in verdict.case.wanted and verdict.level == level
            ]
            cells.append(f"{sum(verdict.right_and_first for verdict in rows)} of {len(rows)}")
        lines.append(f"{cause:24}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def said_instead(judged: Sequence[Judged]) -> str:
    """What came first where a case is not right, with the number of cases."""
    wrong: dict[tuple[str, str], Counter[str]] = {}
    for verdict in judged:
        if not verdict.right_and_first:
            planted = "+".join(sorted(fault.cause for fault in verdict.case.faults))
            wrong.setdefault((_label(verdict), planted), Counter())[
                f"{verdict.first}{'' if verdict.level == 'none' else f' ({verdict.level})'}"
            ] += 1
    lines = [f"{'cases':40}{'planted':40}first (cases)"]
    for (label, planted), firsts in wrong.items():
        words = ", ".join(f"{first} {count}" for first, count in firsts.most_common())
        lines.append(f"{label:40}{planted:40}{words}")
    return "\n".join(lines)


def quietless_table(judged: Sequence[Judged]) -> str:
    """How many cases without quiet times are right, by the trouble beside the fault."""
    heads = ("right", "fault first", "of", "wrong causes", "unmeasured", "early warnings")
    lines = [f"{'cases':40}" + "".join(f"{head:>16}" for head in heads)]
    for label in dict.fromkeys(map(_label, judged)):
        rows = [verdict for verdict in judged if _label(verdict) == label]
        cells = (
            sum(verdict.right_and_first for verdict in rows),
            sum(verdict.first == verdict.case.faults[0].cause for verdict in rows),
            len(rows),
            sum(len(verdict.wrong) for verdict in rows),
            sum(verdict.unmeasured for verdict in rows),
            sum(bool(verdict.early) for verdict in rows),
        )
        lines.append(f"{label:40}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _label(verdict: Judged) -> str:
    trouble = verdict.case.trouble
    return verdict.case.group if trouble is None else f"{verdict.case.group}: {trouble.name}"


def headed_table(rows: Sequence[Headed]) -> str:
    """A row for each case whose queue grows under a root cause."""
    heads = ("first after", "stays first", "queue under it", "critical")
    lines = [f"{'':4}{'machine':16}{LOST:40}" + "".join(f"{head:>16}" for head in heads)]
    for row in rows:
        after = "-" if row.after_s is None else f"{row.after_s:.0f} s"
        shares = (f"{count} of {of}" for count, of in (row.first, row.explains, row.critical))
        lines.append(
            f"{'yes' if row.right else 'NO':4}{row.case.machine:16}{row.case.name:40}"
            + "".join(f"{cell:>16}" for cell in (after, *shares))
            + f"  first causes {row.said}"
        )
    return "\n".join(lines)
