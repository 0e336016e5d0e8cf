"""Recording rules and alerts for faulty GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from kneewatch.dashboards.prometheus.gpu_series import (
    BOARD,
    CLOCK,
    WHERE,
    gpu_alert,
    raw,
    series_of,
)
from kneewatch.dashboards.prometheus.rule_group import Alert, Plan, Record
from kneewatch.diagnose.causes.gpu_faults import LINK_ERRORS_PER_S, PCIE_REPLAYS_PER_S, WORKS_AGAIN
from kneewatch.diagnose.gpu import (
    DRAINED,
    ENERGY,
    LINK,
    LOADS,
    RECOVERY,
    REPLACE,
    RESET,
    XID,
    XID_COUNTER,
    XID_IN_WINDOW,
    XID_KEPT_S,
    XIDS,
)
from kneewatch.diagnose.gpu import POWER as POWER_USAGE
from kneewatch.rules.facts import duration, number, recorded
from kneewatch.rules.rule import Severity

AILMENT = series_of("ailment")
XID_NOW = series_of("xid")
XID_NEW = series_of("xid_new")
XID_COUNTED = series_of("xid_counted")
XID_SEEN = series_of("xid_seen")
XID_WORKED = series_of("xid_worked")
LOST_S = 3600.0
"""Seconds after which a GPU that disappeared from its node's page no longer counts as missing."""

PCIE_ACTION = "reseat the card or its riser, then check the slot"
LOST_ACTION = "check its kernel log (XID 79) and nvidia-smi -L"


class GpuFault(Struct, frozen=True):
    """A kind of GPU fault. A GPU has it where the PromQL condition `when` holds. `at_work`: it
    affects current work; otherwise it is the trace of an old event."""

    id: str
    when: str
    what: str
    action: str
    severity: Severity
    at_work: bool = True


def fault_records(plan: Plan) -> tuple[Record, ...]:
    """Recording rules for XIDs and for each kind of fault."""
    last, kept = recorded(XID), duration(XID_KEPT_S)
    codes = _codes(XIDS)
    shown = f'{XID_NOW}{{xid=~"{codes}"}}'
    changed = f"changes({last}[{duration(plan.range_s)}]) > 0"
    return (
        Record(XID_NOW, f'count_values by ({BOARD}) ("xid", {last})'),
        # An XID is new until another one replaces it; one that the first scrape shows is old.
        Record(XID_NEW, f"({shown} and on ({BOARD}) ({changed})) or ({shown} and {XID_NEW})"),
        Record(XID_COUNTED, _counted(plan, codes)),
        Record(
            XID_SEEN,
            f"(last_over_time({XID_NEW}[{kept}]) unless on ({BOARD}) ({last} == 0))"
            f" or last_over_time({XID_COUNTED}[{kept}])",
        ),
        Record(XID_WORKED, _worked(plan)),
        *(
            Record(
                AILMENT,
                fault.when,
                {
                    "ailment": fault.id,
                    "severity": fault.severity.word,
                    "at_work": str(fault.at_work).lower(),
                },
            )
            for fault in (*_by_xid(), *_by_field())
        ),
    )


def fault_alerts(plan: Plan) -> tuple[Alert, ...]:
    """One alert per kind of fault."""
    return tuple(_fault_alert(plan, fault) for fault in (*_by_xid(), *_by_field()))


def _counted(plan: Plan, codes: str) -> str:
    """A PromQL expression for XIDs within the window, for exporters that have a counter per XID."""
    window, only = duration(plan.range_s), f'xid=~"{codes}"'
    rising = f"rate({raw(plan, XID_COUNTER, only)}[{window}])"
    there = raw(plan, XID_IN_WINDOW, only)
    by = f"max by ({BOARD}, xid)"
    return f"({by} ({rising}) > 0) or ({by} ({there}) > 0)"


def _worked(plan: Plan) -> str:
    """A PromQL expression for XIDs after which the GPU still works. Such XIDs normally halt a GPU,
    but this GPU is awake and has been under load since (see diagnose/gpu.py)."""
    xid = f'{{xid=~"{_codes(code for code, xid in XIDS.items() if xid.halts)}"}}'
    halting = f"({XID_SEEN}{xid} or {XID_NOW}{xid})"
    powered = f"({recorded(CLOCK)} > 0 and on ({BOARD}) {recorded(POWER_USAGE)} > 0)"
    frozen = f"changes({recorded(ENERGY)}[{duration(plan.range_s)}]) == 0"
    loaded = " or ".join(f"{recorded(load)} > 0" for load in LOADS)
    return (
        f"({halting} and on ({BOARD}) ({powered} unless on ({BOARD}) {frozen}))"
        f" and on ({BOARD}, xid) ({XID_WORKED} or ({halting} and on ({BOARD}) ({loaded})))"
    )


