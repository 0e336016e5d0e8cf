"""Alerts on the series of vLLM, DCGM and routers. Each is one expression that reads no recorded
series, and has the labels of the replica, GPU or pool that it is about. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kneewatch.collector.names.vllm_metrics import VLLM_PREFIX
from kneewatch.collector.signals.expr import bound_matcher
from kneewatch.collector.signals.vllm import within_ttft
from kneewatch.dashboards.prometheus.rule_group import Alert, Group, Plan, span
from kneewatch.diagnose.fleet.inventory import DEFAULTS
from kneewatch.diagnose.fleet.routers import IDLE_KV, QUEUED_MIN, ROUTERS
from kneewatch.rules.facts import number
from kneewatch.rules.rule import Severity

CRITICAL, WARNING, INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO

WHO = "{{ or $labels.pod $labels.instance }}"
"""A template for the name of a replica: its pod, or its address outside of Kubernetes."""

PLACE = (
    "{{ with $labels.model_name }} ({{ . }}){{ end }}"
    "{{ with $labels.namespace }} in {{ . }}{{ end }}"
)
GPU = "GPU {{ $labels.gpu }} of {{ $labels.Hostname }}{{ $labels.hostname }}"

SEEN_S = 3600.0
"""Seconds for which a replica that served counts as one that should serve."""

DOWN_S = 120.0
LOADING_S = 900.0
"""Seconds that a pod may take to load its model."""

NAMED_POD = 'pod!=""'
UP_NO_WORKER = 'up{pod!~".+-[0-9]+-[0-9]+"}'
"""`up` without the workers of LeaderWorkerSets, which have no page: chat-0-1."""

CRASHES, CRASHES_S = 3, 1800.0
"""Restarts within CRASHES_S from which on a server is in a crash loop."""

FULL_FROM = 0.95
WAIT_FROM_S = 10.0
"""Seconds that the requests of a queue wait at the present pace, from which an alert fires."""

ERRORS_MIN = 3.0
HITS_FELL = 0.2
"""How far the prefix cache's hit ratio must fall below that of the hours before."""

LOOKED_UP_PER_S = 100.0
"""Minimum prompt tokens/s for a judgement of the prefix cache."""

NO_BATCH = f'{DEFAULTS["goal"][0]}!="throughput"'
"""A matcher that leaves out throughput pools, whose requests queue by design."""

TIMES_ITS_SHARE = 3.0
"""A replica takes too much of its pool's requests from this multiple of the mean on."""

BUSY_RUNNING = 4.0

NO_PREFILL = 'role!="prefill"'
RESTARTED, UP_FROM = 2, 0.85
"""An alert fires if at least so many replicas of a job restarted lately, each of them quickly: it
was up for at least this share of LOADING_S. Longer outages are KneewatchTargetDown."""

STEPS_BELOW, HANGS_BELOW = 0.6, 0.05
"""A busy replica is slow if its steps/s are below the first of these shares of its pool's median,
and hangs if they are below the second."""

SERVES_FROM_PER_S = 0.2
"""Requests/s of the median replica from which one that serves nothing is suspect."""

TRANSFER_TIMES, TRANSFER_FROM_S = 3.0, 0.1
"""A KV transfer is slow at this multiple of its mean of the hours before and at this length."""

PROGRAMS_XIDS = (13, 31, 43, 45, 63, 92)
"""XIDs that are no reason to act: errors of a program, and notes about repaired memory."""

HOT_C, HELD_BELOW, GPU_BUSY = 80.0, 0.75, 0.5
"""A GPU that is busy and this hot is throttled if its SM clock is below this share of its
maximum."""


def alert_group(plan: Plan) -> Group:
    """All alerts about servers, GPUs and routers."""
    series = _Series(plan)
    return Group(
        "kneewatch-alerts",
        (
            *_targets(plan, series),
            *_engines(plan, series),
            *_latencies(plan, series),
            *_gpus(plan, series),
            *_routers(plan, series),
        ),
    )


