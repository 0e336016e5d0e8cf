"""The verdict on one engine at one moment. It is the JSON document kneewatch.diagnosis/1. Pure.

Times are rounded to milliseconds and numbers to six digits when a verdict is made, so that a
verdict that was encoded and decoded again is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.diagnose.changed import Changed
from kneewatch.diagnose.recommend.recommendation import (
    Recommendation,
    in_document,
    with_current_values,
)
from kneewatch.rules.cascade import Stage
from kneewatch.rules.rule import IN_BOUNDS, OK, STATES, WARNING, WORDS, Finding, Severity, State
from kneewatch.rules.wire import (
    Figure,
    UnixTime,
    read,
    rounded,
    to_ms,
    written,
    written_as,
)

SCHEMA: Literal["kneewatch.diagnosis/1"] = "kneewatch.diagnosis/1"


class Evidence(Struct, frozen=True):
    """A measured value for or against a cause, and its text. `threshold` is None if there is
    none."""

    signal: str
    value: Figure | None = None
    threshold: Figure | None = None
    text: str = ""

    def rounded(self) -> Evidence:
        """The evidence with numbers as in documents."""
        return Evidence(self.signal, rounded(self.value), rounded(self.threshold), self.text)


class Counterfactual(Struct, frozen=True):
    """A value at which a cause would no longer be concluded; from there upwards if `above`, else
    downwards."""

    signal: str
    now: Figure
    at: Figure
    above: bool


class Cause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A concluded cause. `lever` is the first thing to do, as text.

    - `since_s`: None if unknown.
    - `seen_s`: the time that all numbers belong to. It is the verdict's time; during the clear
      time, the last time at which the cause was concluded.
    - `unless`: values at which the cause would not have been concluded; only for a verdict's first
      cause.
    - `docs`: the address of the cause's page, if there is one.
    - `apart`: the cause explains no other cause now. Not in documents.
    - `root`: the cause now explains those in its record's `heads`; otherwise they explain it. Not
      in documents.
    """

    id: str
    confidence: Figure = written(0.0)
    severity: Severity
    since_s: UnixTime | None = written_as("since", None)
    seen_s: UnixTime | None = written_as("seen", None)
    summary: str = written("")
    evidence: tuple[Evidence, ...] = written(())
    against: tuple[Evidence, ...] = written(())
    guide: tuple[str, ...] = written(())
    lever: str = written("")
    explains: tuple[str, ...] = written(())
    unless: tuple[Counterfactual, ...] = written(())
    docs: str = ""
    apart: bool = False
    root: bool = False

    @property
    def badness(self) -> tuple[Severity, float]:
        """A sort key: severity, confidence."""
        return self.severity, self.confidence

    def rounded(self) -> Self:
        """The cause with times and numbers as in documents."""
        return replace(
            self,
            since_s=None if self.since_s is None else to_ms(self.since_s),
            seen_s=None if self.seen_s is None else to_ms(self.seen_s),
            evidence=tuple([item.rounded() for item in self.evidence]),
            against=tuple([item.rounded() for item in self.against]),
            unless=tuple(
                [
                    Counterfactual(point.signal, now, at, point.above)
                    for point in self.unless
                    if (now := rounded(point.now)) is not None
                    and (at := rounded(point.at)) is not None
                ]
            ),
        )


AnyCause = TypeVar("AnyCause", bound=Cause)


class Symptom(NamedTuple):
    """A row of the guide's list of symptoms: what users see, and what to do first."""

    words: str
    action: str

    def __str__(self) -> str:
        return f"{self.words} ({self.action})"


SYMPTOMS = {
    "S1": Symptom(
        "TTFT too high at low concurrency",
        "check the prefix hit ratio first, then the tensor-parallel degree",
    ),
    "S2": Symptom("ITL spikes under mixed load", "chunked prefill first"),
    "S3": Symptom(
        "throughput plateau too low",
        "raise a limit that binds, then quantize weights and KV cache, before adding hardware",
    ),
    "S4": Symptom(
        "TTFT and ITL targets cannot both be met",
        "P/D disaggregation, after what helps without new servers",
    ),
    "S5": Symptom(
        "throughput per GPU falls as tensor parallelism grows",
        "lower the tensor-parallel degree and add replicas",
    ),
    "S6": Symptom(
        "ITL too high at low concurrency while the GPU has spare compute",
        "speculative decoding before more hardware",
    ),
    "S7": Symptom(
        "TTFT spikes for some tenants, unrelated to prompt length",
        "check how often LoRA adapters are swapped",
    ),
    "S8": Symptom(
        "P99 latency good at low load, too high at peak load",
        "add replicas or quantize before the next peak",
    ),
}


def symptom_actions(symptoms: Iterable[str]) -> dict[str, str]:
    """The action that the guide recommends for each symptom."""
    return {symptom: SYMPTOMS[symptom].action for symptom in symptoms if symptom in SYMPTOMS}


Value = str | int | float | bool


class LogFact(Struct, frozen=True):
    """A fact about the server, and the log line that it came from."""

    value: Value
    line: str


class KnownFact(Struct, frozen=True):
    """A fact about the server: its source, and how long before the verdict it was read there."""

    name: str
    value: Value | None
    source: str
    age_s: Figure | None = 0.0


