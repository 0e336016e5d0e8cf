"""Prometheus against the sidecar: the same recording, the same rules, the same verdicts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits
from kneewatch.dashboards.prometheus.alerts import expressible
from kneewatch.dashboards.prometheus.causes import cause_queries
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, Flavor, rule_files
from kneewatch.dashboards.prometheus.rule_group import CAUSE, FINDING, Plan
from kneewatch.diagnose.diagnosis_config import Profile
from tests.dashboards.promtool import Sample, evaluate, needed, series_of
from tests.recordings import WINDOW_S

STEP_S = 2.0
STAGE = "kneewatch:cascade_stage"
FINDINGS, CAUSES = FINDING, CAUSE
GROUPS = ("kneewatch", "kneewatch-observer")

Verdict = Mapping[str, int]
"""Severities by rule or cause id; `stage` is the stage's number."""


class Difference(Struct, frozen=True):
    """A step at which the two disagree, and no neighbouring step of the other agrees."""

    at: int
    key: str
    sidecar: int
    prometheus: int


def sidecar(entries: Iterable[Entry], plan: Plan) -> Iterator[tuple[float, Verdict | None]]:
    """When each page was seen, and the sidecar's verdict then; None where it had none."""
    profile = Profile(window_s=plan.window_s, targets=plan.targets)
    stream = TargetStream("h:1", profile, Limits())
    rules, _ = expressible(plan)
    judged = {rule.id for rule in rules}
    causes = {query.record.id for query in cause_queries(plan)}
    for entry in entries:
        verdict: Verdict | None = None
        for diagnosis in stream.replay(entry):
            if diagnosis.stage is None:
                continue
            verdict = {"stage": diagnosis.stage.number}
            verdict |= {
                finding.rule.id: int(finding.held)
                for finding in diagnosis.findings
                if finding.held and finding.rule.id in judged
            }
            verdict |= {c.id: int(c.severity) for c in diagnosis.causes if c.id in causes}
        yield entry.t_s, verdict


def prometheus(path: Path, plan: Plan, rules: str, folder: Path) -> tuple[list[Verdict], float]:
    """Prometheus's verdict at each step, and the first step's time."""
    series, steps, first_s = series_of(path, step_s=STEP_S, instance="h:1")
    asked = (STAGE, FINDINGS, CAUSES)
    answers = evaluate(folder, rules, series, asked, step_s=STEP_S, steps=steps)
    verdicts: list[Verdict] = []
    for at in range(steps):
        shown = [sample for expr in asked for sample in answers[expr][at]]
        verdicts.append(verdict_of((_labels(sample), sample.value) for sample in shown))
    return verdicts, first_s


def verdict_of(samples: Iterable[tuple[Mapping[str, str], float]]) -> Verdict:
    """What is recorded of one engine, by the series' labels: its stage, and what is in force."""
    verdict = {"stage": 0}
    for labels, value in samples:
        key = labels.get("rule") or labels.get("cause", "stage").partition(":")[0]
        verdict[key] = max(verdict.get(key, 0), int(value))
    return verdict


def differences(
    path: Path,
    folder: Path,
    plan: Plan | None = None,
    *,
    flavor: Flavor = Flavor.PROMETHEUS,
    wanted: Callable[[Mapping[str, Any]], bool] = lambda _rule: True,
) -> list[Difference]:
    """Where the two disagree by more than one step; of rules that are not wanted Prometheus says
    nothing."""
    used_plan = plan or Plan(window_s=WINDOW_S, interval_s=STEP_S, scrape_s=STEP_S)
    document = yaml.load(rule_files(used_plan, flavor)[RULES_FILE], yaml.CSafeLoader)
    # The other groups tell nothing of these verdicts, and evaluating them takes as long.
    judging = needed([group for group in document["groups"] if group["name"] in GROUPS], wanted)
    theirs, first_s = prometheus(path, used_plan, json.dumps({"groups": judging}), folder)
    ours: list[Verdict | None] = [None] * len(theirs)
    for t_s, verdict in sidecar(CaptureReader(path), used_plan):
        at = min(len(ours) - 1, round((t_s - first_s) / STEP_S))
        ours[at] = verdict or ours[at]
    return disagreements(ours, theirs)


def disagreements(
    ours: Sequence[Verdict | None], theirs: Sequence[Verdict], *, steps: int = 1
) -> list[Difference]:
    """Where neither says what the other does, `steps` before or after."""
    differing: list[Difference] = []
    for at, mine in enumerate(ours):
        if mine is None:
            continue
        around = slice(max(0, at - steps), at + steps + 1)
        for key in sorted({*mine, *theirs[at]}):
            if not (_any(ours[around], key, theirs[at]) or _any(theirs[around], key, mine)):
                differing.append(Difference(at, key, mine.get(key, 0), theirs[at].get(key, 0)))
    return differing


def _any(verdicts: Sequence[Verdict | None], key: str, wanted: Verdict) -> bool:
    """Whether any verdict says of a key what is wanted."""
    return any(
        verdict is not None and verdict.get(key, 0) == wanted.get(key, 0) for verdict in verdicts
    )


def _labels(sample: Sample) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', sample.labels))