class _Series:
    """vLLM's series as PromQL selectors, and the range over which alerts look back."""

    def __init__(self, plan: Plan) -> None:
        dialect = plan.dialect
        self.range = span(max(2 * plan.window_s, plan.range_s))
        self.present = dialect.series("kv_cache_usage_perc")
        """A series that each engine has, and no router."""
        self.running = dialect.series("num_requests_running")
        self.waiting = dialect.series("num_requests_waiting")
        self.queued = dialect.series("num_requests_waiting", extra=NO_BATCH)
        """The queue, where it is no throughput pool's, which queues by design."""
        self.tokens = dialect.series("generation_tokens", "_total")
        self.first_tokens = dialect.series("time_to_first_token_seconds", "_count")
        self.preempted = f"rate({dialect.series('num_preemptions', '_total')}[{self.range}])"
        self.served = f"on (job, instance) max_over_time({self.present}[{span(SEEN_S)}])"
        """The condition that a target served vLLM lately."""

    def least(self, gauge: str) -> str:
        """The minimum of a gauge."""
        return f"min_over_time({gauge}[{self.range}])"


def alert(
    plan: Plan,
    name: str,
    severity: Severity,
    expr: str,
    for_s: float,
    summary: str,
    description: str,
    action: str,
    page: str,
    **labels: str,
) -> Alert:
    """An alert with its labels and links. `page` is the page about its cause or rule, such as
    causes/target_down; labels name the cause or rule too."""
    of, _, about = page.partition("/")
    kind = {"kneewatch": "cause" if of == "causes" else "finding", of.removesuffix("s"): about}
    annotations = {
        "summary": summary,
        "description": description,
        "action": action,
        "runbook_url": f"{plan.runbooks}/{page}",
    }
    return Alert(
        name,
        expr,
        for_s,
        {"severity": severity.word} | kind | labels,
        annotations | _links(plan, labels.get("kneewatch", "")),
    )


def _links(plan: Plan, kind: str) -> dict[str, str]:
    """The links of an alert of a kind to its triage page and dashboard, as far as the addresses are
    known."""
    links: dict[str, str] = {}
    if plan.triage_url and not kind:
        links["triage"] = f"{plan.triage_url.rstrip('/')}/{{{{ $labels.instance }}}}"
    if plan.grafana_url:
        board, variable, label = {
            "": ("replica", "replica", "instance"),
            "gpu": ("gpus", "node", "Hostname"),
        }.get(kind, ("fleet", "model", "model_name"))
        links["dashboard_url"] = (
            f"{plan.grafana_url.rstrip('/')}/d/kneewatch-{board}"
            f"?var-{variable}={{{{ $labels.{label} | urlquery }}}}"
        )
    return links


# --- Servers that are down, restart, or have no metrics -------------------------------------------


