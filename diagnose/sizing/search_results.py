"""The result of a search: candidates and rejections, as lines and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import LONGEST_TOKENS, WEIGHTS_FORMAT
from kneewatch.diagnose.catalogue.gpu_specs import Gpu
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.arithmetic import seconds
from kneewatch.diagnose.sizing.launch_notes import over_pcie
from kneewatch.diagnose.sizing.memory.kv_formats import kv_format
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.size import Size
from kneewatch.diagnose.sizing.speed.roofline_inputs import margins
from kneewatch.rules.formatting import duration, figure, percent, plural


class Reason(StrEnum):
    """Why a launch is rejected, in the order of the checks."""

    NODE = "GPU cannot be linked to others"
    FORMAT = "number format not supported by the GPU"
    REQUANTIZED = "checkpoint is already quantized"
    HEADS = "TP does not divide the attention heads"
    CONTEXT_RANKS = "decode context parallel size does not fit the TP"
    LAYERS = "more pipeline stages than layers"
    WEIGHTS = "weights do not fit"
    KV = "KV cache is too small for one request of the longest length"
    TTFT_MISSED = "TTFT misses the target with a single request"
    ITL_MISSED = "ITL misses the target with a single request"
    GPUS = "needs more GPUs than allowed"


def name_of(launch: Launch) -> str:
    """A short name of a launch: GPU, parallelism, weights, KV dtype and longest context."""
    gpu = launch.gpu.id if launch.gpu is not None else "no GPU"
    stages = f" PP {launch.parallel.pipeline}" if launch.parallel.pipeline > 1 else ""
    if launch.parallel.data > 1:
        stages += f" DP {launch.parallel.data}"
    if launch.parallel.experts:
        stages += " EP"
    if launch.decode_context_parallel > 1:
        stages += f" DCP {launch.decode_context_parallel}"
    return (
        f"{gpu} TP {launch.parallel.tensor}{stages}, {launch.scheme.id} weights, "
        f"{launch.kv_format.label} KV cache, up to {launch.longest_tokens:,} tokens"
    )


class Rejection(Struct, frozen=True):
    """Configurations that fail for a reason; the launch is the one that is closest to passing.

    `needed_ratio`: what it needs divided by what is available.
    """

    reason: Reason
    launch: Launch
    detail: Callable[[], str]
    configurations: int = 1
    needed_ratio: float = 1.0

    @property
    def example(self) -> str:
        """The configuration that is closest to passing, in words."""
        return f"{name_of(self.launch)}: {self.detail()}"


def by_reason(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """The rejections of each reason as one, in the order of the checks."""
    nearest_by_reason: dict[Reason, Rejection] = {}
    for each in rejections:
        before = nearest_by_reason.get(each.reason, each)
        count = each.configurations + (0 if before is each else before.configurations)
        nearest = each if each.needed_ratio < before.needed_ratio else before
        nearest_by_reason[each.reason] = replace(nearest, configurations=count)
    return tuple(nearest_by_reason[reason] for reason in Reason if reason in nearest_by_reason)


# --- The result: candidates that meet the targets, and reasons for the others ---------------------


ASSUMED_ITL_S = 0.1
"""Of a search without an ITL target: without any, the largest batch is always the cheapest."""
BY_HOUR, BY_TOKENS = "usd_per_hour", "usd_per_million_output_tokens"


class Candidate(Struct, frozen=True, kw_only=True):
    """A configuration that meets the targets.

    - `concurrency`, `requests_per_s`, the latencies and `kv_usage_ratio` are for one replica with
      as many requests in flight as the targets allow.
    - `binding`: the limit that prevents more.
    - `gpus`, `usd_per_hour`: for all replicas.
    - `usd_per_million_output_tokens`: at this load times the question's utilization.
    """

    launch: Launch
    replicas: int
    gpus: int
    usd_per_hour: float
    usd_per_million_output_tokens: float
    concurrency: int
    requests_per_s: float
    ttft_s: float
    itl_s: float
    kv_usage_ratio: float
    binding: str
    starts_for_certain: bool
    """Whether the launch starts even with the highest overhead of the memory's range."""

    @property
    def gpu(self) -> Gpu:
        """The GPU of the launch; a search always sets it."""
        if self.launch.gpu is None:
            raise TypeError("a launch of a search has a GPU")
        return self.launch.gpu

    @property
    def validations(self) -> int:
        """Formats narrower than published, of weights and KV cache; their quality must be
        validated."""
        own = scheme(self.launch.model.quantization).id
        return (self.launch.scheme.id != own) + kv_format(self.launch.kv_cache_dtype).is_quantized


