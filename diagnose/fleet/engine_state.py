"""One engine of a fleet at one moment: its findings, cascade stage and causes. Pure.

Some rules need history: those that must hold for longer than the window, and those that compare
with quiet times. If recording rules are loaded, their alerts decide such rules. Otherwise the rules
are listed as not judged, with the reason. Collapse (stage 4) shows only over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from kneewatch.collector.signals.expr import Dialect, InfoChanges
from kneewatch.collector.signals.signal import Signal as CatalogueSignal
from kneewatch.diagnose.causes.availability import STALLED_S, Stalled
from kneewatch.diagnose.causes.evidence import Cause, Facts
from kneewatch.diagnose.causes.gpu_faults import GPU_FAULT
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.inventory import HOUR_S, Labels, Member, Observed, Values
from kneewatch.diagnose.learned.derived_signals import MOMENTARY
from kneewatch.diagnose.ranking import CAUSES, conclude, ranked
from kneewatch.rules.cascade import (
    EVIDENCE,
    FILLING_FROM_RATIO,
    NAMES,
    Stage,
    compiled_severities,
    evidence_of,
)
from kneewatch.rules.conditions import nodes
from kneewatch.rules.facts import Baselines, Moment, Spelling, Targets, duration
from kneewatch.rules.formatting import span
from kneewatch.rules.quantities import RECENT, BaselineValue, Held, signals_of
from kneewatch.rules.rule import WINDOW_S, Rule, Severity

# --- Causes by the same records as in the sidecar -------------------------------------------------
#
# A moment's values replace the sidecar's window; how long a condition has held, baselines and
# drifts come from the metrics system, where it can tell.

_FORMS = tuple(
    form for record in CAUSES if not record.sidecar for form in record.forms if not form.sidecar
)

SIGNALS = signals_of(_FORMS)
"""Signals that an engine's causes are concluded from."""

BASELINES = {node.key: node.name for node in nodes(_FORMS) if isinstance(node, BaselineValue)}
"""Signals that are compared with quiet times, each with the key of its recorded baseline."""

LEFT_OUT = {
    **{record.id: record.sidecar for record in CAUSES if record.sidecar and not record.fleet},
    GPU_FAULT.id: "of a GPU's faults only XIDs are read; exported alerts have the others",
}
"""Causes that fleet mode cannot conclude, and why."""

REMEMBERED = (*BASELINES.values(), *RECENT.values())
"""Keys that only recording rules can provide."""

STALLED = "stalled"
_HELD = {(node.name, node.for_s.value): node for node in nodes(_FORMS) if isinstance(node, Held)}
"""Conditions that must hold for some time, by name and seconds."""


def held_queries(to: Spelling) -> dict[tuple[str, float], str]:
    """Queries by (name of a condition, seconds).

    Each query returns a series for every engine where the condition has held for that many seconds.
    """
    step = duration(to.scrape_s)
    queries: dict[tuple[str, float], str] = {}
    for held in _HELD.values():
        flag, span_s = held.flag(to), held.lasts_s(to)[1]
        if flag is not None:
            queries[held.name, span_s] = f"min_over_time(({flag})[{duration(span_s)}:{step}]) == 1"
    queries[STALLED, STALLED_S] = Stalled(whole=True).promql(to, side=True).vector
    return queries


class RecordedBaselines(Baselines, Struct, frozen=True):
    """Quiet baselines, read from the series of the recording rules."""

    values: Values

    def get(self, key: str) -> float | None:
        """The baseline of a signal; None if no recording rule has it."""
        return self.values.get(BASELINES.get(key, f"{key}:baseline"))


# --- Its state ------------------------------------------------------------------------------------

MOMENT_S = WINDOW_S
"""Rules that must hold for longer than this cannot be judged from one moment."""

OWN = (
    "running",
    "running_avg",
    "waiting",
    "waiting_by_capacity",
    "waiting_min",
    "arrival_per_s",
    "generation_tokens_per_s",
    "computed_prompt_tokens_per_s",
    "kv_usage_ratio",
    "kv_usage_avg_ratio",
    "preemption_per_s",
    "preemption_ratio_per_s",
    "prefix_hit_ratio",
    "prefix_query_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p50_s",
    "itl_p99_s",
    "itl_mean_s",
    "prompt_tokens_p50",
    "queue_share_ratio",
    "finished_error_ratio",
)
"""Signals needed for sizing, for causes across replicas and for the printed table."""

STAGE_KEYS = ("cascade_stage", "cascade_severity")
FORECAST_BY_DAEMON = ("kv_demand_ahead_ratio",)
"""Signals that need a trend, which recording rules do not compute."""

