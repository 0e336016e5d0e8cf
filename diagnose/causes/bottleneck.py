"""What limits a working GPU: memory bandwidth, compute or the host. Guide 3.2, 3.3, 8.4. Pure.

Decode reads all weights for few tokens, which keeps the memory busy. Prefill keeps the tensor pipes
busy. A GPU that idles while requests run waits for the host, which other programs may slow down.
The overall busy ratio does not show which of them is the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from kneewatch.collector.engines.engine_kind import API_SERVERS, SEATS, STEP_TOKENS
from kneewatch.diagnose.account_signals import (
    CHANGED_FROM,
    DEMAND,
    PILED,
    PREFILL_SPEED,
    SPEED,
    SPEED_ERROR,
    WARM_UP_S,
)
from kneewatch.diagnose.causes.common_conditions import (
    BATCH,
    FIRST_TOKENS_VERY_LATE,
    ITL_DRIFT,
    ITL_IS_MISSED,
    ITL_P50_S,
    ITL_P99_S,
    ITL_TARGET_S,
    MEAN_TTFT_GROWTH,
    NOT_EVICTING,
    PREFILL_S,
    SERVED,
    TTFT_DRIFT,
    TTFT_IS_MISSED,
    TTFT_P99_S,
    TTFT_TARGET_S,
    UNMOVED,
    WINDOW_S,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Computed, Form, Term, Tested, cause, term
from kneewatch.rules.conditions import ALWAYS, Check, Condition, Number
from kneewatch.rules.formatting import percent
from kneewatch.rules.quantities import BaselineValue, Live
from kneewatch.rules.rule import Severity

FED_FROM = 0.6
"""The guide wants a serving GPU to be busy at least 60% of the time (9.3)."""

FEW_REQUESTS = 8.0
"""A batch below this is low concurrency: each step reads all weights for a few tokens."""

Kind = Literal["memory", "compute", "host"]
WORDS: dict[Kind, str] = {
    "memory": "memory-bound",
    "compute": "compute-bound",
    "host": "host-bound: the GPU idles while requests run",
}
LEVERS: dict[Kind, str] = {
    "memory": "Quantize weights or use an fp8 KV cache to move fewer bytes, or add bandwidth "
    "(more or newer GPUs). A smaller batch helps little.",
    "compute": f"Lower {SEATS} or {STEP_TOKENS}, move prefill to its own servers, "
    "or add GPUs: compute is the limit.",
    "host": "Check the host first: CPU cores for the engine and its API servers, CPU clock, "
    "logging, guided decoding, eager mode (no CUDA graphs).",
}
"""What to do about slow decode, by what limits the GPU."""

LIMITS: tuple[tuple[Kind, str, float], ...] = (
    ("memory", "gpu_dram_active_ratio", 0.6),
    ("compute", "gpu_tensor_active_ratio", 0.5),
    ("memory", "mbu_ratio", 0.55),
    ("compute", "mfu_ratio", 0.4),
)
"""Limits, each with its signal and the value from which it counts as reached.

