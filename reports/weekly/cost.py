"""A tier's cost, output and idle hours (guide 9.1 step 12, 9.2). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.reports.formatting import plural
from kneewatch.reports.weekly import measures as m
from kneewatch.reports.weekly.advice import live
from kneewatch.reports.weekly.figures import DOWN, UP, Trend
from kneewatch.reports.weekly.hours import HOUR_S
from kneewatch.reports.weekly.knee import Curve
from kneewatch.reports.weekly.observed import Recommended, Span, TierObserved
from kneewatch.reports.weekly.tier_sections import Saving, TierMoney, TierSize
from kneewatch.reports.weekly.trends import Measure, Of, TierPeriod, trend, unknown

HOURS_PER_MONTH = 730.0
"""A twelfth of a year."""

NO_GPUS = "number of GPUs per engine not set (gpus, or tensor_parallel)"
NO_PRICE = "no price set (usd_per_gpu_hour), and the GPU is unknown (gpu)"
NO_MEMORY = "the GPU is unknown (gpu), or the number of GPUs per engine (gpus)"
NO_TARGET = "no TTFT target set (slo.ttft_p99_s)"
NO_CURVE = "no GPU source, and the capacity of an engine is unknown"
SCALE_DOWN = "scale-down"


def money(
    tier: TierObserved,
    size: TierSize,
    knee: Curve | None,
    now: TierPeriod | None,
    before: TierPeriod | None,
    recommended: Sequence[Recommended],
) -> TierMoney:
    """The tier's bill over the period."""
    gpus, price = tier.stated.gpus, tier.stated.usd_per_gpu_hour
    missing = NO_GPUS if gpus is None else NO_PRICE if price is None else ""
    whole = now.whole if now is not None else Span()
    hours = None if gpus is None else whole.engine_s / HOUR_S * gpus
    idle = None if gpus is None else whole.idle_s / HOUR_S * gpus
    rate = None if gpus is None or price is None else gpus * price
    used, basis = _utilization(tier, knee, now, before)
    return TierMoney(
        tier=tier.id,
        gpus=size.gpus_present,
        gpu_hours=hours,
        usd_per_gpu_hour=price,
        price_source=tier.stated.price_source,
        usd=trend(Measure("usd", "cost", "usd", _usd(rate), missing=missing), now, before),
        tokens_per_gpu_hour=trend(
            Measure("tokens_per_gpu_hour", "tokens per GPU-hour", "tokens",
                    m.tokens_per_gpu_hour(gpus), UP,
                    missing=NO_GPUS if gpus is None else "no tokens counted"), now, before,
        ),
        usd_per_million_tokens=trend(
            Measure("usd_per_million_tokens", "cost per million generated tokens",
                    "usd_per_million_tokens", _per_million(rate), DOWN,
                    missing=missing or "no tokens counted"), now, before,
        ),
        requests_per_s_per_gpu=trend(
            Measure("requests_per_s_per_gpu", "requests/s per GPU", "per_s",
                    m.per_gpu(m.COMPLETED, gpus), UP, missing=NO_GPUS), now, before,
        ),
        requests_in_time_per_usd=trend(
            Measure("requests_in_time_per_usd", "requests within the targets per USD",
                    "requests_per_usd", _in_time_per_usd(tier, rate), UP,
                    missing=missing or NO_TARGET), now, before,
        ),
        tokens_per_s_per_hbm_gb=trend(
            Measure("tokens_per_s_per_hbm_gb", "tokens/s per GB of GPU memory", "tokens_per_s",
                    m.per_gpu(m.GENERATED, _hbm_gb(tier, gpus)), UP, missing=NO_MEMORY),
            now, before,
        ),
        usd_per_million_tokens_at_full=_at_full(rate, knee),
        utilization_ratio=used,
        utilization_basis=basis,
        idle_hours=idle,
        idle_ratio=m.over(whole.idle_s, whole.watched_s),
        idle_usd=None if idle is None or price is None else idle * price,
        savings=_savings(size, price, recommended),
        missing=missing,
    )  # fmt: skip


