"""Made-up servers for the promtool tests. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kneewatch.collector.signals.expr import Dialect
from kneewatch.dashboards.prometheus.hourly import NAMES
from kneewatch.dashboards.prometheus.model import Plan
from kneewatch.rules.facts import number

WINDOWS = 8
"""How many windows a scenario lasts."""


class Server:
    """Series of a made-up server, in promtool's notation: start+step x count. Where no model is
    stated it serves one that is called like itself: then it has no peers."""

    def __init__(self, plan: Plan, name: str, *, model: str = "") -> None:
        self._plan = plan
        self._process = {"instance": name, "job": "vllm"}
        for label, _ in plan.gpu_join:
            self._process[label] = (model or name) if label in NAMES else name
        self._engine = self._process | {"model_name": model or name, "engine": "0"}
        self.steps = round(WINDOWS * plan.window_s / plan.interval_s)

    def level(self, value: float) -> str:
        """A gauge that stands still."""
        return f"{number(value)}x{self.steps}"

    def rate(self, per_s: float) -> str:
        """A counter that grows."""
        return f"0+{number(per_s * self._plan.interval_s)}x{self.steps}"

    def ramp(self, per_s: float) -> str:
        """A gauge that grows."""
        return self.rate(per_s)

    def named(self, metric: str, *labels: str) -> str:
        """A series of the engine."""
        spelled = Dialect(self._plan.window_s, prefix=self._plan.prefix)
        return spelled.series(metric, extra=", ".join((*pairs(self._engine), *labels)))

    @property
    def up(self) -> str:
        """Whether the server's page can be read."""
        return f"up{{{', '.join(pairs(self._process))}}}"

    def busy(
        self,
        *,
        running: float,
        waiting: str = "",
        usage: float = 0.5,
        preempted_per_s: float = 0.0,
        served_per_s: float = 4.0,
        tokens_per_s: float = 800.0,
        itl_s: float = 0.02,
    ) -> dict[str, str]:
        """A server that serves: TTFT 0.2 s."""
        queue = waiting or self.level(0)
        found = {
            self.named("num_requests_running"): self.level(running),
            self.named("num_requests_waiting"): queue,
            self.named("num_requests_waiting_by_reason", 'reason="capacity"'): queue,
            self.named("num_requests_waiting_by_reason", 'reason="deferred"'): self.level(0),
            self.named("kv_cache_usage_perc"): self.level(usage),
            self.named("num_preemptions_total"): self.rate(preempted_per_s),
            self.named("generation_tokens_total"): self.rate(tokens_per_s),
            self.named("prompt_tokens_total"): self.rate(4 * served_per_s),
            self.named("request_success_total", 'finished_reason="stop"'): self.rate(served_per_s),
            self.up: self.level(1),
        }
        for name, bounds, value_s, per_s in (
            ("time_to_first_token_seconds", (0.1, 0.25, 1.0), 0.2, served_per_s),
            ("inter_token_latency_seconds", (0.01, 0.025, 0.05, 0.075, 0.5), itl_s, tokens_per_s),
            ("e2e_request_latency_seconds", (1.0, 5.0, 10.0), 4.0, served_per_s),
            ("request_prefill_time_seconds", (0.1, 0.3, 1.0), 0.05, served_per_s),
        ):
            found |= self._histogram(name, bounds, value_s=value_s, per_s=per_s)
        return found

    def _histogram(
        self, name: str, bounds: tuple[float, ...], *, value_s: float, per_s: float
    ) -> dict[str, str]:
        """A histogram all of whose observations are the same."""
        found = {
            self.named(f"{name}_bucket", f'le="{bound}"'): self.rate(
                per_s if bound >= value_s else 0.0
            )
            for bound in bounds
        }
        found[self.named(f"{name}_bucket", 'le="+Inf"')] = self.rate(per_s)
        found[self.named(f"{name}_count")] = self.rate(per_s)
        found[self.named(f"{name}_sum")] = self.rate(value_s * per_s)
        return found


def pairs(labels: Mapping[str, str]) -> Iterator[str]:
    """Labels as a selector has them."""
    return (f'{name}="{value}"' for name, value in labels.items())
