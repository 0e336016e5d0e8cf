"""Finds GPUs that are throttled under load by heat, power or a setting. Guide 9.3. Pure.

Each GPU is judged alone. An idle GPU may lower its clocks and still be healthy, and one slow GPU
slows all GPUs that serve the same model with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.account_signals import LEARNED_FROM, SPEED
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.causes.common_conditions import ITL_DRIFT, UNMOVED
from kneewatch.diagnose.causes.evidence import Case, Facts
from kneewatch.diagnose.causes.gpu_faults import close_of_gpus
from kneewatch.diagnose.causes.record import Term, cause, term, weigh
from kneewatch.diagnose.deployment.server_state import CLOCK_SEEN, GPU_BUSY_FROM, GpuState
from kneewatch.rules.formatting import percent
from kneewatch.rules.quantities import Live
from kneewatch.rules.rule import Severity

THROTTLED_FROM = 0.1
"""A GPU counts as throttled from this share of the time on."""

LOW_CLOCK = 0.75
PEERS_CLOCK = 0.85
NEARLY_FULL = 0.9
HALF_SPEED = 0.6
QUEUED_S = 10.0
AT_LIMIT, LOWERED = 0.95, 0.9
"""A GPU is at its power limit if it draws at least `AT_LIMIT` of the limit.

