"""What is served: the four archetypes, online or batch, and what the long tail does. Pure.

Source: guide 1.1, 1.2, 1.4, 3.5 and 9.1 (step 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive


@dataclass(frozen=True, slots=True)
class Archetype:
    """A kind of workload: what binds it, what to watch, what to buy."""

    id: str
    inputs: str
    outputs: str
    bottleneck: str
    slo: str
    hardware: str


ARCHETYPES = (
    Archetype(
        id="chat",
        inputs="short",
        outputs="short",
        bottleneck="prefill at low concurrency",
        slo="TTFT under load",
        hardware="compute",
    ),
    Archetype(
        id="rag",
        inputs="long",
        outputs="short to medium",
        bottleneck="prefill compute",
        slo="TTFT",
        hardware="compute",
    ),
    Archetype(
        id="code",
        inputs="short to medium",
        outputs="long",
        bottleneck="memory bandwidth in decode",
        slo="ITL and decode throughput",
        hardware="bandwidth",
    ),
    Archetype(
        id="agentic",
        inputs="long, growing over the session",
        outputs="long",
        bottleneck="KV cache held over a session, both phases",
        slo="session time",
        hardware="memory",
    ),
)
"""The guide's four archetypes (1.2; hardware: 3.5 and 9.1, step 2)."""


def archetype(name: str) -> Archetype:
    """The archetype called `name`.

    Raises:
        SizingError: an unknown name; the choices are listed.
    """
    for candidate in ARCHETYPES:
        if candidate.id == name:
            return candidate
    choices = tuple(candidate.id for candidate in ARCHETYPES)
    message = f"archetype is {name!r}; choose one of {', '.join(choices)}"
    raise SizingError(message, name="archetype", choices=choices)


@dataclass(frozen=True, slots=True)
class Target:
    """What a fleet is run for."""

    optimize: str
    operating_point: str


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "online": Target("TTFT", "below the knee, prefill favoured"),
        "batch": Target("tokens per GPU-hour", "highest sustainable concurrency"),
    }
)
"""Online streaming and offline batch are different optimisations (guide 1.4)."""


def chunks(*, prompt_tokens: int, chunk_tokens: int) -> int:
    """Steps that a chunked prefill takes (guide 6.4)."""
    positive("prompt_tokens", prompt_tokens)
    positive("chunk_tokens", chunk_tokens)
    return math.ceil(prompt_tokens / chunk_tokens)


@dataclass(frozen=True, slots=True)
class Session:
    """Tokens of a whole agentic session."""

    peak_context_tokens: int
    prefill_tokens: int
    prefill_tokens_cached: int
    output_tokens: int


def session_tokens(
    *, calls: int, first_prompt_tokens: int, added_tokens: int, output_tokens: int
) -> Session:
    """Tokens of `calls` dependent calls, each prompt holding all that came before it.

    Without prefix caching the prefill grows with the square of the calls; with it each call
    computes what is new, its predecessor's output having been cached while it was generated.
    Source: guide 1.2 (agentic: the session is the unit of sizing); text 001, 4.9.
    """
    positive("calls", calls)
    positive("first_prompt_tokens", first_prompt_tokens)
    not_negative("added_tokens", added_tokens)
    not_negative("output_tokens", output_tokens)
    grown = added_tokens + output_tokens
    return Session(
        peak_context_tokens=first_prompt_tokens + (calls - 1) * grown + output_tokens,
        prefill_tokens=calls * first_prompt_tokens + grown * calls * (calls - 1) // 2,
        prefill_tokens_cached=first_prompt_tokens + (calls - 1) * added_tokens,
        output_tokens=calls * output_tokens,
    )
