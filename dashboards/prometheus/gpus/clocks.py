"""A GPU whose clocks are held down while it works, as rules: diagnose/causes/gpu_clocks.py. Pure.

Each GPU is judged by itself. That it is behind its peers is left to the sidecar and to `diagnose
--prometheus`: which GPUs of a node do the same work no label of DCGM's says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

from kneewatch.dashboards.prometheus.gpus.series import BOARD, NAME, WHERE, each
from kneewatch.dashboards.prometheus.model import Alert, Plan, Record
from kneewatch.dashboards.prometheus.query import Spelled, confidence, scored
from kneewatch.diagnose.case import CONCLUDED_FROM, DOUBTFUL_BELOW
from kneewatch.diagnose.catalogue.gpu_table import plain_name
from kneewatch.diagnose.catalogue.gpus import gpus
from kneewatch.diagnose.causes.gpu_clocks import (
    AT_LIMIT,
    BOARD_TERMS,
    BUSY_FROM,
    HALF_SPEED,
    HELD_FROM,
    LOW_CLOCK,
    LOWERED,
    MAX_SM_CLOCK_HZ,
    NEARLY_FULL,
    Held,
)
from kneewatch.diagnose.causes.record import CLEAR_S, ONSET_S
from kneewatch.diagnose.gpu_health import GpuState
from kneewatch.rules.facts import number
from kneewatch.rules.model import Severity

THROTTLED = each("throttled_confidence")
WORKING = each("working_ratio")
HEAT, BRAKE, POWER = each("heat_held_ratio"), each("brake_held_ratio"), each("power_held_ratio")
FULL_HZ, RATIO, LOW = each("clock_full_hz"), each("clock_full_ratio"), each("clock_low")
USUAL, BINDS, WANTED = each("power_usual_watts"), each("at_power_limit"), each("throttled_wanted")
ZERO = f"({WORKING} * 0)"
HELD = number(HELD_FROM)


class Reason(NamedTuple):
    """Why clocks are held down: where, of what the reasons before it left, and the words."""

    id: str
    when: str
    text: str
    action: str


def clock_records() -> tuple[Record, ...]:
    """What a throttled GPU is concluded from, and the conclusion by reason."""
    clock_hz, most_hz = each("gpu_sm_clock_hz"), each("gpu_sm_clock_most_hz")
    return (
        Record(WORKING, f"{each('busy_ratio')} >= {number(BUSY_FROM)}"),
        Record(HEAT, _greatest("gpu_thermal_throttle_ratio", "gpu_heat_bit_ratio")),
        Record(BRAKE, _greatest("gpu_power_brake_ratio", "gpu_power_brake_bit_ratio",
                                "gpu_board_limit_ratio", "gpu_hw_slowdown_ratio")),
        Record(POWER, _greatest("gpu_power_throttle_ratio", "gpu_power_bit_ratio")),
        Record(FULL_HZ, _first(f"({each('gpu_sm_clock_max_hz')} > 0)",
                               *_by_model(clock_hz, _clocks()))),
        Record(RATIO, f"{clock_hz} / ({FULL_HZ} > 0)"),
        Record(LOW, f"({most_hz} > 0) / ({FULL_HZ} > 0) < {number(LOW_CLOCK)}"),
        Record(USUAL, _first(f"({each('gpu_power_limit_default_watts')} > 0 and {LOW})",
                             *_by_model(LOW, _watts()))),
        Record(BINDS, _at_power_limit()),
        *(Record(THROTTLED, _concluded(at), {"reason": one.id})
          for at, one in enumerate(REASONS)),
        Record(WANTED, f"max by ({BOARD}) ({THROTTLED}{{reason=~\"power_limit|setting\"}})"),
    )  # fmt: skip


def clock_alerts(plan: Plan) -> tuple[Alert, ...]:
    """A throttled GPU by reason: wanted by somebody it is a note, unless it is at half speed."""
    nearly = f"({RATIO} >= {number(NEARLY_FULL)})"
    wanted = f"({WANTED} unless ({RATIO} < {number(HALF_SPEED)}))"
    alerts: list[Alert] = []
    for reason in REASONS:
        told = f'{THROTTLED}{{reason="{reason.id}"}}'
        warning = (
            f"({told} >= {number(DOUBTFUL_BELOW)}) unless on ({BOARD}) {nearly}"
            f" unless on ({BOARD}) {wanted}"
        )
        info = f"({told} >= {number(CONCLUDED_FROM)}) unless ({warning})"
        alerts.append(_alert(plan, reason, Severity.WARNING, warning))
        alerts.append(_alert(plan, reason, Severity.INFO, info))
    return tuple(alerts)


def _alert(plan: Plan, reason: Reason, severity: Severity, expr: str) -> Alert:
    return Alert(
        name="KneewatchGpuThrottled",
        expr=expr,
        for_s=ONSET_S * plan.scale,
        keep_s=CLEAR_S * plan.scale,
        labels={
            "severity": severity.word,
            "kneewatch": "gpu",
            "cause": "gpu_throttled",
            "reason": reason.id,
        },
        annotations={
            "summary": f"{NAME} of {WHERE} is held down {reason.text} while it works",
            "description": "Confidence {{ $value | humanizePercentage }}; it is the GPU, not the "
            f"cache or the batch. Its shares of time and clock: {each('')}*.",
            "action": f"On {WHERE} {reason.action}.",
            "guide": "9.3",
        },
        by=f"{BOARD}, reason",
    )


def _at_power_limit() -> str:
    """Whether the power limit holds it: by time, or by what it draws (without a limit on the page
    of a GPU with low clocks: against the usual one)."""
    watts, limit = each("gpu_power_watts"), f"(({each('gpu_power_limit_watts')} > 0) or {USUAL})"
    return f"({POWER} >= {HELD}) or ({watts} >= {number(AT_LIMIT)} * {limit})"


def _matters() -> str:
    """More than what a busy GPU does anyway: at the limit that it was delivered with is that."""
    at_watts = f"(({each('gpu_power_limit_watts')} > 0) or {each('gpu_power_watts')})"
    lowered = f"({at_watts} < {number(LOWERED)} * {USUAL})"
    by_design = f"({BINDS} unless {lowered})"
    idle = f"({each('gpu_idle_ratio')} >= 0.5)"
    hurt = f"({HEAT} >= {HELD}) or ({BRAKE} >= {HELD})"
    return f"({hurt} or (({LOW} unless {by_design}) unless {idle}))"


def _reasons() -> tuple[Reason, ...]:
    """The reasons in the sidecar's words, the one that goes first first."""
    nobody = GpuState("", "", "", "")

    def reason(
        name: str,
        when: str,
        *,
        heat: float = 0.0,
        brake: float = 0.0,
        power: float = 0.0,
        setting: bool = False,
    ) -> Reason:
        held = Held(nobody, None, True, False, heat, brake, power, setting, None)
        return Reason(name, when, *held.why)

    return (
        reason("heat", f"({HEAT} >= {HELD})", heat=1.0),
        reason("board", f"({BRAKE} >= {HELD})", brake=1.0),
        reason("power_limit", BINDS, power=1.0),
        reason("setting", f"({each('gpu_clock_setting_ratio')} >= {HELD})", setting=True),
        reason("unknown", ""),
    )


