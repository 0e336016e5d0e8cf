"""What a search answers: what meets the targets, and how much does not, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kneewatch.diagnose.catalogue.gpus import Gpu
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.memory.kv_cache import kv_element_bytes
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.question import Question
from kneewatch.diagnose.sizing.search.rejections import Rejection

BY_HOUR, BY_TOKENS = "usd_per_hour", "usd_per_million_output_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration that meets the targets.

    `concurrency`, `requests_per_s`, the latencies and `kv_usage_ratio` are of one replica with as
    many requests in flight as the targets allow; `binding` is what allows no more. `gpus` and
    `usd_per_hour` are of all replicas; `usd_per_million_output_tokens` is at that load times the
    question's utilization.
    """

    setup: Setup
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
    """Whether it starts with the most overhead of the memory's band, too."""

    @property
    def gpu(self) -> Gpu:
        """What it runs on."""
        return gpu_of(self.setup)

    @property
    def validations(self) -> int:
        """Formats whose quality must be validated: weights and KV cache narrower than published."""
        own = scheme(self.setup.model.quantization).id
        return (self.setup.scheme.id != own) + (kv_element_bytes(self.setup.kv_cache_dtype) < 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer of a search.

    `best` has the cheapest first, `by_gpu` the cheapest on every GPU; both hold a launch once, at
    the longest context that it starts with. `configurations` were tried, `meeting` of them meet
    the targets, and `rejections` count the rest. `ranked_by` is BY_HOUR where there is a peak to
    carry, BY_TOKENS where there is none.
    """

    question: Question
    ranked_by: str
    best: tuple[Candidate, ...]
    by_gpu: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    configurations: int
    launches: int
    meeting: int

    @property
    def winner(self) -> Candidate | None:
        """The cheapest; None where nothing meets the targets."""
        return self.best[0] if self.best else None


def gpu_of(setup: Setup) -> Gpu:
    """The GPU of a launch that a search made."""
    if setup.gpu is None:
        raise TypeError("a launch of a search has a GPU")
    return setup.gpu


def question_of(question: Question, candidate: Candidate) -> Question:
    """The question about that candidate at its highest load: `size` answers it in full."""
    return replace(
        question,
        setup=candidate.setup,
        replicas=candidate.replicas,
        concurrency=float(candidate.concurrency * candidate.replicas),
    )