The signals are shares of cycles in which DRAM or the tensor pipes are active, or shares of the
GPU's peak. No kernel reaches 100% of the peak.
"""

SHARES = (
    ("gpu_dram_active_ratio", "DRAM active"),
    ("gpu_tensor_active_ratio", "tensor pipes active"),
    ("gpu_sm_active_ratio", "SMs active"),
    ("gpu_sm_occupancy_ratio", "SM occupancy"),
    ("gpu_engine_active_ratio", "GPU busy"),
    ("mbu_ratio", "MBU"),
    ("mfu_ratio", "MFU"),
)


class GpuLimit(NamedTuple):
    """What limits the GPU, with the signal that shows it."""

    kind: Kind
    signal: str
    value: float
    threshold: float
    facts: Facts

    @property
    def text(self) -> str:
        """The limit, and all known shares."""
        return f"{WORDS[self.kind]} ({_shares(self.facts)})"


def bound_of(facts: Facts) -> GpuLimit | None:
    """What limits the GPUs: by the activity that DCGM or NVML reports, or by vLLM's estimate of its
    work.

    None if nothing is known, no limit is reached, or the GPUs are a guess.
    """
    if facts.get("running_avg") < 1 or facts.gpus_guessed:
        return None
    engine, value_of = facts.values.get("gpu_engine_active_ratio"), facts.values.get
    over = [row for row in LIMITS if (value_of(row[1]) or 0.0) >= row[2]]
    if over:
        kind, signal, threshold = max(over, key=lambda row: facts.get(row[1]) / row[2])
        value = facts.get(signal)
    elif engine is not None and engine < FED_FROM:
        kind, signal, value, threshold = "host", "gpu_engine_active_ratio", engine, FED_FROM
    else:
        return None
    return GpuLimit(kind, signal, value, threshold, facts)


def has_spare_compute(facts: Facts) -> bool:
    """Whether the GPUs serve few requests and could compute more; False if unknown.

    A GPU that reads memory all the time counts as busy, yet its tensor pipes may be idle.
    """
    running = facts.get("running_avg")
    if facts.gpus_guessed or not 1 <= running < FEW_REQUESTS:
        return False
    computing = [
        value < threshold
        for kind, signal, threshold in LIMITS
        if kind == "compute" and (value := facts.values.get(signal)) is not None
    ]
    return all(computing) and (bool(computing) or bound_of(facts) is not None)


def is_bound(kind: Kind) -> Condition:
    """The condition that the GPUs have this kind of limit; false if unknown."""
    return Tested(lambda facts: _is(facts, kind), f"the GPUs are {WORDS[kind]}")


def bound_terms(kind: Kind, weight: float = 0.6, against: float = -0.6) -> tuple[Term, ...]:
    """The GPU's limit as evidence: for the cause if the limit is of this `kind`, otherwise against
    it."""
    value = Computed(
        lambda facts: _get(facts, "value"), "the GPU activity that identifies the limit"
    )
    bound = Computed(lambda facts: _get(facts, "threshold"), "its threshold")
    host = is_bound("host")

    def limit_term(weight: float, when: Condition, *, below: bool = False) -> Term:
        return term(value, bound, weight, _text, when=when, below=below, signal=_signal)

    return (
        limit_term(weight, is_bound(kind)),
        limit_term(against, ~is_bound(kind) & ~host),
        limit_term(against, host, below=True),
    )


def _is(facts: Facts, kind: Kind) -> bool:
    bound = bound_of(facts)
    return bound is not None and bound.kind == kind


def _get(facts: Facts, name: Literal["value", "threshold"]) -> float | None:
    bound = bound_of(facts)
    return None if bound is None else getattr(bound, name)


def _text(facts: Facts) -> str:
    bound = bound_of(facts)
    return "" if bound is None else bound.text


def _signal(facts: Facts) -> str:
    bound = bound_of(facts)
    return "" if bound is None else bound.signal


def _shares(facts: Facts) -> str:
    shares = [(words, facts.values.get(signal)) for signal, words in SHARES]
    return ", ".join(f"{words} {percent(share)}" for words, share in shares if share is not None)


# --- A host that others slow down -----------------------------------------------------------------

PRESSED_FROM, STOLEN_FROM = 0.2, 0.05
"""The host slows steps from these shares of time on.

