"""Hardware faults that a GPU reports: XID, ECC, row remap, NVLink, PCIe. Guide 9.3. Pure.

Used GPU memory is not evidence: vLLM allocates its pool at start-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.causes.availability import stalled_from_s
from kneewatch.diagnose.causes.evidence import Case, Facts
from kneewatch.diagnose.causes.record import cause
from kneewatch.diagnose.deployment.server_state import GpuState
from kneewatch.rules.formatting import plural
from kneewatch.rules.rule import Severity

# --- XID errors -----------------------------------------------------------------------------------

_TABLES = packaged_tables("diagnose.causes", "xids.toml")
ACTIONS: Mapping[str, str] = _TABLES["actions"]
RECOVERY: Mapping[str, str] = _TABLES["recovery"]


class Xid(Struct, frozen=True, forbid_unknown_fields=True):
    """What an XID error number means and what to do about it; the head of xids.toml explains the
    fields."""

    meaning: str
    action: str
    urgent: bool = True
    halts: bool = False


XIDS = {int(code): read_as(table, Xid) for code, table in _TABLES["xids"].items()}


# --- Faults ---------------------------------------------------------------------------------------

LINK_ERRORS_PER_S = 100.0
"""NVLink sends data again if its checksum fails; DCGM reports a fault from this rate on."""

PCIE_REPLAYS_PER_S = 8 / 60
"""DCGM's limit: eight replays a minute."""

GUESS_LOG_ODDS = -0.8
TOGETHER_S = 60.0
"""An XID and a stop of the engine within this time are one event: DCGM reports each 30 s."""

WORKS_AGAIN = (
    "Nothing to do now: the code stays until the driver or its exporter restarts. The kernel log "
    "has its time."
)
WEIGHTS = {Severity.CRITICAL: 2.5, Severity.WARNING: 1.6, Severity.INFO: 0.9}


class Fault(NamedTuple):
    """One fault of a GPU, what to do about it, and the signal that shows it.

    `at_work`: the fault affects the GPU's work now; otherwise it is the trace of an earlier event.
    `dead`: the GPU does no work. An empty `action` means that there is nothing to do.
    """

    signal: str
    value: float
    threshold: float | None
    what: str
    action: str
    severity: Severity
    at_work: bool = True
    dead: bool = False


def gpu_fault(facts: Facts) -> Cause | None:
    """The cause for GPUs that report a hardware fault or no longer answer."""
    faults = [(gpu, fault) for gpu in facts.gpus for fault in _faults(gpu)]
    faults.sort(key=lambda pair: (-pair[1].severity, not pair[1].at_work))
    if not faults and not facts.gpus_lost:
        return None
    severity = Severity.CRITICAL if facts.gpus_lost else faults[0][1].severity
    apart = not facts.gpus_lost and not any(fault.at_work for _, fault in faults)
    lines = [*facts.gpus_lost, *(f"{gpu.name}: {fault.what}" for gpu, fault in faults)]
    more = f" (and {plural(len(lines) - 1, 'more fault')})" if len(lines) > 1 else ""
    lever = "Drain the node and check its kernel log."
    if not facts.gpus_lost:
        gpu, worst = faults[0]
        lever = f"Drain {gpu.node or 'the node'}: {worst.action}." if worst.action else WORKS_AGAIN
    case = Case(
        "gpu_fault",
        f"{lines[0]}{more}. "
        + ("Not known to affect running work." if apart else "This is a hardware fault."),
        lever,
        severity,
        apart=apart,
    )
    for line in facts.gpus_lost:
        case.weigh("gpu_lost", 1.0, None, WEIGHTS[Severity.CRITICAL], line)
    for gpu, fault in faults:
        weight, text = WEIGHTS[fault.severity], f"{gpu.name}: {fault.what}"
        case.weigh(fault.signal, fault.value, fault.threshold, weight, text)
    if _stopped_the_engine(facts):
        return case.close()
    dead = bool(facts.gpus_lost) or any(fault.dead for _, fault in faults)
    return close_of_gpus(case, facts, most=Severity.WARNING if dead else Severity.INFO)


def _stopped_the_engine(facts: Facts) -> bool:
    """Whether the engine is stalled since about the time of an urgent XID: then the GPU is one of
    this server's."""
    stalled_s = facts.streaks_s.get("stalled", 0.0)
    return stalled_s >= stalled_from_s(facts.values) and any(
        seen.since_s is not None and abs(facts.now_s - stalled_s - seen.since_s) <= TOGETHER_S
        for gpu in facts.gpus
        for seen in gpu.xids
        if seen.code in XIDS and XIDS[seen.code].urgent
    )


