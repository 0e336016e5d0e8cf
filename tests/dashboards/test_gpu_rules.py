"""The exported rules about GPUs say what the sidecar says of the same pages, and nothing of what
only looks like trouble."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from kneewatch.collector.exposition import PageParser
from kneewatch.collector.names.dcgm_fields import is_sentinel
from kneewatch.collector.samples import Series
from kneewatch.dashboards.prometheus.causes import cause_groups
from kneewatch.dashboards.prometheus.gpu_series import BLANKS_32, BLANKS_DOUBLE, NO_VALUE_FROM
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, rule_files
from kneewatch.dashboards.prometheus.rule_group import Plan
from kneewatch.diagnose.gpu import GpuMonitor
from kneewatch.rules.facts import recorded
from kneewatch.rules.rule import WORDS, Severity
from tests.collector.dcgm_pages import Pages, body, labels
from tests.dashboards.promtool import Sample, evaluate
from tests.diagnose.situations import CALM, NOW_S
from tests.programs import require

STEP_S, HELD, ENOUGH = 15.0, 4, 7
"""Seconds between pages; how often the last of fewer than enough is repeated: alerts have an
onset."""

FIRING = 'ALERTS{kneewatch="gpu",alertstate="firing"}'
RANKS = {word: int(severity) for severity, word in WORDS.items()}
GPU = labels(0, pod="vllm-0")
OTHER_POD = labels(0, pod="batch-0")
EXPORTED = labels(0, pod="vllm-0", exported=True)
SLICES = labels(0, mig=1, pod="vllm-0"), labels(0, mig=2, pod="vllm-1")
BLANK, BLANK_32 = 9223372036854775794.0, 2147483632.0
SLOW = {"DEV_SM_CLOCK": 990.0, "DEV_GPU_TEMP": 88.0}
MOST = {"DEV_MAX_SM_CLOCK": 1980.0}

At = Mapping[str, float]
NORMAL: At = {}
Story = Sequence[Mapping[str, At]]
"""Pages: what each GPU's labels say, over a healthy busy GPU's fields."""


def still(**own: float) -> Story:
    return [{GPU: own}] * 2


def grows(field: str, per_page: float, start: float = 50.0) -> Story:
    return [{GPU: {field: start + per_page * at}} for at in range(7)]


def bits(mask: int, **own: float) -> Story:
    return still(**{"DEV_CLOCKS_EVENT_REASONS": float(mask), **SLOW, **MOST, **own})


TROUBLE: Mapping[str, Story] = {
    "an XID comes": [{GPU: {}}, {GPU: {}}, {GPU: {"DEV_XID_ERRORS": 79.0}}],
    "an XID comes and the GPU stops": [
        {GPU: {}}, {GPU: {}},
        {GPU: {"DEV_XID_ERRORS": 79.0, "DEV_SM_CLOCK": 0.0, "DEV_POWER_USAGE": 0.0}},
    ],
    "an XID stood there": still(DEV_XID_ERRORS=95.0),
    "an XID that is a note": still(DEV_XID_ERRORS=63.0),
    "an XID behind the next one": [
        {GPU: {}}, {GPU: {"DEV_XID_ERRORS": 48.0}}, {GPU: {"DEV_XID_ERRORS": 45.0}}
    ],
    "memory errors rise": grows("DEV_ECC_DBE_VOL_TOTAL", 1),
    "memory errors stand": grows("DEV_ECC_DBE_VOL_TOTAL", 0),
    "NVLink errors": grows("DEV_NVLINK_ERROR_DL_CRC", 3000),
    "NVLink errors, Ampere": grows("DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 3000),
    "an NVLink is lost": grows("DEV_NVLINK_RECOVERY_FAILED_TOTAL", 1),
    "PCIe replays": grows("DEV_PCIE_REPLAY_COUNTER", 3),
    "a row is not remapped": still(DEV_ROW_REMAP_FAILURE=1.0),
    "a row waits to be remapped": still(DEV_ROW_REMAP_PENDING=1.0),
    "the driver asks for a reboot": still(DEV_GPU_RECOVERY_ACTION=2.0),
    "throttled by heat": bits(0x20),
    "throttled by the board": bits(0x80),
    "throttled by its limit": bits(0x4),
    "by a limit that was lowered": bits(0x4, DEV_SM_CLOCK=1400.0, DEV_ENFORCED_POWER_LIMIT=300.0,
                                        DEV_POWER_USAGE=299.0),
    "by a setting": bits(0x2),
    "by counted seconds of heat": [
        {GPU: {**SLOW, **MOST, "DEV_THERMAL_VIOLATION": 6e9 * at}} for at in range(7)
    ],
    "the default fields only": still(**SLOW),
    "newer names": [{GPU: {"DEV_SM_CLOCK_HERTZ": 990e6, "DEV_SM_MAX_CLOCK_HERTZ": 1980e6}}] * 2,
    "pods share it": [{GPU: {"DEV_PCIE_REPLAY_COUNTER": 3.0 * at},
                       OTHER_POD: {"DEV_PCIE_REPLAY_COUNTER": 3.0 * at}} for at in range(7)],
    "without honorLabels": [{EXPORTED: {"DEV_ROW_REMAP_FAILURE": 1.0}}] * 2,
    "a board of MIG instances": [{key: {**SLOW, **MOST} for key in SLICES}] * 2,
}  # fmt: skip
HARMLESS: Mapping[str, Story] = {
    "a healthy busy GPU": still(),
    "an XID of a program": [{GPU: {}}, {GPU: {"DEV_XID_ERRORS": 43.0}}],
    "the exporter began anew": [
        {GPU: {"DEV_XID_ERRORS": code, "DEV_PCIE_REPLAY_COUNTER": count}}
        for code, count in ((0.0, 900.0), (48.0, 900.0), (0.0, 0.0))
    ],
    "a counter that began anew at nothing": still(DEV_PCIE_REPLAY_COUNTER=0.0),
    "memory is taken": still(DEV_FB_USED=79_900.0, DEV_FB_FREE=100.0),
    "corrected errors": grows("DEV_ECC_SBE_VOL_TOTAL", 5),
    "idle, with low clocks": still(PROF_GR_ENGINE_ACTIVE=0.01, **SLOW, **MOST),
    "no profiling metrics, idle": still(PROF_GR_ENGINE_ACTIVE=BLANK, DEV_GPU_UTIL=1.0, **SLOW),
    "blank fields": still(
        **dict.fromkeys(
            ("DEV_XID_ERRORS", "DEV_ECC_DBE_VOL_TOTAL", "DEV_ROW_REMAP_PENDING",
             "DEV_PCIE_REPLAY_COUNTER", "DEV_GPU_RECOVERY_ACTION", "DEV_SM_CLOCK",
             "DEV_CLOCKS_EVENT_REASONS", "DEV_THERMAL_VIOLATION", "DEV_MEMORY_TEMP"),
            BLANK),
        DEV_ROW_REMAP_FAILURE=BLANK_32,
    ),
    "MIG instances at work": [dict.fromkeys(SLICES, NORMAL)] * 2,
    "a small board at its limit": still(
        DEV_CLOCKS_EVENT_REASONS=4.0, DEV_ENFORCED_POWER_LIMIT=700.0,
        DEV_POWER_MGMT_LIMIT_DEF=700.0, DEV_POWER_USAGE=699.0, **SLOW, **MOST),
}  # fmt: skip


@pytest.fixture(scope="module")
def rules() -> str:
    """The group of the GPUs alone."""
    require("promtool")
    text = rule_files(Plan(interval_s=STEP_S, scrape_s=STEP_S))[RULES_FILE]
    document = yaml.load(text, yaml.CSafeLoader)
    # JSON is YAML.
    return json.dumps({"groups": [g for g in document["groups"] if "gpus" in g["name"]]})


@pytest.fixture(scope="module")
def alerts(rules: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Sample]]:
    """What fires at the end of each story: each is a node's, and all are told at once."""
    stories = [*TROUBLE.items(), *HARMLESS.items()]
    steps = max(len(shown(story)) for _, story in stories)
    series: dict[Series, str] = {}
    for at, (_, story) in enumerate(stories):
        series |= written(shown(story), steps, f"node-{at}")
    answers = evaluate(
        tmp_path_factory.mktemp("gpus"), rules, series, [FIRING], step_s=STEP_S, steps=steps
    )
    return {
        name: [
            sample for sample in answers[FIRING][-1] if label(sample, "Hostname") == f"node-{at}"
        ]
        for at, (name, _) in enumerate(stories)
    }


