"""DCGM's fields and the health signals of each GPU as recording rules. Pure.

A field is recorded once per board; a field of MIG instances, once per instance. Values are in SI
units and have DCGM's older field names, whatever names the exporter uses. If DCGM has no value,
there is no series. A board's series have only the labels of the board, because a GPU that several
pods share is on a page once per pod.
"""

from __future__ import annotations

import re

from kneewatch.collector.names.dcgm_fields import Field, field_table
from kneewatch.collector.signals.expr import BitShare, Dialect
from kneewatch.collector.signals.gpu import DEV, PROF, health_signals
from kneewatch.dashboards.prometheus.alerts import dashboard_annotation, runbook_annotation
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan, Record
from kneewatch.diagnose.causes.record import CLEAR_S, ONSET_S
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.gpu import ENERGY, LOADS, OF_AN_INSTANCE, POWER, XID
from kneewatch.rules.facts import PREFIX, duration, number, recorded
from kneewatch.rules.rule import Severity

GPU_LABELS = ("cluster", "Hostname", "hostname", "gpu", "UUID", "modelName")
"""Labels that identify a board, and the label with its model. An exporter writes either Hostname or
hostname."""

BOARD = ", ".join(GPU_LABELS)
INSTANCE = "GPU_I_ID"
NAME = "GPU {{ $labels.gpu }}{{ if not $labels.gpu }}{{ $labels.UUID }}{{ end }}"
WHERE = "{{ $labels.Hostname }}{{ $labels.hostname }}"
"""A template for the node of a GPU, for annotations."""

USED_BY = (
    "{{ with $labels.pod }}, used by {{ . }}{{ end }}"
    "{{ with $labels.namespace }} in {{ . }}{{ end }}"
)
"""A template for the pod that uses a GPU, for annotations. Empty if the pod is unknown."""

REMEMBERED_S = 3600.0
"""Seconds for which a GPU counts as used by its last pod. If a GPU fault ends the pod, the alert
about the GPU thus keeps the pod's name."""

USED, FREE = DEV + "FB_USED", DEV + "FB_FREE"
BUSY = PROF + "GR_ENGINE_ACTIVE"
CLOCK = DEV + "SM_CLOCK"
SHOWN = (USED, FREE, BUSY, XID, CLOCK, POWER, ENERGY, *LOADS)
"""Fields that are recorded in addition to the health signals, because findings and XIDs need
them."""

NO_VALUE_FROM = 2.0**63
BLANKS_32 = 0x7FFFFFF0, 0x7FFFFFF0 + 16
BLANKS_DOUBLE = 2.0**47
"""DCGM's placeholders for missing values, as they appear on a page
(collector/names/dcgm_fields.py). Real values of fields that are not wide never reach 2^47."""


OWNER = recorded("gpu:pod_seen_s")


def series_of(key: str) -> str:
    """The name of the recorded series of a GPU's health signal."""
    return recorded("gpu:" + key.removeprefix("gpu_"))


def gpu_records(plan: Plan) -> tuple[Record, ...]:
    """Recording rules for fields, bits and health signals. A rule comes after the rules that it
    reads."""
    signals = {signal.key: signal.expr for signal in health_signals(None)}
    dialect = Dialect(plan.range_s, GPU_LABELS, prefix=PREFIX)
    compiled = {key: expr.promql(dialect) for key, expr in signals.items()}
    queries = {key: query for key, query in compiled.items() if query is not None}
    shares = {key: expr for key, expr in signals.items() if isinstance(expr, BitShare)}
    masks = [expr.metric for expr in signals.values() if isinstance(expr, BitShare)]
    read = re.findall(rf"{PREFIX}(DCGM_\w+)", " ".join(queries.values()))
    fields = dict.fromkeys((*read, *masks, *SHOWN))
    window = duration(plan.range_s)
    return (
        *(Record(recorded(name), _cleaned(plan, name)) for name in fields),
        *(Record(_bit(key), _seen(share)) for key, share in shares.items()),
        *(Record(series_of(key), query) for key, query in queries.items()),
        *(Record(series_of(key), f"avg_over_time({_bit(key)}[{window}])") for key in shares),
    )