class SearchResult(Struct, frozen=True, kw_only=True):
    """The result of a search.

    - `question`: as asked; `is_itl_assumed`: its ITL target is the search's own.
    - `best`: candidates, the cheapest first. `by_gpu`: the cheapest for every GPU. Both contain a
      launch once, with the longest context that it starts with.
    - `configurations`: number tried. `meeting`: how many of them meet the targets. `rejections`:
      the others by reason.
    - `ranked_by`: BY_HOUR if there is a peak to serve, otherwise BY_TOKENS.
    """

    question: Question
    is_itl_assumed: bool
    ranked_by: str
    best: tuple[Candidate, ...]
    by_gpu: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    configurations: int
    launches: int
    meeting: int

    @property
    def winner(self) -> Candidate | None:
        """The cheapest candidate; None if none meets the targets."""
        return self.best[0] if self.best else None


def question_of(question: Question, candidate: Candidate) -> Question:
    """The question to give to `size` for one candidate, at the candidate's highest load."""
    return replace(
        question,
        launch=candidate.launch,
        replicas=candidate.replicas,
        concurrency=float(candidate.concurrency * candidate.replicas),
    )


# --- A search as lines of text, and as JSON -------------------------------------------------------


_SAME_RATIO = 1e-9
_PREDICTED = "speeds are predicted, not measured: benchmark the winner before you buy"


def _assumptions(result: SearchResult) -> list[str]:
    """What holds for all candidates, one sentence each."""
    lines, winner = [_PREDICTED], result.winner
    stated = result.question.targets
    if result.is_itl_assumed:
        lines.append(_assumed_itl())
    if winner is not None:
        lines.append(
            f"targets have a margin as wide as the accuracy: {margins(stated, winner.launch)}"
        )
    return lines


def changes(result: SearchResult, candidate: Candidate) -> tuple[str, ...]:
    """What the candidate changes of the question's launch and of the checkpoint, one sentence
    each."""
    asked, launch, gpu = result.question.launch, candidate.launch, candidate.gpu
    lines: list[str] = []
    if asked.gpu is not None and asked.gpu.id != gpu.id:
        lines.append(f"GPU changed from {asked.gpu.id} to {gpu.id}")
    if launch.scheme.id != asked.scheme.id:
        lines.append(
            f"weights changed from {asked.scheme.id} to {launch.scheme.id} "
            f"(fix them with {WEIGHTS_FORMAT}): test answer quality on your own prompts"
        )
    if launch.kv_cache_dtype != asked.kv_cache_dtype:
        lines.append(
            f"KV cache changed from {kv_format(asked.kv_cache_dtype).label} to "
            f"{launch.kv_cache_dtype}: test answer quality, especially on long contexts"
        )
    if launch.longest_tokens < asked.longest_tokens:
        lines.append(
            f"needs {LONGEST_TOKENS} {launch.longest_tokens}: longer requests (up to "
            f"{asked.longest_tokens:,} tokens) are rejected"
        )
    return tuple(lines)


def notes(result: SearchResult, candidate: Candidate) -> tuple[str, ...]:
    """What to check before buying this candidate, one sentence each."""
    launch, gpu = candidate.launch, candidate.gpu
    lines = [*changes(result, candidate), *over_pcie(gpu, launch.parallel.tensor)]
    if not candidate.starts_for_certain:
        lines.append("may not start: it does not fit at the high end of the overhead estimate")
    if gpu.memory_is_estimated:
        lines.append(f"{gpu.id}: memory {gpu.memory_source}")
    return tuple(lines)


def difference(result: SearchResult, candidate: Candidate) -> str:
    """A sentence: why this candidate is the cheapest, or how much more it costs and why."""
    limit = f"{candidate.binding} limits a replica to {candidate.concurrency} concurrent requests"
    winner = result.winner
    if winner is None or candidate is winner:
        return f"cheapest that meets the targets; {limit}"
    cost, least = _cost(result, candidate), _cost(result, winner)
    if cost <= least * (1 + _SAME_RATIO):
        return f"costs the same, but {_tie(winner, candidate)}; {limit}"
    more = f"costs {percent(cost / least - 1)} more" if least else "costs more"
    return f"{more}: {_cause(result, winner, candidate)}because {limit}"


def _cost(result: SearchResult, candidate: Candidate) -> float:
    if result.ranked_by == BY_HOUR:
        return candidate.usd_per_hour
    return candidate.usd_per_million_output_tokens


def _tie(winner: Candidate, candidate: Candidate) -> str:
    if candidate.gpus > winner.gpus:
        return f"takes {candidate.gpus} GPUs instead of {winner.gpus}"
    if candidate.validations > winner.validations:
        return "has more formats whose answer quality must be tested"
    return "is slower at its highest load"


def _cause(result: SearchResult, winner: Candidate, candidate: Candidate) -> str:
    if result.ranked_by != BY_HOUR:
        return (
            f"{figure(candidate.requests_per_s / candidate.launch.parallel.gpus)} requests/s "
            "per GPU "
        )
    if candidate.gpus > winner.gpus:
        alike = candidate.launch.parallel.gpus == winner.launch.parallel.gpus
        added = candidate.replicas - winner.replicas if alike else candidate.gpus - winner.gpus
        return f"needs {plural(added, 'replica' if alike else 'GPU').replace(' ', ' more ')} "
    price = figure(candidate.usd_per_hour / candidate.gpus)
    return f"needs {candidate.gpus} GPUs at {price} USD/h each "


