"""The causes that PromQL can conclude for one engine, with the sidecar's evidence. Pure.

What needs a number inside a label (the KV capacity), a quarter of the window or the order of
scrapes is the sidecar's alone: `INEXPRESSIBLE` says which and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kneewatch.dashboards.prometheus.model import Plan, duration, number, recorded
from kneewatch.dashboards.prometheus.odds import ZERO, Term, value
from kneewatch.diagnose.causes import (
    drafts,
    features,
    latency,
    memory,
    observer,
    prefix,
    transfer,
    workload,
)
from kneewatch.diagnose.derived import RECENT_SHARE
from kneewatch.rules.cascade import EVICT_WARNING_PER_S
from kneewatch.rules.model import Severity

EACH_GPU = (
    "it judges each GPU by itself and by its number, and which are an engine's takes labels that "
    "GPU pages and vLLM's do not share"
)
INEXPRESSIBLE: Mapping[str, str] = {
    "gpu_fault": EACH_GPU,
    "gpu_throttled": EACH_GPU,
    "prefix_churn": "how long a cached block lasts follows from the KV capacity, a number that "
    "stands inside a label of cache_config_info",
}

Levels = tuple[tuple[Severity, str], ...]
"""Severities and when each applies, worst first; an empty condition always does."""


@dataclass(frozen=True, slots=True)
class CauseQuery:
    """A cause as PromQL: concluded where `when` holds and the evidence carries it."""

    id: str
    when: str
    terms: tuple[Term, ...]
    start: float
    levels: Levels
    summary: str
    lever: str
    guide: tuple[str, ...]
    note: str = ""
    """Another form of the cause, told beside it by a name of its own."""

    @property
    def series(self) -> str:
        """What tells its recorded confidence from those of the others."""
        return f"{self.id}:{self.note}" if self.note else self.id


def cause_queries(plan: Plan) -> tuple[CauseQuery, ...]:
    """Every cause that a plan's series can show."""
    made: list[CauseQuery] = []
    for build in BUILDERS:
        query = build(plan)
        if query is not None:
            made.append(query)
    return tuple(made)


def _kv_pressure(plan: Plan) -> CauseQuery:
    usage, stage = recorded("kv_usage_avg_ratio"), recorded("cascade_stage")
    evicting = f"{stage} >= 2"
    bound = f"({usage} >= {number(memory.KV_BOUND_FROM)}) and {_queued(plan)}"
    severity = recorded("cascade_severity")
    return CauseQuery(
        "kv_pressure",
        f"({evicting}) or ({bound})",
        (
            Term(f"{ZERO} - 0.5", None, -0.5, f"{stage} < 2"),
            Term(value("preemption_ratio_per_s"), number(EVICT_WARNING_PER_S), 2.0, evicting),
            Term(usage, "0.9", 2.0, f"{usage} >= 0.85"),
            Term(usage, "0.9", -1.5, f"{usage} < 0.85", below=True),
            Term(
                recorded("waiting_by_capacity"), "1", 1.0, f"{recorded('waiting_by_capacity')} >= 1"
            ),
            Term(
                recorded("itl_stall_time_ratio"),
                "0.02",
                0.5,
                f"({recorded('itl_stall_time_ratio')} > 0.02) and ({evicting})",
            ),
        ),
        0.0,
        (
            (Severity.CRITICAL, f"({stage} >= 2) and ({severity} == 3)"),
            (Severity.WARNING, f"(({stage} >= 2) and ({severity} == 2)) or ({stage} < 2)"),
            (Severity.INFO, ""),
        ),
        "The KV cache is too small for this load",
        "Give the KV cache more room (fp8 KV cache, higher --gpu-memory-utilization), admit less "
        "(lower --max-num-seqs), or add replicas.",
        ("7.4", "9.3"),
    )