def shown(story: Story) -> list[Mapping[str, At]]:
    """The pages, energy used all the time; the last of a few is shown for longer."""
    pages = [*story, *[story[-1]] * (HELD if len(story) < ENOUGH else 0)]
    return [
        {who: {"DEV_TOTAL_ENERGY_CONSUMPTION": at, **own} for who, own in page.items()}
        for at, page in enumerate(pages)
    ]


def sidecar(story: Story) -> dict[str, int]:
    """What the sidecar concludes of an engine with these GPUs, and no quiet past."""
    monitor, parse = GpuMonitor(window_s=60), Pages()
    pages = shown(story)
    for at, page in enumerate(pages):
        monitor.take(NOW_S + STEP_S * (at - len(pages) + 1), parse(body(page)))
    reading = monitor.reading(NOW_S)
    values = {**CALM.values, "itl_mean_drift_ratio": None}
    causes = replace(CALM, gpus=tuple(reading.states), values=values).causes()
    return {
        cause.id: int(cause.severity) for cause in causes.values() if cause.id.startswith("gpu_")
    }


def written(pages: Sequence[Mapping[str, At]], steps: int, node: str) -> dict[Series, str]:
    """Pages up to the last step as promtool's series; what a page lacks is stale."""
    values_by_series: dict[Series, list[str]] = {}
    first = steps - len(pages)
    for at, page in enumerate(pages):
        text = body(page).replace("gpu-node-1", node)
        for series, value in PageParser().parse(text).samples():
            values = values_by_series.setdefault(
                series, ["_"] * (first + at) + ["stale"] * (steps - first - at)
            )
            values[first + at] = repr(value)
    return {series: " ".join(values) for series, values in values_by_series.items()}