def decided(result: SearchResult) -> list[str]:
    """What the search decided beside the split, as one line; empty if nothing."""
    if result.winner is None:
        return []
    assumed = [_assumed_itl()] if result.is_itl_assumed else []
    texts = [*changes(result, result.winner), *assumed]
    return [f"The search decided: {'; '.join(texts)}"] if texts else []


def _assumed_itl() -> str:
    return f"no ITL target is set, so {seconds(ASSUMED_ITL_S)} is assumed: set --itl-slo"


def brief(result: SearchResult) -> tuple[str, ...]:
    """The best configurations, a line each; all of `explain` if none meets the targets."""
    if not result.best:
        return explain(result)
    return (explain(result)[0], *_headlines(result))


def _headlines(result: SearchResult) -> list[str]:
    return [f"{place}. {_headline(each)}" for place, each in enumerate(result.best, start=1)]


def explain(result: SearchResult) -> tuple[str, ...]:
    """The result as lines: the best configurations, the cost on each GPU, and why others are
    rejected."""
    order = "hour" if result.ranked_by == BY_HOUR else "token"
    ending = f"; the cheapest per {order}:" if result.best else ""
    lines = [
        f"{result.meeting:,} of {result.configurations:,} configurations meet the targets{ending}"
    ]
    for headline, candidate in zip(_headlines(result), result.best, strict=True):
        lines += [headline, f"   {difference(result, candidate)}"]
        lines += [f"   {_speed(candidate)}", *[f"   - {note}" for note in notes(result, candidate)]]
    if result.best:
        lines += [f"Note: {text}." for text in _assumptions(result)]
    if len(result.by_gpu) > 1:
        lines.append("Cheapest configuration on each GPU:")
        lines += [
            f"   {_headline(candidate)}; {figure(round(_gb_per_usd(candidate)))} GB/s of memory "
            "bandwidth per USD/h"
            for candidate in result.by_gpu
        ]
    if result.rejections:
        lines.append("Why other configurations fail, with the one that comes closest:")
        lines += [
            f"   {rejection.configurations:,}: {rejection.reason} ({rejection.example})"
            for rejection in result.rejections
        ]
    return tuple(lines)


def _headline(candidate: Candidate) -> str:
    return (
        f"{plural(candidate.replicas, 'replica')} on {name_of(candidate.launch)}: "
        f"{plural(candidate.gpus, 'GPU')}, {figure(candidate.usd_per_hour)} USD/h, "
        f"{figure(candidate.usd_per_million_output_tokens)} USD per million output tokens"
    )


def _gb_per_usd(candidate: Candidate) -> float:
    """Memory bandwidth in GB/s per dollar per hour (guide 3.5)."""
    hourly = candidate.usd_per_hour / candidate.gpus
    return candidate.gpu.memory_bandwidth_bytes_per_s / 1e9 / hourly if hourly else 0.0


def _speed(candidate: Candidate) -> str:
    return (
        f"each replica with {candidate.concurrency} concurrent requests: "
        f"{figure(candidate.requests_per_s)} requests/s, TTFT {duration(candidate.ttft_s)}, "
        f"ITL {duration(candidate.itl_s)}, KV cache {percent(candidate.kv_usage_ratio)} full"
    )


def document(result: SearchResult, winner: Size | None) -> dict[str, object]:
    """The search result as JSON types, with the arithmetic of the winner's fleet and cost."""
    return {
        "ranked_by": result.ranked_by,
        "configurations": result.configurations,
        "launches": result.launches,
        "meeting": result.meeting,
        "best": [_entry(result, candidate) for candidate in result.best],
        "by_gpu": [_entry(result, candidate) for candidate in result.by_gpu],
        "rejections": [
            {
                "reason": rejection.reason,
                "configurations": rejection.configurations,
                "example": rejection.example,
            }
            for rejection in result.rejections
        ],
        "notes": _assumptions(result),
        "steps": [] if winner is None else [step.line() for step in winner.sheet.steps],
    }


def _entry(result: SearchResult, candidate: Candidate) -> dict[str, object]:
    launch = candidate.launch
    fields: dict[str, object] = {
        "gpu": candidate.gpu.id,
        "tensor_parallel": launch.parallel.tensor,
        "pipeline_parallel": launch.parallel.pipeline,
        "data_parallel": launch.parallel.data,
        "expert_parallel": launch.parallel.experts,
        "quantization": launch.scheme.id,
        "kv_cache_dtype": launch.kv_cache_dtype,
        "max_model_len": launch.longest_tokens,
    }
    plain = {
        name: getattr(candidate, name) for name in candidate.__struct_fields__ if name != "launch"
    }
    plain["bandwidth_gb_per_s_per_usd_per_hour"] = round(_gb_per_usd(candidate), 2)
    texts = {"reason": difference(result, candidate), "notes": list(notes(result, candidate))}
    return fields | plain | texts
