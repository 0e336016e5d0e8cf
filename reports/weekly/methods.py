"""How each figure of the report is computed, with the guide's sections. Pure."""

from __future__ import annotations

from kneewatch.reports.weekly.trends import NOISE_TEST
from kneewatch.reports.weekly.trust import Method

METHODS: tuple[Method, ...] = (
    Method(
        "tiers",
        "A tier is a model on a kind of GPU: the target's label `tier`, or model and GPU as the "
        "settings state them. No figure is made of two tiers.",
        ("9.5",),
    ),
    Method("arrows", NOISE_TEST, ()),
    Method(
        "percentiles",
        "Increases of the server's histogram buckets, summed over the period and the tier's "
        "engines, then interpolated as Prometheus's histogram_quantile does. They are as fine as "
        "the buckets. No percentile is averaged.",
        ("8.2", "9.3"),
    ),
    Method(
        "counters",
        "As Prometheus counts: a counter that went back began anew at nothing. What was counted "
        "while nobody looked is in the sums, spread evenly over that time; of a process that was "
        "replaced then, only what the new one had counted.",
        (),
    ),
    Method(
        "gauges",
        "Time-weighted means over the scrapes; the busiest (or worst) hour is the highest mean of "
        "a local hour.",
        (),
    ),
    Method(
        "goodput and error budget",
        "A request is in time when its first token came within the TTFT target, judged at the "
        "nearest bucket bound that is not above it. The objective is 99 % of requests, as the "
        "target is one of P99; the burn is the share of late requests over the 1 % allowed.",
        ("8.4",),
    ),
    Method(
        "time shares",
        "Sums of the queue, prefill and decode histograms over that of whole requests; what is "
        "left is the server's other work and preempted time.",
        ("8.4",),
    ),
    Method(
        "incidents",
        "Stages and causes as the sidecar concluded them at each scrape, from warning on, and "
        "restarts. Repeats within 15 minutes are one incident; what follows from a cause is told "
        "with it.",
        ("7.4", "8.5"),
    ),
    Method(
        "cost of an incident",
        "Preemptions and late requests are counted from its start to its end; recomputed tokens "
        "are preemptions by the mean prompt, at least; lost requests are those that the hour "
        "before would have served in a time in which nothing was.",
        ("7.4",),
    ),
    Method(
        "knee",
        "One point a minute and engine: requests in flight, what was served, how late; gathered "
        "by concurrency in steps of the square root of two. With targets C_max is the last step "
        "that keeps them in most of its minutes, without them the step with most tokens per "
        "second over the time a token takes. Only loads that were seen count.",
        ("8.1", "8.3"),
    ),
    Method(
        "Little's law",
        "C_max over the mean time of a request there, against the requests that were served "
        "there: a gap above 2 means that the two do not belong together.",
        ("8.3",),
    ),
    Method(
        "benchmark",
        "TTFT P99 more than 30 % above the benchmark's, or GPU activity while serving more than "
        "20 points below it: the size was computed for another workload.",
        ("9.1",),
    ),
    Method(
        "arrivals",
        "Requests that got their first token, minute by minute, all engines of the tier together; "
        "P95 and P99 are of these minutes.",
        ("1.3",),
    ),
    Method(
        "archetype",
        "By the mean prompt (long from 2,000 tokens) and the mean output (long from 800).",
        ("1.2",),
    ),
    Method(
        "size",
        "From ceil(P99 of arrivals x safety / usable requests a second of one engine) to the "
        "guide's ceil(ceil(P99 / usable) x safety) a fleet is of the right size; what is usable is "
        "learned from the period, or predicted from model and GPU.",
        ("8.3", "9.1"),
    ),
    Method(
        "money",
        "Every hour of an engine is paid, idle or not: GPU-hours by price, over generated tokens. "
        "Idle is an hour's share with fewer than one request in two running, and none waiting.",
        ("9.1", "9.2"),
    ),
    Method(
        "track record",
        "A change counts as made where the engine's own page shows it; then what was predicted is "
        "compared with what was measured under a load like the one before.",
        ("9.1",),
    ),
)