`PRESSED_FROM`: tasks wait for a CPU. `STOLEN_FROM`: the hypervisor withholds CPU time (steal).
"""

PRESSURE, STEAL = Live("host_cpu_pressure_ratio"), Live("host_cpu_steal_ratio")
SPEED_RATIO, PREFILL_SPEED_RATIO = Live(SPEED), Live(PREFILL_SPEED)
SPEED_AT_MOST = SPEED_RATIO + Live(SPEED_ERROR).otherwise(0.0)
SLOWER_BY, PREFILLS_SLOWER_BY = 1.0 / SPEED_RATIO, 1.0 / PREFILL_SPEED_RATIO
SLOW_FROM, HARMFUL_FROM = 0.75, 0.45
"""Steps are slow, and harmfully so, from these shares of the speed of quiet times on: harmfully if
the speed with its error is no larger."""

SLOWED_TOKENS = (
    "inter-token latency is {value:.1f}x its quiet mean, with {running_avg:.1f} requests in the "
    "batch"
)

IS_SLOW = SPEED_RATIO <= SLOW_FROM
"""Steps take longer than in quiet times, although they do no more work."""

BATCH_GROWTH = BATCH / BaselineValue("running_avg")
LENGTH_GROWTH = Live("output_tokens_mean") / BaselineValue("output_tokens_mean")
EQUAL_WORK = (BATCH_GROWTH <= 1.1) & (LENGTH_GROWTH <= 1.2).assume(unknown=True)
SLOW_AT_EQUAL_WORK = (
    IS_SLOW | ((ITL_DRIFT >= UNMOVED) & (Live("itl_p50_drift_ratio") >= UNMOVED) & EQUAL_WORK)
).assume(unknown=False)
"""By the account, or because the batch is no larger and answers are no longer, which is known
earlier."""

IS_PRESSED, IS_STOLEN = PRESSURE >= PRESSED_FROM, STEAL >= STOLEN_FROM

WARMED_UP = Tested(
    lambda facts: facts.served_s >= WARM_UP_S * min(1.0, facts.scale) + facts.window_s,
    "the process generated its first token half a minute before the window, or earlier",
)
"""Loading weights takes CPU, and what is slow at first has left the window."""

_SLOW_AT_EQUAL_WORK = SLOW_AT_EQUAL_WORK.python()


def unseen_host(facts: Facts) -> list[str]:
    """A note if steps are slow at equal work and nothing is known about the host; otherwise
    empty."""
    seen = any(facts.values.get(key) is not None for key in (PRESSURE.key, STEAL.key))
    if seen or not _SLOW_AT_EQUAL_WORK(facts):
        return []
    return [
        "host_contention: steps are slow at equal work; whether the host lacks CPU cannot be "
        "told from here: run kneewatch on the server's node, outside a container of its own"
    ]


E2E_S = Live("e2e_mean_s")
OUTSIDE_S = E2E_S - Live("queue_mean_s") - Live("prefill_mean_s") - Live("decode_mean_s")
"""Mean seconds that a finished request spent outside the engine's queue, prefill and decode.

In this time the API server's process prepares the prompt, and later turns tokens into text.
"""

LONGER_THAN_STEPS = (
    (OUTSIDE_S > Live("prefill_p99_s"))
    & (OUTSIDE_S > Live("itl_stall_time_ratio") * Live("decode_mean_s"))
).assume(unknown=True)
"""The time outside the engine is longer than long steps can explain.