def label(sample: Sample, name: str) -> str:
    match = re.search(rf'\b{name}="([^"]*)"', sample.labels)
    return match[1] if match else ""


def worst(samples: Sequence[Sample]) -> dict[str, int]:
    severities: dict[str, int] = {}
    for sample in samples:
        cause, rank = label(sample, "cause"), RANKS[label(sample, "severity")]
        severities[cause] = max(rank, severities.get(cause, 0))
    return severities


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_is_told_as_the_sidecar_tells_it(
    name: str, alerts: Mapping[str, list[Sample]]
) -> None:
    expected = sidecar(TROUBLE[name])
    assert expected
    assert worst(alerts[name]) == expected
    assert {label(alert, "gpu") for alert in alerts[name]} == {"0"}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_like_trouble_is_not_told(
    name: str, alerts: Mapping[str, list[Sample]]
) -> None:
    assert sidecar(HARMLESS[name]) == {}
    assert alerts[name] == []


@pytest.mark.parametrize(
    ("story", "namespace", "pod"),
    [
        pytest.param("a row is not remapped", "llm", "vllm-0", id="honorLabels"),
        pytest.param("without honorLabels", "llm", "vllm-0", id="exported labels"),
        pytest.param("a board of MIG instances", "llm", "", id="two pods of a namespace"),
    ],
)
def test_an_alert_names_the_pod_and_its_namespace(
    story: str, namespace: str, pod: str, alerts: Mapping[str, list[Sample]]
) -> None:
    assert {(label(alert, "namespace"), label(alert, "pod")) for alert in alerts[story]} == {
        (namespace, pod)
    }