def _targets(plan: Plan, series: _Series) -> Iterator[Alert]:
    # A target that service discovery dropped shows its last sample for a while.
    down_s, fresh_s = max(DOWN_S, 2 * plan.scrape_s), max(75.0, 1.25 * plan.scrape_s)
    gone_s = max(5 * plan.window_s, 5 * plan.scrape_s)
    restarts = f"changes({_started(plan)}[{span(CRASHES_S)}])"
    observed = {"kneewatch": "observer"}
    yield alert(
        plan,
        "KneewatchTargetDown",
        CRITICAL,
        f"up == 0 and timestamp(up) > time() - {number(fresh_s)} and {series.served}"
        " unless on (namespace, pod) kube_pod_deletion_timestamp"
        f" unless on (namespace, pod) kube_pod_created > time() - {number(LOADING_S)}",
        down_s,
        f"vLLM server is not reachable: {WHO}{PLACE}",
        f"All scrapes of {WHO} have failed for {span(down_s)}. It served within the last hour.",
        "Check the vLLM process and its log, then `curl` its /metrics.",
        "causes/target_down",
    )
    yield alert(
        plan,
        "KneewatchCrashLoop",
        CRITICAL,
        f"{restarts} >= {CRASHES} and {series.served}",
        0.0,
        f"vLLM server restarts again and again: {WHO}{PLACE}",
        f"{WHO} started {{{{ $value }}}} times within {span(CRASHES_S)}.",
        "Read the end of the log before each restart (kubectl logs --previous).",
        "causes/engine_died",
    )
    yield alert(
        plan,
        "KneewatchRestarted",
        INFO,
        f"{restarts} > 0 < {CRASHES} and {series.served}",
        0.0,
        f"vLLM server restarted: {WHO}{PLACE}",
        f"{WHO} started anew {{{{ $value }}}} times within {span(CRASHES_S)}.",
        "If nobody restarted it, read the end of its log before the restart.",
        "causes/engine_restarted",
    )
    yield alert(
        plan, "KneewatchPoolRestarts", WARNING,
        # A container that starts anew in its pod has died: a rollout makes new pods.
        f"count by (namespace, job) (changes({_started(plan, NAMED_POD)}[{span(LOADING_S)}]) > 0"
        f" and on (job, instance) avg_over_time(up[{span(LOADING_S)}]) > {number(UP_FROM)}"
        f" and {series.served}) >= {RESTARTED}",
        0.0,
        "vLLM servers of one job restart{{ with $labels.namespace }} in {{ . }}{{ end }}"
        " (job {{ $labels.job }})",
        f"{{{{ $value }}}} containers started anew in their pods within {span(LOADING_S)}.",
        "Compare with the newest release, and roll it back if it is the cause. Read the end of"
        " the logs before the restarts (kubectl logs --previous).",
        "causes/engine_restarted", kneewatch="observer",
    )  # fmt: skip
    yield alert(
        plan, "KneewatchTargetDown", WARNING,
        f"{UP_NO_WORKER} == 0 unless max_over_time(up[{span(SEEN_S)}]) > 0"
        f" and on (namespace, job) {series.present}",
        LOADING_S,
        f"vLLM server has never answered: {WHO}{PLACE}",
        f"{WHO} has been a target for {span(LOADING_S)}, and no scrape succeeded.",
        "Read the pod's events and log: image, weights, GPU memory, probes.",
        "causes/target_down", how="never_answered",
    )  # fmt: skip
    yield alert(
        plan,
        "KneewatchNoMetrics",
        CRITICAL,
        f"absent({series.running}) and absent({_prompts(plan)})",
        gone_s,
        "No vLLM server is scraped",
        "Prometheus has no vLLM series, so no other alert can fire.",
        "Check the Prometheus targets page and vLLM's /metrics.",
        "causes/metrics_missing",
        **observed,
    )
    yield alert(
        plan, "KneewatchMetricsVanished", WARNING,
        # With several API servers vLLM has no gauges before the first request.
        f"up == 1 and {series.served} unless on (job, instance) {series.present}"
        f" unless on (job, instance) {_prompts(plan)} == 0",
        gone_s,
        f"vLLM's metrics are missing on a page that answers: {WHO}{PLACE}",
        f"The page of {WHO} lacks series that it had within the last hour.",
        "Check whether an engine died or --disable-log-stats was set.",
        "causes/metrics_missing", **observed,
    )  # fmt: skip
    yield from _pools(plan, series)


def _started(plan: Plan, *matchers: str) -> str:
    return plan.dialect.labelled(
        "process_start_time_seconds", [part for part in (plan.selector, *matchers) if part]
    ).removeprefix(plan.prefix)


def _prompts(plan: Plan) -> str:
    return plan.dialect.series("prompt_tokens", "_total")


def _pools(plan: Plan, series: _Series) -> Iterator[Alert]:
    """Alerts for a pool that has no replica left: at once where its job has no target either, and
    where all targets are new, after the time that loading takes."""
    pool, wanted = "namespace, job, model_name", "kube_deployment_spec_replicas"
    gone = (
        f"max by ({pool}) (max_over_time({series.present}[{span(SEEN_S)}]))"
        f" unless on ({pool}) {series.present}"
    )
    to_zero = f"({wanted} == 0 < max_over_time({wanted}[{span(SEEN_S)}]))"
    for how, expr, for_s in (
        (
            "gone",
            # A ruler that outlives its Prometheus sees no target at all.
            f"{gone} unless on (namespace, job) up unless on (namespace) {to_zero} and on () up",
            2 * plan.scrape_s,
        ),
        (
            "replaced",
            f"{gone} and on (namespace, job) (up == 0 unless {series.served})",
            LOADING_S,
        ),
    ):
        yield alert(
            plan, "KneewatchPoolVanished", CRITICAL, expr, for_s,
            "No replica serves {{ $labels.model_name }}{{ with $labels.namespace }} in {{ . }}"
            "{{ end }} (job {{ $labels.job }})",
            "It was served within the last hour and has no replica now.",
            "Check the workload's pods and events, and the monitor that selects them.",
            "causes/target_down", kneewatch="observer", how=how,
        )  # fmt: skip


# --- Engines --------------------------------------------------------------------------------------


