"""Evidence for and against a cause, and the confidence it adds up to. Pure.

Confidence is a sum of log-odds, not a constant: each piece of evidence adds its weight times how
far its value lies beyond the threshold (half at the threshold, whole at twice the threshold),
evidence against takes away. `make accuracy` checks what the numbers mean on recordings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from kneewatch.diagnose.causes.lora_adapters import AdapterUse
from kneewatch.diagnose.gpu import GpuState
from kneewatch.diagnose.learned.knee import CurveLearner, LearnedKnee
from kneewatch.diagnose.learned.length_drift import Departure, Drift
from kneewatch.diagnose.learned.live_workload import LiveWorkload
from kneewatch.diagnose.sizing.benchmark.operating_point import Comparison
from kneewatch.rules.cascade import Stage
from kneewatch.rules.facts import Moment
from kneewatch.rules.rule import INFO, OK, Finding, Severity

CONCLUDED_FROM = 0.5
"""Below even odds a cause is not concluded."""

LISTED_FROM = 0.25
"""Strength from which a value is listed as evidence: that of half its threshold."""

DOUBTFUL_BELOW = 0.6
"""A cause with less confidence than this is only `info` and pages nobody."""


class Evidence(Struct, frozen=True):
    """A measured value for or against a cause, and its text. `threshold` is None where none
    applies."""

    signal: str
    value: float | None
    threshold: float | None
    text: str


class ReplacedProcess(Struct, frozen=True):
    """A vLLM process that was replaced: when the next one was first seen, how long it ran (None
    where that is unknown), and its last page in words. `broke_off`: it had requests in flight or a
    cause at warning, so that nobody drained it on purpose."""

    t_s: float
    uptime_s: float | None = None
    last_page: str = ""
    broke_off: bool = False


STEADY = Stage(0, 0.0, Severity.OK, None, ())


class Facts(Moment, frozen=True):
    """All that a cause may look at, for one engine at one moment. The defaults are those of an
    engine without a past: a tier's average engine, or one beside its peers.

    - `missing`: the metrics that each unknown signal lacks; `findings`: by rule id.
    - `gpus`: the target's GPUs; with `gpus_guessed`, GPUs that may be its own. `gpus_lost`: a line
      for each that does not answer.
    - `adapters`: LoRA adapters that had a slot in the window; only filled while requests wait.
    - `lengths`: answers' lengths against those of quiet times; only filled while many more than
      then end at their limit, and None where too few are known.
    - `endless`: answers far longer than the stated workload, filled while many end at their limit;
      `workload`: the requests of an hour against it. None without a stated workload.
    - `knee`: the load that this engine carries, learned from its own windows, which `curve` holds;
      `split`: what the stated benchmarks say about its tensor-parallel degree.
    """

    now_s: float = 0.0
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    findings: Mapping[str, Finding] = field(default_factory=dict[str, Finding])
    stage: Stage = STEADY
    restarts: Sequence[ReplacedProcess] = ()
    gpus: Sequence[GpuState] = ()
    gpus_guessed: bool = False
    gpus_lost: Sequence[str] = ()
    adapters: Sequence[AdapterUse] = ()
    lengths: Drift | None = None
    endless: Departure | None = None
    workload: LiveWorkload | None = None
    knee: LearnedKnee | None = None
    curve: CurveLearner | None = None
    split: Comparison | None = None

    def get(self, signal: str, default: float = 0.0) -> float:
        """A signal's value, or `default` where it has none."""
        value = self.values.get(signal)
        return default if value is None else value

    def held(self, streak: str, seconds: float) -> bool:
        """Whether a condition has held for `seconds`, scaled like the rules' durations."""
        return self.streaks_s.get(streak, -1.0) >= seconds * self.scale

    def severity(self, rule_id: str) -> Severity:
        """A finding's severity, clear time included; ok where it is unknown."""
        finding = self.findings.get(rule_id)
        return finding.held if finding else OK


class Counterfactual(Struct, frozen=True):
    """The value of a signal from which on a cause would not be concluded: upwards if `above`, else
    downwards."""

    signal: str
    now: float
    at: float
    above: bool


class Cause(Struct, frozen=True):
    """A concluded cause. `lever` is the first thing to do, as text.

    All its numbers are of one moment, `seen_s`: that of the diagnosis or, during its clear time,
    the last one at which it was concluded. `unless` holds, for the first cause of a diagnosis, the
    values at which it would not have been concluded then. `apart`: it explains no other cause now.
    `root`: now it explains the causes in its record's `heads`, which otherwise explain it.
    """

    id: str
    confidence: float
    severity: Severity
    summary: str
    evidence: tuple[Evidence, ...]
    against: tuple[Evidence, ...]
    guide: tuple[str, ...]
    lever: str
    since_s: float = math.nan
    seen_s: float = math.nan
    explains: tuple[str, ...] = ()
    unless: tuple[Counterfactual, ...] = ()
    apart: bool = False
    root: bool = False


class Case(Struct):
    """Collects the evidence for one cause."""

    id: str
    summary: str
    lever: str
    guide: tuple[str, ...]
    severity: Severity
    log_odds: float = 0.0
    apart: bool = False
    root: bool = False
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
        """Add evidence: for the cause with a positive weight, against it with a negative one.

        `below`: a value says the more the further it lies below its threshold, not above. A value
        far short of its threshold supports neither side and is not listed.
        """
        if value is None:
            return
        share = strength(value, threshold, below=below)
        self.log_odds += weight * share
        if share >= LISTED_FROM:
            side = self.evidence if weight >= 0 else self.against
            side.append(Evidence(signal, value, threshold, text))

    def close(self) -> Cause | None:
        """The cause, or None where the confidence is too low."""
        confidence = chance(self.log_odds)
        if confidence < CONCLUDED_FROM:
            return None
        severity = self.severity if confidence >= DOUBTFUL_BELOW else INFO
        return Cause(
            self.id,
            round(confidence, 2),
            severity,
            self.summary,
            tuple(self.evidence),
            tuple(self.against),
            self.guide,
            self.lever,
            apart=self.apart,
            root=self.root,
        )


def chance(log_odds: float) -> float:
    """Log-odds as a probability, 0 to 1."""
    return 1 / (1 + math.exp(-log_odds))


def strength(value: float, threshold: float | None, *, below: bool = False) -> float:
    """The strength of a value as evidence, 0 to 1: 0.5 at its threshold, 1 at twice the threshold
    (or, with `below`, at half of it), less than 0.5 short of it."""
    if threshold is None or threshold <= 0:
        return 1.0
    if below:
        return 1.0 if value <= threshold / 2 else 0.5 * threshold / value
    return min(1.0, max(0.0, 0.5 * value / threshold))
