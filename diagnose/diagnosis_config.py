"""The inputs of a diagnosis beside the pages: windows, targets, hardware, thresholds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.signals.signal import Signal
from kneewatch.collector.signals.table import VLLM_SIGNALS, configured
from kneewatch.diagnose.capacity import DegreeComparison, StatedServer
from kneewatch.diagnose.learned.acceptance import AFTER_S
from kneewatch.diagnose.learned.kv_forecast import AHEAD_S
from kneewatch.diagnose.learned.live_workload import unwatched
from kneewatch.rules.facts import Targets
from kneewatch.rules.library import BENCHMARK_LOAD, RULES, slo_rules, with_thresholds
from kneewatch.rules.rule import QUEUE_RULES, WINDOW_S, Rule


class Profile(Struct, frozen=True, dict=True):
    """Everything that a user may state, and the signals and rules that follow, computed once.

    None means not stated; signals that need the value are unknown. `throughput_only`: requests may
    queue by design, as batch work does; only goodput, errors and stalls count.
    """

    window_s: float = WINDOW_S
    targets: Targets = field(default_factory=Targets)
    gpus: int | None = None
    peak_flop_per_s: float | None = None
    peak_bytes_per_s: float | None = None
    benchmark: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    stated: StatedServer = StatedServer()
    thresholds: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict[str, Mapping[str, float]]
    )
    thresholds_origin: str = "settings"
    kv_horizon_s: float = AHEAD_S
    expected_prefix_hit_ratio: float | None = None
    usual_after_s: float = AFTER_S
    throughput_only: bool = False

    def for_throughput(self) -> Profile:
        """This profile for a server whose requests may queue by design."""
        return replace(self, throughput_only=True, targets=Targets())

    @property
    def scale(self) -> float:
        """The short window divided by its default; durations are multiplied by this."""
        return self.window_s / WINDOW_S

    @cached_property
    def signals(self) -> tuple[Signal, ...]:
        """The catalogue's signals, and those that this profile makes computable."""
        return (
            *VLLM_SIGNALS,
            *configured(
                ttft_slo_s=self.targets.ttft_p99_s,
                itl_slo_s=self.targets.itl_p99_s,
                gpus=self.gpus,
                peak_flop_per_s=self.peak_flop_per_s,
                peak_bytes_per_s=self.peak_bytes_per_s,
            ),
        )

    @cached_property
    def core(self) -> tuple[str, ...]:
        """Signals without which a page is incomplete."""
        return tuple(signal.key for signal in self.signals if signal.core)

    @cached_property
    def split(self) -> DegreeComparison | None:
        """The stated tensor-parallel degree, compared using the stated sweeps; None without
        sweeps."""
        return self.stated.split(self.targets)

    @cached_property
    def unstated(self) -> Mapping[str, str]:
        """Signals that need a setting which is missing, and why: {signal: reason}."""
        reasons = {
            "goodput_per_s": (self.targets.ttft_p99_s, "no TTFT target (slo.ttft_p99_s)"),
            "tokens_per_gpu_hour": (self.gpus, "number of GPUs not stated (gpus)"),
            "mfu_ratio": (self.peak_flop_per_s, "GPU peak not stated (peak.flop_per_s)"),
            "mbu_ratio": (self.peak_bytes_per_s, "GPU peak not stated (peak.bytes_per_s)"),
        }
        lacking = {key: why for key, (stated, why) in reasons.items() if stated is None}
        if self.benchmark.get(BENCHMARK_LOAD) is None and any(self.benchmark.values()):
            lacking["benchmark"] = f"its load is not stated ({BENCHMARK_LOAD})"
        if self.split is not None and self.split.why:
            lacking["tp_overhead"] = self.split.why
        return lacking | unwatched(self.stated)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """All rules with the user's thresholds."""
        rules = (
            *(rule for rule in RULES if not (self.throughput_only and rule.id in QUEUE_RULES)),
            *slo_rules(
                ttft_p99_s=self.targets.ttft_p99_s,
                itl_p99_s=self.targets.itl_p99_s,
                benchmark=self.benchmark,
            ),
        )
        return with_thresholds(rules, self.thresholds, self.thresholds_origin)
