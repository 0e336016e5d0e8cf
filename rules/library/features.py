"""Speculation, adapters, KV transfer: what a server has only when it was asked for. Pure."""

from __future__ import annotations

from kneewatch.rules.baseline import ITL, LOAD, TRANSFER, TTFT
from kneewatch.rules.rule import Bound, Guard, Rule, Severity

RULES = (
    Rule(
        id="SPEC-ACCEPT",
        signal="spec_acceptance_ratio",
        bounds=(
            Bound(Severity.INFO, 0.60, "guide 9.3: target above 60 %"),
            Bound(Severity.WARNING, 0.50, "guide 9.3: below 50 %"),
        ),
        below=True,
        summary="The model rejects most of what is drafted",
        advice="Disable speculation, shorten the draft or retune it to the traffic.",
        guide=("6.6", "9.3"),
        for_s=10.0,
        guards=(Guard("spec_draft_tokens_per_s", 5.0),),
        moves=(ITL,),
    ),
    Rule(
        id="LORA-WAIT",
        signal="waiting_deferred_min",
        bounds=(Bound(Severity.WARNING, 0.5, "kneewatch: held back through the whole window"),),
        summary="Requests are held back for an adapter slot",
        advice="Raise --max-loras (or lower the adapters' rank), or spread adapters over replicas.",
        guide=("2.5", "9.3"),
        for_s=10.0,
        guards=(Guard("lora_max", 1.0),),
        moves=(
            TTFT,
            LOAD,
        ),
    ),
    Rule(
        id="LORA-CHANGE",
        signal="lora_change_per_s",
        bounds=(Bound(Severity.INFO, 0.2, "guide 9.3: adapter eviction near zero"),),
        summary="The set of running adapters keeps changing",
        advice="Watch TTFT by adapter; raise --max-loras when requests wait for it.",
        guide=("2.5", "9.3"),
        for_s=30.0,
        guards=(Guard("lora_max", 1.0), Guard("waiting_deferred_avg", 1.0)),
    ),
    Rule(
        id="XFER-FAIL",
        signal="kv_transfer_failed_per_s",
        bounds=(Bound(Severity.WARNING, 0.0, "kneewatch: a failed transfer is recomputed"),),
        summary="KV transfers between nodes fail",
        advice="Look at the network and at the peer's log before anything else.",
        guide=("7.7",),
        moves=(
            TRANSFER,
            TTFT,
        ),
    ),
    Rule(
        id="XFER-SLOW",
        signal="kv_transfer_drift_ratio",
        bounds=(Bound(Severity.WARNING, 3.0, "kneewatch: three times the quiet baseline"),),
        summary="KV transfers take much longer than before",
        advice="Look at network or PCIe utilization: the data path, not the GPU.",
        guide=("7.7",),
        for_s=30.0,
        moves=(
            TRANSFER,
            TTFT,
        ),
    ),
)
