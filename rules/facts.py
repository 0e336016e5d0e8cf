"""The input of conditions: an engine's values at one moment. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct, field


class Targets(Struct, frozen=True):
    """The user's latency targets (P99) in seconds; None if not set."""

    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None

    @property
    def are_set(self) -> bool:
        return self != type(self)()

    def beside(
        self, ttft_s: float, itl_s: float, latency_s: float | None = None
    ) -> Iterator[tuple[str, float, float]]:
        """For each latency with a target: its name, the latency and the target, both in seconds.

        `latency_s` is of a whole request; None if it is unknown. Subclasses may have a target.
        """
        del latency_s
        if self.ttft_p99_s is not None:
            yield "TTFT", ttft_s, self.ttft_p99_s
        if self.itl_p99_s is not None:
            yield "ITL", itl_s, self.itl_p99_s


NO_TARGETS = Targets()


class Baselines:
    """The baselines of an engine that has none; subclasses return learned baselines."""

    __slots__ = ()

    def get(self, key: str) -> float | None:
        """A signal's baseline; None if unknown."""
        del key
        return None

    def usual(self, key: str) -> float | None:
        """A signal's usual value at this hour of the week; None if unknown."""
        del key
        return None


NO_BASELINE = Baselines()


class Moment(Struct, frozen=True):
    """One engine at one moment: the input of quantities and conditions.

    - `values`: signals and derived signals; None for unknown.
    - `recent`: some of them over the newest part of the window; None for unknown.
    - `streaks_s`: seconds for which named conditions have held; absent if one does not hold.
    - `config`: the labels of cache_config_info.
    - `baseline`: the baselines of signals.
    - `window_s`: the short window.
    - `scale`: the short window divided by its default; durations are multiplied by it.
    - `observed_s`: seconds since the first scrape of this process.
    """

    values: Mapping[str, float | None]
    targets: Targets = NO_TARGETS
    streaks_s: Mapping[str, float] = field(default_factory=dict[str, float])
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    recent: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    baseline: Baselines = NO_BASELINE
    window_s: float = 0.0
    observed_s: float = 0.0
    scale: float = 1.0


Read = Callable[[Moment], float | None]
Holds = Callable[[Moment], bool]
"""Functions that records compile to: `Read` for quantities (None: unknown), `Holds` for
conditions."""
