"""Evidence for and against a cause, and the confidence that results. Pure.

Confidence is a sum of log-odds. Each piece of evidence adds its weight times its strength: 0.5 if
its value is at the threshold, 1 at twice the threshold. Evidence against the cause subtracts.
`make accuracy` checks on recordings what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.capacity import DegreeComparison, LearnedKnee
from kneewatch.diagnose.cause import Cause, Evidence
from kneewatch.diagnose.deployment.server_state import AdapterUse, GpuState
from kneewatch.diagnose.lengths import Departure, LiveWorkload
from kneewatch.rules.cascade import Stage, staged
from kneewatch.rules.facts import Moment
from kneewatch.rules.rule import INFO, OK, Finding, Severity

TABLES = packaged_tables("diagnose.causes", "causes.toml")
GUIDE = {name: tuple(table.get("guide", ())) for name, table in TABLES.items()}
"""The sections of the sizing guide about each cause."""

CONCLUDED_FROM = 0.5
"""A cause is concluded from even odds on."""

LISTED_FROM = 0.25
"""Values of at least this strength are listed as evidence: half of the threshold is enough."""

DOUBTFUL_BELOW = 0.6
"""Causes with less confidence than this are only `info` and do not page anyone."""


class ReplacedProcess(Struct, frozen=True):
    """A vLLM process that was replaced.

    - `t_s`: when the next process was first seen.
    - `uptime_s`: how long this process ran; None if unknown.
    - `last_page`: what its last page showed, in words.
    - `away_s`: how long no page was read between this process and the next one.
    - `broke_off`: it had requests in flight or a cause at warning, so it was not drained on
      purpose.
    """

    t_s: float
    uptime_s: float | None = None
    last_page: str = ""
    broke_off: bool = False
    away_s: float = 0.0


STEADY = staged(0, 0.0, OK, None, ())


class Facts(Moment, frozen=True):
    """Everything that a cause may read about one engine at one moment.

    The defaults are those of an engine without history, such as a tier's average engine or an
    engine that is compared with its peers.

    - `served_s`: seconds since the process generated its first token; inf if unknown.
    - `missing`: the metrics that each unknown signal lacks.
    - `findings`: findings by rule id.
    - `gpus`: the target's GPUs; with `gpus_guessed`, GPUs that may be the target's.
    - `gpus_lost`: a line for each GPU that does not answer.
    - `adapters`: LoRA adapters that had a slot in the window; only filled while requests wait.
    - `endless`: answers far longer than the stated workload; only filled while many end at their
      limit.
    - `workload`: the requests of an hour compared with the stated workload. Like `endless`, None if
      no workload is stated.
    - `knee`: the load that this engine can carry, learned from its own windows.
    - `split`: what the stated benchmarks show about its tensor-parallel degree.
    """

    now_s: float = 0.0
    served_s: float = math.inf
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    findings: Mapping[str, Finding] = field(default_factory=dict[str, Finding])
    stage: Stage = STEADY
    restarts: Sequence[ReplacedProcess] = ()
    gpus: Sequence[GpuState] = ()
    gpus_guessed: bool = False
    gpus_lost: Sequence[str] = ()
    adapters: Sequence[AdapterUse] = ()
    endless: Departure | None = None
    workload: LiveWorkload | None = None
    knee: LearnedKnee | None = None
    split: DegreeComparison | None = None

    def get(self, signal: str, default: float = 0.0) -> float:
        """A signal's value; `default` if it has none."""
        value = self.values.get(signal)
        return default if value is None else value

    def held(self, streak: str, seconds: float) -> bool:
        """Whether a condition has held for `seconds`; they are scaled like the rules' durations."""
        return self.streaks_s.get(streak, -1.0) >= seconds * self.scale

    def severity(self, rule_id: str) -> Severity:
        """The severity of a rule's finding, including its clear time; ok if unknown."""
        finding = self.findings.get(rule_id)
        return finding.held if finding else OK


class Case(Struct):
    """Collects the evidence for one cause."""

    id: str
    summary: str
    lever: str
    severity: Severity
    log_odds: float = 0.0
    apart: bool = False
    root: bool = False
    guide: tuple[str, ...] = ()
    """Sections of the sizing guide, where they are not those of the cause's table."""
    evidence: list[Evidence] = field(default_factory=list[Evidence])
    against: list[Evidence] = field(default_factory=list[Evidence])

    def weigh(
        self,
        signal: str,
        value: float | None,
        threshold: float | None,
        weight: float,
        text: str,
        *,
        below: bool = False,
    ) -> None:
        """Add evidence: for the cause if the weight is positive, against it if negative.

        With `below`, values below the threshold are strong evidence instead of values above it. A
        value far short of its threshold supports neither side and is not listed.
        """
        if value is None:
            return
        share = strength(value, threshold, below=below)
        self.log_odds += weight * share
        if share >= LISTED_FROM:
            side = self.evidence if weight >= 0 else self.against
            side.append(Evidence(signal, value, threshold, text))

    def close(self) -> Cause | None:
        """The cause; None if its confidence is too low."""
        confidence = chance(self.log_odds)
        if confidence < CONCLUDED_FROM:
            return None
        severity = self.severity if confidence >= DOUBTFUL_BELOW else INFO
        return Cause(
            id=self.id,
            confidence=round(confidence, 2),
            severity=severity,
            summary=self.summary,
            evidence=tuple(self.evidence),
            against=tuple(self.against),
            guide=self.guide or GUIDE.get(self.id, ()),
            lever=self.lever,
            apart=self.apart,
            root=self.root,
        )


def chance(log_odds: float) -> float:
    """The probability, 0 to 1, for these log-odds."""
    return 1 / (1 + math.exp(-log_odds))


def strength(value: float, threshold: float | None, *, below: bool = False) -> float:
    """The strength of a value as evidence, from 0 to 1.

    It is 0.5 at the threshold and 1 at twice the threshold; with `below`, 1 at half of the
    threshold. Values short of the threshold have less than 0.5.
    """
    if threshold is None or threshold <= 0:
        return 1.0
    if below:
        return 1.0 if value <= threshold / 2 else 0.5 * threshold / value
    return min(1.0, max(0.0, 0.5 * value / threshold))