class UnknownFact(Struct, frozen=True):
    """A fact that is not known, and how the user can supply it."""

    name: str
    supply: str


class Server(Struct, frozen=True):
    """The facts about a server at the time of a verdict."""

    facts: Sequence[KnownFact] = ()
    notes: Sequence[str] = ()
    unknown: Sequence[UnknownFact] = ()


NO_STAGE = "cascade_stage: "
"""Prefix of the line in `unknown` that says why the stage is unknown."""

UNKNOWN_STAGE = Stage()


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict on one engine at one moment.

    `unknown` says why a signal or the stage is unknown. `judged_against` says what latencies were
    compared with. `window_s` is the time that the window really covers; it is shorter after a start
    or restart. `server` has the facts about the server; None if only its page was read. `log` are
    the facts of its log, if the user asked for them.
    """

    schema: Literal["kneewatch.diagnosis/1"] = written(SCHEMA)
    t_s: UnixTime = field(name="t")
    target: str
    engine: str = written("")
    model: str = written("")
    tier: str | None = written(None)
    health: State
    stage: Stage = written(UNKNOWN_STAGE)
    changed: Changed | None = written(None)
    causes: Sequence[Cause] = written([])
    symptoms: Sequence[str] = written([])
    symptom_actions: Mapping[str, str] = msgspec.field(default_factory=lambda: dict[str, str]())
    findings: Sequence[Finding] = written([])
    recommendations: Sequence[Recommendation] = written([])
    values: Mapping[str, Figure | None] = written_as("signals", {})
    unknown: Sequence[str] = written([])
    window_s: Figure = written(0.0)
    judged_against: str = written("nothing that is known")
    server: Server | None = None
    log: Mapping[str, LogFact] | None = None

    @property
    def was_read(self) -> bool:
        """Whether the engine was on a page that could be read; its stage may still be unknown."""
        return self.stage.number is not None or bool(self.values)

    @property
    def stage_unknown(self) -> str:
        """Why the stage is unknown, as text; empty if it is known."""
        if self.stage.number is not None:
            return ""
        if not self.was_read:
            return self.judged_against.removeprefix("nothing: ")
        return next(
            (line.removeprefix(NO_STAGE) for line in self.unknown if line.startswith(NO_STAGE)),
            "required signals are unknown",
        )

    @property
    def headline(self) -> str:
        """The id that decides the verdict; empty if there is no cause.

        Usually the first cause. If that is only info and a finding is worse, the rule of the worst
        finding.
        """
        if not self.causes:
            return ""
        if self.causes[0].severity >= min(self.severity, WARNING):
            return self.causes[0].id
        worst = max(self.findings, key=lambda finding: finding.severity, default=None)
        graver = worst is not None and worst.severity >= WARNING
        return worst.rule if worst is not None and graver else ""

    @property
    def severity(self) -> Severity:
        """The worst severity of causes, stage and findings."""
        return worst_of(self.causes, self.stage, self.findings)


def worst_of(causes: Sequence[Cause], stage: Stage, findings: Sequence[Finding]) -> Severity:
    """The worst of the severities of causes, stage and findings; ok if there are none."""
    crossed = [f.severity for f in findings if f.state not in IN_BOUNDS]
    return max([stage.severity or OK, *[c.severity for c in causes], *crossed])


# --- As JSON --------------------------------------------------------------------------------------

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Verdict)
WORDS_OF = {
    "schema": (SCHEMA,),
    "health": tuple(STATES),
    "state": tuple(STATES),
    "severity": tuple(WORDS.values()),
    "held": tuple(WORDS.values()),
}
"""The allowed words of a document's keys."""


def documented(verdict: Verdict) -> Verdict:
    """The verdict as documents contain it: symptoms have their actions, recommendations the current
    signal values, and causes lack what only the judge needs."""
    if not (verdict.causes or verdict.recommendations or verdict.symptoms):
        return verdict
    return replace(
        verdict,
        causes=[told(cause) for cause in verdict.causes],
        symptom_actions=symptom_actions(verdict.symptoms),
        recommendations=[
            in_document(with_current_values(advice, verdict.values))
            for advice in verdict.recommendations
        ],
    )


def told(cause: AnyCause) -> AnyCause:
    """A cause as documents contain it."""
    return replace(cause, apart=False, root=False)


def encode(verdict: Verdict) -> bytes:
    """The verdict as JSON. NaN and infinity, which JSON lacks, become null."""
    return _ENCODER.encode(documented(verdict))


def decode(data: bytes | str) -> Verdict:
    """Decode a verdict. Unknown keys are ignored, because keys are only ever added.

    Raises:
        DocumentError: it is not such a document, or a value has the wrong type.
    """
    return read(_DECODER, data, schema=SCHEMA, words=WORDS_OF)


LOG_BASIS = "nothing: a log has no metrics"
"""What a verdict from a log alone is judged against."""


class LogFailure(Struct, frozen=True):
    """Why a server did not start or died, according to its log, and changes that would let it
    start."""

    cause: Cause
    recommendations: tuple[Recommendation, ...]
    unknown: tuple[str, ...]
