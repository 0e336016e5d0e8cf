"""The load that engines can carry: learned from their history, or measured by benchmarks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from kneewatch.diagnose.lengths import StatedPoint, StatedWorkload
from kneewatch.rules.facts import Targets

FAR_BELOW = 0.75
"""Throughput per GPU, divided by that of the smaller degree: below this, too much is lost.

The all-reduce explains only a loss of 20 to 30% of a step on PCIe (guide 5.1).
"""

ALIKE = 1.5
"""Sweeps are comparable up to this ratio of their tokens per request."""

Unit = Literal["tokens", "requests"]


class BenchmarkPoint(Struct, frozen=True):
    """One run at one concurrency. A field is None if the report does not contain it.

    `requests` is the number of completed requests, `failed` of failed ones. `origin` names the row
    or document, `model` the model as the report does. `input_tokens` is a mean. `latency_mean_s`
    and `latency_p99_s` are from sending a request to its last token.
    """

    concurrency: float
    requests_per_s: float
    ttft_p99_s: float
    itl_p99_s: float
    ttft_p50_s: float | None = None
    itl_p50_s: float | None = None
    latency_mean_s: float | None = None
    latency_p99_s: float | None = None
    output_tokens_per_s: float | None = None
    input_tokens: float | None = None
    requests: int | None = None
    failed: int | None = None
    origin: str = ""
    model: str = ""


class Degree(Struct, frozen=True):
    """The measured throughput of one engine at a tensor-parallel degree.

    - `per_s`: tokens/s or requests/s, the same unit for all compared degrees. With latency targets,
      at the highest load that meets them; without, the highest measured.
    - `most_per_s`: throughput at the next load, which missed a target. The limit is between the
      two.
    - `reached`: throughput had stopped growing with the load.
    - `point`: None if no measured load met the targets; `missed` then names the target.
    """

    tensor_parallel: int
    point: BenchmarkPoint | None
    per_s: float
    most_per_s: float
    reached: bool
    missed: str = ""

    @property
    def per_s_per_gpu(self) -> float:
        """Throughput per GPU, in the unit of `per_s`."""
        return self.per_s / self.tensor_parallel

    @property
    def in_flight_per_gpu(self) -> float:
        return 0.0 if self.point is None else self.point.concurrency / self.tensor_parallel

    @property
    def tokens_per_request(self) -> float | None:
        """Generated tokens per request; None if the report does not contain them."""
        if self.point is None or not self.point.output_tokens_per_s:
            return None
        return self.point.output_tokens_per_s / self.point.requests_per_s


class DegreeComparison(Struct, frozen=True):
    """A tensor-parallel degree, `wide`, compared with the best smaller one, `narrow`.

    `share_ratio` is throughput per GPU of `wide` divided by that of `narrow`. It may be as high as
    `most_ratio` if the sweep has a gap at its limit. Both are None if the degrees cannot be
    compared; `why` then has the reason.
    """

    unit: Unit
    wide: Degree | None = None
    narrow: Degree | None = None
    share_ratio: float | None = None
    most_ratio: float | None = None
    why: str = ""

    @property
    def far_below(self) -> bool:
        """Whether the wider split certainly loses more than the guide expects on PCIe."""
        return self.most_ratio is not None and self.most_ratio < FAR_BELOW


class StatedServer(Struct, frozen=True, kw_only=True):
    """What a judge reads of the settings of a server; None if unknown. `Stated` has the rest."""

    tensor_parallel: int | None = None
    replicas: int | None = None
    gpus: int | None = None
    workload: StatedWorkload | None = None

    @property
    def degree(self) -> int | None:
        return self.tensor_parallel

    @property
    def engines(self) -> int:
        """Data-parallel engines of the server; 1 if not stated."""
        return 1

    @property
    def server_gpus(self) -> int | None:
        return self.gpus

    @property
    def seats(self) -> float | None:
        """Most requests that run at once."""
        return None

    @property
    def points(self) -> Mapping[str, tuple[StatedPoint, ...]]:
        """The stated request lengths of the server, by side."""
        return {} if self.workload is None else self.workload.lengths(None, None)

    def split(self, targets: Targets) -> DegreeComparison | None:
        """The tensor-parallel degree compared with smaller ones; None without sweeps."""
        return None


def alike(tokens: float | None, other_tokens: float | None) -> bool:
    """Whether two request lengths are about the same; true if either is unknown."""
    return (
        tokens is None
        or other_tokens is None
        or max(tokens, other_tokens) <= ALIKE * min(tokens, other_tokens)
    )


# --- Learned from an engine's own history ---------------------------------------------------------


STEPS_PER_DOUBLING = 2
HALF_A_STEP = 2 ** (0.5 / STEPS_PER_DOUBLING)
"""Factor from the middle of a step to its edge."""


class Range(Struct, frozen=True):
    """A value with its lower and upper bounds; of measured windows, those of their middle half."""

    low: float
    expected: float
    high: float

    def map(self, function: Callable[[float], float]) -> Range:
        """Applies an increasing function to the expected value and to both bounds."""
        return Range(function(self.low), function(self.expected), function(self.high))


class LearnedKnee(Struct, frozen=True):
    """The concurrency that one engine can serve, learned from its own history.

    `c_max` is in requests in flight: up to `low` is safe, above `high` is past the knee. If no load
    past the knee was seen, `reached` is False and C_max is a lower bound. `basis` says how the knee
    was found. `most_requests_per_s` bounds the usable rate from above: it is higher than expected
    if the loads just above C_max were not seen.
    """

    c_max: Range
    usable_requests_per_s: Range
    most_requests_per_s: float
    reached: bool
    basis: str
    points: int
    steps: int

    @property
    def past_from(self) -> float | None:
        """Requests in flight above which the engine is certainly overloaded.

        None if no overload was seen.
        """
        return self.c_max.high * HALF_A_STEP if self.reached else None

    @property
    def before_to(self) -> float:
        """Requests in flight up to which the engine is certainly not overloaded."""
        return self.c_max.low * HALF_A_STEP
