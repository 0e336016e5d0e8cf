"""Causes that lie in LoRA and speculation, as PromQL. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.model import Plan, duration, number, recorded
from kneewatch.dashboards.prometheus.odds import Term, value
from kneewatch.diagnose.causes import (
    drafts,
    features,
)
from kneewatch.diagnose.derived import RECENT_SHARE
from kneewatch.rules.model import Severity


def adapter_thrash(plan: Plan) -> CauseQuery:
    """Requests wait for an adapter's slot."""
    deferred = recorded("waiting_deferred")
    held = duration(features.DEFERRED_HELD_S * plan.scale)
    usage, average = recorded("kv_usage_avg_ratio"), recorded("waiting_deferred_avg")
    swapped = f"{recorded('lora_change_recent_per_s')} * {number(RECENT_SHARE * plan.window_s)}"
    on_and_off = (
        f"(({average} >= {number(features.DEFERRED_AVG)})"
        f" and ({swapped} >= {number(features.SWAPPED_SETS - features.ALMOST)}))"
    )
    return CauseQuery(
        "adapter_thrash",
        f"((min_over_time({deferred}[{held}]) >= 1) or {on_and_off})"
        f" and on ({plan.process}) {plan.dialect.series('lora_requests_info')}",
        (
            Term(average, "1", 1.4),
            Term(
                recorded("lora_change_per_s"), "0.1", 0.6, f"{recorded('lora_change_per_s')} > 0.1"
            ),
            Term(usage, "0.9", -0.8, f"{usage} > 0.9"),
        ),
        0.3,
        ((Severity.WARNING, ""),),
        "LoRA adapters compete for too few slots",
        "Raise --max-loras (memory allowing), lower the adapters' rank, or spread adapters over "
        "replicas.",
        ("2.5", "8.5", "9.3"),
    )


def spec_decode_poor(plan: Plan) -> CauseQuery:
    """Acceptance is surely below what pays."""
    recent = recorded("spec_acceptance_recent_ratio")
    ratio = f"({recent} or {recorded('spec_acceptance_ratio')})"
    per_draft = recorded("spec_accepted_per_draft_tokens")
    running, mean = recorded("running_avg"), recorded("spec_acceptance_ratio")
    poor = number(drafts.PAYS_FROM)
    # Of a draft of accepted over share tokens.
    drafted = f"{number(drafts.DRAFT_COST_RATIO)} * {per_draft} / ({mean} > 0)"
    pays = (
        f"((1 + {per_draft}) / (1 + {drafted}) >= {number(features.PAYS_WELL)})"
        f" and ({mean} < {poor}) and ({running} < {number(features.LARGE_BATCH)})"
        f" unless {_surely_below(mean, recent, plan, RECENT_SHARE)}"
    )
    surely = " or ".join(
        _surely_below(poor, told, plan, share)
        for told, share in ((recent, RECENT_SHARE), (mean, 1))
    )
    return CauseQuery(
        "spec_decode_poor",
        f"({ratio} < {poor}) and ({surely})"
        f" and ({recorded('spec_draft_tokens_per_s')} >= {number(features.SPEC_DRAFTS_MIN_PER_S)})",
        (
            Term(ratio, poor, 2.2, below=True),
            Term(per_draft, "1", 0.6, f"({per_draft} < 1) unless ({pays})", below=True),
            Term(per_draft, None, features.PAYS_LOG_ODDS, pays),
            Term(
                running,
                number(features.LARGE_BATCH),
                0.3,
                f"{running} >= {number(features.LARGE_BATCH / 2)}",
            ),
        ),
        0.0,
        ((Severity.WARNING, f"{running} unless ({pays})"), (Severity.INFO, "")),
        "Speculation does not pay: most drafted tokens are rejected",
        "Disable speculation, draft fewer tokens, or retune the draft.",
        ("6.6", "9.3"),
    )


def _surely_below(bound: str, ratio: str, plan: Plan, share: float) -> str:
    """Where acceptance on this share of the window is below a bound by more than chance."""
    started = f"{number(share * plan.window_s)} * {value('arrival_per_s')}"
    requests = f"({value('running_avg')} + {started})"
    least = f"{number(features.REQUESTS_DIFFER)} / sqrt({requests} > 0)"
    return f"({ratio} + {least} < {bound})"