def _engines(plan: Plan, series: _Series) -> Iterator[Alert]:
    range_, settles_s = series.range, plan.settles_s
    yield alert(
        plan,
        "KneewatchCauseEngineStalled",
        CRITICAL,
        f"{series.least(series.running)} > 0 and rate({series.tokens}[{range_}]) == 0",
        2 * plan.scrape_s,
        f"Engine generates no token: {WHO}{PLACE}",
        f"{{{{ $value }}}} requests run on {WHO}, and for {range_} no token came out.",
        "Save the log and stacks (py-spy dump), then restart this replica.",
        "causes/engine_stalled",
    )
    per_running = f"{series.preempted} / avg_over_time({series.running}[{range_}])"
    for severity, bounds in _bounds(plan, "KV-EVICT"):
        yield alert(
            plan,
            "KneewatchKvEvict",
            severity,
            f"{per_running} {bounds}",
            settles_s,
            f"vLLM preempts running requests: {WHO}{PLACE}",
            f"{{{{ $value | humanizePercentage }}}} of the running requests on {WHO} are preempted"
            " every second and computed again.",
            "Enlarge the KV cache (fp8 KV cache, --gpu-memory-utilization), or lower"
            " --max-num-seqs.",
            "rules/KV-EVICT",
        )
    yield alert(
        plan,
        "KneewatchKvFull",
        WARNING,
        f"{series.least(series.present)} > {number(FULL_FROM)}"
        f" and {series.least(series.queued)} > 0 unless {series.preempted} > 0",
        settles_s,
        f"KV cache is full and requests wait: {WHO}{PLACE}",
        f"The KV cache of {WHO} was at least {{{{ $value | humanizePercentage }}}} full for"
        f" {range_}, with requests in the queue.",
        "Enlarge the KV cache (fp8 KV cache, --gpu-memory-utilization), or shorten contexts.",
        "rules/KV-FULL",
    )
    yield alert(
        plan, "KneewatchQueueGrows", WARNING,
        f"{series.least(series.queued)} / (rate({series.first_tokens}[{range_}]) > 0)"
        f" > {number(WAIT_FROM_S)}",
        settles_s,
        f"Requests queue: {WHO}{PLACE}",
        f"The queue of {WHO} takes {{{{ $value | humanizeDuration }}}} at the present pace.",
        "Check first whether other replicas of the pool are idle (routing) or this one is slow."
        " Otherwise more requests arrive than are served.",
        "rules/QUEUE-GROWS",
    )  # fmt: skip
    yield from _requests(plan, series)
    yield from _sharing(plan, series)


def _bounds(plan: Plan, rule_id: str) -> Iterator[tuple[Severity, str]]:
    """For the warning and the critical bound of a rule, milder first: the severity, and a
    comparison that ends where the next bound begins. So at most one of the alerts fires."""
    (rule,) = (rule for rule in plan.rules() if rule.id == rule_id)
    bounds = sorted(
        (bound for bound in rule.bounds if bound.severity >= WARNING), key=lambda b: b.severity
    )
    for at, bound in enumerate(bounds):
        below = "".join(f" <= {number(worse.threshold)}" for worse in bounds[at + 1 : at + 2])
        yield bound.severity, f"> {number(bound.threshold)}{below}"


def _requests(plan: Plan, series: _Series) -> Iterator[Alert]:
    over = span(max(300.0, plan.range_s))
    finished = plan.dialect.series("request_success", "_total")
    failed = plan.dialect.series("request_success", "_total", (("finished_reason", "error"),))
    share = (
        f"rate({failed}[{over}]) / ignoring (finished_reason) group_left"
        f" sum without (finished_reason) (rate({finished}[{over}]))"
    )
    for severity, bounds in _bounds(plan, "ERRORS"):
        yield alert(
            plan,
            "KneewatchErrors",
            severity,
            f"{share} {bounds} and increase({failed}[{over}]) >= {number(ERRORS_MIN)}",
            plan.settles_s,
            f"Requests end in an error: {WHO}{PLACE}",
            f"{{{{ $value | humanizePercentage }}}} of the requests on {WHO} failed within {over}.",
            "Read vLLM's log.",
            "rules/ERRORS",
        )
    deferred = plan.dialect.series("num_requests_waiting_by_reason", "", (("reason", "deferred"),))
    yield alert(
        plan, "KneewatchLoraWait", WARNING,
        f"{series.least(deferred)} > 0"
        f" and on (job, instance) {plan.dialect.series('lora_requests_info')}",
        plan.settles_s,
        f"Requests wait for a LoRA adapter slot: {WHO}{PLACE}",
        f"{{{{ $value }}}} requests on {WHO} were held back for {series.range}.",
        "Raise --max-loras, lower the adapters' rank, or spread adapters over replicas.",
        "rules/LORA-WAIT",
    )  # fmt: skip