def _queue(plan: Plan, *, pinned: bool) -> CauseQuery:
    waiting, usage = recorded("waiting_by_capacity"), recorded("kv_usage_avg_ratio")
    wait = f"({waiting} / ({recorded('completed_per_s')} > 0))"
    target_s = plan.targets.ttft_p99_s
    if target_s is not None:
        hurts = f"{wait} >= {number(0.5 * target_s)}"
    else:
        floor = (
            f"clamp_min({number(memory.QUEUE_SHARE_OF_REQUEST)} * {value('e2e_mean_s')},"
            f" {number(memory.QUEUE_WAIT_MIN_S)})"
        )
        hurts = f"{wait} >= {floor}"
    hurts = f"(({hurts}) or ({waiting} unless {recorded('completed_per_s')} > 0))"
    seats = _seats_bind()
    binding = f"and {seats}" if pinned else f"unless {seats}"
    drift = recorded("itl_mean_drift_ratio")
    return CauseQuery(
        "admission_limit" if pinned else "queue_saturation",
        f"({_queued(plan)} and {hurts} and ({recorded('cascade_stage')} < 2)"
        f" and ({value('kv_usage_avg_ratio')} < {number(memory.KV_BOUND_FROM)})) {binding}",
        (
            Term(waiting, "2", 1.2),
            Term(
                usage,
                number(memory.KV_ROOM_BELOW),
                1.0,
                f"{usage} < {number(memory.KV_ROOM_BELOW)}",
                below=True,
            ),
            Term(
                recorded("waiting_slope_per_s"),
                "0.1",
                0.6,
                f"{recorded('waiting_slope_per_s')} > 0.1",
            ),
            Term(drift, number(memory.GPU_ROOM_DRIFT), 0.6, below=pinned),
        ),
        0.3,
        (
            (Severity.CRITICAL, f"{wait} >= {number(memory.CRITICAL_WAIT_S)}"),
            (Severity.WARNING, ""),
        ),
        "The batch is pinned at its limit while KV and GPU have room"
        if pinned
        else "More requests arrive than are served, and the KV cache is not the limit",
        "Raise --max-num-seqs; check ITL as the batch grows."
        if pinned
        else "Add replicas; the KV cache is not what limits this one.",
        ("9.3", "8.1"),
    )


def _queue_saturation(plan: Plan) -> CauseQuery:
    return _queue(plan, pinned=False)


def _admission_limit(plan: Plan) -> CauseQuery:
    return _queue(plan, pinned=True)


def _prefix_cache_off(plan: Plan) -> CauseQuery:
    off = plan.dialect.series("cache_config_info", extra='enable_prefix_caching="False"')
    return CauseQuery(
        "prefix_cache_off",
        f"{_prefill_heavy()} and on ({plan.process}, engine) {off}",
        (
            Term(_work_ratio(), number(prefix.WORK_RATIO), 1.2),
            Term(recorded("prefill_service_ratio"), number(prefix.PREFILL_SHARE), 1.0),
        ),
        0.3,
        ((Severity.WARNING, ""),),
        "Prefix caching is off while prompts are most of the work",
        "Remove --no-enable-prefix-caching (caching is vLLM's default) and watch the hit ratio.",
        ("7.2", "8.5"),
    )


def _prefix_reuse_lost(_plan: Plan) -> CauseQuery:
    hits, quiet = recorded("prefix_hit_fewest_ratio"), recorded("prefix_hit_ratio:quiet")
    tokens = recorded(f"{prefix.HIT_TOKENS}:quiet")
    as_many = f"{recorded('prefix_hit_fewest_tokens_mean')} > {number(prefix.HALVED)} * {tokens}"
    return CauseQuery(
        "prefix_reuse_lost",
        f"({_prefill_heavy()} and ({quiet} >= {number(prefix.WAS_SHARED_FROM)})"
        f" and ({hits} <= {number(prefix.HALVED)} * {quiet})"
        f" and ({hits} <= {number(prefix.RESIDUAL_HITS)})) unless ({as_many})",
        (
            Term(hits, f"{number(prefix.HALVED)} * {quiet}", 2.0, below=True),
            Term(recorded("prefill_service_ratio"), number(prefix.PREFILL_SHARE), 0.8),
        ),
        0.5,
        ((Severity.WARNING, ""),),
        "Prompts stopped sharing prefixes",
        "Look at what changed in front of the prompt (a date, an id, a reordered template) and at "
        "the router's stickiness.",
        ("7.2", "7.3", "9.3"),
    )


