"""Incidents with their source, what is expected, and what is said: a table of `make accuracy`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.incidents.messages import first_message
from tests.incidents.pages import STEP_S, Phases, pages
from tests.recordings import NO_TARGETS

BEGUN_S = 1_795_000_000.0
NOTHING = ""
"""The expected cause where no cause may be said at warning or worse."""


TIMED_OUT = CollectError("timed out", kind="timeout")


class Incident(Struct, frozen=True, kw_only=True):
    """An incident and the expected verdict.

    `source` is the issue thread or the recording. `first_cause` must come first in every scrape
    from `judged_from_s` to the end, at `least` or worse; NOTHING: no cause at warning or worse.
    Its summary must contain `says`. `never` are causes that no judged scrape may say, `no_change`
    flags that no judged scrape may recommend to change. `other_engines` are data-parallel engines
    on the same page; the first engine is judged.
    """

    name: str
    source: str
    load_at: Phases
    lasts_s: float
    judged_from_s: float
    first_cause: str
    least: Severity = Severity.CRITICAL
    says: str = ""
    never: frozenset[str] = frozenset()
    no_change: frozenset[str] = frozenset()
    targets: Targets = NO_TARGETS
    step_s: float = STEP_S
    other_engines: tuple[Phases, ...] = ()


class Said(Struct, frozen=True):
    """The diagnoses of an incident, oldest first."""

    incident: Incident
    diagnoses: Sequence[Verdict]

    @property
    def judged(self) -> Sequence[Verdict]:
        """The diagnoses that count."""
        from_s = BEGUN_S + self.incident.judged_from_s
        return [diagnosis for diagnosis in self.diagnoses if diagnosis.t_s >= from_s]

    @property
    def wrong(self) -> str:
        """The first judged scrape that is wrong, in words; empty where all are right."""
        return next((words for each in self.judged if (words := self._wrong(each))), "")

    def _wrong(self, diagnosis: Verdict) -> str:
        expected = self.incident
        causes = {name for c in diagnosis.causes for name in (c.id, *c.explains)}
        flags = {change.flag for r in diagnosis.recommendations for change in r.changes}
        at = f"after {diagnosis.t_s - BEGUN_S:.0f} s: "
        if causes & expected.never:
            return f"{at}says {', '.join(sorted(causes & expected.never))}"
        if expected.first_cause == NOTHING:
            return "" if diagnosis.severity < Severity.WARNING else f"{at}{worded(diagnosis)}"
        first = diagnosis.causes[0] if diagnosis.causes else None
        if first is None or first.id != expected.first_cause or first.severity < expected.least:
            return at + worded(diagnosis)
        if expected.says not in first.summary:
            return at + first.summary
        if flags & expected.no_change:
            return f"{at}recommends {', '.join(sorted(flags & expected.no_change))}"
        return ""


def worded(diagnosis: Verdict) -> str:
    """The first cause with its severity; without causes the health."""
    if not diagnosis.causes:
        return diagnosis.health
    first = diagnosis.causes[0]
    return f"{first.id} {first.severity.word}"


def said(incident: Incident) -> Said:
    """The diagnoses of an incident's pages."""
    profile = Profile(targets=incident.targets, stated=Stated(replicas=1))
    stream = TargetStream("m@r0", profile, Limits())
    diagnoses: list[Verdict] = []
    engines = (incident.load_at, *incident.other_engines)
    for at_s, page in pages(engines, incident.lasts_s, incident.step_s):
        t_s = BEGUN_S + at_s
        taken = stream.take(t_s, page, "text/plain") if page else stream.judge(t_s, TIMED_OUT)
        diagnoses.append(taken[0])
    return Said(incident, diagnoses)


def table(every: Sequence[Said]) -> str:
    """A row per incident, and how many were said right."""
    lines = [f"{'incident':48}{'source':34}{'expected':36}{'ok':4}{'message':28}said at the end"]
    for row in every:
        incident = row.incident
        expected = f"{incident.first_cause} {incident.least.word}"
        if incident.first_cause == NOTHING:
            expected = "nothing at warning"
        mark = "NO" if row.wrong else "yes"
        last = row.wrong or worded(row.diagnoses[-1])
        sent = str(first_message(row.diagnoses) or "-")
        lines.append(f"{incident.name:48}{incident.source:34}{expected:36}{mark:4}{sent:28}{last}")
    right = sum(not row.wrong for row in every)
    return "\n".join([*lines, f"\nreal incidents said right: {right} of {len(every)}"])
