"""The sizing guide's metric tables (9.3 and 7.7): which rules and causes cover each row, and the
values for one tier. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.signals.vllm import QUEUE, XFER
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.figures import DOWN, UP, Trend
from kneewatch.reports.weekly.measures import Measure, TierPeriod, trend
from kneewatch.reports.weekly.observed import Span, TierStated
from kneewatch.reports.weekly.tier_sections import TableRow, TierTables
from kneewatch.rules.formatting import percent
from kneewatch.rules.library import slo_rules
from kneewatch.rules.rule import Rule, Severity

OFF_LORA = "LoRA: no adapters reported"
OFF_SPECULATION = "speculative decoding: no draft tokens"
OFF_CACHING = "prefix caching: no cache queries"
OFF_TRANSFER = "KV transfer: no connector metrics"
WITH_LORA = "--enable-lora, with adapters in use"
FLEET = "Fleet utilization"
BY_SLO = ("TTFT-P99", "TTFT-P50")


class Row(Struct, frozen=True):
    """A row of a guide table.

    `rules` and `causes` cover the row. `gap` is what cannot be observed, and why. `judges` maps ids
    of rules to the index of the figure that the rule judges. The sparkline shows the last figure.

    If the first figure has no value, the row is "off" if `off` is set, else "unknown". `off` names
    the feature that is not in use. `enable` says how to get a value.
    """

    section: str
    subject: str
    rules: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    figures: tuple[Measure, ...] = ()
    band: str = ""
    how: str = ""
    low: float | None = None
    high: float | None = None
    judges: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    off: str = ""
    enable: str = ""
    gap: str = ""
    trend_only: bool = False


def monitoring(gpus: int | None, rules: Mapping[str, Rule]) -> tuple[Row, ...]:
    """The rows of table 9.3. `gpus` is the number of GPUs per engine. `rules` are the active rules
    by id."""
    memory = Measure("gpu_memory_used_ratio", "", "ratio", m.level(m.GPU_MEMORY),
                     missing=m.GPU_MISSING)  # fmt: skip
    serving = Measure("gpu_engine_active_ratio", "while serving", "ratio",
                      m.level(m.GPU_BUSY, serving=True), missing=m.GPU_MISSING)  # fmt: skip
    fleet = Measure("gpu_engine_active_mean_ratio", "all hours", "ratio", m.level(m.GPU_BUSY), UP,
                    missing=m.GPU_MISSING)  # fmt: skip
    deferred = Measure("waiting_deferred", "requests deferred for a slot", "requests",
                       _deferred_with_lora, DOWN, missing="not exported")  # fmt: skip
    changes = Measure("lora_change_per_s", "changes of the running adapters", "per_s",
                      m.level(m.ADAPTER_CHANGES), DOWN, missing="not exported")  # fmt: skip
    queue = Measure("waiting", "mean", "requests", m.level(m.WAITING), DOWN)
    queued_time = Measure("queue_share_ratio", "of request time", "ratio",
                          m.share_of_time(QUEUE), DOWN)  # fmt: skip
    queue_peak = Measure("waiting_peak", "worst hour of an engine", "requests",
                         m.top(m.WAITING), DOWN)  # fmt: skip
    tokens = Measure("tokens_per_gpu_hour", "", "tokens", m.tokens_per_gpu_hour(gpus), UP,
                     missing="number of GPUs per engine unknown"
                     if gpus is None else "no tokens counted")  # fmt: skip
    accepted = Measure("spec_acceptance_ratio", "", "ratio", m.ratio(m.ACCEPTED, m.DRAFTED), UP,
                       missing=m.NO_SPECULATION)  # fmt: skip
    return (
        Row(
            "9.3", "GPU memory utilization", ("GPU-MEMORY-LOW", "GPU-MEMORY-HIGH"), (),
            (memory,), "80-95%", "used GPU memory divided by total, mean over time and GPUs",
            0.8, 0.95, {"GPU-MEMORY-LOW": 0, "GPU-MEMORY-HIGH": 0}, enable=m.GPU_SOURCE,
        ),
        Row(
            "9.3", "GPU compute utilization", ("GPU-BUSY-LOW", "GPU-BUSY-FULL", "GPU-SATURATED"),
            (), (serving,), "60-85% while serving",
            "share of time with GPU activity, while requests ran", 0.6, 0.85,
            {"GPU-BUSY-LOW": 0, "GPU-BUSY-FULL": 0, "GPU-SATURATED": 0}, enable=m.GPU_SOURCE,
            gap="needs a GPU source (--gpu-metrics); unknown without",
        ),
        Row(
            "9.3", "Adapter cache hit rate", ("LORA-WAIT",), ("adapter_thrash",),
            (deferred,), "above 80% (not exported)",
            "vLLM counts no adapter hits; requests deferred for an adapter slot stand for misses",
            off=OFF_LORA, enable=WITH_LORA,
            gap="vLLM exports no adapter hits or loads; what shows is requests held back for a "
            "slot",
        ),
        Row(
            "9.3", "Adapter eviction rate", ("LORA-CHANGE",), ("adapter_thrash",),
            (changes,), "near zero",
            "changes of the set of running adapters per second; vLLM does not export evictions",
            judges={"LORA-CHANGE": 0}, off=OFF_LORA, enable=WITH_LORA,
            gap="evictions themselves are not exported; changes of the running set stand for them",
        ),
        _kv_usage("9.3"),
        _eviction("9.3", "KV cache eviction rate", rules),
        Row(
            "9.3", FLEET, ("FLEET-LOW", "FLEET-HIGH", "IDLE-HOURS"), ("underused",),
            (fleet,), "60-80%", "share of time with GPU activity, over all hours", 0.6, 0.8,
            {"FLEET-LOW": 0, "FLEET-HIGH": 0}, enable=m.GPU_SOURCE,
        ),
        _hits("9.3", "Prefix cache hit rate", ("prefix_reuse_lost", "prefix_churn")),
        Row(
            "9.3", "TTFT P50 / P99", (*BY_SLO, "TTFT-TAIL"), ("prefill_bound", "past_knee"),
            (m.TTFT_P50, m.TTFT_P99), "within the SLO",
            "quantiles of the time to first token over all requests",
            judges={"TTFT-P50": 0, "TTFT-P99": 1},
            enable="set a target (slo.ttft_p99_s) to judge it",
        ),
        Row(
            "9.3", "ITL / TPOT P50 / P99", ("ITL-P99", "ITL-P50", "ITL-STALL"),
            ("prefill_interference", "decode_bound"),
            (m.ITL_P50, m.ITL_P99), "within the SLO",
            "quantiles of the time between output tokens", judges={"ITL-P50": 0, "ITL-P99": 1},
            enable="set a target (slo.itl_p99_s) to judge it",
        ),
        Row(
            "9.3", "Queue depth", ("QUEUE-GROWS", "QUEUE-SHARE"),
            ("queue_saturation", "admission_limit"),
            (queue, queued_time, queue_peak), "near zero",
            "queued requests per engine, time-weighted mean; the share of request time is judged",
            judges={"QUEUE-SHARE": 1},
        ),
        Row(
            "9.3", "Tokens/GPU-hour", (), (),
            (tokens,), "higher is better",
            "generated tokens divided by GPU-hours, idle hours included", trend_only=True,
            enable="set gpus, or tensor_parallel",
            gap="a trend without a bound: signal tokens_per_gpu_hour, judged week over week by the "
            "report; needs the number of GPUs",
        ),
        Row(
            "9.3", "Speculative decoding acceptance", ("SPEC-ACCEPT",), ("spec_decode_poor",),
            (accepted,), "above 60%", "accepted divided by drafted tokens, over the period", 0.6,
            judges={"SPEC-ACCEPT": 0}, off=OFF_SPECULATION, enable="--speculative-config",
        ),
    )  # fmt: skip


def _deferred_with_lora(span: Span) -> float | None:
    """The number of deferred requests. None if no adapters are in use."""
    in_use = m.level(m.ADAPTER_CHANGES)(span) is not None
    return m.level(m.DEFERRED)(span) if in_use else None


def kv_metrics(rules: Mapping[str, Rule]) -> tuple[Row, ...]:
    """The rows of table 7.7. `rules` are the active rules by id."""
    saved = Measure("prefix_saved_ratio", "", "ratio", m.saved, UP,
                    missing="prompt tokens by source not exported")  # fmt: skip
    residency = Measure("kv_residency_s", "mean", "s", m.mean(m.RESIDENCY), UP,
                        missing="lifetimes of KV blocks not exported")  # fmt: skip
    transfer = (
        Measure("kv_transfer_mean_s", "mean", "s", m.mean(XFER), DOWN, missing="no KV transfer"),
        Measure("kv_transfer_p99_s", "P99", "s", m.quantile(XFER, 0.99), DOWN,
                missing="no KV transfer"),
    )  # fmt: skip
    return (
        _hits("7.7", "Cache hit rate", ("prefix_cache_off", "prefix_reuse_lost")),
        Row(
            "7.7", "Prefix cache reuse ratio", ("PREFIX-SAVED",), (),
            (saved,), "near the hit rate",
            "share of prompt tokens taken from any cache instead of computed",
            judges={"PREFIX-SAVED": 0}, enable="vLLM 0.16 or later",
        ),
        _kv_usage("7.7"),
        _eviction("7.7", "Eviction rate", rules),
        Row(
            "7.7", "KV residency time", ("KV-RESIDENCY",), ("prefix_churn",),
            (residency,), "longer than the time between reuses",
            "mean time from filling a block to its eviction", judges={"KV-RESIDENCY": 0},
            enable="start vLLM with --kv-cache-metrics",
            gap="measured only with --kv-cache-metrics; else estimated from capacity and inflow",
        ),
        Row(
            "7.7", "KV transfer latency", ("XFER-SLOW", "XFER-FAIL"), ("kv_transfer_slow",),
            transfer, "not rising",
            "duration of KV transfers between nodes or tiers, over the period", off=OFF_TRANSFER,
            enable="a KV connector",
        ),
    )  # fmt: skip


def _kv_usage(section: str) -> Row:
    return Row(
        section, "KV cache utilization", ("KV-FULL", "KV-UNUSED"), ("kv_overprovisioned",),
        (m.KV_MEAN, m.KV_PEAK), "75-90% at the peak",
        "share of KV blocks in use while requests ran; the busiest hour of an engine is judged",
        0.75, 0.9, {"KV-FULL": 1, "KV-UNUSED": 1},
    )  # fmt: skip


def _eviction(section: str, subject: str, rules: Mapping[str, Rule]) -> Row:
    # Both tables have one target, the rule's, although the guide has 5% in 9.3 and 10% in 7.7.
    rule = rules.get("KV-EVICT")
    high = rule.threshold(Severity.WARNING) if rule is not None else None
    band = f"below {percent(high)} of running requests/s" if high is not None else "near zero"
    return Row(
        section, subject, ("KV-EVICT",), ("kv_pressure",),
        (m.EVICTION, m.EVICTION_PEAK), band,
        "preemptions per running request and second; the worst hour and incidents are judged",
        None, high, {"KV-EVICT": 1},
    )  # fmt: skip


def _hits(section: str, subject: str, causes: tuple[str, ...]) -> Row:
    return Row(
        section, subject, ("PREFIX-HIT",), causes,
        (m.HIT_RATIO,), "depends on the workload; at least 30% with known reuse",
        "hit tokens divided by queried prompt tokens, over the period", 0.3,
        judges={"PREFIX-HIT": 0}, off=OFF_CACHING, enable="--enable-prefix-caching",
    )  # fmt: skip


# --- The guide's tables filled in for one tier ----------------------------------------------------


BY_HIT_RATE = "PREFIX-HIT"
KNOWN_REUSE = 0.3
"""Minimum hit ratio in the period before for a workload to count as repeating its prefixes. The
guide's bound on hits applies only to such workloads."""