The limit was lowered if it is below `LOWERED` of the GPU's usual limit.
"""

HEATS = ("gpu_thermal_throttle_ratio", "gpu_heat_bit_ratio")
BRAKES = (
    "gpu_power_brake_ratio",
    "gpu_power_brake_bit_ratio",
    "gpu_board_limit_ratio",
    "gpu_hw_slowdown_ratio",
)
POWERS = ("gpu_power_throttle_ratio", "gpu_power_bit_ratio")
"""Signals for the same reason, as different exporters name it: the greatest value is used."""

MAX_SM_CLOCK_HZ = {
    "A100": 1410e6,
    "H100 80GB HBM3": 1980e6,
    "H200": 1980e6,
    "GH200": 1980e6,
    "B200": 1965e6,
    "L4": 2040e6,
    "L40S": 2520e6,
}
"""Highest SM clock in Hz that NVML reports for these boards; used if the page has none."""


class ThrottledGpu(Struct, frozen=True):
    """One GPU, with the share of time that it was throttled, by reason.

    - `ratio`: its clock divided by its full clock; None if the full clock is unknown.
    - `low`: in the whole window the clock was never near the full clock.
    - `behind`: GPUs with the same work run much faster.
    - `usual_watts`: the default power limit.
    """

    gpu: GpuState
    ratio: float | None
    low: bool
    behind: bool
    heat: float
    brake: float
    power: float
    setting: bool
    usual_watts: float | None

    @property
    def at_power_limit(self) -> bool:
        """Whether the power limit throttles the GPU; False if unknown."""
        limit_watts = self.gpu.get("gpu_power_limit_watts") or self.usual_watts
        watts = self.gpu.get("gpu_power_watts")
        return self.power >= THROTTLED_FROM or bool(limit_watts and watts >= AT_LIMIT * limit_watts)

    @property
    def by_design(self) -> bool:
        """Whether the GPU is at its default power limit, which is normal for a busy GPU.

        At this limit, small boards run at half of their maximum clock.
        """
        # Without a limit on the page, the draw while the limit throttles it stands for the limit.
        held_at_watts = self.gpu.get("gpu_power_limit_watts") or self.gpu.get("gpu_power_watts")
        lowered = self.usual_watts is not None and held_at_watts < LOWERED * self.usual_watts
        return self.at_power_limit and not lowered

    @property
    def matters(self) -> bool:
        """Whether anything else than the default power limit throttles the GPU."""
        if max(self.heat, self.brake) >= THROTTLED_FROM:
            return True
        if self.gpu.get("gpu_idle_ratio") >= 0.5:
            return False
        return self.behind or (self.low and not self.by_design)

    @property
    def deliberate(self) -> bool:
        """Whether the throttling may be intended: a lowered power limit or locked clocks."""
        return max(self.heat, self.brake) < THROTTLED_FROM and (self.at_power_limit or self.setting)

    @property
    def why(self) -> tuple[str, str]:
        """The reason as text, and what to do about it."""
        if self.heat >= THROTTLED_FROM:
            return "by heat", "check fans, coolant, inlet temperature and dust"
        if self.brake >= THROTTLED_FROM:
            return "by the board or its power supply", "check power supplies and their cables"
        if self.at_power_limit:
            return (
                "by its power limit",
                "check whether the limit was lowered (nvidia-smi -q -d POWER)",
            )
        if self.setting:
            return "by a setting", "reset the locked clocks (nvidia-smi -rgc, -rac)"
        return "for an unknown reason", "run nvidia-smi -q -d PERFORMANCE"


def gpu_throttled(facts: Facts) -> Cause | None:
    """The cause for the GPU that is throttled most under load."""
    slow = True if _LOSES_SPEED(facts) else False if _KEEPS_SPEED(facts) else None
    if facts.get("running_avg") < 1 and not slow:
        return None
    # A GPU whose load is unknown works while requests run on its engine.
    unknown = GPU_BUSY_FROM if facts.get("running_avg") >= 1 else 0.0
    busy = [(gpu, gpu.values.get("busy_ratio")) for gpu in facts.gpus]
    working = [gpu for gpu, load in busy if (unknown if load is None else load) >= GPU_BUSY_FROM]
    judged = [_throttled(gpu, working, slow=bool(slow)) for gpu in working]
    throttled = [gpu for gpu in judged if gpu.matters]
    if not throttled:
        return None
    worst = min(throttled, key=lambda gpu: (1.0 if gpu.ratio is None else gpu.ratio, -gpu.heat))
    why, action = worst.why
    where = worst.gpu.node or "the node"
    severity = _severity(worst, facts, slow=slow)
    to = f" to {percent(share)} of its clock" if (share := worst.ratio or 1) < NEARLY_FULL else ""
    case = Case(
        "gpu_throttled",
        f"{worst.gpu.name} is throttled{to} {why} under load"
        + (f" ({len(throttled)} of {len(facts.gpus)} GPUs are)." if len(throttled) > 1 else "."),
        f"On {where} {action}." if worst.deliberate else f"Drain {where} and {action}.",
        severity,
        apart=severity == Severity.INFO or slow is False,
    )
    weigh((*BOARD_TERMS, *ENGINE_TERMS), case, _of_worst(worst, facts))
    return close_of_gpus(case, facts)


def _throttled(gpu: GpuState, working: Sequence[GpuState], *, slow: bool) -> ThrottledGpu:
    """The GPU with what throttles it. The highest clock seen stands for an unknown full clock while
    the engine is `slow`: boost clocks at light load are higher than any at full load."""
    peers = [
        hz
        for peer in working
        if peer is not gpu and peer.model == gpu.model and (hz := peer.get("gpu_sm_clock_hz"))
    ]
    peers_hz = median(peers) if len(peers) > 1 else None
    seen_hz = gpu.values.get(CLOCK_SEEN) if slow else None
    full_hz = _full_clock_hz(gpu) or peers_hz or seen_hz
    now_hz = gpu.values.get("gpu_sm_clock_hz")
    most_hz = gpu.get("gpu_sm_clock_most_hz")
    low = bool(full_hz and 0 < most_hz < LOW_CLOCK * full_hz)
    return ThrottledGpu(
        gpu,
        ratio=now_hz / full_hz if now_hz and full_hz else None,
        low=low,
        behind=bool(peers_hz and 0 < most_hz < PEERS_CLOCK * peers_hz),
        heat=max(map(gpu.get, HEATS)),
        brake=max(map(gpu.get, BRAKES)),
        power=max(map(gpu.get, POWERS)),
        setting=gpu.get("gpu_clock_setting_ratio") >= THROTTLED_FROM,
        usual_watts=gpu.values.get("gpu_power_usual_watts") if low else None,
    )


def _full_clock_hz(gpu: GpuState) -> float | None:
    """The maximum SM clock in Hz, from the page or else from the GPU's model; None if unknown."""
    own_hz = gpu.values.get("gpu_sm_clock_max_hz")
    if own_hz:
        return own_hz
    matches = [(len(name), hz) for name, hz in MAX_SM_CLOCK_HZ.items() if name in gpu.model]
    return max(matches)[1] if matches else None


