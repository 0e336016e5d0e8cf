"""A GPU with an error of its own: the hardware, not the software. Guide 9.3. Pure.

How much of a GPU's memory is taken is no evidence of anything: vLLM takes its pool at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kneewatch.diagnose.causes.common_conditions import SLOW_GPU
from kneewatch.diagnose.causes.evidence import Case, Cause, Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.gpu.health import DRAINED, LINK, RECOVERY, REPLACE, RESET, XIDS, GpuState
from kneewatch.rules.rule import Severity

LINK_ERRORS_PER_S = 100.0
"""NVLink repeats what fails its checksum; only so many a second matter (a limit of DCGM's)."""

PCIE_REPLAYS_PER_S = 8 / 60
"""Eight a minute are DCGM's limit."""

GUESS_LOG_ODDS = -0.8
WEIGHTS = {Severity.CRITICAL: 2.5, Severity.WARNING: 1.6, Severity.INFO: 0.9}


class Ailment(NamedTuple):
    """One thing that is wrong with a GPU, what to do, and the signal that shows it.

    `at_work`: it bears on what the GPU does now, and is no mark that an old event left.
    """

    signal: str
    value: float
    threshold: float | None
    what: str
    action: str
    severity: Severity
    at_work: bool = True


def gpu_fault(facts: Facts) -> Cause | None:
    """A GPU reports an error of its own, or no longer answers."""
    found = [(gpu, one) for gpu in facts.gpus for one in _ailments(gpu)]
    found.sort(key=lambda pair: (-pair[1].severity, not pair[1].at_work))
    if not found and not facts.gpus_lost:
        return None
    severity = Severity.CRITICAL if facts.gpus_lost else found[0][1].severity
    apart = not facts.gpus_lost and not any(one.at_work for _, one in found)
    said = [*facts.gpus_lost, *(f"{gpu.name}: {one.what}" for gpu, one in found)]
    more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
    lever = "Drain the node and look at its kernel log."
    if not facts.gpus_lost:
        gpu, worst = found[0]
        lever = f"Drain {gpu.node or 'the node'}: {worst.action}."
    case = Case(
        "gpu_fault",
        f"{said[0]}{more}. "
        + ("It slows nothing yet." if apart else "It is the hardware, not the cache or the batch."),
        lever,
        ("9.3",),
        severity,
        apart=apart,
    )
    for line in facts.gpus_lost:
        case.weigh("gpu_lost", 1.0, None, WEIGHTS[Severity.CRITICAL], line)
    for gpu, one in found:
        weight = WEIGHTS[one.severity]
        case.weigh(one.signal, one.value, one.threshold, weight, f"{gpu.name}: {one.what}")
    return close_of_gpus(case, facts)


def close_of_gpus(case: Case, facts: Facts) -> Cause | None:
    """The cause; a note that explains nothing where the GPUs may be another server's."""
    if facts.gpus_guessed:
        case.severity, case.apart = Severity.INFO, True
        text = "which of the node's GPUs are this server's is a guess"
        case.weigh("gpu_join", 1.0, None, GUESS_LOG_ODDS, text)
    return case.close()


def _ailments(gpu: GpuState) -> Iterator[Ailment]:
    yield from _reported(gpu)
    yield from _memory(gpu)
    yield from _links(gpu)


def _reported(gpu: GpuState) -> Iterator[Ailment]:
    for seen in gpu.xids:
        xid = XIDS.get(seen.code)
        if xid is None:
            continue
        old = seen.since_s is None
        severity = Severity.WARNING if old else Severity.CRITICAL
        since = ", since before this watch" if old else ""
        yield Ailment(
            "gpu_xid_last",
            float(seen.code),
            None,
            f"{xid.meaning} (XID {seen.code}{since})",
            xid.action,
            severity if xid.urgent else Severity.INFO,
            at_work=xid.urgent and not old,
        )
    wanted = gpu.get("gpu_recovery_action")
    if wanted > 0:
        action = RECOVERY.get(int(wanted), f"take recovery action {wanted:.0f}")
        what = f"its driver asks to {action}"
        yield Ailment("gpu_recovery_action", wanted, None, what, action, Severity.CRITICAL)


def _memory(gpu: GpuState) -> Iterator[Ailment]:
    failed, pending = gpu.get("gpu_row_remap_failures"), gpu.get("gpu_row_remap_pending")
    if failed > 0:
        what = "a memory row could not be remapped"
        signal = "gpu_row_remap_failures"
        yield Ailment(signal, failed, None, what, REPLACE, Severity.WARNING, at_work=False)
    if pending > 0:
        what = "a memory row waits to be remapped"
        signal = "gpu_row_remap_pending"
        yield Ailment(signal, pending, None, what, DRAINED, Severity.INFO, at_work=False)
    errors = gpu.get("gpu_ecc_uncorrectable")
    if errors > 0:
        rising = gpu.get("gpu_ecc_uncorrectable_per_s") > 0
        what = f"{errors:.0f} uncorrectable memory errors since its driver was loaded"
        yield Ailment(
            "gpu_ecc_uncorrectable",
            errors,
            None,
            f"{what}, and rising" if rising else what,
            RESET,
            Severity.CRITICAL if rising else Severity.WARNING,
            at_work=rising,
        )


def _links(gpu: GpuState) -> Iterator[Ailment]:
    errors = gpu.get("gpu_nvlink_error_per_s")
    if errors >= LINK_ERRORS_PER_S:
        yield Ailment(
            "gpu_nvlink_error_per_s",
            errors,
            LINK_ERRORS_PER_S,
            f"{errors:.0f} NVLink checksum errors/s",
            LINK,
            Severity.WARNING,
        )
    for signal, severity, how in (
        ("gpu_nvlink_recovery_failed_per_s", Severity.CRITICAL, "was lost and not recovered"),
        ("gpu_nvlink_recovery_per_s", Severity.WARNING, "was lost and recovered"),
    ):
        if gpu.get(signal) > 0:
            yield Ailment(signal, gpu.get(signal), None, f"an NVLink {how}", LINK, severity)
    replays = gpu.get("gpu_pcie_replay_per_s")
    if replays > PCIE_REPLAYS_PER_S:
        yield Ailment(
            "gpu_pcie_replay_per_s",
            replays,
            PCIE_REPLAYS_PER_S,
            f"{60 * replays:.0f} PCIe replays/min",
            "reseat the card or its riser, then look at the slot",
            Severity.WARNING,
        )


GPU_FAULT = CauseRecord(
    id="gpu_fault",
    title="GPU fault",
    means="A GPU reports an error of its own, or no longer answers.",
    judge=gpu_fault,
    explains=(*SLOW_GPU, "engine_stalled", "kv_transfer_slow", "gpu_throttled"),
    sidecar="of an engine, whose GPUs no label says: --gpu-join states it. Each GPU by itself has "
    "its alert",
)
"""It moves no baseline: an error may stand for weeks, and what it harms is a cause of its own."""