def tables(
    tier: str,
    stated: TierStated,
    now: TierPeriod,
    before: TierPeriod,
    *,
    worst: Mapping[str, Severity],
    c_max: float | None,
) -> TierTables:
    """The monitoring table and the KV metrics table of a tier, compared with the period before.

    `worst` is the worst severity of each cause in the incidents. `c_max` is the number of requests
    in flight at which an engine reaches its knee; None if unknown.
    """
    targets = stated.targets
    own = slo_rules(ttft_p99_s=targets.ttft_p99_s, itl_p99_s=targets.itl_p99_s)
    rules = {rule.id: rule for rule in (*own, *stated.rules)}
    return TierTables(
        tier=tier,
        monitoring=tuple(
            _filled(_placed(row, now, c_max), now, before, rules, worst)
            for row in monitoring(stated.gpus, rules)
        ),
        kv=tuple(_filled(row, now, before, rules, worst) for row in kv_metrics(rules)),
    )


def _placed(row: Row, now: TierPeriod, c_max: float | None) -> Row:
    """The row, unchanged unless it is the fleet utilization row and no GPU source has its value.

    That row then gets requests in flight divided by `c_max`, if `c_max` is known.
    """
    if row.subject != FLEET or c_max is None or now.value(row.figures[0]) is not None:
        return row

    def load(span: Span) -> float | None:
        running, waiting = m.level(m.RUNNING)(span), m.level(m.WAITING)(span)
        return None if running is None else (running + (waiting or 0.0)) / c_max

    return replace(
        row,
        figures=(
            Measure("load_ratio", "of the learned C_max", "ratio", load, missing=m.GPU_MISSING),
        ),
        how="requests in flight divided by the learned C_max, over all hours",
    )


