"""A model split over too many GPUs, by the user's own sweeps. Guide 5.1, 8.2, 8.5 (S5). Pure."""

from __future__ import annotations

from kneewatch.diagnose.causes.common_conditions import QUEUED_MIN, QUEUED_SHARE
from kneewatch.diagnose.causes.evidence import Case, Cause, Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.sizing.arithmetic import figure
from kneewatch.diagnose.sizing.benchmark.tensor_parallel import FAR_BELOW, Comparison, Degree, alike
from kneewatch.rules.rule import Severity

SWEEPS = "benchmark.by_tensor_parallel"
"""What stands for a signal in the evidence: the setting that the sweeps come from."""


def tp_overhead(facts: Facts) -> Cause | None:
    """The sweeps give far less a GPU at this degree than at a smaller one, within the targets."""
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


def is_queued(waiting: float | None, running: float) -> bool:
    """Whether a server gives all it can: what others give is what they are asked for."""
    return waiting is not None and waiting >= max(QUEUED_MIN, QUEUED_SHARE * running)


def split_case(split: Comparison) -> Case | None:
    """The case by the sweeps alone; None where they do not make one for certain. A note: it costs
    money at every load, and harms nobody's request."""
    wide, narrow, share = split.wide, split.narrow, split.share_ratio
    if wide is None or narrow is None or share is None or not split.far_below:
        return None
    case = Case(
        "tp_overhead",
        f"TP {wide.tensor_parallel} gave {figure(round(wide.per_s_per_gpu, 3))} {split.unit} a "
        f"second and GPU in the benchmark, TP {narrow.tensor_parallel} "
        f"{figure(round(narrow.per_s_per_gpu, 3))}: the split costs {1 - share:.0%}.",
        f"Serve from more replicas with TP {narrow.tensor_parallel}, where it fits and keeps the "
        "targets.",
        ("5.1", "8.2", "8.5"),
        Severity.INFO,
        log_odds=0.0,
    )
    text = (
        f"{share:.0%} of the {split.unit} a second and GPU of TP {narrow.tensor_parallel}; 70 to "
        "80 % is usual over PCIe"
    )
    case.weigh(SWEEPS, share, FAR_BELOW, 1.5, text, below=True)
    for one in (narrow, wide):
        case.weigh(SWEEPS, one.per_s_per_gpu, None, 0.1, degree_words(one))
    return case


def degree_words(one: Degree) -> str:
    """Where a degree was measured."""
    point = one.point
    if point is None:
        return f"TP {one.tensor_parallel}: {one.missed}"
    return (
        f"TP {one.tensor_parallel} with {figure(point.concurrency)} requests in flight: TTFT P99 "
        f"{1000 * point.ttft_p99_s:.0f} ms, ITL P99 {1000 * point.itl_p99_s:.0f} ms"
    )


def weigh_live(
    case: Case,
    split: Comparison,
    *,
    tokens_per_s: float | None,
    tokens_per_request: float | None,
    queued: bool,
) -> None:
    """Adds what the live engine gives a GPU, where it has a queue and answers are as long as the
    benchmark's: about what its degree gave there is for the case, what the smaller one gave is
    against it."""
    wide, narrow = split.wide, split.narrow
    if wide is None or narrow is None or split.unit != "tokens" or not queued:
        return
    if not tokens_per_s or not tokens_per_request:
        return
    if not alike(tokens_per_request, wide.tokens_per_request):
        return
    each = tokens_per_s / wide.tensor_parallel
    share = each / narrow.per_s_per_gpu
    known = alike(each, wide.per_s_per_gpu)
    if share < FAR_BELOW and not known:
        # Far less than its own benchmark as well: other prompts, or another fault.
        return
    text = (
        f"with a queue it gives {figure(round(each, 1))} tokens a second and GPU now, {share:.0%} "
        f"of what TP {narrow.tensor_parallel} gave"
    )
    below = share < FAR_BELOW
    weight = 0.5 if below else -1.0
    case.weigh("generation_tokens_per_s", share, FAR_BELOW, weight, text, below=below)


TP_OVERHEAD = CauseRecord(
    id="tp_overhead",
    title="Tensor parallelism cost throughput",
    means="The sweeps give far less per GPU at this tensor-parallel degree than at a smaller one.",
    judge=tp_overhead,
    fleet=True,
    symptoms=("S5",),
    levers=("lower_tensor_parallel",),
    sidecar="sweeps are files of the user's, not series",
)
