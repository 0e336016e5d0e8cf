"""Targets fed with pages, and what is said of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.recordings import CAPTURES, NO_TARGETS

START_S = 1_795_300_000.0
INTERVAL_S = 2.0


class Target:
    """One target that is scraped every two seconds."""

    def __init__(self, *, window_s: float = 60.0, targets: Targets = NO_TARGETS) -> None:
        profile = Profile(window_s=window_s, targets=targets)
        self.stream = TargetStream("tiny", profile, Limits())
        self.now_s = START_S - INTERVAL_S

    def take(self, *bodies: str, every_s: float = INTERVAL_S) -> list[Verdict]:
        """What is said after the last of these pages."""
        diagnoses: list[Verdict] = []
        for body in bodies:
            self.now_s += every_s
            diagnoses = self.stream.take(self.now_s, body, "")
        return diagnoses

    def one(self, *bodies: str, every_s: float = INTERVAL_S) -> Verdict:
        """What is said of the only engine after the last of these pages."""
        (diagnosis,) = self.take(*bodies, every_s=every_s)
        return diagnosis


def bodies(capture: str) -> list[str]:
    """The pages of a recording, in order; failed scrapes left out."""
    entries = CaptureReader(CAPTURES / f"{capture}.jsonl.gz")
    return [entry.body for entry in entries if entry.body is not None]


def recording(capture: str) -> Path:
    """The file of a recording."""
    return CAPTURES / f"{capture}.jsonl.gz"


def cause_ids(diagnosis: Verdict) -> list[str]:
    """The ids of what is concluded."""
    return [cause.id for cause in diagnosis.causes]


def alarming(diagnoses: Iterable[Verdict]) -> list[tuple[float, str, Sequence[str]]]:
    """Diagnoses at warning or worse, with what they say: empty where all is well."""
    return [
        (
            diagnosis.t_s,
            diagnosis.health,
            [
                *cause_ids(diagnosis),
                *(f.rule for f in diagnosis.findings if f.severity >= Severity.WARNING),
            ],
        )
        for diagnosis in diagnoses
        if diagnosis.severity >= Severity.WARNING or diagnosis.health in ("warning", "critical")
    ]


def pages_config(capture: str) -> dict[str, str]:
    """The labels of cache_config_info on a recording's first page."""
    (line,) = re.findall(r"(?m)^vllm:cache_config_info\{(.*)\} ", bodies(capture)[0])
    return dict(re.findall(r'(\w+)="([^"]*)"', line))