The engine takes new requests into its queue between two steps. So waiting for a long step, or for a
hung engine, also counts as time outside. But then prefills, or the pauses of running requests, are
as long.
"""

WAITS_BY_NATURE = (
    (OUTSIDE_S < 10.0)
    & (Live("ttft_mean_s") >= 0.5 * OUTSIDE_S)
    & (MEAN_TTFT_GROWTH < 1.5).assume(unknown=True)
    & (TTFT_P99_S <= TTFT_TARGET_S).assume(unknown=True)
).assume(unknown=False)
"""Some servers' requests take seconds to prepare: images and videos. That is worth a warning once
it takes longer than usual or than is promised. What comes after the first token has no such reason.
"""

CALLS_PILE_UP = (
    (Live(PILED) > 0.0)
    & (SERVED > 0.0)
    & (CHANGED_FROM * Live(DEMAND) <= 1.0)
    & (TTFT_DRIFT <= UNMOVED)
).assume(unknown=False)
"""Calls stay open and fewer than usual reach the engine, which serves those as soon as ever: they
wait for nothing that the engine has. Connections that clients keep open take no requests from it.
"""

EAGER = Live("eager_decode_ratio")
BY_THE_ENGINE = (
    term(EAGER, 0.5, 0.6, "{value:%} of decode passes run without a CUDA graph", when=EAGER >= 0.5),
    term(Live("gpu_work_ratio"), None, 0.0, "the GPU computes in {value:%} of the time"),
    term(Live("scheduler_cpu_ratio"), None, 0.0, "the scheduler uses {value:.2f} CPU cores"),
)
"""What some engines measure of their own steps; vLLM does not."""

HOST_CONTENTION = cause(
    "host_contention",
    Form(
        gate=SLOW_AT_EQUAL_WORK
        & (IS_PRESSED | IS_STOLEN)
        & WARMED_UP
        & ~is_bound("memory")
        & ~is_bound("compute"),
        terms=(
            term(
                PRESSURE,
                PRESSED_FROM,
                1.2,
                "tasks wait for a CPU in {value:%} of the time",
                when=IS_PRESSED,
            ),
            term(
                STEAL,
                STOLEN_FROM,
                1.2,
                "the hypervisor withholds {value:%} of the CPU time",
                when=IS_STOLEN,
            ),
            term(ITL_DRIFT, UNMOVED, 0.8, SLOWED_TOKENS),
            *BY_THE_ENGINE[1:],
            *bound_terms("host")[:1],
        ),
        levels=((Severity.WARNING, ITL_DRIFT >= 1.5),),
        severity=Severity.INFO,
        say="Steps take {slower:.1f}x as long at equal work: the host lacks CPU.",
        words=(("slower", ITL_DRIFT),),
        summary="Steps slow down at equal work: the host lacks CPU",
        lever="See what else runs there (`top`, `kubectl top pods`); give the server CPUs of "
        "its own (CPU manager policy static, cpuset), or move one of both to another node.",
    ),
    Form(
        gate=CALLS_PILE_UP
        | (OUTSIDE_S >= 1.0)
        & (OUTSIDE_S >= 0.3 * E2E_S)
        & LONGER_THAN_STEPS
        & NOT_EVICTING
        & (SERVED * WINDOW_S >= 4.0),
        terms=(
            term(
                OUTSIDE_S,
                1.0,
                1.2,
                "requests spend {value:s} of {e2e_mean_s:s} outside the engine: neither in its "
                "queue nor in prefill nor in decode",
            ),
            term(
                Live(PILED),
                None,
                1.2,
                "the API server has {value} more open connections than minutes ago, beside the "
                "requests of the engine",
                when=CALLS_PILE_UP,
            ),
            *bound_terms("host")[:1],
        ),
        levels=(
            (Severity.CRITICAL, (OUTSIDE_S >= 60.0) | FIRST_TOKENS_VERY_LATE),
            (Severity.WARNING, ~WAITS_BY_NATURE | CALLS_PILE_UP),
        ),
        severity=Severity.INFO,
        instead=(
            (
                CALLS_PILE_UP,
                "Calls pile up in the API server's process: {piled_calls} more are open than "
                "minutes ago, and x{demand_moved_ratio:.1f} of the usual requests/s reach the "
                "engine.",
            ),
        ),
        say="Requests wait {outside_s:s} outside the engine: in the API server's process, "
        "before or after it.",
        words=(("outside_s", OUTSIDE_S),),
        summary="Requests wait in the API server's process, not in the engine",
        lever="Look at the CPU of the API server's process (`top`): tokenizing, chat "
        "templates, images and videos, and detokenizing run there. Add API servers "
        f"({API_SERVERS}) and cores, or prepare the media elsewhere.",
    ),
    unusual=SLOW_AT_EQUAL_WORK | ~WAITS_BY_NATURE,
)

# --- Slow steps whose reason is not measured ------------------------------------------------------

NEIGHBOURS = Live("gpu_neighbour_memory_ratio")
OVER_TARGET = ITL_IS_MISSED.assume(unknown=True) & WARMED_UP
FIRST_TOKENS_SUFFER = TTFT_IS_MISSED.assume(unknown=True)

PREFILLS_SLOW_FROM = 0.6
"""Prefills are slow from this share of their speed in quiet times on: they wait for one another, so
their times vary more than those of steps."""

QUEUE_S = Live("queue_mean_s").otherwise(0.0)
SLOW_STEPS_ALONE = (
    TTFT_IS_MISSED
    & ITL_IS_MISSED
    & (ITL_P50_S > 0.5 * ITL_TARGET_S)
    & (PREFILL_S > 0.0)
    & (PREFILL_S + QUEUE_S <= 3.0 * ITL_P50_S)
    & ((TTFT_P99_S <= 3.0 * ITL_P99_S) | is_bound("host"))
).assume(unknown=False)
"""Slow steps alone explain why TTFT and ITL miss their targets; faster steps would help both.

