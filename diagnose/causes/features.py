"""Causes in what a server has only when asked: speculation, adapters, KV transfer. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.rules.model import Severity

SPEC_POOR_BELOW = 0.5
SPEC_DRAFTS_MIN_PER_S = 5.0
LARGE_BATCH = 32.0
DEFERRED_HELD_S = 10.0
TRANSFER_SHARE = 0.3
TRANSFER_DRIFT = 3.0


def spec_decode_poor(facts: Facts) -> Cause | None:
    """Fewer than half of the drafted tokens are accepted."""
    ratio = facts.recent.get("spec_acceptance_ratio")
    if ratio is None:
        ratio = facts.values.get("spec_acceptance_ratio")
    drafts_per_s = facts.get("spec_draft_tokens_per_s")
    if ratio is None or ratio >= SPEC_POOR_BELOW or drafts_per_s < SPEC_DRAFTS_MIN_PER_S:
        return None
    case = Case(
        "spec_decode_poor",
        f"Speculation does not pay: the model accepts {100 * ratio:.0f} % of the drafted tokens.",
        "Disable speculation (drop --speculative-config), draft fewer tokens, or retune the draft.",
        ("6.6", "9.3"),
        Severity.WARNING,
        log_odds=0.0,
    )
    case.weigh(
        "spec_acceptance_ratio",
        ratio,
        SPEC_POOR_BELOW,
        2.2,
        f"{100 * ratio:.0f} % of {drafts_per_s:.0f} drafted tokens a second are accepted",
        below=True,
    )
    per_draft = facts.values.get("spec_accepted_per_draft_tokens")
    if per_draft is not None and per_draft < 1:
        case.weigh(
            "spec_accepted_per_draft_tokens",
            per_draft,
            1.0,
            0.6,
            f"{per_draft:.2f} accepted tokens for each verification",
            below=True,
        )
    running = facts.get("running_avg")
    if running >= LARGE_BATCH / 2:
        case.weigh(
            "running_avg",
            running,
            LARGE_BATCH,
            0.3,
            f"batch of {running:.0f}: verification costs grow",
        )
    return case.close()


def adapter_thrash(facts: Facts) -> Cause | None:
    """LoRA adapters compete for too few slots: requests are held back though there is capacity."""
    slots = facts.values.get("lora_max")
    deferred = facts.get("waiting_deferred")
    if slots is None or not facts.held("deferred", DEFERRED_HELD_S):
        return None
    average = facts.get("waiting_deferred_avg")
    case = Case(
        "adapter_thrash",
        f"Adapters compete for {slots:.0f} slot{'s' if slots != 1 else ''}: {deferred:.0f} "
        "requests "
        "are held back while the batch has room.",
        "Raise --max-loras (memory allowing), lower the adapters' rank, or spread adapters over "
        "replicas.",
        ("2.5", "8.5", "9.3"),
        Severity.WARNING,
        log_odds=0.3,
    )
    case.weigh(
        "waiting_deferred", average, 1.0, 1.4, f"{average:.1f} requests are held back on average"
    )
    changes = facts.get("lora_change_per_s")
    if changes > 0.1:
        case.weigh("lora_change_per_s", changes, 0.1, 0.6, "the running adapters keep changing")
    running = facts.values.get("lora_running")
    if running is not None and running >= slots:
        case.weigh("lora_running", running, slots, 0.6, "all adapter slots are taken")
    usage = facts.get("kv_usage_avg_ratio")
    if usage > 0.9:
        case.weigh("kv_usage_avg_ratio", usage, 0.9, -0.8, "the KV cache is full as well")
    return case.close()


def kv_transfer_slow(facts: Facts) -> Cause | None:
    """KV movement between nodes or tiers is the wait."""
    mean_s, ttft_s = facts.values.get("kv_transfer_mean_s"), facts.get("ttft_mean_s")
    quiet_s = facts.baseline.get("kv_transfer_mean_s")
    failed_per_s = facts.get("kv_transfer_failed_per_s")
    fetching = facts.held("fetching", DEFERRED_HELD_S)
    share = mean_s / ttft_s if mean_s is not None and ttft_s > 0 else 0.0
    drift = mean_s / quiet_s if mean_s is not None and quiet_s else 0.0
    slow = share >= TRANSFER_SHARE or drift >= TRANSFER_DRIFT
    if not (slow or failed_per_s > 0 or fetching):
        return None
    case = Case(
        "kv_transfer_slow",
        "Requests wait for KV blocks to arrive from another node or tier.",
        "Look at the network, RDMA or PCIe path and the peer's log: it is the data path, not "
        "the GPU.",
        ("6.5", "7.7"),
        Severity.WARNING,
        log_odds=-0.3,
    )
    if share >= TRANSFER_SHARE:
        case.weigh(
            "kv_transfer_mean_s",
            share,
            TRANSFER_SHARE,
            1.2,
            f"a transfer takes {100 * share:.0f} % of TTFT",
        )
    if drift >= TRANSFER_DRIFT:
        case.weigh(
            "kv_transfer_mean_s",
            drift,
            TRANSFER_DRIFT,
            1.5,
            f"transfers take {drift:.1f} times their quiet mean",
        )
    if failed_per_s > 0:
        case.weigh(
            "kv_transfer_failed_per_s", failed_per_s, 0.0, 1.5, "transfers fail and are repeated"
        )
    if fetching:
        waiting = facts.get("kv_fetch_waiting")
        case.weigh("kv_fetch_waiting", waiting, 1.0, 1.2, f"{waiting:.0f} requests wait for KV")
    return case.close()