def _prefix_never_shared(plan: Plan) -> CauseQuery:
    hits, quiet = recorded("prefix_hit_fewest_ratio"), recorded("prefix_hit_ratio:quiet")
    seen_s = 2 * plan.window_s
    seen = f"count_over_time({recorded('running')}[{duration(seen_s)}])"
    return CauseQuery(
        "prefix_reuse_lost",
        f"({_prefill_heavy()} and ({hits} <= {number(prefix.NEVER_HITS)})"
        f" and ({recorded('prefill_share_ratio')} >= {number(prefix.NEVER_SHARE)})"
        f" and ({seen} >= {number(int(seen_s / plan.interval_s))}))"
        f" unless ({quiet} >= {number(prefix.WAS_SHARED_FROM)})",
        (Term(hits, number(prefix.NEVER_HITS), 0.3, below=True),),
        0.2,
        ((Severity.INFO, ""),),
        "Prompts share no prefix, as far as can be seen; prefill is a large part of the work",
        "Nothing is broken. If prompts have a common part, put it first.",
        ("7.2",),
        "never",
    )


def _adapter_thrash(plan: Plan) -> CauseQuery:
    deferred = recorded("waiting_deferred")
    held = duration(features.DEFERRED_HELD_S * plan.scale)
    usage, average = recorded("kv_usage_avg_ratio"), recorded("waiting_deferred_avg")
    swapped = f"{recorded('lora_change_recent_per_s')} * {number(RECENT_SHARE * plan.window_s)}"
    on_and_off = (
        f"(({average} >= {number(features.DEFERRED_AVG)})"
        f" and ({swapped} >= {number(features.SWAPPED_SETS - features.ALMOST)}))"
    )
    return CauseQuery(
        "adapter_thrash",
        f"((min_over_time({deferred}[{held}]) >= 1) or {on_and_off})"
        f" and on ({plan.process}) {plan.dialect.series('lora_requests_info')}",
        (
            Term(average, "1", 1.4),
            Term(
                recorded("lora_change_per_s"), "0.1", 0.6, f"{recorded('lora_change_per_s')} > 0.1"
            ),
            Term(usage, "0.9", -0.8, f"{usage} > 0.9"),
        ),
        0.3,
        ((Severity.WARNING, ""),),
        "LoRA adapters compete for too few slots",
        "Raise --max-loras (memory allowing), lower the adapters' rank, or spread adapters over "
        "replicas.",
        ("2.5", "8.5", "9.3"),
    )


def _kv_transfer_slow(_plan: Plan) -> CauseQuery:
    mean = recorded("kv_transfer_mean_s")
    share = f"({mean} / ({recorded('ttft_mean_s')} > 0))"
    drift, failed = recorded("kv_transfer_drift_ratio"), recorded("kv_transfer_failed_per_s")
    slow_share = f"{share} >= {number(transfer.TRANSFER_SHARE)}"
    slow_drift = f"{drift} >= {number(transfer.TRANSFER_DRIFT)}"
    return CauseQuery(
        "kv_transfer_slow",
        f"({slow_share}) or ({slow_drift}) or ({failed} > 0)",
        (
            Term(share, number(transfer.TRANSFER_SHARE), 1.2, slow_share),
            Term(drift, number(transfer.TRANSFER_DRIFT), 1.5, slow_drift),
            Term(failed, None, 1.5, f"{failed} > 0"),
        ),
        -0.3,
        ((Severity.WARNING, ""),),
        "Requests wait for KV blocks from another node or tier",
        "Look at the network, RDMA or PCIe path and the peer's log: it is the data path.",
        ("6.5", "7.7"),
    )


