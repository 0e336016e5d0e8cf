"""What a step does, and how long that takes."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Work(Struct, frozen=True):
    """What a step does: `decodes` sequences that attend to `context_tokens` together, and a
    prompt's tokens that attend to `pairs` token pairs. `verified`: tokens a decode."""

    decodes: int
    context_tokens: float
    prompt_tokens: float
    pairs: float
    verified: int


class Steps(Protocol):
    """How long work takes."""

    @property
    def request_s(self) -> float:
        """Spent on a request outside the engine: HTTP, tokens to text."""
        ...

    @property
    def load_adapter_s(self) -> float:
        """Spent on bringing an adapter into its slot."""
        ...

    def step_s(self, work: Work) -> float:
        """Seconds of one step."""
        ...

    def worked(self, work: Work, steps: int, step_s: float) -> None:
        """So many such steps were done (for the GPU's counters)."""
        ...
