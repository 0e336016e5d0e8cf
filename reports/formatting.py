"""Numbers, durations, moments and lines for reading, and the list of unknowns in groups. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from datetime import UTC, datetime

from kneewatch.collector.signals.gpu import FULLER, GPU_SIGNALS
from kneewatch.collector.signals.signal import Signal
from kneewatch.collector.signals.vllm import VLLM_SIGNALS, configured
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import NO_STAGE, Diagnosis

WIDTH = 100
"""Lines are at most this long where their words allow it."""


def number(value: float | None) -> str:
    """A number with three significant digits; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """A count with its noun: 1 replica, 2 replicas; `plural_noun` for irregular ones."""
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"


def percent(ratio: float) -> str:
    """A ratio in percent: 0.2%, 4.6%, 98%."""
    scaled = 100 * ratio
    whole = abs(scaled) >= 9.95 or abs(scaled) < 0.05
    return f"{scaled:.0f}%" if whole else f"{round(scaled, 1):g}%"


def duration(seconds: float) -> str:
    """A measured time: 35 ms, 2.5 s, 40 s, 12 min."""
    if abs(seconds) < 0.9995:
        millis = 1000 * seconds
        return f"{millis:.0f} ms" if abs(millis) >= 9.95 else f"{millis:.2g} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else span(seconds)


def quantity(key: str, value: float | None) -> str:
    """A signal's value with the unit that ends its key."""
    if value is None:
        return "-"
    if key.endswith("_ratio_per_s"):
        return f"{percent(value)}/s"
    if key.endswith(("_ratio", "_share")) and 0 <= value <= 1:
        return percent(value)
    if key.endswith("_bytes_per_s"):
        return f"{number(value / 1e9)} GB/s"
    if key.endswith("_per_s"):
        return f"{number(value)}/s"
    return duration(value) if key.endswith("_s") else number(value)


def span(seconds: float) -> str:
    """How long something has lasted: 45 s, 12 min, 3.2 h, 4.5 days."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def clock(t_s: float) -> str:
    """A UTC time of day: 03:07:12."""
    return datetime.fromtimestamp(t_s, tz=UTC).strftime("%H:%M:%S")


def date(t_s: float) -> str:
    """A UTC date: 2026-11-21."""
    return datetime.fromtimestamp(t_s, tz=UTC).strftime("%Y-%m-%d")


def moment(t_s: float, now_s: float) -> str:
    """A UTC time as read at `now_s`: with its date unless that is the same day."""
    day = "" if date(t_s) == date(now_s) else f"{date(t_s)} "
    return f"{day}{clock(t_s)} UTC"


def lasting(since_s: float, now_s: float) -> str:
    """How long something has lasted and since when: for 12 min, since 03:07:12 UTC."""
    if now_s - since_s < 1:
        return f"as of {moment(since_s, now_s)}"
    return f"for {span(now_s - since_s)}, since {moment(since_s, now_s)}"


def printable(text: str) -> str:
    """Text without control characters: names and errors from other machines could contain some."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def wrapped(line: str, *, width: int = WIDTH, indent: int = 0, more: int = 2) -> list[str]:
    """A line wrapped at `width`, continuation lines indented by `more`; words are not broken."""
    return textwrap.wrap(
        printable(line),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + more),
        break_long_words=False,
        break_on_hyphens=False,
    )


def cut(line: str, width: int = WIDTH) -> str:
    """A line cut to `width` characters, with an ellipsis where text was removed."""
    line = printable(line)
    return line if len(line) <= width else line[: width - 1] + "…"


SHOWN = 6

FEATURES = {
    "speculative decoding": "speculation",
    "--enable-lora": "LoRA",
    "a KV connector": "KV connector",
    "vLLM 0.32 with --max-num-queued-reqs or --max-num-queued-tokens": "admission control",
    FULLER: "DCGM's fuller list of fields",
}
"""Names of optional features, by the `needs` text of their signals; others use the text itself."""

ALWAYS_ON = "generation_tokens_per_s"
"""Has a value from the second scrape on. From then on a feature without values is not in use."""

FOLLOWS = {"kv_transfer_drift_ratio": "kv_transfer_mean_s"}
"""Derived signals of a feature, each with a signal of the same feature."""

OPTIONAL = {
    signal.key: signal
    for signal in (
        *VLLM_SIGNALS,
        *configured(ttft_slo_s=1.0, gpus=1, peak_flop_per_s=1.0, peak_bytes_per_s=1.0),
        *GPU_SIGNALS,
    )
    if signal.optional and not re.fullmatch(r"vLLM [0-9.]+ or later", signal.needs)
}

UNSTATED = Profile().unstated()
SETTING = re.compile(r"\((\S+)\)$")


def gaps(diagnosis: Diagnosis, *, shown: int = SHOWN) -> list[str]:
    """Lines that list what could not be judged and why, the worst gap first, at most `shown`."""
    if not diagnosis.was_read:
        # The line about every signal has the error, which the cause says already.
        more = [line for line in diagnosis.unknown if not line.startswith("every signal: ")]
        return [f"anything: {diagnosis.stage_unknown}", *more]
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
        lines.append(f"settings that would add signals: {', '.join(settings)}")
    unused = not_in_use(diagnosis)
    if unused:
        lines.append(f"not in use on this server: {', '.join(unused)}")
    return lines


def not_in_use(diagnosis: Diagnosis) -> list[str]:
    """Names of the optional features without any signal value: the server does not use them."""
    missing = {line.partition(": ")[0] for line in diagnosis.unknown}
    settled = diagnosis.values.get(ALWAYS_ON) is not None
    features: dict[str, list[str]] = {}
    for signal in OPTIONAL.values():
        if signal.key in diagnosis.values:
            features.setdefault(feature(signal), []).append(signal.key)
    return [
        name
        for name, keys in features.items()
        if all(diagnosis.values[key] is None for key in keys)
        and (settled or not missing.isdisjoint(keys))
    ]


def feature(signal: Signal) -> str:
    """The name of the feature that an optional signal belongs to."""
    return FEATURES.get(signal.needs, signal.needs)


def _rules(diagnosis: Diagnosis) -> list[str]:
    """Lines with the rules that could not be judged although their metric exists, by reason."""
    absent = {line.partition(": ")[0] for line in diagnosis.unknown}
    reasons: dict[str, list[str]] = {}
    for finding in diagnosis.findings:
        if finding.state != "unknown" or finding.missing:
            continue
        if FOLLOWS.get(finding.rule.signal) not in absent:
            reasons.setdefault(finding.note or "no value", []).append(finding.rule.id)
    return [f"{_names(rules)}: {why}" for why, rules in reasons.items()]


def _names(rules: Iterable[str]) -> str:
    names = list(rules)
    return f"rule{'s' if len(names) > 1 else ''} {', '.join(names)}"