def _spec_decode_poor(plan: Plan) -> CauseQuery:
    recent = recorded("spec_acceptance_recent_ratio")
    ratio = f"({recent} or {recorded('spec_acceptance_ratio')})"
    per_draft = recorded("spec_accepted_per_draft_tokens")
    running, mean = recorded("running_avg"), recorded("spec_acceptance_ratio")
    poor = number(drafts.PAYS_FROM)
    # Of a draft of accepted over share tokens.
    drafted = f"{number(drafts.DRAFT_COST_RATIO)} * {per_draft} / ({mean} > 0)"
    pays = (
        f"((1 + {per_draft}) / (1 + {drafted}) >= {number(features.PAYS_WELL)})"
        f" and ({mean} < {poor}) and ({running} < {number(features.LARGE_BATCH)})"
        f" unless {_surely_below(mean, recent, plan, RECENT_SHARE)}"
    )
    surely = " or ".join(
        _surely_below(poor, told, plan, share)
        for told, share in ((recent, RECENT_SHARE), (mean, 1))
    )
    return CauseQuery(
        "spec_decode_poor",
        f"({ratio} < {poor}) and ({surely})"
        f" and ({recorded('spec_draft_tokens_per_s')} >= {number(features.SPEC_DRAFTS_MIN_PER_S)})",
        (
            Term(ratio, poor, 2.2, below=True),
            Term(per_draft, "1", 0.6, f"({per_draft} < 1) unless ({pays})", below=True),
            Term(per_draft, None, features.PAYS_LOG_ODDS, pays),
            Term(
                running,
                number(features.LARGE_BATCH),
                0.3,
                f"{running} >= {number(features.LARGE_BATCH / 2)}",
            ),
        ),
        0.0,
        ((Severity.WARNING, f"{running} unless ({pays})"), (Severity.INFO, "")),
        "Speculation does not pay: most drafted tokens are rejected",
        "Disable speculation, draft fewer tokens, or retune the draft.",
        ("6.6", "9.3"),
    )


def _surely_below(bound: str, ratio: str, plan: Plan, share: float) -> str:
    """Where acceptance on this share of the window is below a bound by more than chance."""
    started = f"{number(share * plan.window_s)} * {value('arrival_per_s')}"
    requests = f"({value('running_avg')} + {started})"
    least = f"{number(features.REQUESTS_DIFFER)} / sqrt({requests} > 0)"
    return f"({ratio} + {least} < {bound})"


def _prefill_interference(plan: Plan) -> CauseQuery:
    share, per_s = recorded("itl_stall_time_ratio"), recorded("itl_stall_per_s")
    long, median = recorded("prefill_long_per_s"), recorded("itl_p50_s")
    counted = f"{long} * {number(plan.window_s)}"
    longs = f"({counted} >= {number(latency.LONG_MIN - latency.COUNTED_SHORT)})"
    drift = recorded("itl_p50_drift_ratio")
    stalls = (
        f"(({share} >= {number(latency.STALL_SHARE)})"
        f" and ({per_s} * {number(plan.window_s)}"
        f" >= {number(latency.STALLS_MIN - latency.COUNTED_SHORT)}) and {longs})"
    )
    terms = [Term(share, number(latency.STALL_SHARE), 1.8, stalls)]
    when, target_s = stalls, plan.targets.itl_p99_s
    if target_s is not None:
        tail = recorded("itl_p99_s")
        over = f"(({tail} > {number(target_s)}) and ({median} <= {number(target_s / 2)}))"
        when = f"({stalls} or {over})"
        terms.append(Term(tail, number(target_s), 1.5, over))
    holds = number(latency.MEDIAN_HOLDS_DRIFT)
    return CauseQuery(
        "prefill_interference",
        f"{when} and ({value('preemption_per_s')} == 0) and ({recorded('cascade_stage')} < 2)",
        (
            *terms,
            Term(median, None, 0.6, f"{drift} <= {holds}"),
            Term(median, None, -0.6, f"{drift} > {holds}"),
            Term(counted, number(latency.LONG_MIN), 0.8, longs),
        ),
        -0.2,
        ((Severity.WARNING, ""),),
        "Decode stalls behind long prefills",
        "Enable chunked prefill or lower --max-num-batched-tokens; for strict targets put prefill "
        "on its own servers.",
        ("6.4", "8.5", "9.3"),
    )


