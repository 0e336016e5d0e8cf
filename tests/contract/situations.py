"""Situations that conclude each cause: the least that does, and one for each other way it shows."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from kneewatch.diagnose.capacity import LearnedKnee, Range
from kneewatch.diagnose.lengths import Departure, StatedPoint
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.diagnose.situations import CALM, CONCLUSIVE, QUEUED, SAME_WORK, SLOW, Situation

MEASURED_ROOM = {"itl_p50_s": 0.02, "prefill_busy_ratio": 0.1, "itl_mean_drift_ratio": None}
MEASURED_SLOW = {**MEASURED_ROOM, "itl_p50_s": 0.15}
KV, CHURN, LOST, OFF, XFER, SPEC, STALLS, KNEE = (
    CONCLUSIVE[cause]
    for cause in (
        *("kv_pressure", "prefix_churn", "prefix_reuse_lost", "prefix_cache_off"),
        *("kv_transfer_slow", "spec_decode_poor", "prefill_interference", "past_knee"),
    )
)
PREFILL, DECODE, RUNAWAY = (
    CONCLUSIVE[cause] for cause in ("prefill_bound", "decode_bound", "runaway_generation")
)
MEMORY_LEAK, SPEC_DRIFT = CONCLUSIVE["host_memory_leak"], CONCLUSIVE["spec_acceptance_drift"]
SLOW_STEPS = CONCLUSIVE["slow_steps"]
HELD, UNEXPLAINED = CONCLUSIVE["kv_held"], CONCLUSIVE["unexplained_latency"]
SPIKES = CONCLUSIVE["prefill_interference"]
CLIMBING = CALM.but(
    kv_floor_before_ratio=0.3, kv_floor_growth_ratio=0.15, kv_floor_level_ratio=0.45,
    kv_floor_straight_ratio=0.97, kv_floor_late_ratio=1.0, **SAME_WORK,
)  # fmt: skip
PROMPTS_FIRST: Mapping[str, float] = {
    "prefill_pass_per_s": 5.0,
    "prefill_busy_ratio": 1.4,
    "itl_p50_s": 0.03,
    "itl_mean_s": 0.2,
}
SAWTOOTH = QUEUED.but(kv_usage_avg_ratio=0.93, kv_usage_max_ratio=0.99)
ADMITS_NONE = QUEUED.but(
    unadmitted_s=90.0, running=1.0, running_avg=1.0, running_max=1.0, kv_usage_avg_ratio=0.02
)
GIANT_FIRST = {
    "prompt_p99_kv_share_ratio": 0.5, "running_max": 18.0, "iteration_tokens_mean": 1.0
}  # fmt: skip
UNSERVED = QUEUED.but(completed_per_s=0.0, arrival_per_s=0.0)
ITL_ONLY = Targets(itl_p99_s=0.1)
FETCHING = CALM.but(kv_fetch_waiting=4.0, kv_fetch_arrived=0.0, kv_fetch_queued=0.0).lasting(
    fetching=30.0
)
ENDLESS = Departure(0.3, StatedPoint(0.99, 900.0, 1800.0), 2000.0, 0.61, 0.25)
KNEE_AT = LearnedKnee(
    Range(18.0, 20.0, 22.0), Range(5.0, 5.5, 6.0), 5.5, True, "P99 within the targets", 40, 6
)
MEMORY = {"gpu_dram_active_ratio": 0.7}
COMPUTE = {"gpu_tensor_active_ratio": 0.6}
HOST = {"gpu_engine_active_ratio": 0.5}

UNUSUAL = {
    # The quiet TTFT P99 and the rate that makes 30 requests wait too long for it.
    "far from quick": (0.2, 1.4),
    "far from usual": (4.0, 0.7),
    "usually slow": (40.0, 0.36),
}
LIMITED: Mapping[str, Mapping[str, float | None]] = {
    "kv_pressure": {"kv_usage_avg_ratio": 0.97},
    "queue_saturation": {"running_max": 14.0},
    "admission_limit": {"running_max": 10.0},
}

GROWING: Mapping[str, tuple[float, float, float | None, Targets]] = {
    # The queue's growth (requests/s), the wait, the usual TTFT P99 and targets.
    "grows, target": (0.3, 5.0, 0.2, SLOW),
    "grows fast, target": (0.6, 5.0, 0.2, SLOW),
    "grows, usually quick": (0.3, 8.0, 0.2, Targets()),
    "grows fast, usually quick": (0.6, 8.0, 0.2, Targets()),
    "grows, usually slow": (0.3, 20.0, 4.0, Targets()),
    "grows fast, usually slow": (0.9, 20.0, 4.0, Targets()),
    "grows, usual wait unknown": (0.1, 15.0, None, Targets()),
    "grows fast, usual wait unknown": (0.3, 15.0, None, Targets()),
}

OTHERS: Mapping[str, Situation] = {
    **{
        f"{cause}:{name}": replace(
            QUEUED.but(completed_per_s=per_s, **values),
            quiet={**QUEUED.quiet, "ttft_p99_s": usual_s},
        )
        for cause, values in LIMITED.items()
        for name, (usual_s, per_s) in UNUSUAL.items()
    },
    **{
        f"queue_saturation:{name}": replace(
            QUEUED.but(
                running_max=14.0, expected_wait_s=0.7, e2e_mean_s=1.9, ttft_p99_s=tail_s
            ),
            quiet={**QUEUED.quiet, "ttft_p99_s": 0.1},
        )
        for name, tail_s in (("short waits, late tails", 2.3), (" not short waits", 0.8))
    },
    "kv_pressure:full": QUEUED.but(kv_usage_avg_ratio=0.96, waiting_by_capacity=3.0),
    "kv_pressure:full at times": SAWTOOTH,
    # Engines that keep blocks free for what running requests may generate.
    "kv_pressure:full by claims": QUEUED.but(
        kv_usage_avg_ratio=0.82, kv_claimed_ratio=0.97, waiting_by_capacity=3.0
    ),
    "kv_pressure: not full by claims": QUEUED.but(kv_usage_avg_ratio=0.82, kv_claimed_ratio=0.94),
    # Engines that compute prompts apart from decodes.
    "queue_saturation:prompts come first": QUEUED.but(
        **PROMPTS_FIRST, kv_usage_avg_ratio=0.96, running_max=12.0
    ),
    "kv_pressure: not where prompts come first": QUEUED.but(
        **PROMPTS_FIRST, kv_usage_avg_ratio=0.96
    ),
    "prefill_interference:short prompts in a row": replace(
        CALM.but(
            itl_stall_time_ratio=0.2,
            itl_stall_per_s=0.5,
            prefill_pass_per_s=0.1,
            prefill_busy_ratio=0.3,
            computed_moved_ratio=1.0,
            demand_moved_ratio=1.0,
        ),
        quiet={**CALM.quiet, "itl_p99_s": 0.2},
    ),
    "kv_pressure: not full at any time": SAWTOOTH.but(kv_usage_max_ratio=0.95),
    "kv_pressure: not full most of the time": SAWTOOTH.but(kv_usage_avg_ratio=0.87),
    "kv_pressure:giants": QUEUED.but(
        kv_usage_avg_ratio=0.8, prompt_tokens_p99=27_000.0, waiting_by_capacity=3.0
    ),
    "kv_pressure:giants, more room": QUEUED.but(
        kv_usage_avg_ratio=0.75, prompt_tokens_p99=27_000.0, waiting_by_capacity=3.0
    ),
    "kv_pressure: not giants for whom a seat is missing": QUEUED.but(
        kv_usage_avg_ratio=0.2, prompt_tokens_p99=90_000.0, running_avg=1.0, running_max=1.0
    ),
    "queue_saturation: not where few fill the cache": QUEUED.but(
        kv_usage_avg_ratio=0.84, running_avg=3.0, running_max=6.0
    ),
    "queue_saturation:few fit": QUEUED.but(
        kv_usage_avg_ratio=0.5, running_avg=2.0, running_max=4.0
    ),
    "admission_limit: not where few fill the cache": QUEUED.but(
        kv_usage_avg_ratio=0.7, running_avg=2.0, running_max=2.0
    ),
    "admission_limit:one seat": QUEUED.but(
        kv_usage_avg_ratio=0.45, running_avg=1.0, running_max=1.0
    ),
    "admission_limit:one seat, slow steps": QUEUED.but(
        kv_usage_avg_ratio=0.2, running_avg=1.0, running_max=1.0, **MEASURED_SLOW
    ),
    "admission_limit:seats pay": replace(
        QUEUED.but(
            running_avg=32.0, running_max=32.0, itl_mean_drift_ratio=1.7, kv_usage_avg_ratio=0.13
        ),
        quiet={**QUEUED.quiet, "running_avg": 4.0},
    ),
    "admission_limit: not where steps grow with the batch": replace(
        QUEUED.but(
            running_avg=32.0, running_max=32.0, itl_mean_drift_ratio=2.4, kv_usage_avg_ratio=0.13
        ),
        quiet={**QUEUED.quiet, "running_avg": 4.0},
    ),
    "admission_limit: not two seats, slow steps": QUEUED.but(
        kv_usage_avg_ratio=0.2, running_avg=2.0, running_max=2.0, **MEASURED_SLOW
    ),
    "kv_pressure:giants between steps": QUEUED.but(
        kv_usage_avg_ratio=0.1, prompt_tokens_p99=50_000.0, iteration_tokens_mean=40.0,
        running_avg=2.0, running_max=2.0,
    ),
    "kv_pressure:giants, more ran before": replace(
        QUEUED.but(
            kv_usage_avg_ratio=0.1, prompt_tokens_p99=50_000.0, iteration_tokens_mean=40.0,
            running_avg=8.0, running_max=12.0,
        ),
        quiet={},
    ),
    "kv_pressure:giants, nothing runs at scrapes": replace(
        QUEUED.but(
            kv_usage_avg_ratio=0.0, prompt_tokens_p99=50_000.0, iteration_tokens_mean=40.0,
            running_avg=0.0, running_max=0.0,
        ),
        quiet={},
    ),
    "prefix_cache_off:giants queue": replace(
        CONCLUSIVE["prefix_cache_off"].but(
            waiting_by_capacity=8.0, kv_usage_avg_ratio=0.65, prompt_tokens_p99=40_000.0
        ).lasting(queued=30.0),
    ),
    "prefix_cache_off:giants queue, one seat": replace(
        CONCLUSIVE["prefix_cache_off"].but(
            waiting_by_capacity=8.0, kv_usage_avg_ratio=0.4, prompt_tokens_p99=90_000.0,
            running_avg=1.0, running_max=1.0,
        ).lasting(queued=30.0),
    ),
    "prefix_cache_off:giants queue between steps": CONCLUSIVE["prefix_cache_off"].but(
        waiting_by_capacity=8.0, kv_usage_avg_ratio=0.1, prompt_tokens_p99=40_000.0,
        iteration_tokens_mean=40.0, running_avg=8.0, running_max=12.0,
    ).lasting(queued=30.0),
    "kv_pressure:giants, little room": QUEUED.but(
        kv_usage_avg_ratio=0.9, prompt_tokens_p99=27_000.0, waiting_by_capacity=3.0
    ),
    "kv_pressure:full, unserved": UNSERVED.but(kv_usage_avg_ratio=0.97).lasting(queued=70.0),
    "kv_pressure:full for long": QUEUED.but(kv_usage_avg_ratio=0.97, completed_per_s=0.3),
    "kv_pressure:full, target": replace(
        QUEUED.but(kv_usage_avg_ratio=0.97, completed_per_s=2.0), targets=SLOW
    ),
    "kv_pressure:evicting, a long wait": replace(
        KV.but(waiting_by_capacity=30.0, expected_wait_s=90.0).lasting(queued=30.0), stage=3
    ),
    "kv_pressure:evicting now and then, tokens late": KV.but(
        cascade_severity=1.0, itl_mean_drift_ratio=2.5
    ),
    "kv_pressure:stalls": KV.but(
        preemption_ratio_per_s=0.06, kv_usage_avg_ratio=0.8, itl_stall_time_ratio=0.025,
        waiting_by_capacity=1.2,
    ),
    "kv_leak:connected": CONCLUSIVE["kv_leak"].but(
        kv_usage_ratio=0.025, kv_transfer_mean_s=0.02
    ).lasting(kv_held=700.0),
    "kv_leak:climbing": CLIMBING,
    "kv_leak:climbing a little": CLIMBING.but(kv_floor_growth_ratio=0.07),
    "host_memory_leak:no limit": MEMORY_LEAK.but(host_memory_limit_bytes=None),
    "host_memory_leak:full within the hour": MEMORY_LEAK.but(
        host_memory_limit_bytes=49.0 * 2**30, work_before_tokens=None
    ),
    "host_memory_leak:slow": MEMORY_LEAK.but(
        host_memory_growth_bytes=1.0 * 2**30, host_memory_before_bytes=47.0 * 2**30,
        host_memory_limit_bytes=50.0 * 2**30,
    ),
    "host_contention:stolen": CONCLUSIVE["host_contention"].but(
        host_cpu_pressure_ratio=None, host_cpu_steal_ratio=0.07
    ),
    "host_contention:a little": CONCLUSIVE["host_contention"].but(
        itl_mean_drift_ratio=1.4, itl_p50_drift_ratio=1.4, host_cpu_steal_ratio=0.06
    ),
    "host_contention:slow, a larger batch": CONCLUSIVE["host_contention"].but(
        itl_p50_drift_ratio=1.0, engine_speed_ratio=0.6
    ),
    "host_contention:idle GPU": CONCLUSIVE["host_contention"].but(**HOST),
    "kv_held:deferred": HELD.but(kv_usage_avg_ratio=0.6, waiting_deferred_avg=1.5),
    "kv_held:expired": HELD.but(kv_usage_avg_ratio=0.6, kv_expired_per_s=0.05),
    "kv_held:full, none queue": HELD.but(kv_usage_avg_ratio=0.97),
    "kv_held:full, some queue": HELD.but(
        kv_usage_avg_ratio=0.97, running=40.0, waiting_by_capacity=5.0
    ).lasting(kv_unaccounted=60.0, queued=90.0),
    "requests_failing:with transfers": CONCLUSIVE["requests_failing"].but(
        finished_error_ratio=0.025, kv_transfer_failed_per_s=0.2
    ),
    "unexplained_latency: not as prompts grew": UNEXPLAINED.but(
        ttft_p50_drift_ratio=2.3, ttft_p99_drift_ratio=2.3, computed_moved_ratio=1.25
    ),
    "unexplained_latency:tokens": UNEXPLAINED.but(
        ttft_p50_drift_ratio=1.0, itl_mean_s=0.06, itl_mean_drift_ratio=2.6, engine_speed_ratio=0.8
    ),
    "unexplained_latency:a larger batch": replace(
        UNEXPLAINED.but(
            ttft_p50_drift_ratio=1.0, itl_mean_s=0.06, itl_mean_drift_ratio=2.6,
            engine_speed_ratio=1.0, running_avg=9.0,
        ),
        quiet={**UNEXPLAINED.quiet, "running_avg": 3.0},
    ),
    **{
        f"unexplained_latency:{name}": replace(
            CALM.but(
                itl_p50_s=0.9, itl_mean_s=0.8, running_avg=100.0, iteration_tokens_mean=tokens
            ),
            targets=Targets(),
        )
        for name, tokens in (("two tokens a second", 180.0), (" not while prompts wait", 300.0))
    },
    "unexplained_latency:one stream of two tokens a second": replace(
        CALM.but(itl_p50_s=0.9, itl_mean_s=0.8, running_avg=1.0, iteration_tokens_mean=90.0),
        targets=Targets(),
    ),
    "unexplained_latency:stops": CALM.but(
        stops_every_s=145.0, stopped_ratio=0.17, stop_due_s=60.0
    ),
    "unexplained_latency:stops that are a little overdue": CALM.but(
        stops_every_s=145.0, stopped_ratio=0.17, stop_due_s=-10.0
    ),
    "unexplained_latency:stops that are overdue": CALM.but(
        stops_every_s=145.0, stopped_ratio=0.17, stop_due_s=-20.0
    ),
    "unexplained_latency:pauses": UNEXPLAINED.but(
        ttft_p50_drift_ratio=1.0, itl_stall_time_ratio=0.06, itl_p99_s=0.4, itl_p99_drift_ratio=2.0
    ),
    **{
        f"unexplained_latency:{name}": replace(
            UNEXPLAINED.but(
                ttft_p50_drift_ratio=1.0,
                itl_stall_time_ratio=share,
                itl_p99_s=0.03,
                itl_p99_drift_ratio=1.0,
                prefill_busy_ratio=0.1,
            ).lasting(pauses=lasts_s),
            quiet={**UNEXPLAINED.quiet, "ttft_p99_s": usual_s},
        )
        for name, share, usual_s, lasts_s in (
            ("short pauses", 0.03, 0.3, 90.0),
            (" not with short pauses, few", 0.015, 0.3, 90.0),
            (" not with short pauses, prompts as long", 0.03, 0.7, 90.0),
            ("pauses beside prompts as long", 0.06, 0.7, 90.0),
            (" not with short pauses that may be a single one", 0.06, 0.3, 60.0),
        )
    },
    **{
        f"unexplained_latency:{name}": replace(
            UNEXPLAINED.but(ttft_mean_s=late_s).lasting(far_off=0.0),
            quiet={**UNEXPLAINED.quiet, "ttft_mean_s": 0.1},
        )
        for name, late_s in ((" not after 40 s", 40.0), ("first tokens after 70 s", 70.0))
    },
    **{
        f"unexplained_latency:{name}": replace(
            UNEXPLAINED.but(ttft_p50_drift_ratio=1.0, itl_stall_time_ratio=0.06, itl_p99_s=0.4),
            quiet={**UNEXPLAINED.quiet, "itl_p99_s": p99_s, "itl_stall_time_ratio": usual_share},
        )
        for name, p99_s, usual_share in (
            (" not with pauses as ever", 0.2, 0.035),
            ("more pauses than ever", 0.2, 0.025),
            (" not with gaps that are hardly longer", 0.3, 0.01),
            ("pauses, and all long gaps are longer", 0.26, 0.01),
        )
    },
    "unexplained_latency:pauses, and prefills are short": UNEXPLAINED.but(
        itl_stall_time_ratio=0.3, itl_p99_s=0.6, itl_p99_drift_ratio=4.0, ttft_p50_drift_ratio=1.0,
        computed_moved_ratio=1.6, prefill_busy_ratio=0.02,
    ),
    "unexplained_latency:pauses, and few other gaps are longer": UNEXPLAINED.but(
        ttft_p50_drift_ratio=1.0, itl_stall_time_ratio=0.06, itl_p99_s=0.24, itl_p99_drift_ratio=1.2
    ),
    "unexplained_latency:long pauses": UNEXPLAINED.but(
        ttft_p50_drift_ratio=1.0, itl_stall_time_ratio=0.7, itl_p99_s=0.4, itl_p99_drift_ratio=2.0
    ),
    "unexplained_latency: not by the median alone": replace(
        UNEXPLAINED.but(ttft_mean_s=0.15), quiet={**UNEXPLAINED.quiet, "ttft_mean_s": 0.1}
    ),
    "unexplained_latency:by the mean too": replace(
        UNEXPLAINED.but(ttft_mean_s=0.3), quiet={**UNEXPLAINED.quiet, "ttft_mean_s": 0.1}
    ),
    "unexplained_latency:noticed at a lower load": replace(
        UNEXPLAINED.but(ttft_mean_s=0.25, demand_moved_ratio=0.1),
        quiet={**UNEXPLAINED.quiet, "ttft_mean_s": 0.1},
    ),
    "unexplained_latency: not where nobody notices": replace(
        UNEXPLAINED.but(ttft_mean_s=0.12, demand_moved_ratio=0.1),
        quiet={**UNEXPLAINED.quiet, "ttft_mean_s": 0.05},
    ),
    "unexplained_latency:more requests, and none queues": UNEXPLAINED.but(
        demand_moved_ratio=1.8, waiting_avg=2.5, waiting_deferred_avg=2.0, itl_mean_drift_ratio=1.1
    ),
    "unexplained_latency:more requests, and the engine has room": UNEXPLAINED.but(
        demand_moved_ratio=1.8, waiting_avg=4.0, waiting_deferred_avg=0.0, itl_mean_drift_ratio=1.1,
        queue_mean_s=2.0, prefill_mean_s=0.4, prefill_busy_ratio=0.7, kv_usage_avg_ratio=0.7,
        running_max=20.0, running_queued_avg=8.0,
    ),
    "unexplained_latency:tokens, and prompts grew": UNEXPLAINED.but(
        ttft_p50_drift_ratio=1.0, itl_mean_s=0.09, itl_mean_drift_ratio=4.0, prefill_busy_ratio=0.3,
        prompts_moved_ratio=2.0, computed_moved_ratio=2.0, engine_speed_ratio=0.8,
    ),
    "unexplained_latency:tokens, and prompts shrank": UNEXPLAINED.but(
        ttft_p50_drift_ratio=1.0, itl_mean_s=0.06, itl_mean_drift_ratio=2.1, prefill_busy_ratio=0.3,
        prompts_moved_ratio=0.5, computed_moved_ratio=1.5, engine_speed_ratio=0.8,
    ),
    "unexplained_latency:very late": UNEXPLAINED.but(
        ttft_p50_drift_ratio=14.0, ttft_p99_drift_ratio=14.0, ttft_p99_s=14.0
    ),
    "prefix_reuse_lost:none of many since the start": replace(
        LOST.but(prefix_hit_ratio=0.0, prefix_hit_tokens_mean=0.0, arrival_per_s=0.4),
        quiet={**LOST.quiet, "prefix_hit_ratio": 0.95}, observed_s=90.0,
    ),
    "prefix_reuse_lost: not of a woken engine": replace(
        LOST.but(
            prefix_hit_ratio=0.0, prefix_hit_tokens_mean=0.0, arrival_per_s=0.4, awake_min=0.0
        ),
        quiet={**LOST.quiet, "prefix_hit_ratio": 0.95}, observed_s=90.0,
    ),
    "prefill_interference: not where prefills are slow": SPIKES.but(
        computed_moved_ratio=1.4, prefill_speed_ratio=0.5
    ),
    "prefill_interference: not where prefills take longer than first tokens took": replace(
        SPIKES.but(computed_moved_ratio=1.4, demand_moved_ratio=1.4, prefill_mean_s=0.4),
        quiet={**SPIKES.quiet, "ttft_mean_s": 0.2},
    ),
    "prefill_interference:prefills take longer as more arrive": replace(
        SPIKES.but(computed_moved_ratio=1.0, demand_moved_ratio=1.6, prefill_mean_s=0.4),
        quiet={**SPIKES.quiet, "ttft_mean_s": 0.2},
    ),
    "prefill_interference: not where all steps are slow": SPIKES.but(
        engine_speed_ratio=0.5, itl_p50_drift_ratio=2.5
    ),
    "prefill_interference:all steps are hardly slower": SPIKES.but(
        engine_speed_ratio=0.8, itl_p50_drift_ratio=2.5
    ),
    "prefill_interference:slow, and the median holds": SPIKES.but(
        engine_speed_ratio=0.5, itl_p50_drift_ratio=1.3
    ),
    "prefill_interference:slower, and longer prompts": SPIKES.but(
        computed_moved_ratio=1.6, prefill_speed_ratio=0.5
    ),
    "prefill_interference:hardly slower": SPIKES.but(
        computed_moved_ratio=1.4, prefill_speed_ratio=0.65
    ),
    "prefill_interference: not with the usual prompts": replace(
        SPIKES.but(computed_moved_ratio=1.0, demand_moved_ratio=1.0),
        quiet={**SPIKES.quiet, "itl_p99_s": 0.4},
    ),
    "prefill_interference:longer prompts": replace(
        SPIKES.but(computed_moved_ratio=1.5, demand_moved_ratio=1.0),
        quiet={**SPIKES.quiet, "itl_p99_s": 0.4},
    ),
    "prefill_interference:more prompts": replace(
        SPIKES.but(computed_moved_ratio=1.0, demand_moved_ratio=1.5),
        quiet={**SPIKES.quiet, "itl_p99_s": 0.4},
    ),
    "prefill_interference:pauses as ever": replace(
        SPIKES.but(computed_moved_ratio=1.0, demand_moved_ratio=1.0),
        quiet={**SPIKES.quiet, "itl_p99_s": 0.7},
    ),
    "slow_steps:a little": SLOW_STEPS.but(engine_speed_ratio=0.7),
    "slow_steps:perhaps not that slow": SLOW_STEPS.but(engine_speed_error_ratio=0.2),
    "slow_steps: not nearly as fast": SLOW_STEPS.but(engine_speed_ratio=0.8),
    "slow_steps: not of unknown speed": SLOW_STEPS.but(engine_speed_ratio=None),
    "slow_steps:a request now and then": SLOW_STEPS.but(running_avg=0.6),
    "slow_steps:no baseline": SLOW_STEPS.but(itl_mean_drift_ratio=None),
    "slow_steps:prefills": CALM.but(prefill_speed_ratio=0.25, prefill_mean_s=0.8),
    "slow_steps:prefills within the target": replace(
        CALM.but(prefill_speed_ratio=0.25, prefill_mean_s=0.8), targets=Targets(ttft_p99_s=30.0)
    ),
    "slow_steps:prefills, idle GPU": CALM.but(prefill_speed_ratio=0.25, **HOST),
    **{
        f"slow_steps:{name}": replace(
            CALM.but(
                prefill_speed_ratio=0.5, ttft_p50_drift_ratio=drift, ttft_mean_s=0.1 * growth
            ),
            quiet={**CALM.quiet, "ttft_mean_s": 0.1},
        )
        for name, drift, growth in (
            ("prefills, some first tokens a little later", 1.0, 1.5),
            (" not for prefills, first tokens as usual", 1.5, 1.0),
        )
    },
    **{
        f"slow_steps:{name}": CALM.but(
            engine_speed_ratio=0.8, engine_speed_error_ratio=error, prefill_speed_ratio=0.7
        ).lasting(rather_slow=90.0)
        for name, error in (("a little longer", 0.05), (" not within the error", 0.15))
    },
    "slow_steps: not for prefills that are a little slower": CALM.but(prefill_speed_ratio=0.7),
    **{
        f"unexplained_latency:{name}": CALM.but(
            stream_moved_ratio=stream, drafts_moved_ratio=drafts, demand_moved_ratio=requests,
            computed_moved_ratio=1.0, spec_draft_tokens_per_s=drafted,
        ).lasting(far_off=90.0)
        for name, stream, drafts, requests, drafted in (
            ("fewer accepted drafts", 0.4, 0.5, 1.0, 10.0),
            (" not slightly fewer accepted drafts", 0.6, 0.7, 1.0, 10.0),
            ("fewer accepted drafts of more requests", 0.3, 0.4, 4.0, 10.0),
            (" not slightly fewer accepted drafts of more requests", 0.3, 0.7, 4.0, 10.0),
            ("no drafts", 0.7, 0.7, 1.0, 0.0),
            (" not for drafts of few tokens", 0.8, 0.7, 1.0, 0.0),
            (" not for streams alone", 0.7, 0.8, 1.0, 0.0),
        )
    },
    "slow_steps:within the target": replace(SLOW_STEPS, targets=Targets(itl_p99_s=0.2)),
    "slow_steps:idle GPU": SLOW_STEPS.but(**HOST),
    "spec_acceptance_drift:first week": SPEC_DRIFT.but(spec_accepted_usual_tokens=None),
    "spec_acceptance_drift:first week, less load": SPEC_DRIFT.but(
        spec_accepted_usual_tokens=None, work_growth_tokens=-1600.0
    ),
    "spec_acceptance_drift:more": SPEC_DRIFT.but(
        spec_accepted_growth_tokens=-0.6, spec_accepted_per_draft_tokens=2.47
    ),
    "kv_leak:little": CONCLUSIVE["kv_leak"].but(kv_usage_ratio=0.03),
    "queue_saturation:targets": replace(
        QUEUED.but(running_max=12.0, itl_mean_drift_ratio=1.8, waiting_by_capacity=2.2,
                   kv_usage_avg_ratio=0.9, running=10.0, completed_per_s=1.5),
        targets=SLOW,
    ),
    "queue_saturation:unserved": UNSERVED.but(
        running_max=14.0, waiting_by_capacity=2.5, kv_usage_avg_ratio=0.7,
        waiting_slope_per_s=0.12,
    ),
    "queue_saturation:unserved for long": UNSERVED.but(running_max=14.0).lasting(queued=70.0),
    "queue_saturation:slow requests": QUEUED.but(
        running_max=14.0, e2e_mean_s=20.0, waiting_by_capacity=9.0
    ),
    "queue_saturation:long for the target": replace(
        QUEUED.but(running_max=14.0), targets=SLOW
    ),
    "admission_limit:long for the target": replace(
        QUEUED.but(running_max=10.0), targets=SLOW
    ),
    "admission_limit:long": QUEUED.but(running_max=10.0, completed_per_s=0.3),
    "admission_limit:unserved for long": UNSERVED.but(running_max=10.0).lasting(queued=70.0),
    "admission_limit:measured": QUEUED.but(running_max=10.0, **MEASURED_ROOM),
    "admission_limit:targets": replace(
        QUEUED.but(running_max=10.0, completed_per_s=40.0), targets=SLOW
    ),
    "admission_limit:unserved": UNSERVED.but(running_max=10.0),
    "engine_asleep:one request": CONCLUSIVE["engine_asleep"].but(running=1.0),
    "engine_stalled:admits none": ADMITS_NONE,
    **{
        f"engine_stalled: not where it admits none {name}": ADMITS_NONE.but(**values)
        for name, values in (
            ("for half a minute", {"unadmitted_s": 30.0}),
            ("and one waits", {"waiting_by_capacity": 1.0}),
            ("into a full cache", {"kv_usage_avg_ratio": 0.85}),
            ("while steps are long", {"itl_mean_drift_ratio": 1.5}),
            ("while a prompt is computed", {"iteration_tokens_mean": 2000.0}),
            ("of another adapter", {"lora_max": 1.0}),
            ("of giants", GIANT_FIRST),
        )
    },
    "engine_stalled:one request": CONCLUSIVE["engine_stalled"].but(running=1.0),
    "queue_saturation:some KV": QUEUED.but(
        running_max=10.0, kv_usage_avg_ratio=0.85, **MEASURED_ROOM
    ),
    "queue_saturation:long steps": QUEUED.but(
        running_max=10.0, **{**MEASURED_ROOM, "itl_p50_s": 0.12}
    ),
    "admission_limit:stalls": QUEUED.but(
        running_max=10.0, itl_stall_time_ratio=0.25, **{**MEASURED_ROOM, "prefill_busy_ratio": 0.6}
    ),
    "queue_saturation:prefill": QUEUED.but(
        running_max=10.0, **{**MEASURED_ROOM, "prefill_busy_ratio": 0.9}
    ),
    "prefix_cache_off:busy": OFF.but(prefill_service_ratio=0.01, prefill_busy_ratio=0.4),
    "prefix_cache_off:first tokens are late": OFF.but(
        prefill_service_ratio=0.01, prefill_busy_ratio=0.1, ttft_p50_drift_ratio=3.0
    ),
    "prefix_cache_off: not where first tokens are hardly late": OFF.but(
        prefill_service_ratio=0.01, prefill_busy_ratio=0.1, ttft_p50_drift_ratio=1.5
    ),
    "prefix_cache_off:no request generates a token": OFF.but(generation_tokens_per_s=0.0),
    "prefix_cache_off:barely": OFF.but(
        prefill_service_ratio=0.06, computed_prompt_tokens_per_s=2_400.0
    ),
    "prefix_reuse_lost:some hits": LOST.but(
        prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, kv_capacity_tokens=1e6,
        prefill_service_ratio=0.06,
    ),
    "prefix_reuse_lost:first tokens hit": replace(
        CHURN.but(prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, prefill_hit_share=0.12,
                  prefill_service_ratio=0.06),
        quiet={**CHURN.quiet, "prefix_hit_ratio": 0.9},
    ),
    "prefix_reuse_lost:first tokens hit, none whole": replace(
        CHURN.but(prefix_hit_ratio=0.3, prefix_hit_tokens_mean=40.0, prefill_hit_share=0.2,
                  prefill_service_ratio=0.06),
        quiet={**CHURN.quiet, "prefix_hit_ratio": 0.85},
    ),
    "prefix_reuse_lost:all hit alike": replace(
        CHURN.but(prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, prefix_hit_spread_sigmas=-2.5,
                  prefix_query_per_s=400.0),
        quiet={**CHURN.quiet, "prefix_hit_ratio": 0.9, "prefix_query_per_s": 400.0},
    ),
    "prefix_reuse_lost:all hit alike, reused in time": replace(
        CHURN.but(prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, prefix_hit_spread_sigmas=-2.5,
                  kv_reuse_gap_s=1.5, kv_idle_before_evict_s=5.0),
        quiet={**CHURN.quiet, "prefix_hit_ratio": 0.9},
    ),
    "prefix_reuse_lost: not where tails are reused late": replace(
        CHURN.but(prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, prefix_hit_spread_sigmas=-2.5,
                  kv_reuse_gap_s=3.0, kv_idle_before_evict_s=5.0),
        quiet={**CHURN.quiet, "prefix_hit_ratio": 0.9},
    ),
    "prefix_churn:tails evicted": replace(
        CHURN.but(prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, prefix_hit_spread_sigmas=-3.0,
                  prefix_query_per_s=600.0),
        quiet={**CHURN.quiet, "prefix_hit_ratio": 0.9, "prefix_query_per_s": 400.0},
    ),
    "prefix_churn: not where prompts hit again": replace(
        CHURN.but(prefix_hit_spread_sigmas=3.0), recent={"prefix_hit_ratio": 0.45}
    ),
    "prefix_churn: not where prompts no longer hit": replace(
        CHURN.but(prefix_hit_spread_sigmas=3.0), recent={"prefix_hit_ratio": 0.08}
    ),
    "prefix_churn:in runs, and no fewer now": replace(
        CHURN.but(prefix_hit_spread_sigmas=3.0), recent={"prefix_hit_ratio": 0.3}
    ),
    "prefix_churn:some hit whole": replace(
        CHURN.but(prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, prefill_hit_share=0.16),
        quiet={**CHURN.quiet, "prefix_hit_ratio": 0.9},
    ),
    "prefix_reuse_lost:another tier": LOST.but(
        prefix_hit_ratio=0.2, prefix_hit_tokens_mean=40.0, prefix_saved_ratio=0.5,
        kv_capacity_tokens=1e6, prefill_service_ratio=0.01, prefill_busy_ratio=0.35,
    ),
    "prefix_cache_off:no request ends": OFF.but(
        prefill_service_ratio=None, prefill_busy_ratio=None, waiting_avg=1.2
    ),
    "prefix_churn:no request ends": CHURN.but(
        prefill_service_ratio=None, prefill_busy_ratio=None, waiting_avg=1.2
    ),
    "prefix_reuse_lost:no request ends": LOST.but(
        prefill_service_ratio=None, prefill_busy_ratio=None, waiting_avg=1.2,
        computed_prompt_tokens_per_s=2_400.0,
    ),
    "prefix_reuse_lost:prompts of many lengths": LOST.but(
        prompt_tokens_mean=300.0, prompt_tokens_p95=2_000.0, prefix_block_tokens=528.0
    ),
    "prefix_reuse_lost: not with prompts shorter than a block": LOST.but(
        prompt_tokens_mean=300.0, prompt_tokens_p95=1_000.0, prefix_block_tokens=528.0
    ),
    "prefix_reuse_lost:never": replace(
        LOST.but(prefix_hit_ratio=0.015, prefill_service_ratio=0.35), quiet={}
    ),
    "prefix_reuse_lost:never, long prompts": replace(
        LOST.but(prefill_service_ratio=0.35, prompt_tokens_p95=3_000.0, prefix_block_tokens=528.0),
        quiet={},
    ),
    "prefix_reuse_lost:never, short blocks": replace(
        LOST.but(prefill_service_ratio=0.35, prompt_tokens_p95=900.0, prefix_block_tokens=128.0),
        quiet={},
    ),
    "prefix_block_too_large:few blocks": replace(
        CONCLUSIVE["prefix_block_too_large"].but(prompt_tokens_p95=2_100.0, prefix_hit_ratio=0.015),
        quiet={},
    ),
    "prefix_block_too_large:shorter on average": replace(
        CONCLUSIVE["prefix_block_too_large"].but(
            prompt_tokens_p95=1_000.0, prompt_tokens_mean=500.0, prefill_service_ratio=0.1
        ),
        quiet={},
    ),
    "prefix_block_too_large:busy": CONCLUSIVE["prefix_block_too_large"].but(
        prefill_service_ratio=0.01, prefill_busy_ratio=0.4
    ),
    "prefix_block_too_large:no request ends": CONCLUSIVE["prefix_block_too_large"].but(
        prefill_service_ratio=None, prefill_busy_ratio=None, waiting_avg=1.2
    ),
    "prefix_block_too_large:once longer": CONCLUSIVE["prefix_block_too_large"].but(
        prompt_tokens_mean=300.0, prefill_service_ratio=0.1
    ),
    "prefix_block_too_large:barely": replace(
        CONCLUSIVE["prefix_block_too_large"].but(prompt_tokens_p95=520.0, prefix_hit_ratio=0.015),
        quiet={},
    ),
    "prefix_churn:reused": replace(
        CHURN.but(prefix_hit_ratio=0.4, block_reuse_per_s=1.0, block_eviction_per_s=6.0,
                  kv_reuse_gap_s=3.0, kv_idle_before_evict_s=5.0, kv_capacity_tokens=250_000.0),
        quiet={},
    ),
    "prefix_churn:mixed": replace(
        CHURN.but(prefill_hit_share=0.3, prefill_miss_share=0.5, prefill_tokens_p95=900.0,
                  kv_reuse_gap_s=1.0, kv_idle_before_evict_s=5.0, prefix_saved_ratio=0.5,
                  kv_capacity_tokens=250_000.0),
        quiet={}, recent={"prefix_hit_ratio": 0.3},
    ),
    "prefix_churn:few hit": replace(
        CHURN.but(prefill_hit_share=0.16, prefill_miss_share=0.8, prefix_hit_ratio=0.15,
                  kv_capacity_tokens=250_000.0),
        quiet={}, recent={"prefix_hit_ratio": 0.15},
    ),
    "prefix_churn: not where all hit a short head": replace(
        CHURN.but(prefill_hit_share=0.16, prefill_miss_share=0.62, prefix_hit_ratio=0.36,
                  kv_capacity_tokens=250_000.0),
        quiet={}, recent={"prefix_hit_ratio": 0.36},
    ),
    "prefix_churn:few miss": replace(
        CHURN.but(prefill_hit_share=0.8, prefill_miss_share=0.12, prefix_hit_ratio=0.3,
                  kv_capacity_tokens=250_000.0),
        quiet={}, recent={"prefix_hit_ratio": 0.3},
    ),
    "prefix_churn:computed again": replace(
        CHURN.but(prefill_service_ratio=0.01, prefill_busy_ratio=0.7,
                  computed_prompt_tokens_per_s=1500.0),
        quiet={**CHURN.quiet, "prefix_hit_ratio": 0.7},
    ),
    "prefix_churn:busy": CHURN.but(prefill_service_ratio=0.01, prefill_busy_ratio=0.4),
    "prefix_churn:still shared": replace(
        CHURN.but(kv_capacity_tokens=250_000.0), recent={"prefix_hit_ratio": 0.3}
    ),
    "adapter_thrash:turns": replace(
        CALM.but(lora_max=2.0, lora_running=2.5, waiting_deferred=0.0, waiting_deferred_avg=0.7,
                 lora_change_per_s=0.15, kv_usage_avg_ratio=0.92),
        recent={"lora_change_per_s": 0.22},
    ),
    "adapter_thrash:one waits": CALM.but(
        lora_max=2.0, waiting_deferred=1.2, waiting_deferred_avg=1.2
    ).lasting(deferred=30.0),
    "kv_transfer_slow:held back": CALM.but(
        waiting_deferred=8.0, waiting_deferred_avg=6.0, external_hit_ratio=0.9, running_avg=10.0
    ).lasting(deferred=30.0),
    "kv_transfer_slow:held back, few run": CALM.but(
        waiting_deferred=3.0, waiting_deferred_avg=2.5, external_hit_ratio=0.9, running_avg=3.0
    ).lasting(deferred=30.0),
    "kv_transfer_slow:passed by others": QUEUED.but(
        waiting_deferred=None, waiting_deferred_avg=None, external_hit_ratio=0.9,
        expected_wait_s=10.0, ttft_mean_s=1.0,
    ).lasting(passed_over=40.0),
    "kv_transfer_slow:more and more, passed by others": QUEUED.but(
        waiting_deferred=None, waiting_deferred_avg=None, external_hit_ratio=0.9,
        expected_wait_s=10.0, ttft_mean_s=1.0, waiting_slope_per_s=0.5,
    ).lasting(passed_over=40.0, queue_grows=70.0),
    "kv_transfer_slow:beside an idle engine": QUEUED.but(
        waiting_deferred=None, waiting_deferred_avg=None, external_hit_ratio=0.9,
        expected_wait_s=10.0, ttft_mean_s=9.0, running_avg=0.3,
    ).lasting(passed_over=40.0),
    "kv_transfer_slow:a few are never served": CALM.but(
        waiting_deferred=1.5, waiting_deferred_avg=1.5, external_hit_ratio=0.6, running_avg=20.0,
        arrival_per_s=6.0, queue_mean_s=0.005,
    ).lasting(stranded=200.0),
    "kv_transfer_slow:more than take turns": CALM.but(
        waiting_deferred=6.0, waiting_deferred_avg=6.0, external_hit_ratio=0.6, running_avg=20.0,
        arrival_per_s=6.0, queue_mean_s=0.4,
    ).lasting(stranded=200.0),
    "prefill_interference:no request ended": STALLS.but(
        completed_per_s=0.0, prefill_long_per_s=0.0, large_step_per_s=0.25, running_avg=4.0,
        itl_stall_per_s=0.75, iteration_tokens_mean=8_195.0,
    ),
    "host_contention:api": CALM.but(
        e2e_mean_s=5.0, queue_mean_s=0.05, prefill_mean_s=0.1, decode_mean_s=3.3,
        completed_per_s=1.0, gpu_engine_active_ratio=0.4,
    ),
    "host_contention:api, short requests": CALM.but(
        e2e_mean_s=1.5, queue_mean_s=0.05, prefill_mean_s=0.1, decode_mean_s=0.1,
        completed_per_s=0.1,
    ),
    "host_contention:api, prepared for seconds since the start": CALM.but(
        e2e_mean_s=5.0, queue_mean_s=0.05, prefill_mean_s=0.1, decode_mean_s=3.0, ttft_mean_s=1.9,
        ttft_p99_s=3.0, completed_per_s=1.0,
    ),
    **{
        f"host_contention:api, prepared for {outside_s:.0f} s": CALM.but(
            e2e_mean_s=outside_s + 3.15, queue_mean_s=0.05, prefill_mean_s=0.1, decode_mean_s=3.0,
            ttft_mean_s=outside_s, ttft_p99_s=outside_s, completed_per_s=1.0,
        )
        for outside_s in (7.0, 15.0)
    },
    "host_contention:api, prepared for longer than usual": replace(
        CALM.but(
            e2e_mean_s=5.0, queue_mean_s=0.05, prefill_mean_s=0.1, decode_mean_s=3.0,
            ttft_mean_s=1.9, ttft_p99_s=3.0, completed_per_s=1.0,
        ),
        quiet={**CALM.quiet, "ttft_mean_s": 0.9},
    ),
    "host_contention:api, calls pile up": CALM.but(
        piled_calls=40.0, demand_moved_ratio=0.5, completed_per_s=1.0, ttft_p50_drift_ratio=1.1,
    ),
    "host_contention: not outside for one long step": CALM.but(
        e2e_mean_s=5.0, queue_mean_s=0.05, prefill_mean_s=1.0, prefill_p99_s=2.0,
        decode_mean_s=2.0, completed_per_s=1.0,
    ),
    "host_contention: not outside for pauses of all": CALM.but(
        e2e_mean_s=5.0, queue_mean_s=0.05, prefill_mean_s=0.1, decode_mean_s=3.0,
        itl_stall_time_ratio=0.7, completed_per_s=1.0,
    ),
    "slow_steps:a neighbour on the GPU": SLOW_STEPS.but(gpu_neighbour_memory_ratio=0.03),
    "requests_failing:in the API server": CALM.but(accepted_per_s=4.0, server_error_per_s=0.2),
    "requests_failing:in the API server, few calls": CALM.but(
        accepted_per_s=1.0, server_error_per_s=0.08
    ),
    "requests_failing:aborted": CALM.but(finished_abort_per_s=0.6),
    "requests_failing:aborted, few requests": CALM.but(
        completed_per_s=0.15, finished_abort_per_s=0.06
    ),
    "requests_failing:answers cut short": CALM.but(
        answers_moved_ratio=0.04, demand_moved_ratio=0.6, prompts_moved_ratio=1.0,
        completed_per_s=0.5, output_tokens_p50=6.0,
    ).lasting(cut_short=70.0),
    "requests_failing: not by short answers that were half of them": CALM.but(
        answers_moved_ratio=0.04, demand_moved_ratio=0.6, prompts_moved_ratio=1.0,
        completed_per_s=0.5, output_tokens_p50=60.0,
    ).lasting(cut_short=70.0),
    "requests_failing: not by short answers to longer prompts": CALM.but(
        answers_moved_ratio=0.04, demand_moved_ratio=1.0, prompts_moved_ratio=1.5,
        completed_per_s=0.5, output_tokens_p50=6.0,
    ).lasting(cut_short=70.0),
    "requests_failing: not by callers that leave": CALM.but(
        finished_abort_per_s=0.6, accepted_per_s=2.0, given_up_ratio=0.3
    ),
    **{
        f"queue_saturation:{name}": replace(
            QUEUED.but(
                running_max=14.0, waiting_slope_per_s=growth_per_s, expected_wait_s=wait_s
            ).lasting(queue_grows=70.0),
            quiet={} if usual_s is None else {**QUEUED.quiet, "ttft_p99_s": usual_s},
            targets=targets,
        )
        for name, (growth_per_s, wait_s, usual_s, targets) in GROWING.items()
    },
    "queue_saturation:a small queue grows": QUEUED.but(
        running_max=14.0, waiting_by_capacity=10.0, waiting_slope_per_s=0.1
    ),
    "queue_saturation:steady": replace(
        QUEUED.but(running_max=14.0, expected_wait_s=90.0, waiting_slope_per_s=0.03), quiet={}
    ),
    "queue_saturation:drains": replace(
        QUEUED.but(running_max=14.0, expected_wait_s=90.0, waiting_slope_per_s=-0.06), quiet={}
    ),
    "kv_held:ever more are deferred": HELD.but(
        waiting_deferred=20.0, waiting_deferred_avg=30.0, waiting_slope_per_s=0.1
    ).lasting(deferred_grows=100.0),
    "kv_held:ever more are deferred, few run": HELD.but(
        waiting_deferred=9.0, waiting_deferred_avg=8.0, waiting_slope_per_s=0.1, running_avg=4.0
    ),
    "kv_held:by deferred prompts": HELD.but(
        prompt_tokens_mean=10_000.0, prompt_tokens_p99=20_000.0, waiting_deferred_avg=3.0
    ),
    "kv_held:without a connector": HELD.but(
        running_avg=6.0, kv_transfer_mean_s=None, waiting_deferred_avg=0.0, prompts_moved_ratio=1.1
    ),
    "kv_held: not where steps read more": HELD.but(
        running_avg=6.0, kv_transfer_mean_s=None, waiting_deferred_avg=0.0, prompts_moved_ratio=1.1,
        itl_mean_drift_ratio=1.4,
    ),
    "kv_held: not as prompts grew": HELD.but(
        running_avg=6.0, kv_transfer_mean_s=None, waiting_deferred_avg=0.0, prompts_moved_ratio=1.3
    ),
    "kv_held: not as prompts became shorter": HELD.but(
        running_avg=8.0, kv_transfer_mean_s=None, waiting_deferred_avg=0.0, prompts_moved_ratio=0.6
    ),
    "kv_held:seats without tokens": CALM.but(
        running_avg=43.0, generation_tokens_per_s=140.0, itl_mean_s=0.02, prefill_busy_ratio=0.1,
        iteration_tokens_mean=10.0,
    ).lasting(seats_held=130.0),
    "kv_held:few seats without tokens": CALM.but(
        running_avg=6.0, generation_tokens_per_s=80.0, itl_mean_s=0.02, prefill_busy_ratio=0.1,
        iteration_tokens_mean=10.0,
    ).lasting(seats_held=130.0),
    "kv_held:seats without tokens, some queue": CALM.but(
        running_avg=43.0, running=43.0, generation_tokens_per_s=140.0, itl_mean_s=0.02,
        prefill_busy_ratio=0.1, iteration_tokens_mean=10.0, waiting_by_capacity=5.0,
    ).lasting(seats_held=130.0, queued=90.0),
    "kv_held:passed by others": CALM.but(
        running_avg=30.0, waiting_deferred=20.0, waiting_deferred_avg=20.0, arrival_per_s=1.0,
        ttft_mean_s=0.5,
    ).lasting(never_served=70.0),
    "kv_held:few, passed by others": CALM.but(
        running_avg=4.0, waiting_deferred=5.0, waiting_deferred_avg=5.0, arrival_per_s=0.3,
        ttft_mean_s=1.5,
    ).lasting(never_served=70.0),
    "kv_held:more and more, passed by others": CALM.but(
        running_avg=4.0, waiting_deferred=20.0, waiting_deferred_avg=20.0, arrival_per_s=1.0,
        ttft_mean_s=0.5, waiting_slope_per_s=0.2,
    ).lasting(never_served=100.0, deferred_grows=100.0),
    "kv_held:less by the balance": HELD.but(kv_unaccounted_ratio=0.1),
    "kv_held:no balance": HELD.but(kv_unaccounted_ratio=None),
    "kv_transfer_slow:longer than usual": XFER.but(
        kv_transfer_mean_s=0.04, ttft_mean_s=0.1, ttft_p50_drift_ratio=2.0
    ),
    "kv_transfer_slow:longer than usual, target": replace(
        XFER.but(kv_transfer_mean_s=0.04, ttft_mean_s=0.1, ttft_p50_drift_ratio=2.0), targets=SLOW
    ),
    "kv_transfer_slow:longer than a user notices": replace(
        XFER.but(kv_transfer_mean_s=0.4, ttft_mean_s=0.6), quiet={}
    ),
    "kv_transfer_slow:share": replace(
        XFER.but(kv_transfer_mean_s=0.4, ttft_mean_s=1.0), quiet={}
    ),
    "kv_transfer_slow:failures": XFER.but(
        kv_transfer_mean_s=None, kv_transfer_failed_per_s=0.2, kv_expired_per_s=0.1
    ),
    "kv_transfer_slow:fetches": FETCHING,
    "kv_transfer_slow:handed over": FETCHING.but(kv_handover_waiting=3.0),
    "kv_transfer_slow:as long for those that were served": FETCHING.but(
        kv_fetch_waiting=8.0, ttft_mean_s=4.0
    ),
    "kv_transfer_slow: not as long as ever": replace(
        FETCHING.but(kv_fetch_waiting=4.0), quiet={**FETCHING.quiet, "ttft_mean_s": 2.0}
    ),
    "kv_transfer_slow:one fetch": FETCHING.but(kv_fetch_waiting=1.2),
    "kv_transfer_slow:queued here": FETCHING.but(
        kv_fetch_queued=3.0, kv_usage_avg_ratio=0.97, kv_expired_per_s=0.1
    ),
    "kv_transfer_slow:arrived": FETCHING.but(
        kv_fetch_arrived=3.0, kv_transfer_failed_per_s=0.1
    ),
    "kv_transfer_slow:LMCache": XFER.but(
        lmcache_retrieve_mean_s=0.08, lmcache_healthy=0.0, kv_transfer_mean_s=0.08
    ),
    "spec_decode_poor:drafts": SPEC.but(
        spec_accepted_per_draft_tokens=0.6, spec_acceptance_ratio=0.2, running_avg=20.0
    ),
    "spec_decode_poor:pays": SPEC.but(
        spec_acceptance_ratio=0.4, spec_accepted_per_draft_tokens=2.0, running_avg=20.0
    ),
    "spec_decode_poor:hardly pays": SPEC.but(
        spec_acceptance_ratio=0.3, spec_accepted_per_draft_tokens=0.9, running_avg=20.0
    ),
    "spec_decode_poor:fallen": replace(
        SPEC.but(spec_acceptance_ratio=0.45, spec_accepted_per_draft_tokens=2.3, running_avg=4.0,
                 arrival_per_s=0.5),
        recent={"spec_acceptance_ratio": 0.3},
    ),
    "spec_decode_poor:recently": replace(
        SPEC.but(spec_acceptance_ratio=0.6, running_avg=4.0, arrival_per_s=0.5),
        recent={"spec_acceptance_ratio": 0.3},
    ),
    "spec_decode_poor:loaded": SPEC.but(
        spec_acceptance_ratio=0.5, spec_accepted_per_draft_tokens=1.5, **COMPUTE
    ),
    "spec_decode_poor:loaded recently": replace(
        SPEC.but(spec_acceptance_ratio=0.7, running_avg=4.0, arrival_per_s=0.5, **COMPUTE),
        recent={"spec_acceptance_ratio": 0.4},
    ),
    **{
        f"prefill_interference:long prompts, {name}": replace(
            STALLS.but(prefill_p50_s=p50_s, **moved).lasting(more_prefill=for_s),
            quiet={**STALLS.quiet, "ttft_p50_s": usual_s},
        )
        for name, p50_s, usual_s, moved, for_s in (
            ("as ever", 0.6, 0.6, {}, 0.0),
            ("hardly long", 0.3, 0.6, {}, 0.0),
            ("not usual", 0.6, 0.3, {}, 0.0),
            ("more of them", 0.6, 0.6, {"demand_moved_ratio": 1.5}, 40.0),
            ("longer ones", 0.6, 0.6, {"computed_moved_ratio": 1.5}, 40.0),
            ("longer ones for a moment", 0.6, 0.6, {"computed_moved_ratio": 1.5}, 20.0),
        )
    },
    **{
        f"prefill_interference:pauses, {name}": replace(
            STALLS.but(itl_stall_time_ratio=share),
            quiet={**STALLS.quiet, "itl_stall_time_ratio": usual_share},
        )
        for name, share, usual_share in (
            ("few as ever", 0.08, 0.05), ("few, but more", 0.08, 0.03), ("many as ever", 0.12, 0.1)
        )
    },
    "prefill_interference:long prompts, target missed": replace(
        STALLS.but(prefill_p50_s=0.6, itl_p99_s=0.12),
        quiet={**STALLS.quiet, "ttft_p50_s": 0.6},
        targets=ITL_ONLY,
    ),
    "prefill_interference:tail": replace(
        STALLS.but(itl_stall_time_ratio=0.01, itl_p99_s=0.12, itl_p50_s=0.04), targets=ITL_ONLY
    ),
    "prefill_interference:slower": STALLS.but(
        itl_stall_time_ratio=0.06, itl_stall_per_s=0.06, prefill_long_per_s=0.02,
        itl_p50_drift_ratio=1.7, large_step_per_s=0.02,
    ),
    "prefill_interference:few run": STALLS.but(
        running_avg=0.3, large_step_per_s=0.1, itl_stall_per_s=0.15
    ),
    "prefill_interference:slow steps": replace(
        STALLS.but(itl_p50_s=0.09, large_step_per_s=0.04, itl_stall_per_s=0.7), quiet={}
    ),
    "prefill_interference:requests queue": replace(
        CALM.but(
            ttft_mean_s=0.9, ttft_p99_s=4.0, ttft_p99_drift_ratio=20.0, queue_mean_s=0.45,
            prefill_long_per_s=0.1, prefill_p99_s=3.0, computed_moved_ratio=3.0,
        ),
        quiet={**CALM.quiet, "ttft_mean_s": 0.05},
        streaks_s={**CALM.streaks_s, "late_behind_prefills": 120.0},
    ),
    "prefill_interference:behind others": replace(
        CALM.but(itl_p99_s=0.3, ttft_p99_s=3.0, prefill_mean_s=0.6, queue_mean_s=0.3),
        targets=SLOW,
    ),
    **{
        f"{cause}:{name}": replace(
            CALM.but(
                itl_p50_s=itl_p50_s,
                itl_p99_s=0.6,
                ttft_p99_s=1.5,
                prefill_mean_s=prefill_s,
                queue_mean_s=0.02,
            ),
            targets=SLOW,
        )
        for cause in ("slo_conflict", "prefill_bound")
        for name, itl_p50_s, prefill_s in (("of some steps", 0.1, 0.32), ("by tails", 0.045, 0.1))
    },
    "decode_bound:a few long prompts, idle GPUs": replace(
        CALM.but(
            itl_p50_s=0.08, itl_p99_s=0.4, ttft_p99_s=1.5, prefill_mean_s=0.1, queue_mean_s=0.02,
            **HOST,
        ),
        targets=SLOW,
    ),
    "decode_bound:both targets": replace(
        CALM.but(
            itl_p50_s=0.08, itl_p99_s=0.6, ttft_p99_s=1.5, prefill_mean_s=0.1, queue_mean_s=0.02
        ),
        targets=SLOW,
    ),
    **{
        f"{cause}:a few long prompts": replace(
            CALM.but(
                itl_p50_s=0.08, itl_p99_s=0.4, ttft_p99_s=1.5, prefill_mean_s=0.1,
                queue_mean_s=0.02,
            ),
            targets=SLOW,
        )
        for cause in ("slo_conflict", "prefill_bound")
    },
    "prefill_bound:share": PREFILL.but(prefill_mean_s=0.8, queue_mean_s=0.1),
    "prefill_bound:alone": PREFILL.but(prefill_mean_s=1.2, queue_mean_s=2.0),
    "prefill_bound:compute": PREFILL.but(ttft_p99_s=1.2, **COMPUTE),
    "prefill_bound:memory": PREFILL.but(ttft_p99_s=1.2, **MEMORY),
    "prefill_bound:host": PREFILL.but(ttft_p99_s=1.2, **HOST),
    "decode_bound:compute": DECODE.but(itl_p50_s=0.12, **COMPUTE),
    "decode_bound:memory": DECODE.but(itl_p50_s=0.12, **MEMORY),
    "decode_bound:host": DECODE.but(itl_p50_s=0.12, **HOST),
    "decode_bound:half": DECODE.but(decode_share_ratio=0.55, itl_p50_s=0.12),
    "past_knee:queue": replace(
        KNEE.but(queue_share_ratio=0.3, waiting_avg=1.5, running_avg=16.0), targets=Targets()
    ),
    "past_knee:known": replace(KNEE.but(running_avg=32.0), knee=KNEE_AT),
    "past_knee:before": replace(
        KNEE.but(running_avg=16.0, waiting_avg=0.0, ttft_p99_p50_drift_ratio=6.0), knee=KNEE_AT
    ),
    "past_knee:no quiet time": replace(
        KNEE.but(running_avg=32.0, ttft_p99_s=1.2), quiet={}, knee=KNEE_AT
    ),
    "clients_give_up:most": CALM.but(
        accepted_per_s=4.0, given_up_per_s=2.2, given_up_ratio=0.55, completed_per_s=1.8
    ),
    "clients_give_up:some": CALM.but(
        accepted_per_s=4.0, given_up_per_s=0.5, given_up_ratio=0.125, completed_per_s=3.5
    ),
    "clients_give_up:nearly many": CALM.but(
        accepted_per_s=4.0, given_up_per_s=0.92, given_up_ratio=0.23, completed_per_s=2.9
    ),
    "clients_give_up:counted as aborted": CALM.but(
        accepted_per_s=0.9, given_up_per_s=0.0, given_up_ratio=0.0, completed_per_s=2.0,
        finished_abort_per_s=1.1,
    ),
    "clients_give_up: not by hardly any": CALM.but(
        accepted_per_s=4.0, given_up_per_s=0.32, given_up_ratio=0.08, completed_per_s=3.7
    ),
    "clients_give_up: not by few calls": CALM.but(
        accepted_per_s=0.1, given_up_per_s=0.05, given_up_ratio=0.5, completed_per_s=0.05
    ),
    "clients_give_up:barely enough calls": CALM.but(
        accepted_per_s=0.2, given_up_per_s=0.07, given_up_ratio=0.35, completed_per_s=0.13
    ),
    "client_errors: not by few": CALM.but(client_error_per_s=0.05, client_error_ratio=0.5),
    "client_errors:barely enough": CALM.but(client_error_per_s=0.07, client_error_ratio=0.12),
    "client_errors: not by a small share": CALM.but(
        client_error_per_s=1.0, client_error_ratio=0.08
    ),
    "runaway_generation:stated": replace(
        CALM.but(finished_length_ratio=0.25), quiet={}, endless=ENDLESS
    ),
    "runaway_generation:always so": replace(
        CALM.but(finished_length_ratio=0.65), quiet={"finished_length_ratio": 0.5},
        endless=ENDLESS,
    ),
    "runaway_generation: not by so little": replace(
        CALM.but(finished_length_ratio=0.25), quiet={},
        endless=replace(ENDLESS, shift_ratio=0.15, chance_ratio=0.1),
    ),
    "runaway_generation:just enough": replace(
        CALM.but(finished_length_ratio=0.25), quiet={},
        endless=replace(ENDLESS, shift_ratio=0.21, chance_ratio=0.1),
    ),
    "runaway_generation:more requests": RUNAWAY.but(demand_moved_ratio=1.5),
    "runaway_generation:hardly longer": RUNAWAY.but(answers_moved_ratio=1.2),
    "runaway_generation: not by answers as long as before": RUNAWAY.but(answers_moved_ratio=1.0),
    "underused:busy GPU": CONCLUSIVE["underused"].but(
        gpu_engine_active_ratio=0.45, running_avg=0.4
    ),
    "underused:idle GPU": replace(
        CALM.but(gpu_engine_active_ratio=0.3, running_avg=0.6),
        findings={"FLEET-LOW": Severity.INFO},
    ),
    "kv_overprovisioned:nearly half": CONCLUSIVE["kv_overprovisioned"].but(
        kv_usage_max_ratio=0.45
    ),
}  # fmt: skip

SITUATIONS: Mapping[str, Situation] = {**CONCLUSIVE, **OTHERS}
"""By the cause's id, or the id, a colon and what is special about it."""