def _sharing(plan: Plan, series: _Series) -> Iterator[Alert]:
    """Alerts for what routing decides: the prefix cache's hits, and how requests are spread."""
    range_ = series.range
    hits = plan.dialect.series("prefix_cache_hits", "_total")
    asked = plan.dialect.series("prefix_cache_queries", "_total")
    before = f"[{span(3 * SEEN_S)}] offset {span(LOADING_S)}"
    yield alert(
        plan,
        "KneewatchPrefixHitFell",
        WARNING,
        f"rate({hits}{before}) / rate({asked}{before})"
        f" - rate({hits}[{range_}]) / rate({asked}[{range_}]) > {number(HITS_FELL)}"
        f" and rate({asked}[{range_}]) > {number(LOOKED_UP_PER_S)}",
        plan.settles_s,
        f"Prefix cache hits fell: {WHO}{PLACE}",
        f"The hit ratio of {WHO} is {{{{ $value | humanizePercentage }}}} (points) below that of"
        " the hours before.",
        "Check what changed: routing by prefix, the beginning of prompts, the KV cache's size.",
        "causes/prefix_reuse_lost",
    )
    requests = f"rate({series.first_tokens}[{range_}])"
    yield alert(
        plan, "KneewatchReplicaImbalance", WARNING,
        f"{requests} / on ({plan.pool}) group_left avg by ({plan.pool}) ({requests})"
        f" > {number(TIMES_ITS_SHARE)}"
        f" and avg_over_time({series.running}[{range_}]) > {number(BUSY_RUNNING)}",
        plan.settles_s,
        f"One replica takes most requests of its pool: {WHO}{PLACE}",
        f'{WHO} gets {{{{ printf "%.1f" $value }}}} times the mean of its pool.',
        "Check the router: its weights, session affinity, and which endpoints it knows. More"
        " replicas do not help.",
        "causes/replica_imbalance",
    )  # fmt: skip
    yield from _peers(plan, series, requests)


def _peers(plan: Plan, series: _Series, requests: str) -> Iterator[Alert]:
    """Alerts for a replica that does less than the median of its pool."""
    range_ = series.range
    of_all, of_one = (
        f"rate({plan.dialect.series('iteration_tokens_total', '_count', extra=extra)}[{range_}])"
        for extra in ("", NO_PREFILL)
    )
    yield alert(
        plan, "KneewatchReplicaSlow", WARNING,
        f"{of_one} / on ({plan.pool}) group_left quantile by ({plan.pool}) (0.5, {of_all})"
        f" > {number(HANGS_BELOW)} < {number(STEPS_BELOW)}"
        f" and {series.least(series.present)} > 0",
        2 * plan.settles_s,  # while an engine stops, it is slow for less than the range
        f"Replica is slower than its pool: {WHO}{PLACE}",
        f"{WHO} is busy and steps at {{{{ $value | humanizePercentage }}}} of the speed of its"
        " pool's median.",
        "Check its GPU's clocks and temperature, the node's CPU, and its prompts' length; drain"
        " the node if only this replica is slow.",
        "causes/bad_node",
    )  # fmt: skip
    yield alert(
        plan, "KneewatchReplicaServesNothing", WARNING,
        f"{requests} == 0 unless {series.running} > 0"
        f" and on ({plan.pool}) quantile by ({plan.pool}) (0.5, {requests})"
        f" > {number(SERVES_FROM_PER_S)}",
        plan.settles_s,
        f"Replica serves nothing while its pool serves: {WHO}{PLACE}",
        f"{WHO} began no request within {range_}.",
        "Send it a request: without an answer the engine hangs (save its stacks, restart it)."
        " With an answer, check why the router does not use it.",
        "causes/engine_stalled",
    )  # fmt: skip
    transfers = [plan.dialect.series("nixl_xfer_time_seconds", of) for of in ("_sum", "_count")]
    now, usual = (
        " / ".join(f"rate({each}{over})" for each in transfers)
        for over in (f"[{range_}]", f"[{span(3 * SEEN_S)}] offset {span(LOADING_S)}")
    )
    yield alert(
        plan, "KneewatchKvTransferSlow", WARNING,
        f"{now} > {number(TRANSFER_FROM_S)} > {number(TRANSFER_TIMES)} * {usual}",
        plan.settles_s,
        f"KV transfers are slow: {WHO}{PLACE}",
        f"A KV transfer to {WHO} takes {{{{ $value | humanizeDuration }}}}, at least"
        f" {number(TRANSFER_TIMES)} times its mean of the hours before.",
        "Check the network between prefill and decode replicas: RDMA, UCX_TLS, errors of the NIC.",
        "causes/kv_transfer_slow",
    )  # fmt: skip