OF_CONFIG = ("kv_capacity_tokens",)
"""Signals that are read from the labels of cache_config_info."""


class Coverage(Struct, frozen=True):
    """How each rule is judged.

    - `moment`: rules judged by the values of this moment.
    - `recorded`: rules judged by the alerts of recording rules.
    - `left_out`: rules that are not judged, each with the reason.
    - `signals`: signals to query for this moment.
    - `remembered`: recorded series that are read if they exist.
    """

    moment: tuple[Rule, ...]
    recorded: tuple[Rule, ...]
    left_out: Mapping[str, str]
    signals: tuple[str, ...]
    remembered: tuple[str, ...]


def coverage(profile: Profile, recorded: Iterable[str] = ()) -> Coverage:
    """How the rules of a profile are judged; `recorded` are the signals from recording rules."""
    dialect = Dialect(profile.window_s)
    queried = {
        s.key
        for s in profile.signals()
        # A page has one adapter metric for all its engines, so no engine's own changes.
        if not isinstance(s.expr, InfoChanges) and s.expr.promql(dialect) is not None
    }
    available, provided = {*queried, *MOMENTARY, *STAGE_KEYS, *OF_CONFIG}, {*recorded}
    moment: list[Rule] = []
    by_alert: list[Rule] = []
    left_out: dict[str, str] = {}
    signals, remembered = list[str](OWN), list[str](STAGE_KEYS)
    for rule in profile.rules():
        needs = (rule.signal, *(guard.signal for guard in rule.guards))
        unknown = [key for key in needs if key not in available]
        if not unknown and rule.for_s <= MOMENT_S:
            moment.append(rule)
            signals += [key for need in needs for key in _inputs(need) if key in queried]
            continue
        remembered.append(rule.signal)
        if rule.signal in provided:
            by_alert.append(rule)
        else:
            left_out[rule.id] = _reason(rule, unknown, profile.signals())
    evidence = signals_of(tuple(when for _, when in EVIDENCE))
    for key in (*evidence, *SIGNALS):
        signals += [part for part in _inputs(key) if part in queried]
        remembered += [] if key in available else [key]
    remembered += REMEMBERED
    return Coverage(
        tuple(moment),
        tuple(by_alert),
        left_out,
        tuple(dict.fromkeys(signals)),
        tuple(dict.fromkeys(remembered)),
    )


def _inputs(key: str) -> tuple[str, ...]:
    return signals_of(MOMENTARY[key]) if key in MOMENTARY else (key,)


def _reason(rule: Rule, unknown: Sequence[str], signals: Sequence[CatalogueSignal]) -> str:
    """Why a rule cannot be judged from one moment."""
    if rule.signal.startswith("gpu_"):
        return "needs the engine's GPUs: load recording rules exported with --gpu-join"
    if unknown and unknown[0] in FORECAST_BY_DAEMON:
        return f"{unknown[0]} is a forecast: only kneewatch run makes it"
    if unknown and unknown[0] in {signal.key for signal in signals}:
        return f"{unknown[0]} is read from labels: load the recording rules"
    if unknown:
        return f"{unknown[0]} needs a baseline: load the recording rules"
    return f"must hold for {span(rule.for_s)}: load the recording rules"


class RuleHit(Struct, frozen=True):
    """A rule whose threshold is crossed, with the signal's value."""

    rule: Rule
    severity: Severity
    value: float


class Engine(Struct, frozen=True):
    """The verdict on one engine.

    `stage` is None if unknown. `causes` are ranked. `image` is its container's image; empty if
    unknown.
    """

    member: Member
    values: Values
    gpus: Values
    config: Labels
    stage: int | None
    severity: Severity
    findings: tuple[RuleHit, ...]
    causes: tuple[Cause, ...] = ()
    image: str = ""

    @property
    def health(self) -> str:
        """ok, info, warning, critical or unknown; never ok without a stage."""
        if self.stage is None and self.severity < Severity.WARNING:
            return "unknown"
        return self.severity.word

    @property
    def stage_name(self) -> str:
        """The stage's name; `unknown` if the stage is unknown."""
        return "unknown" if self.stage is None else NAMES[self.stage]

    def get(self, signal: str) -> float | None:
        """A signal's value; None if it has none."""
        return self.values.get(signal)

    @property
    def in_flight(self) -> float | None:
        """Requests running (the window's mean if known) plus queued; None if running is unknown."""
        running = self.values.get("running_avg", self.values.get("running"))
        return None if running is None else running + self.values.get("waiting", 0.0)