def test_an_alert_stays_that_of_a_pod_that_has_ended(rules: str, tmp_path: Path) -> None:
    broken = {"DEV_ROW_REMAP_FAILURE": 1.0}
    unused = labels(0)
    pages = [{GPU: broken}] * 4 + [{unused: broken}] * 4
    firing = evaluate(tmp_path, rules, written(pages, 8, "n"), [FIRING], step_s=STEP_S, steps=8)[
        FIRING
    ]
    assert [[label(alert, "pod") for alert in now] for now in firing[4:]] == [["vllm-0"]] * 4


def test_without_an_exporter_there_is_nothing(rules: str, tmp_path: Path) -> None:
    up = {Series("up", (("job", "dcgm"),)): "1 1 1 1"}
    every = '{__name__=~"kneewatch:gpu.*|ALERTS"}'
    assert evaluate(tmp_path, rules, up, [every], step_s=STEP_S, steps=4)[every][-1] == []


def test_a_gpu_that_leaves_its_nodes_page_is_missed_and_a_whole_node_is_not(
    rules: str, tmp_path: Path
) -> None:
    there = (GPU, labels(1), labels(0, host="gpu-node-2"))
    page, left = dict.fromkeys(there, NORMAL), {labels(1): NORMAL}
    series = written([page, page, left, left, left, left], 6, "gpu-node-1")
    firing = evaluate(tmp_path, rules, series, [FIRING], step_s=STEP_S, steps=6)[FIRING][-1]
    assert [(label(alert, "ailment"), label(alert, "UUID")) for alert in firing] == [
        ("gone", "GPU-gpu-node-1-0")
    ]


def test_the_blanks_are_dcgms() -> None:
    for blank in (*BLANKS_32, BLANKS_DOUBLE):
        assert is_sentinel(blank) == (blank != BLANKS_32[1])
    assert is_sentinel(NO_VALUE_FROM, wide=True)
    assert not is_sentinel(BLANKS_32[0] - 1)


def test_the_alert_about_a_pods_gpu_explains_what_follows_from_it_there(tmp_path: Path) -> None:
    require("promtool")
    alone, of_pods = recorded("cause_alone"), recorded("gpu:pod_severity")
    rules = [
        {"record": rule.name, "expr": rule.expr}
        for rule in cause_groups(Plan())[0].rules
        if rule.name in (alone, of_pods)
    ]
    series: dict[Series, str] = {}

    def level(name: str, value: str, **labels: str) -> None:
        series[Series(name, tuple(sorted({"namespace": "n", **labels}.items())))] = f"{value}x20"

    def engine(pod: str, cause: str, severity: Severity) -> None:
        level("kneewatch:cause", f"{int(severity)}+0", pod=pod, cause=cause)

    def gpu(pod: str, severity: str, seen: str = "0+15", at_work: str = "true") -> None:
        board = {"pod": pod, "Hostname": f"node-{pod}", "gpu": "0"}
        alert = {"kneewatch": "gpu", "alertstate": "firing", "severity": severity}
        level("ALERTS", "1+0", **board, **alert, at_work=at_work)
        level("kneewatch:gpu:pod_seen_s", seen, **board)

    for pod in ("faulty", "well", "old", "milder", "moved"):
        engine(pod, "bad_node", Severity.WARNING)
    engine("faulty", "kv_leak", Severity.WARNING)
    engine("milder", "engine_stalled", Severity.CRITICAL)
    gpu("faulty", "critical")
    gpu("old", "warning", at_work="false")
    gpu("milder", "warning")
    gpu("moved", "critical", seen="0+0")
    text = json.dumps({"groups": [{"name": "alone", "rules": rules}]})
    shown = evaluate(tmp_path, text, series, [alone], step_s=STEP_S, steps=21, from_step=20)
    (samples,) = shown[alone][20:]
    pods_and_causes = {
        tuple(label(sample, name) for name in ("pod", "cause")) for sample in samples
    }
    assert pods_and_causes == {
        ("well", "bad_node"),
        ("old", "bad_node"),
        ("moved", "bad_node"),
        ("milder", "engine_stalled"),
        ("faulty", "kv_leak"),
    }