def _slo_conflict(plan: Plan) -> CauseQuery | None:
    ttft_s, itl_s = plan.targets.ttft_p99_s, plan.targets.itl_p99_s
    if ttft_s is None or itl_s is None:
        return None
    ttft, itl = recorded("ttft_p99_s"), recorded("itl_p99_s")
    return CauseQuery(
        "slo_conflict",
        f"({ttft} > {number(ttft_s)}) and ({itl} > {number(itl_s)})"
        f" and ({recorded('cascade_stage')} < 2)",
        (Term(ttft, number(ttft_s), 1.0), Term(itl, number(itl_s), 1.0)),
        0.0,
        ((Severity.CRITICAL, ""),),
        "Neither TTFT nor ITL meets its target at this load",
        "Separate prefill and decode (P/D disaggregation), or take load away.",
        ("6.5", "8.5"),
    )


def _prefill_bound(plan: Plan) -> CauseQuery | None:
    target_s = plan.targets.ttft_p99_s
    if target_s is None:
        return None
    ttft, prefill_s = recorded("ttft_p99_s"), value("prefill_mean_s")
    share = f"({prefill_s} / clamp_min({prefill_s} + {value('queue_mean_s')}, 1e-9))"
    bound, alone = number(1 - latency.QUEUE_SMALL_SHARE), f"({prefill_s} > {number(target_s)})"
    return CauseQuery(
        "prefill_bound",
        f"({ttft} > {number(target_s)}) and (({share} > {bound}) or {alone})",
        (
            Term(ttft, number(target_s), 1.0),
            Term(prefill_s, number(target_s), 1.5, alone),
            Term(share, bound, 1.5, f"{share} unless {alone}"),
        ),
        0.0,
        ((Severity.WARNING, ""),),
        "First tokens are late because of prefill, not of the queue",
        "Check the prefix cache's hit ratio first, then a higher tensor-parallel degree, then P/D.",
        ("8.5", "9.3"),
    )


def _decode_bound(plan: Plan) -> CauseQuery | None:
    target_s = plan.targets.itl_p99_s
    if target_s is None:
        return None
    median, share = recorded("itl_p50_s"), recorded("decode_share_ratio")
    return CauseQuery(
        "decode_bound",
        f"{median} > {number(target_s)}",
        (Term(median, number(target_s), 2.0), Term(share, "0.5", 0.8, f"{share} >= 0.5")),
        0.3,
        ((Severity.WARNING, ""),),
        "Decode is slow at every percentile",
        "A smaller batch (--max-num-seqs), weight quantization, or GPUs with more bandwidth.",
        ("3.3", "9.3"),
    )


def _past_knee(plan: Plan) -> CauseQuery:
    drift = recorded("ttft_p99_p50_drift_ratio")
    growth = f"({recorded('running_avg')} / ({recorded('running_avg:quiet')} > 0))"
    queue = f"(({recorded('queue_share_ratio')} >= 0.2) and ({recorded('waiting_avg')} >= 1))"
    terms = [
        Term(drift, number(latency.KNEE_DRIFT), 1.2),
        Term(growth, number(latency.KNEE_LOAD_GROWTH), 0.6),
    ]
    when, target_s = queue, plan.targets.ttft_p99_s
    levels: Levels = ((Severity.INFO, ""),)
    if target_s is not None:
        over = f"({recorded('ttft_p99_s')} > {number(target_s)})"
        when, levels = f"({over} or {queue})", ((Severity.WARNING, over), (Severity.INFO, ""))
        terms.append(Term(recorded("ttft_p99_s"), number(target_s), 1.0, over))
    return CauseQuery(
        "past_knee",
        f"({drift} >= {number(latency.KNEE_DRIFT)})"
        f" and ({growth} >= {number(latency.KNEE_LOAD_GROWTH)})"
        f" and ({recorded('cascade_stage')} < 2) and {when}",
        tuple(terms),
        -0.2,
        levels,
        "The tail of TTFT has left its middle behind as the batch grew",
        "Take load away from this replica: more replicas, or quantization to move the knee.",
        ("8.1", "8.5"),
    )


