"""The workload that a size was computed for, as far as live requests are held against it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kneewatch.diagnose.workload.drift import Point

PROMPTS, ANSWERS = "prompt_tokens", "output_tokens"
WORDS: Mapping[str, str] = {PROMPTS: "prompts", ANSWERS: "answers"}
"""Both lengths of a request, and how they are called."""

METRICS: Mapping[str, str] = {
    PROMPTS: "request_prompt_tokens",
    ANSWERS: "request_generation_tokens",
}
KEYS: Mapping[str, str] = {PROMPTS: "input", ANSWERS: "output"}
"""vLLM's histogram of each length, and what begins its keys in a profile."""

RATE_MIN = 1.2
"""Ratio of rate to peak that counts as another workload: every size includes 20% headroom or more
(guide 8.3)."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a profile says of the requests of one launch: percentiles of their lengths."""

    name: str
    model: str
    gpus: tuple[str, ...]
    lengths: Mapping[str, tuple[Point, ...]]


@dataclass(frozen=True, slots=True)
class StatedWorkload:
    """A profile's figures. `origin` is its file.

    `peak_requests_per_s` is the whole fleet's, with its growth; None for a batch, and where tiers
    share it. `grown` tells that lengths are derived: a session's first call is stated.
    """

    origin: str
    parts: tuple[Part, ...]
    peak_requests_per_s: float | None
    grown: bool = False

    def lengths(self, model: str | None, gpu: str | None) -> Mapping[str, tuple[Point, ...]]:
        """What is stated for a model and a GPU (None: not known). Of several parts that these may
        mean, only what all of them say; a profile of one part means whatever it is held against."""
        meant = [part for part in self.parts if len(self.parts) == 1 or _may(part, model, gpu)]
        if not meant:
            return {}
        return {
            key: points
            for key, points in meant[0].lengths.items()
            if all(part.lengths[key] == points for part in meant)
        }


def _may(part: Part, model: str | None, gpu: str | None) -> bool:
    return model in (None, part.model) and (gpu is None or gpu in part.gpus)
