"""A GPU with an error of its own, as rules: diagnose/causes/gpu_faults.py and the XIDs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kneewatch.dashboards.prometheus.gpus.series import (
    BOARD,
    CLOCK,
    NAME,
    WHERE,
    each,
    field_of,
    raw,
)
from kneewatch.dashboards.prometheus.model import Alert, Plan, Record
from kneewatch.diagnose.causes.gpu_faults import LINK_ERRORS_PER_S, PCIE_REPLAYS_PER_S
from kneewatch.diagnose.causes.record import CLEAR_S, ONSET_S
from kneewatch.diagnose.gpu_health import XID, XID_COUNTER, XID_IN_WINDOW, XID_KEPT_S
from kneewatch.diagnose.xids import DRAINED, LINK, RECOVERY, REPLACE, RESET, XIDS
from kneewatch.rules.facts import duration, number
from kneewatch.rules.model import Severity

AILMENT = each("ailment")
XID_NOW, XID_NEW, XID_COUNTED = each("xid"), each("xid_new"), each("xid_counted")
XID_SEEN = each("xid_seen")
LOST_S = 3600.0
"""A GPU that its node's page had within this and no longer has is missed."""

PCIE_ACTION = "reseat the card or its riser, then look at the slot"
LOST_ACTION = "look at its kernel log (XID 79) and at nvidia-smi -L"


@dataclass(frozen=True, slots=True)
class Ailing:
    """One thing that is wrong with a GPU where `when` holds. `at_work`: it bears on what the GPU
    does now, and is no mark that an old event left."""

    id: str
    when: str
    what: str
    action: str
    severity: Severity
    at_work: bool = True


def fault_records(plan: Plan) -> tuple[Record, ...]:
    """The XIDs seen, and a series for each thing that is wrong with a GPU."""
    last, kept = field_of(XID), duration(XID_KEPT_S)
    known = _codes(XIDS)
    shown = f'{XID_NOW}{{xid=~"{known}"}}'
    changed = f"changes({last}[{duration(plan.window_s)}]) > 0"
    return (
        Record(XID_NOW, f'count_values by ({BOARD}) ("xid", {last})'),
        # It is new for as long as it stays the last one; at the first look it is old.
        Record(XID_NEW, f"({shown} and on ({BOARD}) ({changed})) or ({shown} and {XID_NEW})"),
        Record(XID_COUNTED, _counted(plan, known)),
        Record(
            XID_SEEN,
            f"(last_over_time({XID_NEW}[{kept}]) unless on ({BOARD}) ({last} == 0))"
            f" or last_over_time({XID_COUNTED}[{kept}])",
        ),
        *(
            Record(
                AILMENT,
                one.when,
                {
                    "ailment": one.id,
                    "severity": one.severity.word,
                    "at_work": str(one.at_work).lower(),
                },
            )
            for one in (*_by_xid(), *_by_field())
        ),
    )


def fault_alerts(plan: Plan) -> tuple[Alert, ...]:
    """An alert for each thing that may be wrong."""
    return tuple(_alert(plan, one) for one in (*_by_xid(), *_by_field()))


def _counted(plan: Plan, codes: str) -> str:
    """XIDs of the window, where the exporter counts them by number."""
    window, only = duration(plan.window_s), f'xid=~"{codes}"'
    rising = f"rate({raw(plan, XID_COUNTER, only)}[{window}])"
    there = raw(plan, XID_IN_WINDOW, only)
    by = f"max by ({BOARD}, xid)"
    return f"({by} ({rising}) > 0) or ({by} ({there}) > 0)"


def _by_xid() -> tuple[Ailing, ...]:
    """XIDs by how grave they are: those that came, those that stood there at the first look."""
    urgent = _codes(code for code, xid in XIDS.items() if xid.urgent)
    others = _codes(code for code, xid in XIDS.items() if not xid.urgent)
    seen, now = f'{XID_SEEN}{{xid=~"{urgent}"}}', f'{XID_NOW}{{xid=~"{urgent}"}}'
    note = f'{XID_SEEN}{{xid=~"{others}"}} or {XID_NOW}{{xid=~"{others}"}}'
    return (
        Ailing("xid", seen, _xid_text(urgent=True), _xid_action(urgent=True), Severity.CRITICAL),
        Ailing("xid_old", f"{now} unless {seen}",
               f"{_xid_text(urgent=True)}, since before Prometheus looked",
               _xid_action(urgent=True), Severity.WARNING, False),
        Ailing("xid_note", note, _xid_text(urgent=False), _xid_action(urgent=False),
               Severity.INFO, False),
    )  # fmt: skip