# --- Latency targets ------------------------------------------------------------------------------

SPEEDS = (
    ("KneewatchTtftBudgetFastBurn", CRITICAL, 14.4, 3600.0, 300.0, "two days"),
    ("KneewatchTtftBudgetSlowBurn", WARNING, 6.0, 21600.0, 1800.0, "five days"),
)
"""For each burn-rate alert: its name, severity, minimum burn rate, long and short window in
seconds, and the time after which a month's error budget is used up at that burn rate.

Source: Google, The Site Reliability Workbook, chapter 5, table 5-8.
"""


def _latencies(plan: Plan, series: _Series) -> Iterator[Alert]:
    """Alerts for the latency targets that the user sets."""
    over = span(max(300.0, plan.range_s))
    for name, metric, target_s in (
        ("TTFT", "time_to_first_token_seconds", plan.targets.ttft_p99_s),
        ("ITL", "inter_token_latency_seconds", plan.targets.itl_p99_s),
    ):
        if target_s is not None:
            buckets = plan.dialect.series(metric, "_bucket", extra=NO_BATCH)
            yield alert(
                plan, f"Kneewatch{name.capitalize()}P99", WARNING,
                f"histogram_quantile(0.99, rate({buckets}[{over}])) > {number(target_s)}",
                plan.settles_s,
                f"{name} P99 is over its target: {WHO}{PLACE}",
                f"{name} P99 of {WHO} is {{{{ $value | humanizeDuration }}}} (target:"
                f" {number(target_s)} s).",
                "Look up the cause on the triage page.",
                f"rules/{name}-P99",
            )  # fmt: skip
    within = within_ttft(plan.targets.ttft_p99_s)
    if within is None or not plan.serves(SPEEDS[0][4]):
        return
    in_time = plan.dialect.series(within.metric, "_bucket", extra=bound_matcher(within.bound))
    for name, severity, speed, long_s, short_s, gone in SPEEDS:
        least = number(max(0.001, 1 - speed * (1 - plan.objective_ratio)))
        windows = (
            f"rate({in_time}[{span(window_s)}]) / ignoring (le)"
            f" rate({series.first_tokens}[{span(window_s)}]) < {least}"
            for window_s in (long_s, short_s)
        )
        yield alert(
            plan, name, severity, " and ".join(windows), 0.0,
            f"TTFT error budget is burning: {WHO}{PLACE}",
            f"Only {{{{ $value | humanizePercentage }}}} of the requests on {WHO} met the TTFT"
            f" target within {span(long_s)}. At this rate a month's error budget is used up in"
            f" {gone}.",
            "Look up the cause on the triage page.",
            "rules/TTFT-P99",
        )  # fmt: skip


# --- GPUs -----------------------------------------------------------------------------------------


