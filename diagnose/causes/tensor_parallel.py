"""Too much tensor parallelism, shown by the user's benchmark sweeps. Guide 5.1, 8.2, 8.5 (S5).
Pure."""

from __future__ import annotations

from kneewatch.diagnose.capacity import FAR_BELOW, Degree, DegreeComparison, alike
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.causes.evidence import Case, Facts
from kneewatch.diagnose.causes.record import cause
from kneewatch.rules.formatting import duration, figure, percent
from kneewatch.rules.rule import Severity, is_queued

SWEEPS = "benchmark.by_tensor_parallel"
"""Names the setting that the sweeps come from; it stands for a signal in the evidence."""


def tp_overhead(facts: Facts) -> Cause | None:
    """In the sweeps, a smaller degree has far more throughput per GPU within the targets."""
    if facts.split is None:
        return None
    case = split_case(facts.split)
    if case is None:
        return None
    weigh_live(
        case,
        facts.split,
        tokens_per_s=facts.values.get("generation_tokens_per_s"),
        tokens_per_request=facts.values.get("output_tokens_mean"),
        queued=is_queued(facts.values.get("waiting_by_capacity"), facts.get("running")),
    )
    return case.close()


def split_case(split: DegreeComparison) -> Case | None:
    """The case from the sweeps alone; None unless they prove it beyond doubt.

    Always `info`: the split costs money, but delays no request.
    """
    wide, narrow, share = split.wide, split.narrow, split.share_ratio
    if wide is None or narrow is None or share is None or not split.far_below:
        return None
    case = Case(
        "tp_overhead",
        f"In the benchmark TP {wide.tensor_parallel} reached "
        f"{figure(round(wide.per_s_per_gpu, 3))} {split.unit}/s per GPU, TP "
        f"{narrow.tensor_parallel} {figure(round(narrow.per_s_per_gpu, 3))}: "
        f"TP {wide.tensor_parallel} loses {percent(1 - share)}.",
        f"Serve from more replicas with TP {narrow.tensor_parallel} if the model fits and meets "
        "its targets.",
        Severity.INFO,
        log_odds=0.0,
    )
    text = (
        f"{percent(share)} of the {split.unit}/s per GPU of TP {narrow.tensor_parallel}; 70% to "
        "80% is usual over PCIe"
    )
    case.weigh(SWEEPS, share, FAR_BELOW, 1.5, text, below=True)
    for degree in (narrow, wide):
        case.weigh(SWEEPS, degree.per_s_per_gpu, None, 0.1, degree_text(degree))
    return case


def degree_text(degree: Degree) -> str:
    """The load and latencies at which a degree was measured, or why it has no measurement."""
    point = degree.point
    if point is None:
        return f"TP {degree.tensor_parallel}: {degree.missed}"
    return (
        f"TP {degree.tensor_parallel} with {figure(point.concurrency)} requests in flight: TTFT "
        f"P99 {duration(point.ttft_p99_s)}, ITL P99 {duration(point.itl_p99_s)}"
    )


def weigh_live(
    case: Case,
    split: DegreeComparison,
    *,
    tokens_per_s: float | None,
    tokens_per_request: float | None,
    queued: bool,
) -> None:
    """Add the live engine's throughput per GPU to the case.

    It is evidence for the case if it is as low as in the benchmark. It is evidence against the case
    if it is as high as the smaller degree's. It counts only if the engine has a queue and its
    answers are as long as the benchmark's.
    """
    wide, narrow = split.wide, split.narrow
    if wide is None or narrow is None or split.unit != "tokens" or not queued:
        return
    if not tokens_per_s or not tokens_per_request:
        return
    if not alike(tokens_per_request, wide.tokens_per_request):
        return
    per_gpu = tokens_per_s / wide.tensor_parallel
    share = per_gpu / narrow.per_s_per_gpu
    as_measured = alike(per_gpu, wide.per_s_per_gpu)
    if share < FAR_BELOW and not as_measured:
        # Far below its own benchmark as well: other prompts, or another fault.
        return
    text = (
        f"with a queue it generates {figure(round(per_gpu, 1))} tokens/s per GPU now, "
        f"{percent(share)} of TP {narrow.tensor_parallel} in the benchmark"
    )
    below = share < FAR_BELOW
    weight = 0.5 if below else -1.0
    case.weigh("generation_tokens_per_s", share, FAR_BELOW, weight, text, below=below)


TP_OVERHEAD = cause("tp_overhead", judge=tp_overhead)