def _by_xid() -> tuple[GpuFault, ...]:
    """The XID faults, by urgency. The order is: new XIDs and XIDs that halt a GPU, XIDs that
    were present at the first scrape, XIDs that are only notes, and XIDs after which the GPU
    works again."""
    urgent = _codes(code for code, xid in XIDS.items() if xid.urgent)
    halting = _codes(code for code, xid in XIDS.items() if xid.halts)
    running = _codes(code for code, xid in XIDS.items() if xid.urgent and not xid.halts)
    others = _codes(code for code, xid in XIDS.items() if not xid.urgent)
    seen = f'{XID_SEEN}{{xid=~"{urgent}"}}'
    at_work = f'({seen} or {XID_NOW}{{xid=~"{halting}"}}) unless on ({BOARD}, xid) {XID_WORKED}'
    now = f'{XID_NOW}{{xid=~"{running}"}}'
    note = f'{XID_SEEN}{{xid=~"{others}"}} or {XID_NOW}{{xid=~"{others}"}}'
    return (
        GpuFault("xid", at_work, _xid_text(urgent=True), _xid_action(urgent=True),
                 Severity.CRITICAL),
        GpuFault("xid_old", f"{now} unless {seen}",
                 f"{_xid_text(urgent=True)}, already present when Prometheus first scraped it",
                 _xid_action(urgent=True), Severity.WARNING, False),
        GpuFault("xid_note", note, _xid_text(urgent=False), _xid_action(urgent=False),
                 Severity.INFO, False),
        GpuFault("xid_worked", XID_WORKED,
                 f"{_xid_text(urgent=True)} was reported; the GPU works again", "",
                 Severity.INFO, False),
    )  # fmt: skip


def _xid_text(*, urgent: bool) -> str:
    meanings = {str(code): xid.meaning for code, xid in XIDS.items() if xid.urgent == urgent}
    return _chosen("$labels.xid", meanings) + " (XID {{ $labels.xid }})"


def _xid_action(*, urgent: bool) -> str:
    actions = {str(code): xid.action for code, xid in XIDS.items() if xid.urgent == urgent}
    return _chosen("$labels.xid", actions)


def _by_field() -> tuple[GpuFault, ...]:
    ecc = series_of("gpu_ecc_uncorrectable")
    rising = f"({series_of('gpu_ecc_uncorrectable_per_s')} > 0)"
    errors = "uncorrectable memory errors since the driver was loaded"
    repairs = _chosen('printf "%.0f" $value', {str(code): text for code, text in RECOVERY.items()})
    here, node = recorded(CLOCK), "cluster, Hostname, hostname"
    before = f"last_over_time({here}[{duration(LOST_S)}])"
    return (
        GpuFault("recovery_wanted", f"{series_of('gpu_recovery_action')} > 0",
                 "the driver requests a recovery", repairs, Severity.CRITICAL),
        GpuFault("row_remap_failed", f"{series_of('gpu_row_remap_failures')} > 0",
                 "a memory row could not be remapped", REPLACE, Severity.WARNING, False),
        GpuFault("row_remap_pending", f"{series_of('gpu_row_remap_pending')} > 0",
                 "a memory row is pending remapping", DRAINED, Severity.INFO, False),
        GpuFault("ecc_rising", f"({ecc} > 0) and {rising}",
                 f"{errors}, rising", RESET, Severity.CRITICAL),
        GpuFault("ecc", f"({ecc} > 0) unless {rising}", errors, RESET, Severity.WARNING, False),
        GpuFault("nvlink_errors",
                 f"{series_of('gpu_nvlink_error_per_s')} >= {number(LINK_ERRORS_PER_S)}",
                 "NVLink checksum errors", LINK, Severity.WARNING),
        GpuFault("nvlink_lost", f"{series_of('gpu_nvlink_recovery_failed_per_s')} > 0",
                 "an NVLink was lost and not recovered", LINK, Severity.CRITICAL),
        GpuFault("nvlink_recovered", f"{series_of('gpu_nvlink_recovery_per_s')} > 0",
                 "an NVLink was lost and recovered", LINK, Severity.WARNING),
        GpuFault("pcie_replays",
                 f"{series_of('gpu_pcie_replay_per_s')} > {number(PCIE_REPLAYS_PER_S)}",
                 "PCIe replays", PCIE_ACTION, Severity.WARNING),
        # A whole node that is missing was scaled down or is down; other alerts cover that.
        GpuFault("gone", f"({before} unless {here}) and on ({node}) {here}",
                 "missing from its node's page, which still has other GPUs", LOST_ACTION,
                 Severity.WARNING),
    )  # fmt: skip


def _fault_alert(plan: Plan, fault: GpuFault) -> Alert:
    return gpu_alert(
        plan,
        "gpu_fault",
        fault.severity,
        ("ailment", fault.id),
        f'{AILMENT}{{ailment="{fault.id}"}}',
        summary=f": {fault.what}",
        description="A hardware error, not a problem of the KV cache or the batch "
        f"({fault.id}: {{{{ $value | humanize }}}}).",
        action=f"Drain {WHERE}: {fault.action}." if fault.action else WORKS_AGAIN,
        by="xid, ailment",
    )


def _codes(codes: Iterable[int]) -> str:
    return "|".join(str(code) for code in codes)


def _chosen(what: str, texts: Mapping[str, str]) -> str:
    """A Go template that prints the text in `texts` for the value of `what`."""
    cases = [f'if eq ({what}) "{key}" }}}}{text}' for key, text in texts.items()]
    return "{{ " + "{{ else ".join(cases) + "{{ end }}"