def _runaway_generation(plan: Plan) -> CauseQuery:
    points = recorded("finished_length_drift_points")
    longer = f"({recorded('output_tokens_mean')} / ({recorded('output_tokens_mean:quiet')} > 0))"
    bound = number(workload.LONGER_OUTPUTS)
    return CauseQuery(
        "runaway_generation",
        f"({points} >= {number(workload.LENGTH_POINTS)}) and"
        f" ({recorded('completed_per_s')} * {number(plan.window_s)}"
        f" >= {number(workload.REQUESTS_MIN)})",
        (
            Term(points, number(workload.LENGTH_POINTS), 1.5),
            Term(longer, bound, 1.2, f"{longer} >= {bound}"),
            Term(longer, bound, -1.0, f"{longer} < {bound}", below=True),
        ),
        -0.3,
        ((Severity.WARNING, ""),),
        "Far more requests than before run into their output limit",
        "Look for prompts that make the model ramble or repeat; cap outputs per use case.",
        ("9.4",),
    )


def _engine_stalled(plan: Plan) -> CauseQuery:
    dialect, stalled = plan.dialect, duration(observer.STALLED_S)
    still = " and ".join(
        f"({dialect.sum(f'increase({series}[{stalled}])')} == 0)"
        for series in (
            dialect.series("generation_tokens", "_total"),
            dialect.series("prompt_tokens", "_total"),
        )
    )
    moved = dialect.sum(f"changes({dialect.series('kv_cache_usage_perc')}[{stalled}])")
    in_flight = f"({recorded('running')} + {recorded('waiting')})"
    step = duration(plan.interval_s)
    return CauseQuery(
        "engine_stalled",
        f"(min_over_time({in_flight}[{stalled}:{step}]) >= 1) and {still} and ({moved} == 0)",
        (Term(in_flight, None, 1.5), Term(in_flight, "1", 0.8)),
        0.8,
        ((Severity.CRITICAL, ""),),
        "Requests are in flight and no token comes out",
        "Restart the engine once its log is saved; a request that can never fit waits for ever.",
        ("9.4",),
    )


BUILDERS: tuple[Callable[[Plan], CauseQuery | None], ...] = (
    _engine_stalled,
    _kv_pressure,
    _queue_saturation,
    _admission_limit,
    _prefix_cache_off,
    _prefix_reuse_lost,
    _prefix_never_shared,
    _adapter_thrash,
    _kv_transfer_slow,
    _spec_decode_poor,
    _prefill_interference,
    _slo_conflict,
    _prefill_bound,
    _decode_bound,
    _past_knee,
    _runaway_generation,
)


def _queued(plan: Plan) -> str:
    return (
        f"(min_over_time({recorded('queued')}[{duration(memory.QUEUE_HELD_S * plan.scale)}]) == 1)"
    )


def _seats_bind() -> str:
    drift = recorded("itl_mean_drift_ratio")
    top = recorded("running_max")
    return (
        f"(({recorded('running_avg')} >= {number(memory.PINNED_RATIO)} * {top})"
        f" and ({top} >= 1)"
        f" and ({recorded('kv_usage_avg_ratio')} < {number(memory.KV_ROOM_BELOW)})"
        f" unless ({drift} >= {number(memory.GPU_ROOM_DRIFT)}))"
    )


def _work_ratio() -> str:
    made = f"clamp_min({value('generation_tokens_per_s')}, 1e-9)"
    return f"({recorded('computed_prompt_tokens_per_s')} / {made})"


def _prefill_heavy() -> str:
    return (
        f"(({_work_ratio()} >= {number(prefix.WORK_RATIO)})"
        f" and ({recorded('computed_prompt_tokens_per_s')} > 0)"
        f" and ({recorded('prefill_share_ratio')} >= {number(prefix.PREFILL_SHARE)}))"
    )
