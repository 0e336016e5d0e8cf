"""Recording rules and alerts for throttled and faulty GPUs, alone and joined to engines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from kneewatch.dashboards.prometheus.alerts import dashboard_annotation, runbook_annotation
from kneewatch.dashboards.prometheus.cause_query import CauseQuery, Spelled, confidence, scored
from kneewatch.dashboards.prometheus.gpu_series import (
    BOARD,
    BUSY,
    CLOCK,
    FREE,
    INSTANCE,
    NAME,
    USED,
    USED_BY,
    WHERE,
    gpu_records,
    of_owner,
    owner_record,
    raw,
    series_of,
    spellings,
)
from kneewatch.dashboards.prometheus.recording_rules import FOUND
from kneewatch.dashboards.prometheus.rule_group import Alert, Group, Plan, Record
from kneewatch.diagnose.catalogue.gpu_specs import gpus, plain_name
from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM, DOUBTFUL_BELOW
from kneewatch.diagnose.causes.gpu_clocks import (
    AS_EVER,
    AT_LIMIT,
    BOARD_TERMS,
    BUSY_FROM,
    ENGINE_TERMS,
    HALF_SPEED,
    LOW_CLOCK,
    LOWERED,
    MAX_SM_CLOCK_HZ,
    NEARLY_FULL,
    QUEUED_S,
    SLOWER,
    THROTTLED_FROM,
    ThrottledGpu,
)
from kneewatch.diagnose.causes.gpu_faults import (
    LINK_ERRORS_PER_S,
    PCIE_REPLAYS_PER_S,
    WEIGHTS,
    WORKS_AGAIN,
)
from kneewatch.diagnose.causes.ranking import BY_ID
from kneewatch.diagnose.causes.record import CLEAR_S, ONSET_S
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.gpu import (
    DRAINED,
    ENERGY,
    LINK,
    LOADS,
    RECOVERY,
    REPLACE,
    RESET,
    XID,
    XID_COUNTER,
    XID_IN_WINDOW,
    XID_KEPT_S,
    XIDS,
    GpuState,
)
from kneewatch.diagnose.gpu import POWER as POWER_USAGE
from kneewatch.rules.facts import duration, number, recorded, span_s
from kneewatch.rules.rule import Severity

THROTTLED = series_of("throttled_confidence")
WORKING = series_of("working_ratio")
HEAT = series_of("heat_held_ratio")
BRAKE = series_of("brake_held_ratio")
POWER = series_of("power_held_ratio")
FULL_HZ = series_of("clock_full_hz")
RATIO = series_of("clock_full_ratio")
LOW = series_of("clock_low")
USUAL = series_of("power_usual_watts")
BINDS = series_of("at_power_limit")
WANTED = series_of("throttled_wanted")
ZERO = f"({WORKING} * 0)"
HELD = number(THROTTLED_FROM)


class Reason(NamedTuple):
    """Why a GPU is throttled. `when` is a PromQL condition; earlier reasons take precedence."""

    id: str
    when: str
    text: str
    action: str


def clock_records() -> tuple[Record, ...]:
    """Recording rules: inputs of the throttling verdict, and its confidence by reason."""
    clock_hz, most_hz = series_of("gpu_sm_clock_hz"), series_of("gpu_sm_clock_most_hz")
    return (
        Record(WORKING, f"{series_of('busy_ratio')} >= {number(BUSY_FROM)}"),
        Record(HEAT, _greatest("gpu_thermal_throttle_ratio", "gpu_heat_bit_ratio")),
        Record(BRAKE, _greatest("gpu_power_brake_ratio", "gpu_power_brake_bit_ratio",
                                "gpu_board_limit_ratio", "gpu_hw_slowdown_ratio")),
        Record(POWER, _greatest("gpu_power_throttle_ratio", "gpu_power_bit_ratio")),
        Record(FULL_HZ, _by_model(f"({series_of('gpu_sm_clock_max_hz')} > 0)",
                                  clock_hz, _clocks())),
        Record(RATIO, f"{clock_hz} / ({FULL_HZ} > 0)"),
        Record(LOW, f"({most_hz} > 0) / ({FULL_HZ} > 0) < {number(LOW_CLOCK)}"),
        Record(USUAL, _by_model(f"({series_of('gpu_power_limit_default_watts')} > 0 and {LOW})",
                                LOW, _watts())),
        Record(BINDS, _at_power_limit()),
        *(Record(THROTTLED, _concluded(rank), {"reason": reason.id})
          for rank, reason in enumerate(REASONS)),
        Record(WANTED, f"max by ({BOARD}) ({THROTTLED}{{reason=~\"power_limit|setting\"}})"),
    )  # fmt: skip


def clock_alerts(plan: Plan) -> tuple[Alert, ...]:
    """Alerts for throttled GPUs by reason; an intended limit is info unless it halves the clock."""
    nearly = f"({RATIO} >= {number(NEARLY_FULL)})"
    wanted = f"({WANTED} unless ({RATIO} < {number(HALF_SPEED)}))"
    alerts: list[Alert] = []
    for reason in REASONS:
        confidence_now = f'{THROTTLED}{{reason="{reason.id}"}}'
        warning = (
            f"({confidence_now} >= {number(DOUBTFUL_BELOW)}) unless on ({BOARD}) {nearly}"
            f" unless on ({BOARD}) {wanted}"
        )
        info = f"({confidence_now} >= {number(CONCLUDED_FROM)}) unless ({warning})"
        alerts.append(_clock_alert(plan, reason, Severity.WARNING, warning))
        alerts.append(_clock_alert(plan, reason, Severity.INFO, info))
    return tuple(alerts)


def _clock_alert(plan: Plan, reason: Reason, severity: Severity, expr: str) -> Alert:
    return Alert(
        name="KneewatchGpuThrottled",
        expr=of_owner(expr),
        for_s=ONSET_S * plan.scale,
        keep_s=CLEAR_S * plan.scale,
        labels={
            "severity": severity.word,
            "kneewatch": "gpu",
            "cause": "gpu_throttled",
            "reason": reason.id,
        },
        annotations={
            "summary": f"{NAME} of {WHERE}{USED_BY} is throttled {reason.text} under load",
            "description": "gpu_throttled with confidence {{ $value | humanizePercentage }}. "
            f"Clocks and throttled time are the series {series_of('')}*.",
            "action": f"On {WHERE} {reason.action}.",
            "guide": "9.3",
        }
        | runbook_annotation(cause_page(plan.runbooks, "gpu_throttled"))
        | dashboard_annotation(plan, "kneewatch-gpus", node="Hostname"),
        by=f"{BOARD}, reason",
    )


def _at_power_limit() -> str:
    """Whether the power limit throttles it: by throttled time, or by power draw over the limit (the
    model's usual limit where the page has none)."""
    watts = series_of("gpu_power_watts")
    limit = f"(({series_of('gpu_power_limit_watts')} > 0) or {USUAL})"
    return f"({POWER} >= {HELD}) or ({watts} >= {number(AT_LIMIT)} * {limit})"


def _matters() -> str:
    """Throttled beyond what a busy GPU does at its default power limit."""
    at_watts = f"(({series_of('gpu_power_limit_watts')} > 0) or {series_of('gpu_power_watts')})"
    lowered = f"({at_watts} < {number(LOWERED)} * {USUAL})"
    by_design = f"({BINDS} unless {lowered})"
    idle = f"({series_of('gpu_idle_ratio')} >= 0.5)"
    hurt = f"({HEAT} >= {HELD}) or ({BRAKE} >= {HELD})"
    return f"({hurt} or (({LOW} unless {by_design}) unless {idle}))"


def _reasons() -> tuple[Reason, ...]:
    """The reasons in the sidecar's words, in order of precedence."""
    no_gpu = GpuState("", "", "", "")

    def reason(
        name: str,
        when: str,
        *,
        heat: float = 0.0,
        brake: float = 0.0,
        power: float = 0.0,
        setting: bool = False,
    ) -> Reason:
        gpu = ThrottledGpu(no_gpu, None, True, False, heat, brake, power, setting, None)
        return Reason(name, when, *gpu.why)

    return (
        reason("heat", f"({HEAT} >= {HELD})", heat=1.0),
        reason("board", f"({BRAKE} >= {HELD})", brake=1.0),
        reason("power_limit", BINDS, power=1.0),
        reason("setting", f"({series_of('gpu_clock_setting_ratio')} >= {HELD})", setting=True),
        reason("unknown", ""),
    )


REASONS = _reasons()
BOARDS = Spelled(
    {
        "gpu_thermal_throttle_ratio": HEAT,
        "gpu_power_brake_ratio": BRAKE,
        "gpu_power_throttle_ratio": POWER,
        "gpu_sm_clock_ratio": RATIO,
        "gpu_temperature_c": series_of("gpu_temperature_c"),
    }
)
"""A board's recorded series by the signal names that the evidence uses."""


def _concluded(at: int) -> str:
    """The confidence, for GPUs where this reason is the first that applies."""
    terms = [term for board_term in BOARD_TERMS if (term := scored(BOARDS, board_term)) is not None]
    sure = confidence(0.0, terms, ZERO)
    own = REASONS[at].when
    held = f" and {own}" if own else ""
    held += "".join(f" unless {before.when}" for before in REASONS[:at])
    return f"(({sure}) and {_matters()}){held}"


def _greatest(*keys: str) -> str:
    """The maximum of those signals that have a value."""
    return reduce(
        lambda left, right: f"(({left} > {right}) or {right} or {left})", map(series_of, keys)
    )


def _clocks() -> Mapping[str, float]:
    """Maximum SM clocks in Hz by a pattern of the model's name, longest name first."""
    names = sorted(MAX_SM_CLOCK_HZ, key=len, reverse=True)
    return {f".*{name}.*": MAX_SM_CLOCK_HZ[name] for name in names}


def _watts() -> Mapping[str, float]:
    """Board power in watts by a pattern of the catalogue's names of a GPU."""
    watts: dict[str, float] = {}
    for gpu in gpus().values():
        if any(name.startswith("NVIDIA") for name in gpu.names):
            plain = ("[^a-z0-9]+".join(plain_name(name).split()) for name in gpu.names)
            watts[f"(?i)(nvidia[^a-z0-9]+)?({'|'.join(dict.fromkeys(plain))})"] = gpu.power_watts
    return watts


def _by_model(first: str, series: str, values: Mapping[str, float]) -> str:
    """An expression, or where it has no value that of the model of each GPU of `series`."""
    by_model = (
        f'({series}{{modelName=~"{pattern}"}} * 0 + {number(value)})'
        for pattern, value in values.items()
    )
    return " or ".join((first, *by_model))


# --- Faulty GPUs: diagnose/causes/gpu_faults.py and the XIDs --------------------------------------


AILMENT = series_of("ailment")
XID_NOW = series_of("xid")
XID_NEW = series_of("xid_new")
XID_COUNTED = series_of("xid_counted")
XID_SEEN = series_of("xid_seen")
XID_WORKED = series_of("xid_worked")
LOST_S = 3600.0
"""A GPU is missing if its node's page had it within this time and no longer has it."""

PCIE_ACTION = "reseat the card or its riser, then check the slot"
LOST_ACTION = "check its kernel log (XID 79) and nvidia-smi -L"


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A kind of GPU fault, present where the PromQL condition `when` holds. `at_work`: it affects
    current work, and is not the trace of an old event."""

    id: str
    when: str
    what: str
    action: str
    severity: Severity
    at_work: bool = True


def fault_records(plan: Plan) -> tuple[Record, ...]:
    """Recording rules for the XIDs and for each kind of fault."""
    last, kept = recorded(XID), duration(XID_KEPT_S)
    codes = _codes(XIDS)
    shown = f'{XID_NOW}{{xid=~"{codes}"}}'
    changed = f"changes({last}[{duration(plan.range_s)}]) > 0"
    return (
        Record(XID_NOW, f'count_values by ({BOARD}) ("xid", {last})'),
        # An XID is new until another one replaces it; one that the first scrape shows is old.
        Record(XID_NEW, f"({shown} and on ({BOARD}) ({changed})) or ({shown} and {XID_NEW})"),
        Record(XID_COUNTED, _counted(plan, codes)),
        Record(
            XID_SEEN,
            f"(last_over_time({XID_NEW}[{kept}]) unless on ({BOARD}) ({last} == 0))"
            f" or last_over_time({XID_COUNTED}[{kept}])",
        ),
        Record(XID_WORKED, _worked(plan)),
        *(
            Record(
                AILMENT,
                fault.when,
                {
                    "ailment": fault.id,
                    "severity": fault.severity.word,
                    "at_work": str(fault.at_work).lower(),
                },
            )
            for fault in (*_by_xid(), *_by_field())
        ),
    )


def fault_alerts(plan: Plan) -> tuple[Alert, ...]:
    """One alert per kind of fault."""
    return tuple(_fault_alert(plan, fault) for fault in (*_by_xid(), *_by_field()))


def _counted(plan: Plan, codes: str) -> str:
    """XIDs within the window, where the exporter has a counter per XID."""
    window, only = duration(plan.range_s), f'xid=~"{codes}"'
    rising = f"rate({raw(plan, XID_COUNTER, only)}[{window}])"
    there = raw(plan, XID_IN_WINDOW, only)
    by = f"max by ({BOARD}, xid)"
    return f"({by} ({rising}) > 0) or ({by} ({there}) > 0)"


def _worked(plan: Plan) -> str:
    """XIDs that halt a GPU, where it is awake and has had load since: diagnose/gpu.py."""
    xid = f'{{xid=~"{_codes(code for code, xid in XIDS.items() if xid.halts)}"}}'
    halting = f"({XID_SEEN}{xid} or {XID_NOW}{xid})"
    powered = f"({recorded(CLOCK)} > 0 and on ({BOARD}) {recorded(POWER_USAGE)} > 0)"
    frozen = f"changes({recorded(ENERGY)}[{duration(plan.range_s)}]) == 0"
    loaded = " or ".join(f"{recorded(load)} > 0" for load in LOADS)
    return (
        f"({halting} and on ({BOARD}) ({powered} unless on ({BOARD}) {frozen}))"
        f" and on ({BOARD}, xid) ({XID_WORKED} or ({halting} and on ({BOARD}) ({loaded})))"
    )


def _by_xid() -> tuple[GpuFault, ...]:
    """XIDs by urgency: new ones and those that halt a GPU, those that were there at the first
    scrape, notes, and those after which the GPU works again."""
    urgent = _codes(code for code, xid in XIDS.items() if xid.urgent)
    halting = _codes(code for code, xid in XIDS.items() if xid.halts)
    running = _codes(code for code, xid in XIDS.items() if xid.urgent and not xid.halts)
    others = _codes(code for code, xid in XIDS.items() if not xid.urgent)
    seen = f'{XID_SEEN}{{xid=~"{urgent}"}}'
    at_work = f'({seen} or {XID_NOW}{{xid=~"{halting}"}}) unless on ({BOARD}, xid) {XID_WORKED}'
    now = f'{XID_NOW}{{xid=~"{running}"}}'
    note = f'{XID_SEEN}{{xid=~"{others}"}} or {XID_NOW}{{xid=~"{others}"}}'
    return (
        GpuFault("xid", at_work, _xid_text(urgent=True), _xid_action(urgent=True),
                 Severity.CRITICAL),
        GpuFault("xid_old", f"{now} unless {seen}",
                 f"{_xid_text(urgent=True)}, already present when Prometheus first scraped it",
                 _xid_action(urgent=True), Severity.WARNING, False),
        GpuFault("xid_note", note, _xid_text(urgent=False), _xid_action(urgent=False),
                 Severity.INFO, False),
        GpuFault("xid_worked", XID_WORKED,
                 f"{_xid_text(urgent=True)} was reported; the GPU works again", "",
                 Severity.INFO, False),
    )  # fmt: skip


def _xid_text(*, urgent: bool) -> str:
    meanings = {str(code): xid.meaning for code, xid in XIDS.items() if xid.urgent == urgent}
    return _chosen("$labels.xid", meanings) + " (XID {{ $labels.xid }})"


def _xid_action(*, urgent: bool) -> str:
    actions = {str(code): xid.action for code, xid in XIDS.items() if xid.urgent == urgent}
    return _chosen("$labels.xid", actions)


def _by_field() -> tuple[GpuFault, ...]:
    ecc = series_of("gpu_ecc_uncorrectable")
    rising = f"({series_of('gpu_ecc_uncorrectable_per_s')} > 0)"
    errors = "uncorrectable memory errors since the driver was loaded"
    asked = _chosen('printf "%.0f" $value', {str(code): text for code, text in RECOVERY.items()})
    here, node = recorded(CLOCK), "cluster, Hostname, hostname"
    before = f"last_over_time({here}[{duration(LOST_S)}])"
    return (
        GpuFault("recovery_wanted", f"{series_of('gpu_recovery_action')} > 0",
                 "the driver requests a recovery", asked, Severity.CRITICAL),
        GpuFault("row_remap_failed", f"{series_of('gpu_row_remap_failures')} > 0",
                 "a memory row could not be remapped", REPLACE, Severity.WARNING, False),
        GpuFault("row_remap_pending", f"{series_of('gpu_row_remap_pending')} > 0",
                 "a memory row is pending remapping", DRAINED, Severity.INFO, False),
        GpuFault("ecc_rising", f"({ecc} > 0) and {rising}",
                 f"{errors}, rising", RESET, Severity.CRITICAL),
        GpuFault("ecc", f"({ecc} > 0) unless {rising}", errors, RESET, Severity.WARNING, False),
        GpuFault("nvlink_errors",
                 f"{series_of('gpu_nvlink_error_per_s')} >= {number(LINK_ERRORS_PER_S)}",
                 "NVLink checksum errors", LINK, Severity.WARNING),
        GpuFault("nvlink_lost", f"{series_of('gpu_nvlink_recovery_failed_per_s')} > 0",
                 "an NVLink was lost and not recovered", LINK, Severity.CRITICAL),
        GpuFault("nvlink_recovered", f"{series_of('gpu_nvlink_recovery_per_s')} > 0",
                 "an NVLink was lost and recovered", LINK, Severity.WARNING),
        GpuFault("pcie_replays",
                 f"{series_of('gpu_pcie_replay_per_s')} > {number(PCIE_REPLAYS_PER_S)}",
                 "PCIe replays", PCIE_ACTION, Severity.WARNING),
        # A whole node that is missing was scaled down or is down; other alerts cover that.
        GpuFault("gone", f"({before} unless {here}) and on ({node}) {here}",
                 "missing from its node's page, which still has other GPUs", LOST_ACTION,
                 Severity.WARNING),
    )  # fmt: skip


def _fault_alert(plan: Plan, fault: GpuFault) -> Alert:
    return Alert(
        name="KneewatchGpuFault",
        expr=of_owner(f'{AILMENT}{{ailment="{fault.id}"}}'),
        for_s=ONSET_S * plan.scale,
        keep_s=CLEAR_S * plan.scale,
        labels={
            "severity": fault.severity.word,
            "kneewatch": "gpu",
            "cause": "gpu_fault",
            "ailment": fault.id,
        },
        annotations={
            "summary": f"{NAME} of {WHERE}{USED_BY}: {fault.what}",
            "description": "A hardware error, not a problem of the KV cache or the batch "
            f"({fault.id}: {{{{ $value | humanize }}}}).",
            "action": f"Drain {WHERE}: {fault.action}." if fault.action else WORKS_AGAIN,
            "guide": "9.3",
        }
        | runbook_annotation(cause_page(plan.runbooks, "gpu_fault"))
        | dashboard_annotation(plan, "kneewatch-gpus", node="Hostname"),
        by=f"{BOARD}, xid, ailment",
    )


def _codes(codes: Iterable[int]) -> str:
    return "|".join(str(code) for code in codes)


def _chosen(what: str, texts: Mapping[str, str]) -> str:
    """A Go template that prints the text for the value of `what`."""
    cases = [f'if eq ({what}) "{key}" }}}}{text}' for key, text in texts.items()]
    return "{{ " + "{{ else ".join(cases) + "{{ end }}"


# --- GPU rules joined to engines, where labels allow it -------------------------------------------


GIVEN = series_of("given")
THROTTLED_ODDS, FAULT_ODDS = recorded("gpu_throttled_log_odds"), recorded("gpu_fault_log_odds")
CLOCK_RATIO, UNWANTED = recorded("gpu_throttled_clock_ratio"), recorded("gpu_throttled_unwanted")
ENGINE_CLOCK, ENGINE_HEAT, ENGINE_XID = map(recorded, (
    "gpu_sm_clock_min_hz", "gpu_temperature_max_c", "gpu_xid_max"
))  # fmt: skip
"""An engine's lowest clock, highest temperature and highest XID, for comparison with its peers."""

FAULT_SEVERITY, FAULT_AT_WORK = recorded("gpu_fault_severity"), recorded("gpu_fault_at_work")


def joined_group(plan: Plan) -> Group:
    """An engine's GPU signals and the inputs of its GPU causes; empty without `gpu_join`."""
    if not plan.gpu_join:
        return Group("kneewatch-engine-gpus", ())
    used, free = recorded(USED), recorded(FREE)
    sure = f"max by ({BOARD}) ({THROTTLED})"
    own = f"{BOARD}, {INSTANCE}"
    return Group(
        "kneewatch-engine-gpus",
        (
            Record(GIVEN, _given(plan)),
            Record(
                recorded(FOUND[0]),
                f"{_engine(plan, 'sum', used, own)} / on ({plan.engine})"
                f" ({_engine(plan, 'sum', f'{used} + {free}', own)} > 0)",
            ),
            Record(recorded(FOUND[1]), _engine(plan, "avg", recorded(BUSY), own)),
            Record(ENGINE_CLOCK, _engine(plan, "min", f"max by ({BOARD}) ({recorded(CLOCK)})")),
            Record(ENGINE_HEAT, _engine(plan, "max", series_of("temperature_c"))),
            Record(ENGINE_XID, _engine(plan, "max", recorded(XID))),
            Record(THROTTLED_ODDS, _engine(plan, "max", f"ln({sure} / (1 - {sure}))")),
            Record(CLOCK_RATIO, _engine(plan, "min", f"{RATIO} and on ({BOARD}) {THROTTLED}")),
            Record(UNWANTED, _engine(plan, "max", f"{sure} unless {WANTED}")),
            Record(FAULT_ODDS, _engine(plan, "max", f"sum by ({BOARD}) ({_weights()})")),
            Record(FAULT_SEVERITY, _engine(plan, "max", f"max by ({BOARD}) ({_severities()})")),
            Record(
                FAULT_AT_WORK,
                _engine(plan, "max", f'count by ({BOARD}) ({AILMENT}{{at_work="true"}})'),
            ),
        ),
    )


def _given(plan: Plan) -> str:
    """1 per GPU or MIG instance, with the labels of the engine that it is assigned to."""
    there = ", ".join(f'{gpu}!=""' for _, gpu in plan.gpu_join)
    mine = ", ".join(label for label, _ in plan.gpu_join)
    parts: list[str] = []
    for name, _ in spellings(CLOCK):
        series = raw(plan, name, there)
        for label, gpu in plan.gpu_join:
            if label != gpu:
                series = f'label_replace({series}, "{label}", "$1", "{gpu}", "(.+)")'
        parts.append(f"max by ({BOARD}, {INSTANCE}, {mine}) ({series}) * 0 + 1")
    return " or ".join(parts)


def _engine(plan: Plan, fold: str, expr: str, by: str = BOARD) -> str:
    """An expression per board (or MIG instance), aggregated with `fold` over the engine's own."""
    mine = ", ".join(label for label, _ in plan.gpu_join)
    folded = f"{fold} by ({mine}) ({GIVEN} * on ({by}) group_left () ({expr}))"
    return f"({recorded('running')} * 0 + on ({mine}) group_left () {folded})"


def _weights() -> str:
    return " or ".join(
        f'({AILMENT}{{severity="{severity.word}"}} * 0 + {number(weight)})'
        for severity, weight in WEIGHTS.items()
    )


def _severities() -> str:
    return " or ".join(
        f'({AILMENT}{{severity="{severity.word}"}} * 0 + {int(severity)})' for severity in WEIGHTS
    )


# --- GPU causes of an engine ----------------------------------------------------------------------


DRIFT = recorded("itl_mean_drift_ratio")
ENGINES = Spelled({"itl_mean_drift_ratio": DRIFT})


def gpu_queries(plan: Plan) -> tuple[CauseQuery, ...]:
    """The GPU causes by form: a fault that affects work now or an old one, throttling that slows
    the engine or does not (or is intended)."""
    return (
        _fault(f"{FAULT_AT_WORK} > 0"),
        _fault(f"{FAULT_SEVERITY} unless {FAULT_AT_WORK}", "apart"),
        _throttled_and_slow(plan),
        _throttled_apart(),
    )


def _throttled_and_slow(plan: Plan) -> CauseQuery:
    slow = f"({_slow()})"
    queued_s = span_s(QUEUED_S * plan.scale, plan.sample_s)
    harmed = (
        f"({recorded('cascade_stage')} >= 2)"
        f" or (min_over_time({recorded('queued')}[{duration(queued_s)}]) == 1)"
    )
    for target_s, signal in (
        (plan.targets.ttft_p99_s, "ttft_p99_s"),
        (plan.targets.itl_p99_s, "itl_p99_s"),
    ):
        if target_s is not None:
            harmed += f" or ({recorded(signal)} > {number(target_s)})"
    return _throttled(
        f"{_grave()} unless {_apart()}",
        ((Severity.CRITICAL, f"{slow} and ({harmed})"), (Severity.WARNING, "")),
    )


def _throttled_apart() -> CauseQuery:
    levels = ((Severity.WARNING, _grave()), (Severity.INFO, ""))
    when = f"{THROTTLED_ODDS} unless ({_grave()} unless {_apart()})"
    return _throttled(when, levels, "apart")


def _fault(when: str, note: str = "") -> CauseQuery:
    return CauseQuery(
        BY_ID["gpu_fault"],
        when,
        (),
        FAULT_ODDS,
        (
            (Severity.CRITICAL, f"{FAULT_SEVERITY} == 3"),
            (Severity.WARNING, f"{FAULT_SEVERITY} == 2"),
            (Severity.INFO, ""),
        ),
        "A GPU of this server reports a hardware error",
        "Drain its node. The alert KneewatchGpuFault names the GPU and the repair.",
        ("9.3",),
        note,
        apart=bool(note),
    )


def _throttled(when: str, levels: tuple[tuple[Severity, str], ...], note: str = "") -> CauseQuery:
    return CauseQuery(
        BY_ID["gpu_throttled"],
        f"({recorded('running_avg')} >= 1) and ({when})",
        tuple(
            term
            for engine_term in ENGINE_TERMS
            if (term := scored(ENGINES, engine_term)) is not None
        ),
        THROTTLED_ODDS,
        levels,
        "A GPU of this server is throttled under load",
        "Check that GPU's temperature, power limit and clock settings. The alert "
        "KneewatchGpuThrottled names the GPU and the reason.",
        ("9.3",),
        note,
        apart=bool(note),
    )


def _slow() -> str:
    return (
        f"({DRIFT} >= {number(SLOWER)}) or (({CLOCK_RATIO} < {number(HALF_SPEED)}) unless {DRIFT})"
    )


def _grave() -> str:
    """Throttling worth a warning: unintended, or the engine is slow."""
    return f"(({UNWANTED} or ({_slow()})) unless ({CLOCK_RATIO} >= {number(NEARLY_FULL)}))"


def _apart() -> str:
    return f"({DRIFT} < {number(AS_EVER)})"


# --- Rules per GPU --------------------------------------------------------------------------------


def gpu_group(plan: Plan) -> Group:
    """Recording rules and alerts per GPU, from a DCGM exporter's series."""
    return Group(
        "kneewatch-gpus",
        (
            *gpu_records(plan),
            *clock_records(),
            *fault_records(plan),
            owner_record(plan),
            *clock_alerts(plan),
            *fault_alerts(plan),
        ),
    )
