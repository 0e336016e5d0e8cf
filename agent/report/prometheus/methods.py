"""How figures are computed from a metrics system's series, where that differs. Pure."""

from __future__ import annotations

from kneewatch.agent.report.prometheus.trouble import LOOKED_MOST, LOOKED_S
from kneewatch.reports.weekly.trust import Method
from kneewatch.reports.words import duration

METHODS: tuple[Method, ...] = (
    Method(
        "tiers",
        "A tier is a model on a kind of GPU: the series' label `tier`, else the GPU that DCGM "
        "names, else that of the settings. No figure is made of two tiers.",
        ("9.5",),
    ),
    Method(
        "counters",
        "Prometheus's increase() of each local hour, or sums of it that recording rules keep of "
        "five minutes each, added up by tier on the server. A counter that went back began anew "
        "at nothing.",
        (),
    ),
    Method(
        "gauges",
        "Means over steps, engine by engine; the busiest (or worst) hour is the highest mean of a "
        "local hour.",
        (),
    ),
    Method(
        "incidents",
        "The steps of each engine are searched for signs of trouble. Around each sign (the "
        f"{LOOKED_MOST} worst; of long ones the first {duration(LOOKED_S)}) the samples are read "
        "as they were scraped and judged as the sidecar judges pages; further outages, cascades "
        "and stalls are told from the steps alone. Restarts are process_start_time_seconds. "
        "Repeats within 15 minutes are one incident; what follows from a cause is told with it.",
        ("7.4", "8.5"),
    ),
    Method(
        "knee",
        "One point a step, of some engines of each tier: requests in flight, what was served, how "
        "late, over a window at the step's end; gathered by concurrency in steps of the square "
        "root of two. With targets C_max is the last step that keeps them in most of its windows, "
        "without them the step with most tokens per second over the time a token takes. Only "
        "loads that were seen count.",
        ("8.1", "8.3"),
    ),
    Method(
        "track record",
        "What became of a recommendation cannot be seen in a metrics system's series.",
        ("9.1",),
    ),
)