def _xid_text(*, urgent: bool) -> str:
    meant = {str(code): xid.meaning for code, xid in XIDS.items() if xid.urgent == urgent}
    return _chosen("$labels.xid", meant) + " (XID {{ $labels.xid }})"


def _xid_action(*, urgent: bool) -> str:
    wanted = {str(code): xid.action for code, xid in XIDS.items() if xid.urgent == urgent}
    return _chosen("$labels.xid", wanted)


def _by_field() -> tuple[Ailing, ...]:
    ecc, rising = each("gpu_ecc_uncorrectable"), f"({each('gpu_ecc_uncorrectable_per_s')} > 0)"
    errors = "uncorrectable memory errors since its driver was loaded"
    asked = _chosen('printf "%.0f" $value', {str(code): text for code, text in RECOVERY.items()})
    here, node = field_of(CLOCK), "cluster, Hostname, hostname"
    before = f"last_over_time({here}[{duration(LOST_S)}])"
    return (
        Ailing("recovery_wanted", f"{each('gpu_recovery_action')} > 0",
               "its driver asks for a recovery", asked, Severity.CRITICAL),
        Ailing("row_remap_failed", f"{each('gpu_row_remap_failures')} > 0",
               "a memory row could not be remapped", REPLACE, Severity.WARNING, False),
        Ailing("row_remap_pending", f"{each('gpu_row_remap_pending')} > 0",
               "a memory row waits to be remapped", DRAINED, Severity.INFO, False),
        Ailing("ecc_rising", f"({ecc} > 0) and {rising}",
               f"{errors}, and rising", RESET, Severity.CRITICAL),
        Ailing("ecc", f"({ecc} > 0) unless {rising}", errors, RESET, Severity.WARNING, False),
        Ailing("nvlink_errors", f"{each('gpu_nvlink_error_per_s')} >= {number(LINK_ERRORS_PER_S)}",
               "NVLink checksum errors", LINK, Severity.WARNING),
        Ailing("nvlink_lost", f"{each('gpu_nvlink_recovery_failed_per_s')} > 0",
               "an NVLink was lost and not recovered", LINK, Severity.CRITICAL),
        Ailing("nvlink_recovered", f"{each('gpu_nvlink_recovery_per_s')} > 0",
               "an NVLink was lost and recovered", LINK, Severity.WARNING),
        Ailing("pcie_replays",
               f"{each('gpu_pcie_replay_per_s')} > {number(PCIE_REPLAYS_PER_S)}",
               "PCIe replays", PCIE_ACTION, Severity.WARNING),
        # A node that went altogether was scaled down or is down: other alerts are there for it.
        Ailing("gone", f"({before} unless {here}) and on ({node}) {here}",
               "it is no longer on its node's page, and others are", LOST_ACTION,
               Severity.WARNING),
    )  # fmt: skip


def _alert(plan: Plan, one: Ailing) -> Alert:
    return Alert(
        name="KneewatchGpuFault",
        expr=f'{AILMENT}{{ailment="{one.id}"}}',
        for_s=ONSET_S * plan.scale,
        keep_s=CLEAR_S * plan.scale,
        labels={
            "severity": one.severity.word,
            "kneewatch": "gpu",
            "cause": "gpu_fault",
            "ailment": one.id,
        },
        annotations={
            "summary": f"{NAME} of {WHERE}: {one.what}",
            "description": f"{one.id}: {{{{ $value | humanize }}}}. It is the hardware, not the "
            "cache or the batch.",
            "action": f"Drain {WHERE}: {one.action}.",
            "guide": "9.3",
        },
        by=f"{BOARD}, xid, ailment",
    )


def _codes(codes: Iterable[int]) -> str:
    return "|".join(str(code) for code in codes)


def _chosen(what: str, texts: Mapping[str, str]) -> str:
    """A template that says the text of what stands there."""
    cases = [f'if eq ({what}) "{key}" }}}}{text}' for key, text in texts.items()]
    return "{{ " + "{{ else ".join(cases) + "{{ end }}"