REASONS = _reasons()
BOARDS = Spelled(
    {
        "gpu_thermal_throttle_ratio": HEAT,
        "gpu_power_brake_ratio": BRAKE,
        "gpu_power_throttle_ratio": POWER,
        "gpu_sm_clock_ratio": RATIO,
        "gpu_temperature_c": each("gpu_temperature_c"),
    }
)
"""A board's signals under the names that the evidence has for them."""


def _concluded(at: int) -> str:
    """The confidence where this reason is the first that holds."""
    terms = [made for each in BOARD_TERMS if (made := scored(BOARDS, each)) is not None]
    sure = confidence(0.0, terms, ZERO)
    own = REASONS[at].when
    held = f" and {own}" if own else ""
    held += "".join(f" unless {before.when}" for before in REASONS[:at])
    return f"(({sure}) and {_matters()}){held}"


def _greatest(*keys: str) -> str:
    """The greatest of the signals that have a value."""
    return reduce(lambda one, other: f"(({one} > {other}) or {other} or {one})", map(each, keys))


def _first(*options: str) -> str:
    return " or ".join(options)


def _clocks() -> Mapping[str, float]:
    """Highest clocks by a pattern of the model's name; the longest names go first."""
    names = sorted(MAX_SM_CLOCK_HZ, key=len, reverse=True)
    return {f".*{name}.*": MAX_SM_CLOCK_HZ[name] for name in names}


def _watts() -> Mapping[str, float]:
    """Board power by a pattern of the names that the catalogue knows a GPU by."""
    found: dict[str, float] = {}
    for gpu in gpus().values():
        if any(name.startswith("NVIDIA") for name in gpu.names):
            plain = ("[^a-z0-9]+".join(plain_name(name).split()) for name in gpu.names)
            found[f"(?i)(nvidia[^a-z0-9]+)?({'|'.join(dict.fromkeys(plain))})"] = gpu.power_watts
    return found


def _by_model(series: str, values: Mapping[str, float]) -> list[str]:
    """A value for each GPU of a series whose model a pattern fits."""
    return [
        f'({series}{{modelName=~"{pattern}"}} * 0 + {number(value)})'
        for pattern, value in values.items()
    ]