def owner_record(plan: Plan) -> Record:
    """The recording rule for the pod that uses each board. Its labels are `namespace` and `pod`;
    its value is the Unix time at which the pod was last seen.

    On the exporter's page the pod is in `exported_namespace` and `exported_pod`; with honorLabels,
    in `namespace` and `pod`. If several pods of a namespace share a board, `pod` is missing.
    """
    by_label: list[str] = []
    for name, _ in spellings(CLOCK):
        exported = raw(plan, name, 'exported_pod!=""')
        for label in ("namespace", "pod"):
            exported = f'label_replace({exported}, "{label}", "$1", "exported_{label}", "(.+)")'
        # Without a pod of its own a series has the labels of the exporter's pod.
        plain = raw(plan, name, 'exported_pod="",pod!=""')
        own = f"({plain} unless on (instance, pod) up)"
        by_label += [exported, own]
    used = " or ".join(by_label)
    owners = " or ".join(
        f"({pods} and on ({BOARD}) (count by ({BOARD}) ({pods}) == 1))"
        for labels in ("namespace, pod", "namespace")
        for pods in (f"group by ({BOARD}, {labels}) ({used})",)
    )
    now = f"max by ({BOARD}, namespace, pod) (topk by ({BOARD}) (1, {owners})) * 0 + time()"
    before = f"topk by ({BOARD}) (1, last_over_time({OWNER}[{duration(REMEMBERED_S)}]))"
    lately = f"({before} > time() - {number(REMEMBERED_S)})"
    return Record(OWNER, f"({now}) or ({lately} unless on ({BOARD}) ({now}))")


def gpu_alert(
    plan: Plan,
    cause: str,
    severity: Severity,
    kind: tuple[str, str],
    expr: str,
    *,
    summary: str,
    description: str,
    action: str,
    by: str,
) -> Alert:
    """An alert about a GPU.

    `kind` is the name and value of the label that distinguishes the alerts of a cause. `summary` is
    appended to the GPU's name, node and pod. `by` are labels in addition to those of the GPU.
    """
    name, value = kind
    return Alert(
        name="Kneewatch" + "".join(part.capitalize() for part in cause.split("_")),
        expr=of_owner(expr),
        for_s=ONSET_S * plan.scale,
        keep_s=CLEAR_S * plan.scale,
        labels={"severity": severity.word, "kneewatch": "gpu", "cause": cause, name: value},
        annotations={
            "summary": f"{NAME} of {WHERE}{USED_BY}{summary}",
            "description": description,
            "action": action,
        }
        | runbook_annotation(cause_page(plan.runbooks, cause))
        | dashboard_annotation(plan, "kneewatch-gpus", node="Hostname"),
        by=f"{BOARD}, {by}",
    )


def of_owner(expr: str) -> str:
    """An expression about boards, with the labels of the pod that uses each board added."""
    named = f"({expr}) * on ({BOARD}) group_left (namespace, pod) ({OWNER} * 0 + 1)"
    return f"({named}) or (({expr}) unless on ({BOARD}) {OWNER})"


def raw(plan: Plan, name: str, extra: str = "") -> str:
    """A selector for the exporter's own series."""
    matchers = ",".join(part for part in (plan.gpu_selector, extra) if part)
    return f"{name}{{{matchers}}}" if matchers else name


def spellings(name: str) -> list[tuple[str, float]]:
    """The metric names of a field, the preferred one first. Each has the factor that converts its
    values to the field's unit."""
    names = [(n.rank, text, n.scale) for text, n in field_table().names.items()
             if n.field.name == name]  # fmt: skip
    return [(text, scale) for _, text, scale in sorted(names)]


def _bit(key: str) -> str:
    return series_of(key.removesuffix("_ratio") + "_now")


def _seen(share: BitShare) -> str:
    """A PromQL expression that is 1 if at least one bit of the mask is set now, else 0."""
    mask = recorded(share.metric)
    bits = [1 << at for at in range(share.mask.bit_length()) if share.mask >> at & 1]
    each_bit = " + ".join(f"(floor({mask} / {bit}) % 2)" for bit in bits)
    return f"clamp_max({each_bit}, 1)"


def _cleaned(plan: Plan, name: str) -> str:
    field = field_table().fields[name]
    links = tuple(label for label in field.labels if label == "nvlink")
    own = (INSTANCE,) if name.startswith(OF_AN_INSTANCE) else ()
    by = ", ".join((*GPU_LABELS, *links, *own))
    parts: list[str] = []
    for spelling, scale in spellings(name):
        value = _known(raw(plan, spelling), field, scale)
        if links:  # series of links name their GPU in other labels
            for label, other in (("UUID", "gpu_uuid"), ("modelName", "model_name")):
                value = f'label_replace({value}, "{label}", "$1", "{other}", "(.+)")'
        scaled = value if scale == 1 else f"{number(scale)} * {value}"
        parts.append(f"max by ({by}) ({scaled})")
    return " or ".join(parts)


def _known(series: str, field: Field, scale: float) -> str:
    """A PromQL expression for a field's series. DCGM's placeholders for unknown values are left
    out. NaN is left out too, because no comparison keeps it."""
    if field.wide:
        return f"({series} < {number(NO_VALUE_FROM)})"
    low, high = BLANKS_32
    below = f"({series} < {low})"
    if field.unit == "hertz" and scale == 1:  # clocks pass 2^31 Hz
        return f"({below} or ({series} >= {high} < {number(BLANKS_DOUBLE)}))"
    return below
