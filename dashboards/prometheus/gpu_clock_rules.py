"""Recording rules and alerts for throttled GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

from kneewatch.dashboards.prometheus.cause_query import Spelled, confidence, scored
from kneewatch.dashboards.prometheus.gpu_series import (
    BOARD,
    WHERE,
    gpu_alert,
    series_of,
)
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan, Record
from kneewatch.diagnose.catalogue.gpu_specs import gpus, plain_name
from kneewatch.diagnose.causes.evidence import CONCLUDED_FROM, DOUBTFUL_BELOW
from kneewatch.diagnose.causes.gpu_clocks import (
    AT_LIMIT,
    BOARD_TERMS,
    BUSY_FROM,
    HALF_SPEED,
    LOW_CLOCK,
    LOWERED,
    MAX_SM_CLOCK_HZ,
    NEARLY_FULL,
    THROTTLED_FROM,
    ThrottledGpu,
)
from kneewatch.diagnose.gpu import GpuState
from kneewatch.rules.facts import number
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
    """A reason why a GPU is throttled. `when` is a PromQL condition. If several reasons apply, the
    first one counts."""

    id: str
    when: str
    text: str
    action: str


def clock_records() -> tuple[Record, ...]:
    """Recording rules for the inputs of the throttling verdict and for the confidence in each
    reason."""
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
    """Alerts for throttled GPUs by reason. An intended limit is an info, unless it halves the
    clock."""
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
    return gpu_alert(
        plan,
        "gpu_throttled",
        severity,
        ("reason", reason.id),
        expr,
        summary=f" is throttled {reason.text} under load",
        description="gpu_throttled with confidence {{ $value | humanizePercentage }}. "
        f"Clocks and throttled time are the series {series_of('')}*.",
        action=f"On {WHERE} {reason.action}.",
        by="reason",
    )


def _at_power_limit() -> str:
    """A PromQL condition for GPUs that the power limit throttles. The evidence is throttled time,
    or power draw relative to the limit. If the page lacks the limit, the usual limit of the model
    is used."""
    watts = series_of("gpu_power_watts")
    limit = f"(({series_of('gpu_power_limit_watts')} > 0) or {USUAL})"
    return f"({POWER} >= {HELD}) or ({watts} >= {number(AT_LIMIT)} * {limit})"


def _matters() -> str:
    """A PromQL condition for GPUs that are throttled more than a busy GPU at its default power
    limit."""
    at_watts = f"(({series_of('gpu_power_limit_watts')} > 0) or {series_of('gpu_power_watts')})"
    lowered = f"({at_watts} < {number(LOWERED)} * {USUAL})"
    by_design = f"({BINDS} unless {lowered})"
    idle = f"({series_of('gpu_idle_ratio')} >= 0.5)"
    hurt = f"({HEAT} >= {HELD}) or ({BRAKE} >= {HELD})"
    return f"({hurt} or (({LOW} unless {by_design}) unless {idle}))"


def _reasons() -> tuple[Reason, ...]:
    """The reasons, in the same words as in the sidecar. If several apply, the first one counts."""
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
"""The recorded series of a board, by the names of signals that the evidence uses."""


def _concluded(at: int) -> str:
    """A PromQL expression for the confidence that a GPU is throttled for the reason `REASONS[at]`.
    It has a value only for GPUs to which no earlier reason applies."""
    terms = [term for board_term in BOARD_TERMS if (term := scored(BOARDS, board_term)) is not None]
    sure = confidence(0.0, terms, ZERO)
    own = REASONS[at].when
    held = f" and {own}" if own else ""
    held += "".join(f" unless {before.when}" for before in REASONS[:at])
    return f"(({sure}) and {_matters()}){held}"


def _greatest(*keys: str) -> str:
    """A PromQL expression for the maximum of signals. Signals without a value are ignored."""
    return reduce(
        lambda left, right: f"(({left} > {right}) or {right} or {left})", map(series_of, keys)
    )


def _clocks() -> Mapping[str, float]:
    """Maximum SM clocks in Hz, by a pattern for the name of the GPU model. The longest name is
    first."""
    names = sorted(MAX_SM_CLOCK_HZ, key=len, reverse=True)
    return {f".*{name}.*": MAX_SM_CLOCK_HZ[name] for name in names}


def _watts() -> Mapping[str, float]:
    """Board power in watts, by a pattern for the names of a GPU in the catalogue."""
    watts: dict[str, float] = {}
    for gpu in gpus().values():
        if any(name.startswith("NVIDIA") for name in gpu.names):
            plain = ("[^a-z0-9]+".join(plain_name(name).split()) for name in gpu.names)
            watts[f"(?i)(nvidia[^a-z0-9]+)?({'|'.join(dict.fromkeys(plain))})"] = gpu.power_watts
    return watts


def _by_model(first: str, series: str, values: Mapping[str, float]) -> str:
    """A PromQL expression for each GPU of `series`: the value of `first`; where that has none, the
    constant in `values` for the GPU's model."""
    by_model = (
        f'({series}{{modelName=~"{pattern}"}} * 0 + {number(value)})'
        for pattern, value in values.items()
    )
    return " or ".join((first, *by_model))
