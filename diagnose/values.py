"""Everything that the judge reads about one engine at one moment, as plain numbers. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import inf

from msgspec import Struct, field

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind
from kneewatch.diagnose.deployment.server_state import AdapterUse, CanaryState, GpuState

Signals = Mapping[str, float | None]
"""Signals by key; None for unknown."""

Histogram = Mapping[float, float]
"""Number of observations up to each upper edge, as in Prometheus; `inf` has all of them."""


class GpuReading(Struct, frozen=True):
    """GPU signals now.

    - `unknown`: a line for each signal that could not be read.
    - `joined`: how the GPUs were matched to the target. `guess`: the match is assumed.
    - `states`: the state of each GPU.
    - `lost`: a line for each GPU that no longer answers.
    - `models`: product names of the target's GPUs; empty if the match is a guess, and for MIG
      instances.
    """

    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    unknown: tuple[str, ...] = ("gpu_*: no GPU source",)
    joined: str = ""
    guess: bool = False
    states: Sequence[GpuState] = ()
    lost: Sequence[str] = ()
    models: tuple[str, ...] = ()


NO_GPUS = GpuReading()


class RequestCounts(Struct, frozen=True):
    """Counters of the newest page: requests with a first token, and requests by length.

    `bounds` and `lengths` are by side (prompt or answer). Shapes: both (buckets,), cumulative.
    """

    requests: float
    bounds: Mapping[str, tuple[float, ...]]
    lengths: Mapping[str, array[float]] = field(default_factory=dict[str, "array[float]"])


class Values(Struct, frozen=True):
    """One engine at one moment.

    Signals:

    - `signals`: the signals over the window, and those derived from them alone; None for unknown.
    - `missing`: the metrics that each unknown signal lacks.
    - `impossible`: metrics with a value that they cannot have, and that value.
    - `recent`: some signals over the newest quarter of the window.
    - `window_s`: the time that the window really covers; `scrapes`: the scrapes in it.

    The process:

    - `kind`: the engine's kind.
    - `config`: the labels of cache_config_info.
    - `observed_s`: seconds since the oldest scrape of this process that is kept.
    - `served_s`: seconds since its first token, or since its start where that is all that is known;
      inf if nothing is.
    - `started_s`: when the process started; None if the page lacks it.
    - `restarted`: this scrape shows that the process was replaced. `starts_over`: earlier scrapes
      do not count, because the process was replaced or the clock was set back.
    - `unused`: the process has had no tokens to work on since it started.

    Since the previous scrape; None for unknown:

    - `arrivals`: requests with a first token.
    - `generated`: generated tokens. While there are none, `answered` says whether a request ended
      other than by an abort; `longest_prefill_s` and `prefill_s_per_token` are those of the process
      so far.
    - `preempted`: preemptions.

    Since the process started:

    - `totals`: the counters that the account compares, in the order of `COUNTED`
      (engine/reader.py); 0 where the page lacks one. None without a page.

    Distributions:

    - `prefix_counts`: for each scrape of the window, the counters of tokens looked up in the prefix
      cache, of tokens that hit, and of requests; empty unless the cache hits in part.
    - `answers`: answers by length in the window or, if it has few, in the longest window; filled
      only if their lengths are stated and many of them end at their limit.
    - `request_counts`: None unless lengths are compared with a stated workload.
    - `adapters`: LoRA adapters that had a slot in the window; only filled while requests wait.

    Other sources:

    - `gpus`: the target's GPUs.
    - `host`: signals of the server's process on this node; empty where it runs elsewhere.
    - `canary`: what canary requests to the server showed; None where none is sent.
    """

    signals: Signals
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    impossible: Mapping[str, float] = field(default_factory=dict[str, float])
    recent: Signals = field(default_factory=dict[str, float | None])
    window_s: float = 0.0
    scrapes: int = 0
    kind: EngineKind = VLLM
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    observed_s: float = 0.0
    served_s: float = inf
    started_s: float | None = None
    restarted: bool = False
    starts_over: bool = False
    unused: bool = False
    arrivals: float | None = None
    generated: float | None = None
    answered: bool = False
    longest_prefill_s: float = 0.0
    prefill_s_per_token: float = 0.0
    preempted: float | None = None
    totals: tuple[float, ...] | None = None
    prefix_counts: Sequence[tuple[float, ...]] = ()
    answers: Histogram | None = None
    request_counts: RequestCounts | None = None
    adapters: Sequence[AdapterUse] = ()
    gpus: GpuReading = NO_GPUS
    host: Mapping[str, float] = field(default_factory=dict[str, float])
    canary: CanaryState | None = None
