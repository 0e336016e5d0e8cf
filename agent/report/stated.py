"""What the settings say about each target, as a report takes it. I/O edge: files may be named."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from kneewatch.agent.daemon.target_tables import table_specs
from kneewatch.agent.deployment import stated
from kneewatch.agent.settings import Settings
from kneewatch.agent.workload_file import SETTING, named_profile
from kneewatch.diagnose.recommend.deployment import deployment
from kneewatch.diagnose.sizing.plan.model import (
    average_requests_per_s,
    call_lengths,
    planned_peak_per_s,
)
from kneewatch.reports.weekly.observed import TierStated, WorkloadStated


def stated_of(settings: Settings) -> Callable[[str], TierStated]:
    """What is stated about a target, by its name: in its own table, else for all.

    Raises:
        SettingsError: a model, GPU, file or table that cannot be.
    """
    own = {spec.name: spec.settings for spec in table_specs(settings)}
    made = cache(_stated)
    made(settings)  # what cannot be is said before anything is read
    return lambda target: made(own.get(target, settings))


def _stated(settings: Settings) -> TierStated:
    known = stated(settings)
    profile = settings.profile(stated=known)
    price, source = settings["usd_per_gpu_hour"], "stated (usd_per_gpu_hour)"
    if price is None and known.gpu is not None:
        price, source = known.gpu.usd_per_hour, f"the catalogue's price of {known.gpu.id}"
    return TierStated(
        targets=profile.targets,
        gpus=settings["gpus"] or deployment({}, known).gpus,
        usd_per_gpu_hour=price,
        price_source=source if price is not None else "",
        benchmark_ttft_p99_s=settings["benchmark.ttft_p99_s"],
        benchmark_gpu_ratio=settings["benchmark.gpu_ratio"],
        stated=known,
        workload=_workload(settings),
        rules=profile.rules(),
    )


def _workload(settings: Settings) -> WorkloadStated | None:
    """The workload of the profile that is named, for reports or for all."""
    key = SETTING if settings["report.profile"] is None else "report.profile"
    profile = named_profile(settings, key)
    if profile is None:
        return None
    lengths = call_lengths(profile.lengths, profile.session)
    return WorkloadStated(
        origin=Path(settings[key]).name,
        input_mean_tokens=lengths.mean_input_tokens,
        # Of a session's calls only the last one's is known, not that of all.
        input_p95_tokens=None if profile.session else float(lengths.input_p95_tokens),
        output_mean_tokens=lengths.mean_output_tokens,
        output_p95_tokens=float(lengths.output_p95_tokens),
        average_requests_per_s=average_requests_per_s(profile),
        peak_requests_per_s=planned_peak_per_s(profile),
        archetype=profile.traffic.archetype,
    )