def _usd(rate: float | None) -> Of:
    """The cost of a span in USD: every hour of an engine is paid."""
    return lambda span: None if rate is None else span.engine_s / HOUR_S * rate


def _in_time_per_usd(tier: TierObserved, rate: float | None) -> Of:
    """Requests within the targets for each dollar (guide 8.4: latency against cost)."""
    targets = tier.stated.targets
    good = m.goodput(targets.ttft_p99_s, targets.itl_p99_s)

    def read(span: Span) -> float | None:
        good_per_s = good(span)
        return None if good_per_s is None else m.over(good_per_s * span.clock_s, _usd(rate)(span))

    return read


def _hbm_gb(tier: TierObserved, gpus: int | None) -> float | None:
    """GPU memory of one engine in 10^9 bytes; None where its GPUs are not known."""
    gpu = tier.stated.stated.gpu
    return None if gpu is None or gpus is None else gpus * gpu.memory_bytes / 1e9


def _per_million(rate: float | None) -> Of:
    def read(span: Span) -> float | None:
        paid, tokens = _usd(rate)(span), span.counts.get(m.GENERATED)
        return None if tokens is None else m.over(paid, tokens / 1e6)

    return read


def _at_full(rate: float | None, knee: Curve | None) -> float | None:
    """USD per million tokens of an engine that always runs at C_max."""
    if rate is None or knee is None:
        return None
    return m.over(rate, knee.tokens_per_s * HOUR_S / 1e6)


def _utilization(
    tier: TierObserved, knee: Curve | None, now: TierPeriod | None, before: TierPeriod | None
) -> tuple[Trend, str]:
    """How much of the capacity was used on average: GPU activity, else load over capacity."""
    busy = Measure("utilization_ratio", "utilization", "ratio", m.level(m.GPU_BUSY), UP,
                   missing=NO_CURVE)  # fmt: skip
    if now is not None and now.value(busy) is not None:
        return trend(busy, now, before), "share of time with GPU activity"
    if knee is None:
        return unknown(busy, NO_CURVE), ""
    usable = knee.learned.usable_requests_per_s.expected

    def load(span: Span) -> float | None:
        return m.over(span.counts.get(m.COMPLETED), span.engine_s * usable)

    measure = Measure("utilization_ratio", "utilization", "ratio", load, UP, missing=NO_CURVE)
    return trend(
        measure, now, before
    ), "requests served divided by the usable capacity of the engines"


def _savings(
    size: TierSize, price: float | None, recommended: Sequence[Recommended]
) -> tuple[Saving, ...]:
    """The savings of each open recommendation, the largest first."""
    savings: list[Saving] = []
    present, needed, replicas = size.gpus_present, size.gpus_needed, size.replicas_needed
    if size.verdict == "too large" and price is not None and present and needed and replicas:
        saved = (present - needed) * price
        savings.append(
            Saving(
                SCALE_DOWN, "", "",
                f"{plural(replicas, 'replica')} instead of {size.replicas_present}", "open", saved,
                saved * HOURS_PER_MONTH,
                "less headroom: remove one replica at a time and watch TTFT P99 at the next peak",
            )
        )  # fmt: skip
    newest = {
        (
            recommendation.document["id"],
            recommendation.target,
            recommendation.engine,
        ): recommendation
        for recommendation in live(recommended)
    }
    for recommendation in newest.values():
        cost = recommendation.document.get("cost_usd_per_hour")
        if cost is None:
            continue
        saved = 0.0 - float(cost)
        savings.append(
            Saving(
                str(recommendation.document["id"]),
                recommendation.target,
                recommendation.engine,
                str(recommendation.document["summary"]),
                recommendation.outcome,
                saved,
                saved * HOURS_PER_MONTH,
                str(recommendation.document.get("risk", "")),
            )
        )
    return tuple(sorted(savings, key=lambda saving: -(saving.saves_usd_per_hour or 0.0)))
