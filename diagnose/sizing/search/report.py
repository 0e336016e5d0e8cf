"""A search told: in lines for people, and in plain types for JSON. Pure."""

from __future__ import annotations

from dataclasses import fields

from kneewatch.diagnose.sizing.search.answer import BY_HOUR, Candidate, Found, question_of
from kneewatch.diagnose.sizing.search.rejections import name_of
from kneewatch.diagnose.sizing.size import size, steps
from kneewatch.diagnose.sizing.steps import Step, figure

_FAST_LINK_FROM = 2
_SAME_RATIO = 1e-9
_PREDICTED = "speeds are predicted by the roofline: measure the winner before buying"


def notes(found: Found, candidate: Candidate) -> tuple[str, ...]:
    """What to validate, to check or to know before that candidate is bought."""
    setup, gpu = candidate.setup, candidate.gpu
    told: list[str] = []
    if setup.quantization is not None:
        told.append(f"validate the quality of {setup.scheme.id} weights on your own prompts")
    if "fp8" in setup.kv_cache_dtype:
        told.append("validate the quality of the FP8 KV cache, on long contexts above all")
    tensor = setup.parallel.tensor
    if tensor > _FAST_LINK_FROM and tensor > gpu.nvlink_gpus:
        told.append(
            f"TP {tensor} is over PCIe; the guide wants NVLink above TP 2: benchmark it against a "
            "smaller one"
        )
    longest = found.question.setup.max_model_len or setup.model.max_context_tokens
    if setup.longest_tokens < longest:
        told.append(
            f"needs --max-model-len {setup.longest_tokens}: longer requests (up to {longest:,} "
            "tokens) are refused"
        )
    if not candidate.starts_for_certain:
        told.append("may not start: it does not with the most overhead of the memory's band")
    if gpu.memory_is_estimated:
        told.append(f"{gpu.id}: memory {gpu.memory_source}")
    return tuple(told)


def difference(found: Found, candidate: Candidate) -> str:
    """Why that candidate won, or what it costs more than the winner and why; one sentence."""
    limit = f"{candidate.binding} binds at {candidate.concurrency} concurrent requests a replica"
    winner = found.winner
    if winner is None or candidate is winner:
        return f"cheapest that meets the targets: {limit}"
    cost, least = _cost(found, candidate), _cost(found, winner)
    if cost <= least * (1 + _SAME_RATIO):
        return f"costs the same, but {_tie(winner, candidate)}; {limit}"
    more = f"costs {cost / least - 1:.0%} more" if least else "costs more"
    return f"{more}: {_cause(found, winner, candidate)}because {limit}"


def _cost(found: Found, candidate: Candidate) -> float:
    if found.ranked_by == BY_HOUR:
        return candidate.usd_per_hour
    return candidate.usd_per_million_output_tokens


def _tie(winner: Candidate, candidate: Candidate) -> str:
    if candidate.gpus > winner.gpus:
        return f"takes {candidate.gpus} GPUs instead of {winner.gpus}"
    if candidate.validations > winner.validations:
        return "has more formats whose quality must be validated"
    return "is slower at its highest load"


def _cause(found: Found, winner: Candidate, candidate: Candidate) -> str:
    if found.ranked_by != BY_HOUR:
        return (
            f"{figure(candidate.requests_per_s / candidate.setup.parallel.gpus)} requests/s a GPU "
        )
    if candidate.gpus > winner.gpus:
        alike = candidate.setup.parallel.gpus == winner.setup.parallel.gpus
        added = candidate.replicas - winner.replicas if alike else candidate.gpus - winner.gpus
        return f"needs {added} more {'replica' if alike else 'GPU'}{'s' * (added > 1)} "
    return f"needs {candidate.gpus} GPUs at {_price(candidate)} USD/h each "


def _price(candidate: Candidate) -> str:
    return figure(candidate.usd_per_hour / candidate.gpus)


def winner_steps(found: Found) -> tuple[Step, ...]:
    """The arithmetic of the winner's fleet and cost, line by line; empty where nothing won."""
    if found.winner is None:
        return ()
    return steps(size(question_of(found.question, found.winner)))


def explain(found: Found) -> tuple[str, ...]:
    """The search in lines: what won, what came next, what each GPU costs, why the rest failed."""
    lines = [
        f"{found.configurations:,} configurations tried, {found.meeting:,} meet the targets; "
        + ("ranked by cost per hour" if found.ranked_by == BY_HOUR else "ranked by cost per token")
    ]
    for place, candidate in enumerate(found.best, start=1):
        lines += [f"{place}. {_headline(candidate)}", f"   {difference(found, candidate)}"]
        lines += [f"   {_speed(candidate)}", *[f"   - {note}" for note in notes(found, candidate)]]
    if found.best:
        lines.append(f"{_PREDICTED}.")
    lines += [step.line() for step in winner_steps(found)]
    if len(found.by_gpu) > 1:
        lines.append("Cheapest on each GPU:")
        lines += [f"   {_headline(candidate)}" for candidate in found.by_gpu]
    if found.rejections:
        lines.append("Why the others failed, with the nearest of each:")
        lines += [
            f"   {each.configurations:,} x {each.reason}: {each.example}"
            for each in found.rejections
        ]
    return tuple(lines)


def _headline(candidate: Candidate) -> str:
    return (
        f"{candidate.replicas} x {name_of(candidate.setup)}: {candidate.gpus} GPU"
        f"{'s' * (candidate.gpus > 1)}, {figure(candidate.usd_per_hour)} USD/h, "
        f"{figure(candidate.usd_per_million_output_tokens)} USD per million output tokens"
    )


def _speed(candidate: Candidate) -> str:
    return (
        f"one replica at {candidate.concurrency} concurrent: "
        f"{figure(candidate.requests_per_s)} requests/s, TTFT {figure(candidate.ttft_s)} s, "
        f"ITL {figure(candidate.itl_s)} s, KV cache {candidate.kv_usage_ratio:.0%} used"
    )


def document(found: Found) -> dict[str, object]:
    """The search in plain types."""
    return {
        "ranked_by": found.ranked_by,
        "configurations": found.configurations,
        "launches": found.launches,
        "meeting": found.meeting,
        "best": [_entry(found, candidate) for candidate in found.best],
        "by_gpu": [_entry(found, candidate) for candidate in found.by_gpu],
        "rejections": [
            {
                "reason": each.reason,
                "configurations": each.configurations,
                "example": each.example,
            }
            for each in found.rejections
        ],
        "notes": [_PREDICTED],
        "steps": [step.line() for step in winner_steps(found)],
    }


def _entry(found: Found, candidate: Candidate) -> dict[str, object]:
    setup = candidate.setup
    launch: dict[str, object] = {
        "gpu": candidate.gpu.id,
        "tensor_parallel": setup.parallel.tensor,
        "pipeline_parallel": setup.parallel.pipeline,
        "quantization": setup.scheme.id,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "max_model_len": setup.longest_tokens,
    }
    plain = {
        field.name: getattr(candidate, field.name)
        for field in fields(candidate)
        if field.name != "setup"
    }
    told = {"reason": difference(found, candidate), "notes": list(notes(found, candidate))}
    return launch | plain | told
