"""Lists what could not be judged, grouped for people. The JSON document has the full list. Pure."""

from __future__ import annotations

import re

from kneewatch.collector.engines.engine_kind import ADAPTERS, QUEUE_LIMIT, VLLM, kind_named
from kneewatch.collector.signals.signal import Signal
from kneewatch.collector.signals.table import (
    GPU_SIGNALS,
    HOST_NEEDS,
    ONE_ENGINE,
    RECOMMENDED,
    VLLM_SIGNALS,
    configured,
)
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import NO_STAGE, Verdict
from kneewatch.reports.health import stage_unknown

SHOWN = 6

FEATURES = {
    "speculative decoding": "speculation",
    ADAPTERS: "LoRA",
    "a KV connector": "KV connector",
    f"vLLM 0.32 with {QUEUE_LIMIT} or --max-num-queued-tokens": "admission control",
    RECOMMENDED: "DCGM's recommended fields",
    ONE_ENGINE: "HTTP request counts (single-engine endpoints only)",
    HOST_NEEDS: "process memory (single-engine endpoints only)",
}
"""Names of optional features, by the `needs` text of their signals. For other signals the `needs`
text is the name."""

ALWAYS_ON = "generation_tokens_per_s"
"""A signal that has a value from the second scrape on. From then on, a feature whose signals have
no value is not in use."""

FOLLOWS = {"kv_transfer_drift_ratio": "kv_transfer_mean_s"}
"""Derived signals of optional features, each with a signal of the same feature."""

OPTIONAL = {
    signal.key: signal
    for signal in (
        *VLLM_SIGNALS,
        *configured(ttft_slo_s=1.0, gpus=1, peak_flop_per_s=1.0, peak_bytes_per_s=1.0),
        *GPU_SIGNALS,
    )
    if signal.optional and not re.fullmatch(r"vLLM [0-9.]+ or later", signal.needs)
}

UNSTATED = Profile().unstated
SETTING = re.compile(r"\((\S+)\)$")


def gaps(diagnosis: Verdict, *, shown: int = SHOWN) -> list[str]:
    """Lines that say what could not be judged, and why. At most `shown` lines about signals come
    first, then lines about rules, settings and unused features."""
    if not diagnosis.was_read:
        # The line about every signal repeats the error that the cause reports.
        more = [line for line in diagnosis.unknown if not line.startswith("every signal: ")]
        return [f"everything: {stage_unknown(diagnosis)}", *more]
    reasons: dict[str, list[str]] = {}
    settings: list[str] = []
    for line in diagnosis.unknown:
        key, _, why = line.partition(": ")
        named = SETTING.search(why)
        if UNSTATED.get(key) == why and named:
            settings.append(named[1])
        elif key not in OPTIONAL and not line.startswith(NO_STAGE):
            reasons.setdefault(why, []).append(key)
    lines = [f"{', '.join(keys)}: {why}" for why, keys in reasons.items()]
    if diagnosis.health == "unknown" and diagnosis.values.get(ALWAYS_ON) is None:
        lines.insert(0, "rates and latencies: the window holds one scrape, they need two")
    if len(lines) > shown:
        lines[shown:] = [f"and {len(lines) - shown} more lines (--format json)"]
    lines += _rules(diagnosis)
    if settings:
        lines.append(f"set these for more signals: {', '.join(settings)}")
    unused = not_in_use(diagnosis)
    if unused:
        lines.append(f"not in use on this server: {', '.join(unused)}")
    return lines


def not_in_use(diagnosis: Verdict) -> list[str]:
    """Names of optional features that the server apparently does not use: none of their signals has
    a value."""
    missing = {line.partition(": ")[0] for line in diagnosis.unknown}
    settled = diagnosis.values.get(ALWAYS_ON) is not None
    kind, of_gpus = kind_named(diagnosis.program), {signal.key for signal in GPU_SIGNALS}
    features: dict[str, list[str]] = {}
    for signal in OPTIONAL.values():
        shown = (
            kind is VLLM
            or signal.key in of_gpus
            or not signal.expr.lacking(kind.shows.__contains__)
        )
        if signal.needs and signal.key in diagnosis.values and shown:
            features.setdefault(kind.said(feature(signal)), []).append(signal.key)
    return [
        name
        for name, keys in features.items()
        if all(diagnosis.values[key] is None for key in keys)
        and (settled or not missing.isdisjoint(keys))
    ]


def feature(signal: Signal) -> str:
    """The name of the feature to which an optional signal belongs."""
    return FEATURES.get(signal.needs, signal.needs)


def _rules(diagnosis: Verdict) -> list[str]:
    """Lines about rules that could not be judged although their metric exists, grouped by
    reason."""
    absent = {line.partition(": ")[0] for line in diagnosis.unknown}
    reasons: dict[str, list[str]] = {}
    for finding in diagnosis.findings:
        if finding.state != "unknown" or finding.missing:
            continue
        if FOLLOWS.get(finding.signal) not in absent:
            reasons.setdefault(finding.note or "no value", []).append(finding.rule)
    return [
        f"rule{'s' if len(rules) > 1 else ''} {', '.join(rules)}: {why}"
        for why, rules in reasons.items()
    ]
