"""The roofline's prediction as arithmetic that can be checked by hand. Pure."""

from __future__ import annotations

from kneewatch.diagnose.sizing.speed.costs import Costs
from kneewatch.diagnose.sizing.speed.efficiency import DEFAULT, SOURCE, Efficiency
from kneewatch.diagnose.sizing.speed.roofline import Load, Performance
from kneewatch.diagnose.sizing.speed.step_time import StepTime
from kneewatch.diagnose.sizing.steps import Step, figure

_MS_PER_S = 1000
_GIGA = 1e9
_TERA = 1e12


def performance_steps(
    costs: Costs, load: Load, found: Performance, efficiency: Efficiency = DEFAULT
) -> tuple[Step, ...]:
    """The prediction line by line: bytes read, a plain step, one with a prompt, the results."""
    fixed = "guide 3.3 and 3.4; " + SOURCE
    places = min(load.concurrency, load.max_running)
    passes = max(load.output_tokens - 1, 0.0) / found.tokens_per_pass
    return (
        _reading(costs, efficiency),
        _step("Decode step", found.decode_step, source=fixed),
        _step(
            f"Step with {figure(round(found.chunk_tokens))} prompt tokens",
            found.prefill_step,
            source="guide 3.2 and 5.1; " + SOURCE,
        ),
        _token(load, found),
        Step(
            "Time to first token",
            "requests in flight / requests per second - decode time",
            f"{figure(load.concurrency)} / {figure(found.requests_per_s)} - "
            f"{figure(passes)} x {_ms(found.itl_s * found.tokens_per_pass)}",
            f"{figure(found.ttft_s)} s",
            "Little's law",
        ),
        Step(
            "Output tokens per second",
            "places / (prefill + decode) x output tokens",
            f"{figure(places)} places: {figure(found.requests_per_s)} requests/s x "
            f"{figure(load.output_tokens)}",
            f"{figure(found.decode_tokens_per_s)} tokens/s, bound by {found.binding}",
            "closed loop",
        ),
    )


def _token(load: Load, found: Performance) -> Step:
    share = figure(found.prefill_step_ratio)
    plain, prompt = _ms(found.decode_step.total_s), _ms(found.prefill_step.total_s)
    formula = "(1 - share) x decode step + share x prompt step"
    values = f"(1 - {share}) x {plain} + {share} x {prompt}"
    if load.drafting is not None and load.drafting.tokens:
        tokens, cost = load.drafting.tokens, figure(load.drafting.cost_ratio)
        formula = (
            "(decode step x (1 + drafted x draft cost) + share x (prompt step - decode step) x "
            "(1 + draft cost)) / tokens per pass"
        )
        values = (
            f"({plain} x (1 + {tokens} x {cost}) + {share} x ({prompt} - {plain}) x (1 + {cost})) "
            f"/ {figure(found.tokens_per_pass)}"
        )
    return Step(
        "Time per output token",
        formula,
        values,
        _ms(found.itl_s),
        "share of steps with a prompt: 1 - exp(-prompts a step); guide 6.6",
    )


def _reading(costs: Costs, efficiency: Efficiency) -> Step:
    bandwidth = costs.bandwidth_bytes_per_s
    return Step(
        "Weights read a step",
        "weights / (bandwidth x MBU) + experts / (bandwidth x expert MBU)",
        f"{figure(costs.weights_bytes / _GIGA)} GB / ({figure(bandwidth / _TERA)} TB/s x "
        f"{figure(efficiency.mbu_ratio)}) + {figure(costs.experts_bytes / _GIGA)} GB / "
        f"({figure(bandwidth / _TERA)} TB/s x {figure(efficiency.expert_mbu_ratio)})",
        _ms(
            costs.weights_bytes / (bandwidth * efficiency.mbu_ratio)
            + costs.experts_bytes / (bandwidth * efficiency.expert_mbu_ratio)
        )
        + (" with every expert touched" if costs.experts_bytes else ""),
        "guide 3.3; " + SOURCE,
    )


def _step(title: str, time: StepTime, *, source: str) -> Step:
    return Step(
        title,
        "max(memory, compute) + all-reduce + kernels + host",
        f"max({_ms(time.memory_s)}, {_ms(time.compute_s)}) + {_ms(time.interconnect_s)} + "
        f"{_ms(time.kernels_s)} + {_ms(time.host_s)}",
        _ms(time.total_s),
        source,
    )


def _ms(seconds: float) -> str:
    return f"{figure(seconds * _MS_PER_S)} ms"
