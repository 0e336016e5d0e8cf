"""Rules of optional features: speculative decoding, LoRA adapters, KV transfers. Pure."""

from __future__ import annotations

from kneewatch.rules.baseline import ITL, LOAD, TRANSFER, TTFT
from kneewatch.rules.rule import Bound, Guard, Rule, Severity

RULES = (
    Rule(
        id="SPEC-ACCEPT",
        signal="spec_acceptance_ratio",
        bounds=(
            Bound(
                Severity.INFO,
                0.60,
                "guide 9.3: target above 60 %; whether less pays is decided by its estimated gain",
            ),
        ),
        below=True,
        summary="Few draft tokens are accepted",
        advice="Retune the draft or draft fewer tokens; spec_decode_poor says whether it pays.",
        guide=("6.6", "9.3"),
        for_s=10.0,
        guards=(Guard("spec_draft_tokens_per_s", 5.0),),
        moves=(ITL,),
    ),
    Rule(
        id="LORA-WAIT",
        signal="waiting_deferred_min",
        bounds=(Bound(Severity.WARNING, 0.5, "kneewatch: waiting through the whole window"),),
        summary="Requests wait for a LoRA adapter slot",
        advice="Raise --max-loras, lower the adapters' rank, or spread adapters over replicas.",
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
        summary="The set of running LoRA adapters keeps changing",
        advice="Watch TTFT by adapter; raise --max-loras if requests wait for a slot.",
        guide=("2.5", "9.3"),
        for_s=30.0,
        guards=(Guard("lora_max", 1.0), Guard("waiting_deferred_avg", 1.0)),
    ),
    Rule(
        id="XFER-FAIL",
        signal="kv_transfer_failed_per_s",
        bounds=(Bound(Severity.WARNING, 0.0, "kneewatch: a failed transfer is recomputed"),),
        summary="KV transfers fail",
        advice="Check the network and the peer's log first.",
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
        summary="KV transfers are slower than usual",
        advice="Check network or PCIe utilization: the data path is slow, not the GPU.",
        guide=("7.7",),
        for_s=30.0,
        moves=(
            TRANSFER,
            TTFT,
        ),
    ),
)
