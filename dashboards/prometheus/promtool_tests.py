"""Tests of the rules for promtool: simulated servers and GPUs, and the alerts that must fire for
them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from kneewatch.collector.signals.expr import Dialect
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, yaml_text
from kneewatch.dashboards.prometheus.rule_group import Plan
from kneewatch.rules.cascade import EVICT_CRITICAL_PER_S
from kneewatch.rules.facts import duration, number

NO_VALUE = 9223372036854775794.0
"""DCGM's placeholder for a field without a value."""

BUSY = {
    "DEV_SM_CLOCK": 1755,
    "DEV_GPU_TEMP": 58,
    "DEV_POWER_USAGE": 412.5,
    "DEV_FB_USED": 70_000,
    "DEV_FB_FREE": 10_000,
    "DEV_XID_ERRORS": 0,
    "DEV_PCIE_REPLAY_COUNTER": 7,
    "DEV_ROW_REMAP_FAILURE": 0,
    "PROF_GR_ENGINE_ACTIVE": 0.87,
}
BLANK = ("DEV_XID_ERRORS", "DEV_PCIE_REPLAY_COUNTER", "DEV_ROW_REMAP_FAILURE", "DEV_GPU_TEMP",
         "DEV_ECC_DBE_VOL_TOTAL")  # fmt: skip

WELL, LOST, HOT = "GPUs that are well", "a GPU falls off the bus", "heat holds a GPU down"
BROKEN = "a memory row cannot be remapped"

Series = Mapping[str, str]
Fires = frozenset[tuple[str, str]]
"""Alerts that fire, as pairs of alert name and severity."""

NOTHING: Fires = frozenset()


class Scenario(Struct, frozen=True):
    """Series by metric and labels, and the alerts that must fire after LASTS_S seconds.

    No other alert at warning or worse may fire. The namespace of the servers, or the beginning of
    the nodes' names, is the name of the scenario, because all scenarios run in the same test.
    """

    name: str
    series: Series
    fires: Fires = NOTHING


# --- Simulated GPUs -------------------------------------------------------------------------------


def _with_gpus(plan: Plan) -> Iterator[Scenario]:
    """Yields scenarios with GPUs. Each GPU has its own node, named after the scenario and the state
    of the GPU."""
    steps = steps_of(plan)
    half = steps // 2

    def level(value: float) -> str:
        return f"{number(value)}x{steps}"

    def gpu(like: str = "", mig: str = "", *, of: str = WELL, **fields: str) -> Series:
        """The series of a busy H100. `fields` replace default values."""
        fields_shown = {name: level(value) for name, value in BUSY.items()} | fields
        node = f"{of}: {like}" if like else of
        labels = {"gpu": "0", "UUID": node, "modelName": "NVIDIA H100 80GB HBM3", "Hostname": node}
        labels |= {"GPU_I_ID": mig} if mig else {}
        inner = ", ".join(pairs(labels))
        return {f"DCGM_FI_{name}{{{inner}}}": values for name, values in fields_shown.items()}

    harmless = {
        **gpu("works"),
        **gpu("has no values", **dict.fromkeys(BLANK, level(NO_VALUE))),
        **gpu("XID of a program", DEV_XID_ERRORS=f"0x{half} 43x{half}"),
        **gpu("began anew", DEV_ECC_DBE_VOL_TOTAL=f"3x{half} 0x{half}"),
        **gpu("idle", PROF_GR_ENGINE_ACTIVE=level(0.01), DEV_SM_CLOCK=f"1755x{half} 345x{half}"),
        **gpu("at its power limit", DEV_SM_CLOCK=f"1755x{half} 1200x{half}"),
        **gpu("MIG", "1"),
        **gpu("MIG", "2"),
    }
    lost = gpu(of=LOST, DEV_XID_ERRORS=f"0x{half} 79x{half}")
    broken = gpu(of=BROKEN, DEV_ROW_REMAP_FAILURE=f"0x{half} 1x{half}")
    hot = gpu(of=HOT, DEV_SM_CLOCK=f"1755x{half} 990x{half}", DEV_GPU_TEMP=f"80x{half} 88x{half}")
    yield Scenario(WELL, harmless)
    yield Scenario(LOST, lost, frozenset({("KneewatchGpuFault", "critical")}))
    yield Scenario(BROKEN, broken, frozenset({("KneewatchGpuFault", "warning")}))
    yield Scenario(HOT, hot, frozenset({("KneewatchGpuThrottled", "warning")}))


# --- Simulated servers ----------------------------------------------------------------------------


LASTS_S = 2400.0
"""Seconds that a scenario lasts. Its problem begins in the middle."""


def steps_of(plan: Plan) -> int:
    """Number of scrapes in a scenario."""
    return round(LASTS_S / plan.scrape_s)