def engines_of(observed: Observed, profile: Profile, covered: Coverage) -> list[Engine]:
    """The verdict on every engine of a fleet."""
    evaluator = _Evaluator(profile, covered, observed.window_s)
    return [evaluator.engine(member, observed) for member in observed.shape.members]


class _Evaluator:
    """The rules of a profile, compiled for evaluating engines."""

    def __init__(self, profile: Profile, covered: Coverage, window_s: float) -> None:
        self._covered, self._targets, self._window_s = covered, profile.targets, window_s
        evicting = next(rule for rule in profile.rules() if rule.id == "KV-EVICT")
        self._severity = compiled_severities(evicting)
        self._momentary = {key: quantity.read() for key, quantity in MOMENTARY.items()}

    def engine(self, member: Member, observed: Observed) -> Engine:
        """The verdict on one engine."""
        values = dict(observed.values.get(member.key, {}))
        usual = observed.past.usual.get(member.group)
        if usual is not None:
            # Baselines that recording rules keep are the engine's own and come first.
            values.setdefault(BASELINES["prefix_hit_ratio"], usual.hit_ratio)
        gpus, config = observed.gpus.get(member.key, {}), observed.configs.get(member.key, {})
        alerts = observed.alerts.get(member.key, {})
        moment = Moment(values, self._targets, window_s=self._window_s)
        completed = dict(values)
        for key, read in self._momentary.items():
            value = read(moment)
            if value is not None:
                completed.setdefault(key, value)
        stage = stage_of(completed, self._targets, self._window_s)
        if stage is not None:
            completed["cascade_stage"] = float(stage)
            judged = Moment(completed, self._targets)
            severity = self._severity(judged)
            completed.setdefault("cascade_severity", float(severity))
        findings = [
            finding for rule in self._covered.moment if (finding := _finding(rule, completed))
        ]
        findings += [
            RuleHit(rule, alerts[rule.id], completed[rule.signal])
            for rule in self._covered.recorded
            if rule.id in alerts and rule.signal in completed
        ]
        causes = self._causes(completed, stage, member, observed)
        severity = max(
            stage_severity(completed),
            *(finding.severity for finding in findings),
            *(cause.severity for cause in causes),
            Severity.OK,
        )
        return Engine(
            member,
            completed,
            gpus,
            config,
            stage,
            severity,
            tuple(findings),
            tuple(causes),
            observed.images.get(member.key, ""),
        )

    def _causes(
        self, values: Values, stage: int | None, member: Member, observed: Observed
    ) -> list[Cause]:
        """The engine's causes, ranked; explained causes are folded into the cause that explains
        them."""
        age_s = values.get("age_s", HOUR_S if "running_hour_ago" in values else 0.0)
        facts = Facts(
            values,
            self._targets,
            observed.streaks_s.get(member.key, {}),
            observed.configs.get(member.key, {}),
            {key: values.get(name, values.get(key)) for key, name in RECENT.items()},
            RecordedBaselines(values),
            self._window_s,
            age_s,
            self._window_s / WINDOW_S,
            stage=Stage(stage or 0, 0.0, stage_severity(values), None, ()),
            gpus=observed.faulty_gpus.get(member.key, ()),
            gpus_guessed="gpus" not in observed.gpus.get(member.key, {}),
        )
        return ranked(conclude(facts))


def stage_of(values: Values, targets: Targets, window_s: float) -> int | None:
    """The cascade's stage; None if unknown.

    It is read from the recording rules, or else computed from the evidence of this moment.
    """
    recorded = values.get("cascade_stage")
    if recorded is not None:
        return int(recorded)
    usage, preempted = values.get("kv_usage_ratio"), values.get("preemption_per_s")
    if usage is None or preempted is None or "running" not in values:
        return None
    filled = min(usage, values.get("kv_usage_avg_ratio", usage)) >= FILLING_FROM_RATIO
    moment = Moment(
        {**values, "preempted_since_scrape": preempted},
        targets,
        {"filling": window_s} if filled else {},
        window_s=window_s,
    )
    return evidence_of(moment)[0]


def stage_severity(values: Values) -> Severity:
    """The severity of an engine's stage; ok if the stage is unknown."""
    return Severity(int(values.get("cascade_severity", 0.0)))


def _finding(rule: Rule, values: Values) -> RuleHit | None:
    value = values.get(rule.signal)
    if value is None or not all(guard.holds(values) for guard in rule.guards):
        return None
    severity = rule.level(value)
    return RuleHit(rule, severity, value) if severity else None
