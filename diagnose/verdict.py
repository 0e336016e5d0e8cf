"""The verdict on one engine at one moment. It is the JSON document kneewatch.diagnosis/1. Pure.

Times are rounded to milliseconds and numbers to six digits when a verdict is made, so that a
verdict that was encoded and decoded again is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.diagnose.cause import Cause as Cause
from kneewatch.diagnose.cause import Counterfactual as Counterfactual
from kneewatch.diagnose.cause import Evidence as Evidence
from kneewatch.diagnose.latency_split import Changed
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.rules.cascade import Stage
from kneewatch.rules.rule import IN_BOUNDS, OK, WARNING, Finding, Severity, State
from kneewatch.rules.wire import Figure, Internal, UnixTime, to_ms, written, written_as

SCHEMA: Literal["kneewatch.diagnosis/1"] = "kneewatch.diagnosis/1"


class Symptom(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the guide's list of symptoms, symptoms.toml: what users see, and what to do first.

    It shows while one of `causes` lasts; without any, in a situation (engine/diagnosis.py).
    """

    words: str
    action: str
    causes: tuple[str, ...] = ()


SYMPTOMS = read_as(packaged_tables("diagnose", "symptoms.toml"), dict[str, Symptom])
SymptomId = Annotated[str, Meta(extra_json_schema={"enum": list(SYMPTOMS)})]


Value = str | int | float | bool


class LogFact(Struct, frozen=True):
    """A fact about the server.

    - `value`: the value.
    - `line`: the log line that it came from.
    """

    value: Value
    line: str


class KnownFact(Struct, frozen=True, omit_defaults=True):
    """A fact about the server.

    - `name`: the setting's key, or the name of a flag or label with underscores.
    - `value`: the value, as a boolean or number if it is one.
    - `source`: a setting, the metrics page, the server's other endpoints, its process on this node,
      the spec of its pod, its log, the GPUs that the process uses, or the model's config.json.
    - `age_s`: seconds since it was read there.
    """

    name: str
    value: Value | None
    source: str
    age_s: Figure | None = written(0.0)
    read_s: Internal[float] = 0.0
    """When it was read there; in a verdict its age says so."""


class UnknownFact(Struct, frozen=True):
    """A fact that is not known.

    - `name`: the setting's key.
    - `supply`: how the user can supply it.
    """

    name: str
    supply: str


class Server(Struct, frozen=True, omit_defaults=True):
    """The facts about a server at the time of a verdict.

    - `facts`: each fact once, from the source that takes precedence.
    - `notes`: conflicts between sources with both values, and what could not be read.
    - `unknown`: facts that the recommendations lack.
    """

    facts: Sequence[KnownFact] = written(())
    notes: Sequence[str] = written(())
    unknown: Sequence[UnknownFact] = written(())
    launch: Internal[Mapping[str, Value | None] | None] = None
    """Before it is in a verdict: the facts that only another launch changes, by name."""

    def value(self, name: str) -> Value | None:
        """A fact's value; None if unknown."""
        return next((fact.value for fact in self.facts if fact.name == name), None)

    def at(self, t_s: float) -> Server:
        """The facts as a verdict at `t_s` contains them."""
        t_s = to_ms(t_s)
        facts = [
            replace(fact, age_s=to_ms(max(t_s - fact.read_s, 0.0)), read_s=0.0)
            for fact in self.facts
        ]
        return Server(facts, self.notes, self.unknown)


NO_STAGE = "cascade_stage: "
"""Prefix of the line in `unknown` that says why the stage is unknown."""

UNKNOWN_STAGE = Stage()
Signals = Annotated[
    Mapping[str, Figure | None], Meta(extra_json_schema={"$ref": "#/$defs/signals"})
]


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict on one engine at one moment. `kneewatch replay --format json` prints one document
    per line.

    - `schema`: the name and version of this document.
    - `t_s`: when the page was scraped.
    - `target`: the scraped endpoint: a server's URL without credentials, or a capture's name.
    - `engine`: the engine core within the target (vLLM's label `engine`); empty before a page could
      be read.
    - `model`: the served model (vLLM's label `model_name`); empty before a page could be read.
    - `program`: the program that serves the model, such as SGLang; absent for vLLM.
    - `tier`: the tier (replicas of one model on one GPU type) of the target; null if it is not set.
    - `health`: the worst of causes, stage and findings. It is unknown if the page could not be
      read, or if core metrics are missing and nothing worse is known.
    - `stage`: the stage of the KV memory-pressure cascade.
    - `changed`: what changed since quiet times; null while no factor is known.
    - `causes`: the causes by rank, empty if there are none. A cause that ended is not listed.
    - `symptoms`: ids of the symptoms that show, S1 to S8.
    - `symptom_actions`: what to do first about each symptom that shows, by its id: a recommended
      change, or else what the guide says.
    - `findings`: the state of every rule, in the order of the rules; empty if the page cannot be
      read.
    - `recommendations`: recommended changes, at most five for a cause, the best first.
    - `values`: every signal of the catalogue by its key.
    - `unknown`: why a signal or the stage is unknown, as `signal: reason`.
    - `window_s`: the seconds that the short window really covers: less after a start or restart, 0
      if the page cannot be read.
    - `judged_against`: what latencies were compared with: targets, the target's own baseline from
      quiet times, or nothing.
    - `proposed`: the latency targets that quiet hours suggest, by signal; absent if targets are
      set, and before four quiet hours.
    - `server`: the facts about the server; absent if only its page was read, and in the history.
    - `log`: facts of the server's start-up log by name; only with `diagnose --log`.
    """

    schema: Literal["kneewatch.diagnosis/1"] = written(SCHEMA)
    t_s: UnixTime = field(name="t")
    target: str
    engine: str = written("")
    model: str = written("")
    program: str = ""
    tier: str | None = written(None)
    health: State
    stage: Stage = written(UNKNOWN_STAGE)
    changed: Changed | None = written(None)
    causes: Sequence[Cause] = written([])
    symptoms: Sequence[SymptomId] = written([])
    symptom_actions: Mapping[str, str] = msgspec.field(default_factory=lambda: dict[str, str]())
    findings: Sequence[Finding] = written([])
    recommendations: Sequence[Advice] = written([])
    values: Signals = written_as("signals", {})
    unknown: Sequence[str] = written([])
    window_s: Figure = written(0.0)
    judged_against: str = written("nothing that is known")
    proposed: Mapping[str, Figure] | None = None
    server: Server | None = None
    log: Mapping[str, LogFact] | None = None

    @property
    def was_read(self) -> bool:
        """Whether the engine was on a page that could be read; its stage may still be unknown."""
        return self.stage.number is not None or bool(self.values)

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
        return worst_of(self.causes, self.stage, self.findings)


def worst_of(causes: Sequence[Cause], stage: Stage, findings: Sequence[Finding]) -> Severity:
    """The worst of the severities of causes, stage and findings; ok if there are none."""
    crossed = [f.severity for f in findings if f.state not in IN_BOUNDS]
    return max([stage.severity or OK, *[c.severity for c in causes], *crossed])


LOG_BASIS = "nothing: a log has no metrics"
"""What a verdict from a log alone is judged against."""


class LogFailure(Struct, frozen=True):
    """Why a server did not start or died, according to its log, and changes that would let it
    start."""

    cause: Cause
    recommendations: tuple[Advice, ...]
    unknown: tuple[str, ...]