def _gpus(plan: Plan, series: _Series) -> Iterator[Alert]:
    """Alerts on the default fields of dcgm-exporter."""
    xids, clocks = _dcgm(plan, "DEV_XID_ERRORS"), _dcgm(plan, "DEV_SM_CLOCK")
    hour, of_board = span(SEEN_S), "max by (Hostname, gpu)"
    harmless = "".join(f" != {xid}" for xid in PROGRAMS_XIDS)
    yield alert(
        plan,
        "KneewatchGpuFault",
        CRITICAL,
        f"{of_board} ({xids}) > 0 < 1000{harmless}"
        f" unless {of_board} ({xids}) == {of_board} ({xids} offset {hour})",
        0.0,
        f"{GPU} reported XID {{{{ $value }}}}",
        f"A hardware error within the last hour on {GPU}.",
        "Drain the node, look up the XID, and reset the GPU or reboot the node.",
        "causes/gpu_fault",
        kneewatch="gpu",
        ailment="xid",
    )
    yield alert(
        plan,
        "KneewatchGpuFault",
        WARNING,
        f"{_dcgm(plan, 'DEV_ROW_REMAP_FAILURE')} == 1"
        f" or increase({_dcgm(plan, 'DEV_ECC_DBE_VOL_TOTAL')}[{hour}]) > 0",
        0.0,
        f"{GPU} has memory errors that were not corrected",
        f"A memory row of {GPU} could not be remapped, or double-bit errors rose.",
        "Drain the node and reset the GPU; replace it if the error returns.",
        "causes/gpu_fault",
        kneewatch="gpu",
        ailment="memory",
    )
    yield alert(
        plan, "KneewatchGpuThrottled", WARNING,
        f"{clocks} < {number(HELD_BELOW)} * max_over_time({clocks}[6h])"
        f" and {_dcgm(plan, 'DEV_GPU_TEMP')} >= {number(HOT_C)}"
        f" and ({_dcgm(plan, 'PROF_GR_ENGINE_ACTIVE')} > {number(GPU_BUSY)}"
        f" or {_dcgm(plan, 'DEV_GPU_UTIL')} > {number(100 * GPU_BUSY)})",
        plan.settles_s,
        f"{GPU} is throttled by heat",
        f"The SM clock of {GPU} is {{{{ $value }}}} MHz under load, at {number(HOT_C)} C or more.",
        "Check the node's cooling and airflow, and drain it if tokens come slower.",
        "causes/gpu_throttled", kneewatch="gpu", reason="heat",
    )  # fmt: skip


def _dcgm(plan: Plan, field: str) -> str:
    return f"DCGM_FI_{field}{{{plan.gpu_selector}}}" if plan.gpu_selector else f"DCGM_FI_{field}"


# --- Routers --------------------------------------------------------------------------------------


def _routers(plan: Plan, series: _Series) -> Iterator[Alert]:
    """Alerts for a router that does not use the engines of its namespace."""
    place, engines = "namespace", f"and on (namespace) {series.present}"
    rows = (
        (
            "KneewatchRouterUnready", CRITICAL,
            f"sum by ({place}) ({_of_routers(plan, 'ready')}) == 0 {engines} unless on ({place})"
            f" sum by ({place}) (rate({series.tokens}[{series.range}])) > 0",
            "Router has no ready endpoint, while engines can be scraped",
            "Check the selector and port of the InferencePool or of the router's discovery.",
        ),
        (
            "KneewatchRouterHolds", WARNING,
            f"max by ({place}) ({_of_routers(plan, 'queue')}) >= {number(QUEUED_MIN)} {engines}"
            f" < {number(IDLE_KV)} unless on ({place}) {series.waiting} > 0",
            "Router holds {{ $value }} requests while engines are idle",
            "Compare the router's limits with the engines' queues and KV usage; restart the router "
            "if its data is stale.",
        ),
        (
            "KneewatchRouterStale", WARNING,
            f"sum by ({place}) (rate({_of_routers(plan, 'errors')}[{series.range}])) > 0 {engines}",
            "Router cannot read its endpoints' metrics",
            "Read the router's log: metrics port or path, TLS, network policy.",
        ),
    )  # fmt: skip
    for name, severity, expr, summary, action in rows:
        for_s = 300.0 if name == "KneewatchRouterStale" else 2 * plan.settles_s
        yield alert(
            plan, name, severity, expr, for_s,
            f"{summary}{{{{ with $labels.namespace }}}} in {{{{ . }}}}{{{{ end }}}}",
            "Read from the router's own metrics and the engines of its namespace.",
            action,
            "causes/router_fault", kneewatch="observer",
        )  # fmt: skip


def _of_routers(plan: Plan, question: str) -> str:
    """A selector for the metric of each known router that answers a question.

    The production-stack router exports metrics under vLLM's own prefix. It is left out if the
    engines use another prefix.
    """
    names = [name for router in ROUTERS if (name := getattr(router, question))]
    own = plan.prefix == VLLM_PREFIX
    names = [name for name in names if own or not name.startswith(VLLM_PREFIX)]
    return names[0] if len(names) == 1 else f'{{__name__=~"{"|".join(names)}"}}'
