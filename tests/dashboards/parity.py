"""Prometheus against the sidecar: the same recording, the same rules, the same verdicts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kneewatch.agent.source import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition.parser import Limits
from kneewatch.dashboards.prometheus.causes import cause_queries
from kneewatch.dashboards.prometheus.files import RULES_FILE, rule_files
from kneewatch.dashboards.prometheus.findings import expressible
from kneewatch.dashboards.prometheus.model import Plan
from kneewatch.diagnose.profile import Profile
from kneewatch.rules.model import WORDS
from tests.dashboards.promtool import Sample, evaluate, series_of
from tests.recordings import WINDOW_S

STEP_S = 2.0
STAGE = "kneewatch:cascade_stage"
FINDINGS = 'ALERTS{kneewatch="finding",alertstate="firing"}'
CAUSES = 'ALERTS{kneewatch="cause",alertstate="firing"}'
RANKS = {word: int(severity) for severity, word in WORDS.items()}

Verdict = Mapping[str, int]
"""Severities by rule or cause id; `stage` is the stage's number."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A step at which the two disagree, and no neighbouring step of the other agrees."""

    at: int
    key: str
    sidecar: int
    prometheus: int


def sidecar(path: Path, plan: Plan, *, steps: int, first_s: float) -> list[Verdict | None]:
    """The sidecar's verdict at each step; None where it had none."""
    profile = Profile(window_s=plan.window_s, targets=plan.targets)
    stream = TargetStream("h:1", profile, Limits())
    rules, _ = expressible(plan)
    judged = {rule.id for rule in rules}
    causes = {query.id for query in cause_queries(plan)}
    told: list[Verdict | None] = [None] * steps
    for entry in CaptureReader(path):
        at = min(steps - 1, round((entry.t_s - first_s) / STEP_S))
        for diagnosis in stream.replay(entry):
            if diagnosis.stage is None:
                continue
            verdict = {"stage": diagnosis.stage.number}
            verdict |= {
                finding.rule.id: int(finding.severity)
                for finding in diagnosis.findings
                if finding.severity and finding.rule.id in judged
            }
            verdict |= {c.id: int(c.severity) for c in diagnosis.causes if c.id in causes}
            told[at] = verdict
    return told


def prometheus(path: Path, plan: Plan, folder: Path) -> tuple[list[Verdict], int, float]:
    """Prometheus's verdict at each step, the number of steps, and the first time."""
    series, steps, first_s = series_of(path, step_s=STEP_S, instance="h:1")
    answers = evaluate(
        folder,
        rule_files(plan)[RULES_FILE],
        series,
        (STAGE, FINDINGS, CAUSES),
        step_s=STEP_S,
        steps=steps,
    )
    told: list[Verdict] = []
    for at in range(steps):
        number = max((int(one.value) for one in answers[STAGE][at]), default=0)
        verdict = {"stage": number}
        for kind, label in ((FINDINGS, "rule"), (CAUSES, "cause")):
            for sample in answers[kind][at]:
                key, rank = _label(sample, label), RANKS[_label(sample, "severity")]
                verdict[key] = max(verdict.get(key, 0), rank)
        told.append(verdict)
    return told, steps, first_s


def differences(path: Path, folder: Path, plan: Plan | None = None) -> list[Difference]:
    """Where the two disagree by more than one step."""
    made = plan or Plan(window_s=WINDOW_S, interval_s=STEP_S)
    theirs, steps, first_s = prometheus(path, made, folder)
    ours = sidecar(path, made, steps=steps, first_s=first_s)
    found: list[Difference] = []
    for at, mine in enumerate(ours):
        if mine is None:
            continue
        for key in sorted({*mine, *theirs[at]}):
            if not (_near(ours, at, key, theirs[at]) or _near(theirs, at, key, mine)):
                found.append(Difference(at, key, mine.get(key, 0), theirs[at].get(key, 0)))
    return found


def _near(verdicts: Sequence[Verdict | None], at: int, key: str, wanted: Verdict) -> bool:
    """Whether any verdict around a step says of a key what is wanted."""
    around = verdicts[max(0, at - 1) : at + 2]
    return any(one is not None and one.get(key, 0) == wanted.get(key, 0) for one in around)


def _label(sample: Sample, name: str) -> str:
    found = re.search(rf'{name}="([^"]*)"', sample.labels)
    return found[1] if found else ""
