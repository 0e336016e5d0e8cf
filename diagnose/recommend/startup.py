"""Changes that would let a failed server start, computed from its log and the sizing. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, floor, log2

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import (
    ADAPTER_SLOTS,
    LONGEST_TOKENS,
    MEMORY_SHARE,
    SEATS,
    STEP_TOKENS,
    TENSOR_SPLIT,
)
from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.cause import Cause, Evidence
from kneewatch.diagnose.deployment import startup_log as log
from kneewatch.diagnose.deployment.deployment import Stated, deployment
from kneewatch.diagnose.deployment.startup_log import Failure, StartupLog, title
from kneewatch.diagnose.engine.wording import in_own_words
from kneewatch.diagnose.ranking import ENGINE_DIED, STARTUP_FAILED
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, Value
from kneewatch.diagnose.recommend.levers_kv_cache import UTILIZATION_MOST
from kneewatch.diagnose.recommend.levers_replicas import MOST_TENSOR_PARALLEL
from kneewatch.diagnose.recommend.prediction import computed_memory
from kneewatch.diagnose.recommend.serve_command import serve_command
from kneewatch.diagnose.sizing.memory.budget import Memory
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.verdict import LOG_BASIS, LogFailure, Verdict
from kneewatch.rules.rule import Severity
from kneewatch.rules.wire import to_ms

CONTEXT_STEP_TOKENS = 256
LEAST_CONTEXT_TOKENS = 1024
"""A shorter context is not recommended: hardly any request would fit."""

_MOST_STEPS = 4
_LEAST_LESS_GIB = 0.1
"""Less memory than this is no change."""
_RISKS = {
    SEATS: "Fewer requests run at once: the others queue.",
    STEP_TOKENS: "Long prompts take more steps, and TTFT grows.",
    MEMORY_SHARE: "The KV cache becomes smaller.",
    ADAPTER_SLOTS: "Fewer adapters run at once: requests for the others wait.",
}
_FIGURES = {LONGEST_TOKENS: "max_model_len_tokens", MEMORY_SHARE: "gpu_memory_utilization_ratio"}
VERIFY = "the log has no error and reaches `Application startup complete`"


class Remedies:
    """Changes to the launch in a log. `stated` includes the log's facts."""

    def __init__(self, failure: Failure, read: StartupLog, stated: Stated) -> None:
        self._failure, self._read, self._stated = failure, read, stated
        self._cause = ENGINE_DIED if failure.served else STARTUP_FAILED
        self._launch = deployment({}, stated).sized_launch

    def all(self) -> Iterator[Advice]:
        """All changes that can be computed, best first."""
        kind = self._failure.kind
        if kind in (log.KV_SMALL, log.MODEL_LEN):
            yield from self._shorter_context()
        if kind == log.FEW_STATES:
            yield from self._fewer_seats()
        if kind == log.FREE_MEMORY:
            yield from self._lower_utilization()
        if kind in (log.KV_NONE, log.KV_SMALL) and not self._failure.served:
            yield from self._higher_utilization()
        if kind == log.GPU_MEMORY and not self._failure.served:
            yield from self._out_of_memory()
        if kind in (log.KV_NONE, log.KV_SMALL) and not self._failure.served:
            yield from self._more_gpus()

    def missing(self) -> list[str]:
        """What the user must state so that changes can be computed, as lines for `unknown`."""
        if (
            self._failure.kind not in (log.KV_NONE, log.KV_SMALL, log.GPU_MEMORY)
            or self._failure.served
        ):
            return []
        lacks = self._stated.lacking
        named = ", ".join(f"--{name.replace('_', '-')}" for name in lacks)
        return [f"what fits on these GPUs: state {named}"] if lacks else []

    def _shorter_context(self) -> Iterator[Advice]:
        """Recommends the longest context that fits, by vLLM's estimate and by the cache's
        layout."""
        longest = self._number("longest_tokens")
        if self._failure.kind == log.KV_SMALL:
            available_gib = self._available_gib()
            kv_bytes = None if available_gib is None else available_gib * GIB
            if kv_bytes is not None and (sized := self._sized(available_kv_bytes=kv_bytes)):
                longest = min(longest or sized.longest_that_fits, sized.longest_that_fits)
        now = self._number("max_model_len") or self._read.number("max_model_len")
        if longest is None:
            return
        to = floor(longest / CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
        if to < LEAST_CONTEXT_TOKENS or (now is not None and to >= now):
            return
        why = (
            f"The KV cache holds one request of up to {longest:,.0f} tokens."
            if self._failure.kind == log.KV_SMALL
            else f"The model allows {longest:,.0f} tokens."
        )
        yield self._advice(
            FlagChange(LONGEST_TOKENS, None if now is None else int(now), to),
            why,
            check=f"confirm that no user needs requests of more than {to:,} tokens",
            risk="vLLM rejects longer requests. A cache for one such request serves few at once.",
        )

    def _fewer_seats(self) -> Iterator[Advice]:
        """Recommends the largest power of two that the blocks in the log allow."""
        most, now = self._number("most_seqs"), self._number("max_num_seqs")
        if most is None or now is None or most < 1:
            return
        yield self._advice(
            FlagChange(SEATS, int(now), 1 << int(most).bit_length() - 1),
            f"The KV cache has blocks for the states of {most:,.0f} running requests.",
            predicted={},
            check="confirm that fewer requests at once are enough, or serve with more GPUs",
            risk=_RISKS[SEATS],
        )

    def _lower_utilization(self) -> Iterator[Advice]:
        """Recommends a utilization that requests only the free share of the GPU's memory."""
        total_gib, others_gib = self._number("gpu_memory_gib"), log.others_gpu_gib(self._failure)
        free_gib = self._number("free_gib") or (total_gib or 0.0) - (others_gib or 0.0)
        now = self._number("gpu_memory_utilization") or self._utilization
        if free_gib <= 0 or not total_gib:
            return
        to = floor(100 * free_gib / total_gib) / 100
        sized = self._sized(gpu_memory_utilization=to)
        if to < 0.05 or (now is not None and to >= now) or (sized and not sized.holds_one):
            return
        yield self._advice(
            FlagChange(MEMORY_SHARE, now, to),
            f"{free_gib:.4g} of {total_gib:g} GiB were free when vLLM started.",
            check="check with nvidia-smi which process uses the GPU: if it is a previous vLLM, end "
            "it instead",
            risk="The KV cache becomes smaller; if weights do not fit, vLLM still does not start.",
        )

    def _out_of_memory(self) -> Iterator[Advice]:
        """Recommends less of what the phase of the start takes memory for, or more GPUs where the
        sizing shows that the launch does not fit. Another process must end first."""
        if log.others_gpu_gib(self._failure):
            yield from self._lower_utilization()
            return
        sized = self._sized()
        if sized is not None and sized.holds_one and log.is_fragmented(self._failure):
            return
        phase = log.phases().get(str(self._failure.details.get("phase")), {})
        lower = [each for flag in phase.get("flags", ()) for each in self._lower(flag)]
        yield from lower
        if not lower and (sized is None or not sized.holds_one):
            yield from self._more_gpus()

    def _lower(self, flag: str) -> Iterator[Advice]:
        """Recommends a lower value of a flag: the next with which the launch is predicted to start
        and to need as much less memory as PyTorch could not allocate."""
        is_share, launch, total_gib = flag == MEMORY_SHARE, self._launch, self._memory_gib
        now = self._utilization if is_share else self._count(flag)
        # Before vLLM has sized the KV cache, its share limits nothing.
        if now is None or (is_share and self._read.number("available_kv_gib") is None):
            return
        lacks_gib = log.size_gib(self._failure, "asked") - log.size_gib(self._failure, "free")
        taken_gib = _taken_gib(computed_memory(launch))
        for to in _lower_shares(now) if is_share else _halves(now):
            sized = None if launch is None else computed_memory(_with(launch, flag, to))
            if launch is not None and (sized is None or not sized.holds_one):
                continue
            after_gib, less_gib = _taken_gib(sized), None
            if is_share and total_gib is not None:
                less_gib = (now - to) * total_gib
            elif not is_share and taken_gib is not None and after_gib is not None:
                less_gib = taken_gib - after_gib
            if less_gib is not None and less_gib < max(lacks_gib, _LEAST_LESS_GIB):
                continue
            phase = log.phases()[str(self._failure.details["phase"])]
            less = "less memory" if less_gib is None else f"{less_gib:.1f} GiB less"
            yield self._advice(
                FlagChange(flag, now, to),
                f"GPU memory ran out {phase['what']}. With {to:g}, vLLM takes {less}.",
                predicted={} if sized is None else _held(sized),
                check="check with nvidia-smi that no other process uses the GPU",
                risk=_RISKS[flag],
            )
            return

    def _count(self, flag: str) -> int | None:
        """A flag of the launch, as logged or, if the launch is sized, by default."""
        logged = self._read.number(fact := flag[2:].replace("-", "_")) or self._number(fact)
        launch = self._launch
        if logged is not None or launch is None:
            return None if logged is None else int(logged)
        return {SEATS: launch.seqs, STEP_TOKENS: launch.batched_tokens}.get(flag)

    def _higher_utilization(self) -> Iterator[Advice]:
        """Recommends the lowest utilization at which one request of full length fits."""
        now, available_gib = self._utilization, self._available_gib()
        memory_gib, needed_gib = self._memory_gib, self._number("needed_gib")
        if now is None or available_gib is None or memory_gib is None:
            return
        if needed_gib is None:
            sized = self._sized(available_kv_bytes=max(available_gib, 1.0) * GIB)
            if sized is None:
                return
            blocks = sized.layout.request_blocks(sized.launch.longest_tokens) + 1
            needed_gib = blocks * sized.layout.block_bytes / GIB
        # The log rounds to 0.01 GiB.
        to = ceil(100 * (now + (needed_gib - available_gib + 0.02) / memory_gib)) / 100
        if not now < to <= UTILIZATION_MOST:
            return
        yield self._advice(
            FlagChange(MEMORY_SHARE, now, to),
            f"One request of full length needs {needed_gib:.2f} GiB of KV cache, and "
            f"{available_gib:.2f} GiB are available at {now:g}.",
            check="confirm that no other process uses the GPU",
            risk="Less memory is left for spikes outside vLLM's share; do not exceed 0.95.",
        )

    def _more_gpus(self) -> Iterator[Advice]:
        """Recommends the next larger tensor-parallel degree at which one request of full length
        fits."""
        launch = self._launch
        if launch is None or launch.gpu is None:
            return
        now = launch.parallel.tensor
        usd = self._stated.usd_per_gpu_hour or launch.gpu.usd_per_hour
        for to in (now * 2**power for power in range(1, 4)):
            wider = replace(
                launch, parallel=replace(launch.parallel, tensor=to), weights_bytes=None
            )
            sized = computed_memory(wider)
            if to > MOST_TENSOR_PARALLEL or sized is None or not sized.holds_one:
                continue
            linked = "connected by NVLink" if to <= launch.gpu.nvlink_gpus else "in one node"
            held = _held(sized)
            yield self._advice(
                FlagChange(TENSOR_SPLIT, now, to),
                f"On {to} GPUs the weights take {(sized.weights_bytes or 0) / GIB:.1f} GiB of "
                f"each, and the KV cache holds {held['max_concurrency']:.1f} requests of full "
                "length.",
                predicted=held,
                check=f"confirm that the {to} GPUs are {linked}",
                risk="All-reduces cost throughput per GPU.",
                cost_usd_per_hour=usd * (to - now) * launch.parallel.pipeline,
            )
            return

    def _advice(
        self,
        change: FlagChange,
        summary: str,
        *,
        check: str,
        risk: str,
        predicted: Mapping[str, float] | None = None,
        cost_usd_per_hour: float | None = 0.0,
    ) -> Advice:
        """A recommendation; without numbers that it `predicted`, with those of its flag."""
        launch, model = self._stated.command_line, self._stated.model
        before, after = _figure(change.flag, change.before), _figure(change.flag, change.after)
        model_id = "" if model is None else model.id
        return Advice(
            id=change.flag[2:].removesuffix("-size"),
            cause=self._cause,
            changes=(change,),
            summary=summary,
            before=before if predicted is None else {},
            predicted=after if predicted is None else predicted,
            cost_usd_per_hour=cost_usd_per_hour,
            checks=(check,),
            risk=risk,
            verify=(VERIFY,),
            guide=(),
            command=None if launch is None else serve_command(launch, model_id, [change]),
        )

    # --- numbers ----------------------------------------------------------------------------------

    def _number(self, name: str) -> float | None:
        value = self._failure.details.get(name)
        return float(value) if isinstance(value, int | float) else None

    def _available_gib(self) -> float | None:
        logged = self._number("available_gib")
        return self._read.number("available_kv_gib") if logged is None else logged

    @property
    def _memory_gib(self) -> float | None:
        logged, gpu = self._read.number("gpu_memory_gib"), self._stated.gpu
        return gpu.memory_bytes / GIB if logged is None and gpu is not None else logged

    @property
    def _utilization(self) -> float | None:
        """The logged utilization; otherwise the version's default, if the whole command line is
        known."""
        launch = self._stated.command
        logged = launch.number(MEMORY_SHARE) or self._read.number("gpu_memory_utilization")
        if logged is not None or self._launch is None:
            return logged
        default_holds = launch.absent(MEMORY_SHARE) and self._stated.version is not None
        return self._launch.defaults.gpu_memory_utilization if default_holds else None

    def _sized(self, **changes: float | None) -> Memory | None:
        """The memory of the launch with these fields of the launch changed; None if unknown."""
        launch = self._launch
        if launch is None or (launch.gpu is None and "available_kv_bytes" not in changes):
            return None
        return computed_memory(replace(launch, **changes))


def _figure(flag: str, value: Value) -> dict[str, float]:
    return {_FIGURES[flag]: value} if flag in _FIGURES and isinstance(value, int | float) else {}


def _lower_shares(now: float) -> list[float]:
    """Lower utilizations in steps of 0.05; where these hold too little, the least step."""
    grid = [ceil(20 * now - 1e-9) / 20 - step / 20 for step in range(1, _MOST_STEPS + 1)]
    return [round(to, 2) for to in (*grid, now - 0.02)]


def _halves(now: float) -> list[int]:
    powers = (ceil(log2(now)) - step for step in range(1, _MOST_STEPS + 1))
    return [int(2**power) for power in powers if power >= 0]


def _held(sized: Memory) -> dict[str, float]:
    return {
        "kv_capacity_tokens": float(int(sized.held_tokens.expected)),
        "max_concurrency": float(f"{sized.concurrency.expected:.3g}"),
    }


def _taken_gib(sized: Memory | None) -> float | None:
    """What vLLM takes beside the model and the KV cache; None if it is not predicted."""
    if sized is None or sized.overhead is None:
        return None
    return (sized.overhead.expected_bytes + sized.adapter_bytes) / GIB


def _with(launch: Launch, flag: str, value: float) -> Launch:
    """The launch with another value of a flag that takes memory."""
    if flag != ADAPTER_SLOTS:
        return replace(launch, **{flag[2:].replace("-", "_"): value})
    adapters = launch.adapters
    if adapters is None:
        return launch
    return replace(launch, adapters=replace(adapters, slots=int(value)))


# --- The diagnosis of a server by its log alone: started, not started or died ---------------------


CONFIDENCE = 0.95
"""Below 1, because the log may be from an earlier start than the one in question."""

GPU_SIZE_TOLERANCE_RATIO = 0.1
"""The driver and ECC use a few percent of a GPU's memory."""


def _out_of_gpu_memory(failure: Failure) -> tuple[str, str]:
    """What happened and what to do, by who holds the memory and by the phase of the start."""
    reason = log.reasons()[log.GPU_MEMORY]
    others_gib = log.others_gpu_gib(failure)
    phase = log.phases().get(str(failure.details.get("phase")), {})
    what = f"{reason['what']} {phase.get('what', '')}".strip()
    lever: str = phase.get("lever", reason["lever"])
    first: list[str] = []
    if log.is_fragmented(failure):
        asked, cached = failure.details["asked"], failure.details["cached"]
        first.append(
            f"Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: PyTorch held {cached} "
            f"in pieces and could not allocate {asked}."
        )
    if others_gib:
        first.append(
            f"Other processes hold {others_gib:.1f} GiB of this GPU: find them with nvidia-smi, a "
            "previous vLLM may still run."
        )
    elif others_gib is None and "max_num_seqs" not in failure.details:
        first.append("Check with nvidia-smi that no other process uses the GPU.")
    if first:
        lever = f"{' '.join(reversed(first))} Else {lever[0].lower()}{lever[1:]}"
    return what, lever


def failed(failure: Failure, t_s: float) -> Cause:
    """The cause of a failure that a log proves, with the log line as evidence; it starts at
    `t_s`."""
    reason = log.reasons()[failure.kind]
    what, lever = reason["what"], reason["lever"]
    if failure.kind == log.GPU_MEMORY:
        what, lever = _out_of_gpu_memory(failure)
    who = "The engine died" if failure.served else "vLLM did not start"
    return Cause(
        id=ENGINE_DIED if failure.served else STARTUP_FAILED,
        confidence=CONFIDENCE,
        severity=Severity.CRITICAL,
        summary=f"{who}: {what}.",
        evidence=(Evidence("server_log", None, None, f"log: {failure.line}"),),
        lever=lever,
        since_s=t_s,
        seen_s=t_s,
    )


def log_failure(read: StartupLog, stated: Stated, since_s: float) -> LogFailure | None:
    """The failure at the end of the log, first read at `since_s`; None if there is none.

    `stated` includes the log's facts. If its GPU has another memory size than the log's GPU, no
    sizes are recommended.
    """
    if read.failure is None:
        return None
    problem = _gpu_problem(read, read.failure, stated)
    remedies = Remedies(read.failure, read, replace(stated, gpu=None) if problem else stated)
    return LogFailure(
        failed(read.failure, since_s),
        tuple(remedies.all()),
        (problem,) if problem else tuple(remedies.missing()),
    )


def _gpu_problem(read: StartupLog, failure: Failure, stated: Stated) -> str:
    """A line about a stated GPU whose memory differs from the log's; empty if it does not
    differ."""
    logged = failure.details.get("gpu_memory_gib", read.number("gpu_memory_gib"))
    if stated.gpu is None or not isinstance(logged, int | float):
        return ""
    stated_gib = stated.gpu.memory_bytes / GIB
    if abs(logged / stated_gib - 1) <= GPU_SIZE_TOLERANCE_RATIO:
        return ""
    return (
        f"what fits on these GPUs: {stated.gpu.id} has {stated_gib:.1f} GiB, and the log says that "
        f"the GPU has {logged:.1f} GiB; check --gpu"
    )


def log_diagnosis(read: StartupLog, stated: Stated, *, target: str, t_s: float) -> Verdict:
    """The diagnosis from a log that was read at `t_s`; `stated` includes the log's facts.

    Its health is `unknown` if the log ends while the server is still starting.
    """
    failure = log_failure(read, stated, t_s)
    model = read.facts.get("model")
    running = read.phase in ("serving", "stopped")
    verdict = Verdict(
        t_s=to_ms(t_s),
        target=target,
        model=str(model.value) if model else "",
        health="critical" if failure else "ok" if running else "unknown",
        # When it happened is unknown: the lines have no year and no time zone.
        causes=[replace(failure.cause, since_s=None).rounded()] if failure else [],
        unknown=[*_lacking(read), *(failure.unknown if failure else ())],
        judged_against=LOG_BASIS,
        recommendations=failure.recommendations if failure else (),
    )
    return in_own_words(verdict, read.kind)


def _lacking(read: StartupLog) -> list[str]:
    """Lines about facts that this version usually logs but this log lacks; none while the server
    starts."""
    if read.phase == "starting":
        return []
    return [f"{title(fact)}: no line in the log" for fact in read.not_logged]