def _filled(
    row: Row,
    now: TierPeriod,
    before: TierPeriod,
    rules: Mapping[str, Rule],
    worst: Mapping[str, Severity],
) -> TableRow:
    figures = tuple(trend(measure, now, before) for measure in row.figures)
    state, advice = _state(row, figures, rules, worst)
    has_value = figures[0].value is not None
    low, high = _band(row, rules)
    return TableRow(
        section=row.section,
        subject=row.subject,
        figures=figures,
        band=row.band,
        low=low,
        high=high,
        state=state,
        advice=advice,
        missing="" if has_value else row.off if state == "off" else figures[0].missing,
        enable=row.enable if not has_value or state == "trend" else "",
        how=row.how,
        rules=row.rules,
        causes=row.causes,
        spark=now.spark(row.figures[-1]) if has_value else None,
    )


def _state(
    row: Row,
    figures: tuple[Trend, ...],
    rules: Mapping[str, Rule],
    worst: Mapping[str, Severity],
) -> tuple[str, str]:
    """The state of a row, and the advice for it."""
    if figures[0].value is None:
        return ("off" if row.off else "unknown"), ""
    state, advice, judged = Severity.OK, "", False
    for rule_id, at in row.judges.items():
        rule, value = rules.get(rule_id), figures[at].value
        if rule is None or value is None:
            continue
        judged = True
        severity = rule.level(value)
        reused_before = (figures[at].before or 0.0) >= KNOWN_REUSE
        if rule_id == BY_HIT_RATE and not reused_before:
            severity = Severity.OK
        if severity > state:
            state, advice = severity, rule.advice
    for cause in row.causes:
        severity = worst.get(cause, Severity.OK)
        if severity > state:
            state, advice = severity, f"see incidents: {cause}"
    if row.trend_only or (not judged and row.judges and state == Severity.OK):
        return "trend", ""
    return state.word, advice


def _band(row: Row, rules: Mapping[str, Rule]) -> tuple[float | None, float | None]:
    """The lower and upper bound of a row's target band; None for no bound."""
    for rule_id in ("TTFT-P99", "ITL-P99"):
        if rule_id in row.judges and rule_id in rules:
            return None, rules[rule_id].threshold(Severity.WARNING)
    return row.low, row.high
