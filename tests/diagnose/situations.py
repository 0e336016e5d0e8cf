"""What one engine looks like, as facts for causes: a healthy load, and what tests change in it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import inf

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.diagnose.capacity import DegreeComparison, LearnedKnee
from kneewatch.diagnose.causes.evidence import Facts, ReplacedProcess
from kneewatch.diagnose.causes.record import CauseRecord, Term
from kneewatch.diagnose.deployment.server_state import GpuState, XidSeen
from kneewatch.diagnose.learned.derived_signals import against_baseline, momentary
from kneewatch.diagnose.learned.knee import CurveLearner
from kneewatch.diagnose.lengths import PROMPTS, SHIFTS, Departure, LiveWorkload, StatedPoint
from kneewatch.diagnose.ranking import EXAMINED, conclude
from kneewatch.diagnose.sizing.benchmark.operating_point import compared, degrees_of
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.baseline import Baseline
from kneewatch.rules.cascade import staged
from kneewatch.rules.conditions import Check, Compare, Number, nodes
from kneewatch.rules.facts import NO_TARGETS, Moment, Targets
from kneewatch.rules.library import RULES
from kneewatch.rules.quantities import Live
from kneewatch.rules.rule import Finding, Severity
from tests.diagnose.sweeps import sweep

NOW_S = 1_795_000_000.0
WINDOW_S = 60.0
HEALTHY: Mapping[str, float | None] = {
    "running": 10.0,
    "running_avg": 10.0,
    "running_max": 12.0,
    "waiting": 0.0,
    "waiting_avg": 0.0,
    "waiting_by_capacity": 0.0,
    "waiting_deferred": 0.0,
    "waiting_deferred_avg": 0.0,
    "waiting_slope_per_s": 0.0,
    "arrival_per_s": 2.0,
    "completed_per_s": 2.0,
    "kv_usage_ratio": 0.5,
    "kv_usage_avg_ratio": 0.5,
    "kv_usage_max_ratio": 0.6,
    "kv_capacity_tokens": 100_000.0,
    "preemption_per_s": 0.0,
    "preemption_ratio_per_s": 0.0,
    "prefix_hit_ratio": 0.6,
    "prefix_hit_tokens_mean": 120.0,
    "prompt_tokens_per_s": 400.0,
    "computed_prompt_tokens_per_s": 200.0,
    "generation_tokens_per_s": 500.0,
    "prefill_share_ratio": 0.04,
    "prefill_service_ratio": 0.04,
    "prefill_long_per_s": 0.0,
    "decode_share_ratio": 0.95,
    "queue_share_ratio": 0.0,
    "ttft_p50_s": 0.1,
    "ttft_p99_s": 0.2,
    "ttft_mean_s": 0.1,
    "ttft_p99_p50_drift_ratio": 1.0,
    "itl_p50_s": 0.02,
    "itl_p99_s": 0.03,
    "itl_p50_drift_ratio": 1.0,
    "itl_mean_drift_ratio": 1.0,
    "itl_stall_time_ratio": 0.0,
    "itl_stall_per_s": 0.0,
    "prefill_mean_s": 0.05,
    "prefill_p99_s": 0.2,
    "queue_mean_s": 0.0,
    "e2e_mean_s": 2.0,
    "finished_length_ratio": 0.3,
    "output_tokens_mean": 200.0,
}
QUIET: Mapping[str, float] = {
    "ttft_p99_s": 0.2,
    "itl_p50_s": 0.02,
    "itl_stall_time_ratio": 0.01,
    "prefix_hit_ratio": 0.6,
    "prefix_hit_tokens_mean": 120.0,
    "finished_length_ratio": 0.3,
    "output_tokens_mean": 200.0,
    "output_tokens_p50": 180.0,
    "running_avg": 10.0,
    "kv_usage_avg_ratio": 0.5,
    "computed_prompt_tokens_per_s": 200.0,
    "spec_accepted_per_draft_tokens": 3.0,
    "kv_transfer_mean_s": 0.02,
}


RULES_BY_ID = {rule.id: rule for rule in RULES}


@lru_cache(maxsize=64)
def _learned(quiet: tuple[tuple[str, float], ...]) -> Baseline:
    """A baseline, which is only read: learned once for the many situations that have it."""
    baseline = Baseline(window_s=WINDOW_S)
    for ago_s in (300.0, 200.0):
        baseline.learn(NOW_S - ago_s, dict(quiet))
    return baseline


class Situation(Struct, frozen=True):
    """An engine at one moment. `quiet` is its baseline, `stage` and `worst` its cascade."""

    values: Mapping[str, float | None] = field(default_factory=lambda: dict(HEALTHY))
    quiet: Mapping[str, float] = field(default_factory=lambda: dict(QUIET))
    recent: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    streaks_s: Mapping[str, float] = field(default_factory=dict[str, float])
    findings: Mapping[str, Severity] = field(default_factory=dict[str, Severity])
    config: Mapping[str, str] = field(default_factory=lambda: {"enable_prefix_caching": "True"})
    targets: Targets = field(default_factory=Targets)
    stage: int = 0
    worst: Severity = Severity.OK
    observed_s: float = 600.0
    served_s: float = inf
    scale: float = 1.0
    restarts: tuple[ReplacedProcess, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    gpus_guessed: bool = False
    gpus_lost: tuple[str, ...] = ()
    split: DegreeComparison | None = None
    endless: Departure | None = None
    knee: LearnedKnee | None = None
    curve: CurveLearner | None = None
    workload: LiveWorkload | None = None

    def but(self, **values: float | None) -> Situation:
        """The same with other signals."""
        return replace(self, values={**self.values, **values})

    def lasting(self, **streaks_s: float) -> Situation:
        """The same with conditions that have held for so long."""
        return replace(self, streaks_s={**self.streaks_s, **streaks_s})

    def facts(self) -> Facts:
        """What causes look at."""
        baseline = _learned(tuple(self.quiet.items()))
        findings = {
            rule_id: Finding(rule_id, severity.word, RULES_BY_ID[rule_id].signal, None, (), NOW_S)
            for rule_id, severity in self.findings.items()
        }
        # What the sidecar derives of the values, the baseline and the cascade.
        moment = Moment(self.values, self.targets, baseline=baseline)
        derived: dict[str, float | None] = {
            "cascade_stage": float(self.stage),
            "cascade_severity": float(self.worst),
            "expected_wait_s": self._wait_s(),
            **{
                key: value
                for key, value in {**momentary(moment), **against_baseline(moment)}.items()
                if "_drift_" in key or key == "prompt_p99_kv_share_ratio"
            },
        }
        return Facts(
            now_s=NOW_S,
            window_s=WINDOW_S * self.scale,
            scale=self.scale,
            observed_s=self.observed_s,
            served_s=self.served_s,
            values={**derived, **self.values},
            recent=self.recent,
            streaks_s=self.streaks_s,
            missing={},
            findings=findings,
            stage=staged(self.stage, NOW_S, self.worst, None, ()),
            baseline=baseline,
            config=self.config,
            targets=self.targets,
            restarts=self.restarts,
            gpus=self.gpus,
            gpus_guessed=self.gpus_guessed,
            gpus_lost=self.gpus_lost,
            split=self.split,
            endless=self.endless,
            knee=self.knee,
            workload=self.workload,
        )

    def _wait_s(self) -> float | None:
        queued = self.values.get("waiting_by_capacity")
        left_per_s = self.values.get("completed_per_s") or self.values.get("arrival_per_s")
        return queued / left_per_s if queued is not None and left_per_s else None

    def causes(self) -> dict[str, Cause]:
        """What is concluded, by id."""
        return {cause.id: cause for cause in conclude(self.facts())}


def split_of(per_gpu: Mapping[int, float], *, tensor_parallel: int) -> DegreeComparison:
    """What sweeps say of a degree, with so many tokens a second and GPU at each."""
    unit, degrees = degrees_of(
        {degree: sweep(degree, tokens)[degree] for degree, tokens in per_gpu.items()},
        NO_TARGETS,
    )
    return compared(unit, degrees, tensor_parallel)


CALM = Situation()
QUEUED = CALM.but(waiting=30.0, waiting_avg=30.0, waiting_by_capacity=30.0).lasting(queued=30.0)
SLOW = Targets(ttft_p99_s=1.0, itl_p99_s=0.1)
HEAVY_PROMPTS = CALM.but(
    computed_prompt_tokens_per_s=4_000.0, prompt_tokens_per_s=4_000.0, prefill_service_ratio=0.3
)
HOT: Mapping[str, float | None] = {
    "busy_ratio": 0.9,
    "gpu_sm_clock_hz": 1_000e6,
    "gpu_sm_clock_most_hz": 1_100e6,
    "gpu_sm_clock_max_hz": 1_980e6,
    "gpu_thermal_throttle_ratio": 0.6,
    "gpu_temperature_c": 88.0,
}


def on_gpu(
    values: Mapping[str, float | None], *xids: XidSeen, index: str = "3", model: str = "NVIDIA H100"
) -> GpuState:
    """A GPU of node-a."""
    return GpuState(index, f"GPU-{index}", "node-a", model, values, xids)


SAME_WORK = {"work_before_tokens": 8000.0, "work_growth_tokens": 200.0}
"""Tokens of the running requests hours ago, and how many more there are."""


def least(record: CauseRecord) -> Situation:
    """What concludes a cause of plain comparisons: all signals are far beyond their bounds."""
    situation = CALM
    for node in nodes(record.forms[:1]):
        match node:
            case Compare(Live(key), sign, Number(bound)):
                situation = situation.but(**{key: bound / 3 if "<" in sign else 3 * bound})
            case Term(value=Live(key), threshold=Number(bound), below=below):
                situation = situation.but(**{key: bound / 3 if below else 3 * bound})
            case Check(name=name, for_s=Number(seconds)):
                situation = situation.lasting(**{name: 2 * seconds})
            case _:
                pass
    return situation


WRITTEN: Mapping[str, Situation] = {
    "gpu_fault": replace(CALM, gpus=(on_gpu({}, XidSeen(79, NOW_S - 20)),)),
    "gpu_throttled": replace(CALM, gpus=(on_gpu(HOT),)),
    "kv_pressure": replace(
        CALM.but(kv_usage_avg_ratio=0.97, preemption_per_s=1.0, preemption_ratio_per_s=0.1),
        stage=2,
        worst=Severity.WARNING,
    ),
    "kv_leak": CALM.but(
        running=0.0, running_avg=0.0, running_max=0.0, kv_usage_ratio=0.14, kv_usage_avg_ratio=0.14
    ).lasting(kv_held=150.0),
    "host_memory_leak": CALM.but(
        host_memory_used_bytes=48.0 * 2**30,
        host_memory_limit_bytes=64.0 * 2**30,
        host_memory_level_bytes=48.0 * 2**30,
        host_memory_before_bytes=44.0 * 2**30,
        host_memory_growth_bytes=4.0 * 2**30,
        host_memory_straight_ratio=0.98,
        host_memory_late_ratio=1.0,
        **SAME_WORK,
    ),
    "host_contention": CALM.but(
        itl_mean_drift_ratio=1.8, itl_p50_drift_ratio=1.7, host_cpu_pressure_ratio=0.4
    ),
    "slow_steps": CALM.but(
        engine_speed_ratio=0.3,
        engine_speed_error_ratio=0.05,
        engine_speed_samples=40.0,
        itl_mean_drift_ratio=4.0,
        itl_p50_drift_ratio=3.5,
        itl_p99_s=0.12,
    ),
    "unexplained_latency": replace(
        CALM.but(
            ttft_p50_drift_ratio=4.0,
            ttft_p99_drift_ratio=4.0,
            demand_moved_ratio=1.0,
            computed_moved_ratio=1.0,
            answers_moved_ratio=1.0,
        ).lasting(far_off=90.0, pauses=90.0),
        quiet={**QUIET, "itl_p99_s": 0.2},
    ),
    "requests_failing": CALM.but(finished_error_ratio=0.05, finished_error_per_s=0.1),
    "kv_held": CALM.but(
        kv_usage_ratio=0.7,
        kv_usage_avg_ratio=0.7,
        kv_unaccounted_ratio=0.6,
        kv_transfer_mean_s=0.001,
        prompt_tokens_mean=200.0,
        prompt_tokens_p99=400.0,
        waiting_deferred_avg=0.5,
    ).lasting(kv_unaccounted=60.0),
    "metrics_stale": CALM.but(cancelled_ratio=1.0),
    "spec_acceptance_drift": CALM.but(
        spec_accepted_per_draft_tokens=2.8,
        spec_accepted_level_tokens=2.8,
        spec_accepted_before_tokens=3.07,
        spec_accepted_growth_tokens=-0.27,
        spec_accepted_straight_ratio=0.96,
        spec_accepted_late_ratio=1.0,
        spec_accepted_usual_tokens=3.05,
        **SAME_WORK,
    ),
    "kv_exhaustion_ahead": replace(
        CALM.but(kv_exhausted_in_s=200.0, kv_peak_demand_ratio=0.8, kv_demand_ahead_ratio=1.1),
        findings={"KV-EXHAUST": Severity.WARNING},
    ),
    "queue_saturation": QUEUED.but(running_max=12.0, itl_mean_drift_ratio=2.0),
    "admission_limit": QUEUED.but(running_max=10.0),
    "clients_give_up": CALM.but(
        accepted_per_s=4.0, given_up_per_s=1.2, given_up_ratio=0.3, completed_per_s=2.8
    ),
    "client_errors": CALM.but(client_error_per_s=1.0, client_error_ratio=0.33),
    "prefix_cache_off": replace(HEAVY_PROMPTS, config={"enable_prefix_caching": "False"}),
    "prefix_reuse_lost": HEAVY_PROMPTS.but(prefix_hit_ratio=0.0, prefix_hit_tokens_mean=0.0),
    "prefix_block_too_large": replace(
        HEAVY_PROMPTS.but(
            prefix_hit_ratio=0.0,
            prefix_hit_tokens_mean=0.0,
            prompt_tokens_p95=480.0,
            prefix_block_tokens=528.0,
            prefill_service_ratio=0.35,
        ),
        quiet={},
    ),
    "prefix_churn": HEAVY_PROMPTS.but(prefix_hit_ratio=0.3, prefix_hit_tokens_mean=60.0),
    "adapter_thrash": CALM.but(
        lora_max=1.0, waiting=4.0, waiting_deferred=4.0, waiting_deferred_avg=4.0
    ).lasting(deferred=30.0),
    "kv_transfer_slow": CALM.but(kv_transfer_mean_s=0.08),
    "spec_decode_poor": CALM.but(spec_acceptance_ratio=0.2, spec_draft_tokens_per_s=100.0),
    "prefill_interference": CALM.but(
        itl_stall_time_ratio=0.2, itl_stall_per_s=0.5, prefill_long_per_s=0.1
    ),
    "slo_conflict": replace(CALM.but(ttft_p99_s=1.5, itl_p99_s=0.15), targets=SLOW),
    "prefill_bound": replace(CALM.but(ttft_p99_s=1.5, prefill_mean_s=0.8), targets=SLOW),
    "decode_bound": replace(CALM.but(itl_p50_s=0.15, itl_p99_s=0.15), targets=SLOW),
    "past_knee": replace(
        CALM.but(ttft_p99_p50_drift_ratio=4.0, running_avg=30.0, ttft_p99_s=1.5), targets=SLOW
    ),
    "runaway_generation": CALM.but(
        finished_length_ratio=0.8, output_tokens_mean=400.0, answers_moved_ratio=4.0
    ),
    "underused": replace(CALM.but(running_avg=0.1), findings={"IDLE-HOURS": Severity.INFO}),
    "kv_overprovisioned": replace(
        CALM.but(kv_usage_max_ratio=0.2), findings={"KV-UNUSED": Severity.INFO}
    ),
    "workload_drift": replace(
        CALM.but(**{SHIFTS[PROMPTS]: 0.4}),
        workload=LiveWorkload(
            "base.toml",
            grown=False,
            span_s=3600.0,
            lengths={
                PROMPTS: Departure(
                    0.4, StatedPoint(0.5, 1000.0, 1000.0), 1000.0, 0.9, chance_ratio=0.12
                )
            },
            live={PROMPTS: (2400.0, 9000.0, None)},
            requests=7200.0,
            expected=0.0,
        ),
    ),
    "tp_overhead": replace(CALM, split=split_of({1: 1000.0, 4: 500.0}, tensor_parallel=4)),
    "engine_stalled": CALM.lasting(stalled=45.0),
    "engine_asleep": CALM.but(awake=0.0),
    "engine_restarted": replace(CALM, restarts=(ReplacedProcess(NOW_S - 10),)),
}
CONCLUSIVE: Mapping[str, Situation] = {
    record.id: WRITTEN.get(record.id) or least(record) for record in EXAMINED
}
"""For each cause the least that concludes it; WRITTEN has those that are no plain comparisons."""