def close_of_gpus(case: Case, facts: Facts, *, most: Severity = Severity.INFO) -> Cause | None:
    """Close a case about GPUs. Returns its cause, or None if the confidence is too low.

    If kneewatch had to guess which of the node's GPUs this server uses, the confidence is lower,
    the cause's severity is at most `most`, and the cause explains no other cause.
    """
    if facts.gpus_guessed:
        case.severity, case.apart = min(case.severity, most), True
        text = "which of the node's GPUs this server uses is a guess"
        case.weigh("gpu_join", 1.0, None, GUESS_LOG_ODDS, text)
    return case.close()


def _faults(gpu: GpuState) -> Iterator[Fault]:
    yield from _reported(gpu)
    yield from _memory(gpu)
    yield from _links(gpu)


def _reported(gpu: GpuState) -> Iterator[Fault]:
    for seen in gpu.xids:
        xid = XIDS.get(seen.code)
        if xid is None:
            continue
        if xid.halts and seen.worked_since:
            what = f"{xid.meaning} (XID {seen.code}) was reported; it works again"
            code = float(seen.code)
            yield Fault("gpu_xid_last", code, None, what, "", Severity.INFO, at_work=False)
            continue
        old = seen.since_s is None and not xid.halts
        severity = Severity.WARNING if old else Severity.CRITICAL
        since = ", since before this watch" if seen.since_s is None else ""
        yield Fault(
            "gpu_xid_last",
            float(seen.code),
            None,
            f"{xid.meaning} (XID {seen.code}{since})",
            ACTIONS[xid.action],
            severity if xid.urgent else Severity.INFO,
            at_work=xid.urgent and not old,
            dead=xid.halts and not gpu.is_awake,
        )
    code = gpu.get("gpu_recovery_action")
    if code > 0:
        action = RECOVERY.get(str(int(code)), f"take recovery action {code:.0f}")
        what = f"the driver requests: {action}"
        yield Fault("gpu_recovery_action", code, None, what, action, Severity.CRITICAL)


def _memory(gpu: GpuState) -> Iterator[Fault]:
    failed, pending = gpu.get("gpu_row_remap_failures"), gpu.get("gpu_row_remap_pending")
    if failed > 0:
        what = "a memory row could not be remapped"
        signal = "gpu_row_remap_failures"
        yield Fault(signal, failed, None, what, ACTIONS["replace"], Severity.WARNING, at_work=False)
    if pending > 0:
        what = "a memory row is pending a remap"
        signal = "gpu_row_remap_pending"
        yield Fault(signal, pending, None, what, ACTIONS["drained"], Severity.INFO, at_work=False)
    errors = gpu.get("gpu_ecc_uncorrectable")
    if errors > 0:
        rising = gpu.get("gpu_ecc_uncorrectable_per_s") > 0
        what = f"{errors:.0f} uncorrectable memory errors since the driver was loaded"
        yield Fault(
            "gpu_ecc_uncorrectable",
            errors,
            None,
            f"{what}, and rising" if rising else what,
            ACTIONS["reset"],
            Severity.CRITICAL if rising else Severity.WARNING,
            at_work=rising,
        )


def _links(gpu: GpuState) -> Iterator[Fault]:
    errors = gpu.get("gpu_nvlink_error_per_s")
    if errors >= LINK_ERRORS_PER_S:
        yield Fault(
            "gpu_nvlink_error_per_s",
            errors,
            LINK_ERRORS_PER_S,
            f"{errors:.0f} NVLink checksum errors/s",
            ACTIONS["link"],
            Severity.WARNING,
        )
    for signal, severity, how in (
        ("gpu_nvlink_recovery_failed_per_s", Severity.CRITICAL, "was lost and not recovered"),
        ("gpu_nvlink_recovery_per_s", Severity.WARNING, "was lost and recovered"),
    ):
        if gpu.get(signal) > 0:
            yield Fault(
                signal, gpu.get(signal), None, f"an NVLink {how}", ACTIONS["link"], severity
            )
    replays = gpu.get("gpu_pcie_replay_per_s")
    if replays > PCIE_REPLAYS_PER_S:
        yield Fault(
            "gpu_pcie_replay_per_s",
            replays,
            PCIE_REPLAYS_PER_S,
            f"{60 * replays:.0f} PCIe replays/min",
            "reseat the card or its riser, then check the slot",
            Severity.WARNING,
        )


GPU_FAULT = cause("gpu_fault", judge=gpu_fault)
"""Disturbs no baseline: a fault may last for weeks, and its effects are causes of their own."""