class Server:
    """The series of a simulated server, in promtool's notation (start+step x count). The servers of
    a scenario serve the same model in the same namespace; both have the scenario's name."""

    def __init__(self, plan: Plan, scenario: str, *, name: str = "") -> None:
        self._plan, self._scenario = plan, scenario
        self._process = {"instance": name or scenario, "job": "vllm", "namespace": scenario}
        self._engine = self._process | {"model_name": scenario, "engine": "0"}
        self.steps = steps_of(plan)
        self.half = self.steps // 2

    def scenario(self, series: Series, *fires: tuple[str, str]) -> Scenario:
        """A scenario with this server's name, made of its series and of the alerts (name, severity)
        that must fire."""
        return Scenario(self._scenario, series, frozenset(fires))

    def level(self, value: float) -> str:
        """The values of a constant gauge."""
        return f"{number(value)}x{self.steps}"

    def rate(self, per_s: float) -> str:
        """The values of a counter or gauge that grows by `per_s` per second."""
        return f"0+{number(per_s * self._plan.scrape_s)}x{self.steps}"

    def named(self, metric: str, *labels: str) -> str:
        """A series name with the labels of the engine."""
        spelled = Dialect(self._plan.range_s, prefix=self._plan.prefix)
        return spelled.labelled(metric, [", ".join((*pairs(self._engine), *labels))])

    def turns(self, before_per_s: float, after_per_s: float) -> str:
        """The values of a counter whose rate changes in the middle."""
        before, after = (per_s * self._plan.scrape_s for per_s in (before_per_s, after_per_s))
        middle = number(before * (self.half + 1))
        return f"0+{number(before)}x{self.half} {middle}+{number(after)}x{self.half}"

    def page(self, metric: str, *labels: str) -> str:
        """A series that has no labels of an engine."""
        return f"{metric}{{{', '.join((*pairs(self._process), *labels))}}}"

    @property
    def up(self) -> str:
        """The series `up` of the server."""
        return self.page("up")

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
        """The series of a serving server with a TTFT of 0.2 s."""
        queue = waiting or self.level(0)
        series = {
            self.named("num_requests_running"): self.level(running),
            self.named("num_requests_waiting"): queue,
            self.named("num_requests_waiting_by_reason", 'reason="capacity"'): queue,
            self.named("num_requests_waiting_by_reason", 'reason="deferred"'): self.level(0),
            self.named("kv_cache_usage_perc"): self.level(usage),
            self.named("num_preemptions_total"): self.rate(preempted_per_s),
            self.named("generation_tokens_total"): self.rate(tokens_per_s),
            self.named("iteration_tokens_total_count"): self.rate(bool(tokens_per_s) / itl_s),
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
            series |= self._histogram(name, bounds, value_s=value_s, per_s=per_s)
        return series

    def _histogram(
        self, name: str, bounds: tuple[float, ...], *, value_s: float, per_s: float
    ) -> dict[str, str]:
        """The series of a histogram whose observations are all equal to `value_s`."""
        series = {
            self.named(f"{name}_bucket", f'le="{bound}"'): self.rate(
                per_s if bound >= value_s else 0.0
            )
            for bound in bounds
        }
        series[self.named(f"{name}_bucket", 'le="+Inf"')] = self.rate(per_s)
        series[self.named(f"{name}_count")] = self.rate(per_s)
        series[self.named(f"{name}_sum")] = self.rate(value_s * per_s)
        return series


def pairs(labels: Mapping[str, str]) -> Iterator[str]:
    """Yields labels in the form in which a selector has them."""
    return (f'{name}="{value}"' for name, value in labels.items())


# --- Scenarios and the test file ------------------------------------------------------------------


TESTS_FILE = "tests/kneewatch.tests.yml"
"""Path of the test file. It is not in the folder of the rules, so that a pattern such as `*.yml`
for rule files does not match it."""

HEAD = "# Generated by `kneewatch export prometheus-tests`: promtool test rules {}\n"

STATED = "TTFT-P99|ITL-P99"
"""A pattern for the rules whose alerts exist only if the user sets targets."""

FEW = 4
"""Number of steps after which a server's metrics end, in scenarios whose alert has a long `for`."""


def scenarios(plan: Plan) -> tuple[Scenario, ...]:
    """All scenarios: those with problems, and those that only look like a problem."""
    return (
        *_calm(plan),
        *_troubled(plan),
        *_absent(plan),
        *_with_peers(plan),
        *_with_gpus(plan),
        *_own(plan),
    )


def _calm(plan: Plan) -> Iterator[Scenario]:
    server = Server(plan, "a server that serves")
    yield server.scenario(server.busy(running=8))
    server = Server(plan, "an idle server")
    yield server.scenario(server.busy(running=0, usage=0, served_per_s=0, tokens_per_s=0))
    server = Server(plan, "a full cache without harm")
    yield server.scenario(server.busy(running=16, usage=0.97))
    server = Server(plan, "counters that begin anew")
    half, step = server.half, number(4 * plan.scrape_s)
    reset = {
        server.named("generation_tokens_total"): f"5000+{step}x{half} 0+{step}x{half}",
        server.named("num_preemptions_total"): f"9x{half} 0x{half}",
        server.page("process_start_time_seconds"): f"1x{half} 900x{half}",
    }
    yield server.scenario(server.busy(running=8) | reset)
    server = Server(plan, "started anew and not used yet")
    tokens = (server.named(f"{kind}_tokens_total") for kind in ("prompt", "generation"))
    fresh = dict.fromkeys(tokens, f"5000x{FEW} 0x{server.steps - FEW}")
    yield server.scenario(_gone(server, until=FEW) | fresh | {server.up: server.level(1)})


def _troubled(plan: Plan) -> Iterator[Scenario]:
    critical = plan.thresholds.get("KV-EVICT", {}).get("critical", EVICT_CRITICAL_PER_S)
    server = Server(plan, "running requests are preempted and queue")
    evicting = server.busy(
        running=16, usage=0.99, preempted_per_s=1.25 * 16 * critical, waiting=server.level(30)
    )
    yield server.scenario(evicting, ("KneewatchKvEvict", "critical"))
    server = Server(plan, "a full cache holds requests back")
    full = server.busy(running=16, usage=0.98, waiting=server.level(9))
    yield server.scenario(full, ("KneewatchKvFull", "warning"))
    server = Server(plan, "more requests arrive than are served")
    growing = server.busy(running=16, waiting=server.rate(0.11))
    yield server.scenario(growing, ("KneewatchQueueGrows", "warning"))
    server = Server(plan, "no token comes out")
    stalled = server.busy(running=8, served_per_s=0.0, tokens_per_s=0.0)
    yield server.scenario(stalled, ("KneewatchCauseEngineStalled", "critical"))
    server = Server(plan, "requests fail")
    failing = {server.named("request_success_total", 'finished_reason="error"'): server.rate(1.0)}
    yield server.scenario(server.busy(running=8) | failing, ("KneewatchErrors", "critical"))
    server = Server(plan, "adapters wait for a slot")
    deferred = server.named("num_requests_waiting_by_reason", 'reason="deferred"')
    adapters = {deferred: server.level(3), server.named("lora_requests_info"): server.level(1)}
    yield server.scenario(server.busy(running=8) | adapters, ("KneewatchLoraWait", "warning"))
    server = Server(plan, "prompts stop hitting the cache")
    hits = {
        server.named("prefix_cache_queries_total"): server.rate(4000.0),
        server.named("prefix_cache_hits_total"): server.turns(2800.0, 400.0),
    }
    yield server.scenario(server.busy(running=8) | hits, ("KneewatchPrefixHitFell", "warning"))
    server = Server(plan, "transfers of the KV cache become slow")
    transfers = {
        server.named("nixl_xfer_time_seconds_sum"): server.turns(0.14, 3.6),
        server.named("nixl_xfer_time_seconds_count"): server.rate(4.0),
    }
    yield server.scenario(
        server.busy(running=8) | transfers, ("KneewatchKvTransferSlow", "warning")
    )
    server = Server(plan, "a batch server that queues by design")
    waiting = server.named("num_requests_waiting", 'kneewatch_goal="throughput"')
    yield server.scenario(server.busy(running=8) | {waiting: server.level(300)})
    server = Server(plan, "a router without endpoints")
    unrouted = server.busy(running=0, usage=0, served_per_s=0, tokens_per_s=0)
    unrouted |= {server.page("llm_d_epp_ready_endpoints"): server.level(0)}
    yield server.scenario(unrouted, ("KneewatchRouterUnready", "critical"))


def _absent(plan: Plan) -> Iterator[Scenario]:
    server = Server(plan, "a server that does not answer")
    down = {server.up: f"1x{server.half} 0x{server.half}"}
    yield server.scenario(
        _gone(server, until=server.half) | down, ("KneewatchTargetDown", "critical")
    )
    server = Server(plan, "a server that crashes again and again")
    starts = " ".join(f"{600 * at}x{server.steps // 8}" for at in range(9))
    crashing = {server.page("process_start_time_seconds"): starts}
    yield server.scenario(server.busy(running=8) | crashing, ("KneewatchCrashLoop", "critical"))
    series: dict[str, str] = {}
    for at in range(2):
        server = Server(plan, "two containers die", name=f"two containers die, {at}")
        started = server.page("process_start_time_seconds", f'pod="p-{at}"')
        series |= server.busy(running=8) | {started: f"1x{server.steps - FEW} 900x{FEW}"}
    yield server.scenario(series, ("KneewatchPoolRestarts", "warning"))
    server = Server(plan, "a new server that never answers")
    silent = Server(plan, "a new server that never answers", name="silent")
    up = {silent.up: silent.level(0)}
    yield server.scenario(server.busy(running=8) | up, ("KneewatchTargetDown", "warning"))
    server = Server(plan, "a page that has lost vLLM's metrics")
    answers = {server.up: server.level(1)}
    vanished = ("KneewatchMetricsVanished", "warning")
    yield server.scenario(_gone(server, until=FEW) | answers, vanished)
    server = Server(plan, "a pool whose pods are deleted")
    left = _gone(server, until=server.half) | {server.up: f"1x{server.half} stale"}
    yield server.scenario(left, ("KneewatchPoolVanished", "critical"))


def _gone(server: Server, *, until: int) -> dict[str, str]:
    """The series of a serving server that end after `until` steps."""
    return {
        series: f"{values.partition('x')[0]}x{until} stale"
        for series, values in server.busy(running=8).items()
    }


def _with_peers(plan: Plan) -> Iterator[Scenario]:
    """Yields scenarios with four servers of the same model. Each has its own requests/s."""
    for name, served, itl_s, alert in (
        ("one of four gets all", (0.0, 0.0, 0.0, 8.0), 0.02, "KneewatchReplicaImbalance"),
        ("one of four gets none", (0.0, 4.0, 3.0, 5.0), 0.02, "KneewatchReplicaServesNothing"),
        ("one of four is slow", (4.0, 2.0, 3.0, 5.0), 0.04, "KneewatchReplicaSlow"),
        ("requests are spread", (4.0, 2.0, 3.0, 5.0), 0.03, ""),
    ):
        series: dict[str, str] = {}
        for at, per_s in enumerate(served):
            server = Server(plan, name, name=f"{name}, {at}")
            series |= server.busy(
                running=2 * per_s,
                served_per_s=per_s,
                tokens_per_s=200 * per_s,
                itl_s=0.02 if at else itl_s,
            )
        yield Scenario(name, series, frozenset({(alert, "warning")} if alert else ()))


def _own(plan: Plan) -> Iterator[Scenario]:
    """Yields scenarios with kneewatch's own metrics."""
    for name, series, fires in (
        ("kneewatch concludes a cause", 'cause_severity{cause="kv_pressure",%s} 3',
         ("KneewatchCause", "critical")),
        ("a fleet's daemon concludes a cause",
         'fleet_cause_severity{cause="bad_node",pool="p",%s} 2',
         ("KneewatchCause", "warning")),
        ("the queue nears its limit", 'finding_severity{rule="BREAKER",%s} 2',
         ("KneewatchGuardrail", "warning")),
        ("kneewatch sees a queue", "stage{%s} 3", ("KneewatchCascadeQueueing", "warning")),
        ("kneewatch has no fresh page", "late{%s} 1", ("KneewatchStale", "warning")),
    ):  # fmt: skip
        labels = f'namespace="{name}",instance="kneewatch",target="r0",model="m",engine="0"'
        key, _, value = (series % labels).rpartition(" ")
        yield Scenario(name, {f"kneewatch_{key}": f"{value}x{steps_of(plan)}"}, frozenset({fires}))


def promtool_files(plan: Plan) -> dict[str, str]:
    """The test file: text by file name. It must be stored next to the rule file.

    All scenarios are in a single test, because promtool takes as long for one server as for twelve.
    """
    all_scenarios = scenarios(plan)
    series = {name: values for played in all_scenarios for name, values in played.series.items()}
    test = {
        "name": "; ".join(played.name for played in all_scenarios),
        "interval": duration(plan.scrape_s),
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [_expected(plan, scenario) for scenario in all_scenarios],
    }
    document: dict[str, Any] = {
        "rule_files": [f"../{RULES_FILE}"],
        "evaluation_interval": duration(plan.interval_s),
        "tests": [test],
    }
    body = yaml_text(document)
    return {TESTS_FILE: HEAD.format(TESTS_FILE) + body}


def _expected(plan: Plan, scenario: Scenario) -> dict[str, Any]:
    """The expectation for promtool: exactly these alerts fire for the scenario's servers and
    GPUs."""
    firing = 'alertname=~"Kneewatch.+", alertstate="firing", severity=~"warning|critical"'
    alerts = " or ".join(
        f'ALERTS{{{label}=~"{scenario.name}.*", {firing}, rule!~"{STATED}"}}'
        for label in ("namespace", "Hostname")
    )
    return {
        "expr": f"count by (alertname, severity) ({alerts})",
        "eval_time": duration(LASTS_S - plan.scrape_s),
        "exp_samples": [
            {"labels": f'{{alertname="{name}", severity="{severity}"}}', "value": 1}
            for name, severity in sorted(scenario.fires)
        ],
    }