ITL is slow not only in its tail. A mean first token takes at most three ordinary steps: the rest of
the running step, and the steps of its prompt. TTFT P99 is at most three of the longest steps; a few
long prompts would take more. TTFT P99 is not compared if GPUs idle while requests run.
"""

MEDIAN_IS_MISSED = ITL_P50_S > ITL_TARGET_S
GPUS_WAIT_FOR_THE_HOST = is_bound("host") & (MEDIAN_IS_MISSED | SLOW_STEPS_ALONE).assume(
    unknown=False
)
"""The reason is measured: decode_bound names it."""

ABORTED_SHARE = Live("finished_abort_per_s") / SERVED
MANY_ABORTED = (ABORTED_SHARE >= 0.5).assume(unknown=False)
ABORTS = term(
    ABORTED_SHARE,
    None,
    0.0,
    "{value:%} of the finished requests were aborted: callers no longer wait",
    when=MANY_ABORTED,
)
PREFILLS_TAKE_LONGER = PREFILL_SPEED_RATIO <= PREFILLS_SLOW_FROM
SPEED_IS_LOST = (IS_SLOW.assume(unknown=False) | PREFILLS_TAKE_LONGER).assume(unknown=False)
"""An engine that lost its speed explains late tokens, and why callers give up."""

FIRST_TOKENS_ARE_LATER = (MEAN_TTFT_GROWTH >= 1.2).assume(unknown=True)
"""Slow prefills delay first tokens: if these come as early as usual, the prefills are not slow."""

RATHER_SLOW_FROM = 0.9
LITTLE_SLOWER = (SPEED_RATIO > SLOW_FROM) & (SPEED_AT_MOST <= RATHER_SLOW_FROM)
RATHER_SLOW = Check("rather_slow", LITTLE_SLOWER, Number(60.0), stretch=False) & LITTLE_SLOWER
"""Steps take a little longer than in quiet times, beyond the error, for a minute."""

LATER_STEPS = "Steps take {slower:.1f}x as long as in quiet times for the same work"
LATER_PREFILLS = (
    "Prefills take {prefills_slower:.1f}x as long as in quiet times for prompts of the same length"
)
LATER_PREFILLS_ALONE = f"{LATER_PREFILLS}, while decode steps do not"
NOT_SHOWN = "; vLLM's metrics do not show why."
SHOWN_IDLE = ": the GPU idles while requests run."


def _host_first(others: str) -> Callable[[Facts], str]:
    """The host as the first thing to look at where the GPUs wait for it, else `others`."""
    return lambda facts: (
        "Look at the host first: other processes and threads at 100% (`top -H`), the container's "
        "CPU limit, OMP_NUM_THREADS, the CPU's clock. Then look at what clients ask for since "
        "then: structured outputs, logits processors, penalties."
        if _is(facts, "host")
        else others
    )


SLOW_STEPS = cause(
    "slow_steps",
    Form(
        gate=IS_SLOW & ~GPUS_WAIT_FOR_THE_HOST,
        terms=(
            term(
                SPEED_RATIO,
                SLOW_FROM,
                2.0,
                "a step takes {slower:.1f}x as long as in quiet times for the same work "
                "(speed x{value:.2f} +-{engine_speed_error_ratio:.2f}, by "
                "{engine_speed_samples} quiet samples)",
                below=True,
            ),
            term(ITL_DRIFT, None, 0.0, SLOWED_TOKENS),
            ABORTS,
            *BY_THE_ENGINE,
            term(
                NEIGHBOURS,
                0.02,
                0.6,
                "other processes hold {value:%} of the GPUs' memory: they share the GPUs",
                when=NEIGHBOURS > 0.0,
            ),
            *bound_terms("host")[:1],
        ),
        levels=(
            (
                Severity.CRITICAL,
                FIRST_TOKENS_VERY_LATE
                | MANY_ABORTED
                | ((SPEED_AT_MOST <= HARMFUL_FROM) & OVER_TARGET),
            ),
            (Severity.WARNING, OVER_TARGET),
        ),
        severity=Severity.INFO,
        instead=((is_bound("host"), LATER_STEPS + SHOWN_IDLE),),
        say=LATER_STEPS + NOT_SHOWN,
        words=(("slower", SLOWER_BY),),
        root=True,
        summary="Steps take far longer than in quiet times at equal work",
        lever=_host_first(
            "Look at the GPUs' clocks (`nvidia-smi -q -d CLOCK,PERFORMANCE`) and processes, "
            "at the host's CPU (`top`), and at what clients ask for since then: structured "
            "outputs, LoRA adapters, logprobs, penalties. If nothing is found, move the replica to "
            "another node."
        ),
    ),
    Form(
        gate=PREFILLS_TAKE_LONGER & FIRST_TOKENS_ARE_LATER & ~GPUS_WAIT_FOR_THE_HOST,
        terms=(
            term(
                PREFILL_SPEED_RATIO,
                PREFILLS_SLOW_FROM,
                2.0,
                "a prefill takes {prefills_slower:.1f}x as long as in quiet times for the same "
                "number of computed tokens (speed x{value:.2f})",
                below=True,
            ),
            term(Live("prefill_mean_s"), None, 0.0, "mean prefill is {value:s}"),
            ABORTS,
            *bound_terms("host")[:1],
        ),
        levels=((Severity.CRITICAL, MANY_ABORTED), (Severity.WARNING, FIRST_TOKENS_SUFFER)),
        severity=Severity.INFO,
        instead=(
            ((SPEED_RATIO > SLOW_FROM) & is_bound("host"), LATER_PREFILLS_ALONE + SHOWN_IDLE),
            (SPEED_RATIO > SLOW_FROM, LATER_PREFILLS_ALONE + NOT_SHOWN),
            (is_bound("host"), LATER_PREFILLS + SHOWN_IDLE),
        ),
        say=LATER_PREFILLS + NOT_SHOWN,
        words=(("prefills_slower", PREFILLS_SLOWER_BY),),
        root=True,
        summary="Prefills take far longer than in quiet times at equal work",
        lever=_host_first(
            "Compare vLLM's version and flags with those of quiet times (attention backend, "
            f"chunked prefill, {STEP_TOKENS}). Look at vLLM's log for compilation, at "
            "the GPUs' clocks (`nvidia-smi -q -d CLOCK,PERFORMANCE`), and at what clients ask for "
            "since then: images, LoRA adapters, prompt logprobs."
        ),
    ),
    Form(
        gate=RATHER_SLOW & ~GPUS_WAIT_FOR_THE_HOST,
        start=Number(0.4),
        terms=(
            term(
                SPEED_RATIO,
                RATHER_SLOW_FROM,
                1.2,
                "speed x{value:.2f} +-{engine_speed_error_ratio:.2f} at equal work, by "
                "{engine_speed_samples} quiet samples",
                below=True,
            ),
            term(ITL_DRIFT, None, 0.0, SLOWED_TOKENS),
        ),
        severity=Severity.INFO,
        say="Steps take {slower:.2f}x as long as in quiet times for the same work.",
        words=(("slower", SLOWER_BY),),
        apart=ALWAYS,
        summary="Steps take a little longer than in quiet times at equal work",
        lever="Compare vLLM's version, flags and the GPUs' clocks with those of quiet times.",
    ),
    unusual=SPEED_IS_LOST,
)