def _severity(worst: ThrottledGpu, facts: Facts, *, slow: bool | None) -> Severity:
    if worst.ratio is not None and worst.ratio >= NEARLY_FULL:
        return Severity.INFO
    if slow is None:
        slow = worst.ratio is not None and worst.ratio < HALF_SPEED
    if worst.deliberate and not slow:
        return Severity.INFO
    harm = facts.stage.level >= 2 or facts.held("queued", QUEUED_S) or _over_target(facts)
    return Severity.CRITICAL if slow and harm else Severity.WARNING


def _over_target(facts: Facts) -> bool:
    targets = facts.targets
    over_first = targets.ttft_p99_s is not None and facts.get("ttft_p99_s") > targets.ttft_p99_s
    over_steps = targets.itl_p99_s is not None and facts.get("itl_p99_s") > targets.itl_p99_s
    return over_first or over_steps


HEAT, BRAKE = Live("gpu_thermal_throttle_ratio"), Live("gpu_power_brake_ratio")
POWER, CLOCK = Live("gpu_power_throttle_ratio"), Live("gpu_sm_clock_ratio")


def _at_limit(facts: Facts) -> str:
    watts, limit = facts.get("gpu_power_watts"), facts.get("gpu_power_limit_watts")
    usual = facts.get("gpu_power_usual_watts")
    lowered = f", default {usual:.0f} W" if usual > limit > 0 else ""
    at_limit = f" ({watts:.0f} of {limit:.0f} W{lowered})" if limit else ""
    share = facts.get("gpu_power_throttle_ratio")
    return f"throttled by its power limit {percent(share)} of the time{at_limit}"


def _clock(facts: Facts) -> str:
    mhz, share = facts.get("gpu_sm_clock_hz") / 1e6, facts.get("gpu_sm_clock_ratio")
    return f"SM clock {mhz:.0f} MHz, {percent(share)} of its full clock"


BOARD_TERMS: tuple[Term, ...] = (
    term(
        HEAT,
        THROTTLED_FROM,
        1.6,
        "throttled by heat {value:%} of the time",
        when=HEAT >= THROTTLED_FROM,
    ),
    term(
        BRAKE,
        THROTTLED_FROM,
        1.6,
        "throttled by the board {value:%} of the time",
        when=BRAKE >= THROTTLED_FROM,
    ),
    term(CLOCK, LOW_CLOCK, 1.8, _clock, when=CLOCK < NEARLY_FULL, below=True),
    term(CLOCK, LOW_CLOCK, -0.6, _clock, when=CLOCK >= NEARLY_FULL),
    term(POWER, THROTTLED_FROM, 0.5, _at_limit, when=POWER >= THROTTLED_FROM),
    term(
        Live("gpu_temperature_c"),
        None,
        0.2,
        "GPU temperature {value} degrees C",
        when=HEAT >= THROTTLED_FROM,
    ),
)
"""Evidence from one board's signals; signals that exporters name differently share one name."""

LOSES_SPEED = Live(SPEED) < LEARNED_FROM
KEEPS_SPEED = (Live(SPEED) >= LEARNED_FROM) & (ITL_DRIFT < UNMOVED).assume(unknown=True)
"""Steps take no longer than usual. If they do, a larger batch may explain it, or hide a loss."""

_LOSES_SPEED, _KEEPS_SPEED = LOSES_SPEED.python(), KEEPS_SPEED.python()

ENGINE_TERMS: tuple[Term, ...] = (
    term(
        Live(SPEED),
        LEARNED_FROM,
        0.8,
        "the engine has {value:%} of its usual speed at equal work",
        when=LOSES_SPEED,
        below=True,
    ),
    term(Live(SPEED), None, -0.6, "the engine has its usual speed", when=KEEPS_SPEED),
)


def _of_worst(worst: ThrottledGpu, facts: Facts) -> Facts:
    """The facts with the signals of the most throttled GPU."""
    own = {
        **worst.gpu.values,
        HEAT.key: worst.heat,
        BRAKE.key: worst.brake,
        POWER.key: worst.power,
        CLOCK.key: worst.ratio,
        "gpu_power_usual_watts": worst.usual_watts,
    }
    return replace(facts, values={**facts.values, **own})


GPU_THROTTLED = cause("gpu_throttled", judge=gpu_throttled)
