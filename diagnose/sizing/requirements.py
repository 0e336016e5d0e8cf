"""The requirements for a launch: its load, targets and price. Pure."""

from __future__ import annotations

from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.inputs import SizingError, not_negative, positive, within
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.replica_count import SAFETY_DEFAULT
from kneewatch.diagnose.sizing.speed.roofline_inputs import Efficiency, on_gpu, with_shares
from kneewatch.rules.facts import NO_TARGETS, Targets

# Beyond these no load, rate or target has a meaning.
_SMALLEST, _LARGEST = 1e-9, 1e12
# No kernel is that far from the peak.
_SMALLEST_SHARE = 0.001


class Question(Struct, frozen=True, kw_only=True):
    """A launch with its load, targets and price. None: not stated; results that need it are None.

    - `replicas`: replicas of this launch; they share `concurrency`.
    - `users`: how many users at once the replicas were counted for. None: they were stated.
    - `usable_requests_per_s`: of one replica, measured. None: predicted for the concurrency and the
      targets.
    - `is_benchmarked`: `usable_requests_per_s` comes from a benchmark report.
    - `mfu_ratio`, `mbu_ratio`: shares of the compute peak and of the bandwidth that a step reaches.
    - `acceptance_ratio`: the chance that one drafted token is accepted.
    """

    launch: Launch
    replicas: int = 1
    concurrency: float | None = None
    users: int | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    peak_requests_per_s: float | None = None
    usable_requests_per_s: float | None = None
    is_benchmarked: bool = False
    targets: Targets = NO_TARGETS
    safety: float = SAFETY_DEFAULT
    usd_per_gpu_hour: float | None = None
    utilization_ratio: float | None = None
    mfu_ratio: float | None = None
    mbu_ratio: float | None = None
    acceptance_ratio: float | None = None

    @property
    def concurrency_per_engine(self) -> float:
        """Requests in flight on one engine; replicas and data-parallel engines share them.

        One per engine if nothing is stated.
        """
        return (self.concurrency or self.engines) / self.engines

    @property
    def efficiency(self) -> Efficiency:
        """Shares of the peaks that a step reaches: the stated ones, otherwise those measured on
        other servers."""
        usual = on_gpu(self.launch.gpu)
        return with_shares(usual, mfu_ratio=self.mfu_ratio, mbu_ratio=self.mbu_ratio)

    @property
    def engines(self) -> int:
        """Engines that share the load."""
        return self.replicas * self.launch.parallel.data

    @property
    def price_usd_per_gpu_hour(self) -> float | None:
        """The stated price, else the catalogue's. None if both are unknown."""
        if self.usd_per_gpu_hour is not None:
            return self.usd_per_gpu_hour
        return None if self.launch.gpu is None else self.launch.gpu.usd_per_hour

    @property
    def full_load_ratio(self) -> float:
        """The stated average share of the capacity in use; 1 if none is stated."""
        return 1.0 if self.utilization_ratio is None else self.utilization_ratio


def check_question(question: Question) -> None:
    """Check load, targets and price.

    Raises:
        SizingError: one of them is invalid; the error has the input's name.
    """
    for name, value in (
        ("concurrency", question.concurrency),
        ("input_tokens", question.input_tokens),
        ("output_tokens", question.output_tokens),
        ("peak_rps", question.peak_requests_per_s),
        ("usable_rps", question.usable_requests_per_s),
        ("ttft_slo", question.targets.ttft_p99_s),
        ("itl_slo", question.targets.itl_p99_s),
    ):
        if value is not None:
            positive(name, value)
            within(name, value, low=_SMALLEST, high=_LARGEST)
    if question.usd_per_gpu_hour is not None:
        not_negative("usd_per_gpu_hour", question.usd_per_gpu_hour)
    _check_shares(question)
    within("utilization", question.full_load_ratio, low=0.001, high=1.0)
    within("safety", question.safety, low=1.0, high=10.0)
    stated = (question.input_tokens, question.output_tokens)
    if (stated[0] is None) != (stated[1] is None):
        missing = "input_tokens" if stated[0] is None else "output_tokens"
        raise SizingError("input and output lengths go together: set both", name=missing)
    longest = question.launch.longest_tokens
    if sum(value or 0.0 for value in stated) > longest:
        raise SizingError(
            f"input and output tokens together exceed the longest request of {longest:,} tokens",
            name="input_tokens",
        )


def _check_shares(question: Question) -> None:
    for name, share in (("mfu", question.mfu_ratio), ("mbu", question.mbu_ratio)):
        if share is not None:
            positive(name, share)
            within(name, share, low=_SMALLEST_SHARE, high=1.0)
    accepted = question.acceptance_ratio
    if accepted is not None:
        within("acceptance", accepted, low=0.0, high=1.0)
        if question.launch.draft is None:
            raise SizingError("an acceptance ratio needs a draft model: set it", name="acceptance")


def at_lengths(question: Question) -> Launch:
    """The launch. If it states no context, its context is the question's request length."""
    launch, inputs, outputs = question.launch, question.input_tokens, question.output_tokens
    if launch.context_tokens is not None or inputs is None or outputs is None:
        return launch
    return replace(launch, context_tokens=min(ceil(inputs + outputs), launch.longest_tokens))
