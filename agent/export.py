"""Files for a metrics system: rules and their tests. I/O edge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import click

from kneewatch.agent.printing import OK
from kneewatch.agent.settings import Settings
from kneewatch.collector.base import SettingsError
from kneewatch.dashboards.dcgm import dcgm_files
from kneewatch.dashboards.prometheus.files import rule_files
from kneewatch.dashboards.prometheus.model import LABELS, Plan
from kneewatch.dashboards.prometheus.scenarios import promtool_files

LEAST_EVALUATIONS = 3
"""A window that holds fewer evaluations than this cannot tell a rate from an accident."""

Files = Callable[[Plan], Mapping[str, str]]


def _dashboards(_plan: Plan) -> dict[str, str]:
    """Grafana's dashboards as they were built."""
    folder = files("kneewatch.dashboards") / "generated"
    return {
        one.name: one.read_text("utf-8") for one in folder.iterdir() if one.name.endswith(".json")
    }


KINDS: Mapping[str, Files] = {
    "prometheus-rules": rule_files,
    "prometheus-tests": lambda plan: {**rule_files(plan), **promtool_files(plan)},
    "grafana": _dashboards,
    "dcgm": lambda _plan: dcgm_files(),
}


def plan_of(
    settings: Settings,
    *,
    evaluation_s: float,
    prefix: str,
    selector: str,
    labels: tuple[str, ...],
    triage_url: str,
) -> Plan:
    """What rules are made for, from settings and flags.

    Raises:
        SettingsError: the window is too short for the evaluation interval, or a threshold names
            no rule.
    """
    profile = settings.profile()
    if profile.window_s < LEAST_EVALUATIONS * evaluation_s:
        raise SettingsError(
            f"window_s = {profile.window_s:g} ({settings.origin('window_s')}) holds fewer than "
            f"{LEAST_EVALUATIONS} evaluations of {evaluation_s:g} s: state a longer --window or a "
            "shorter --evaluation-interval"
        )
    profile.rules()
    return Plan(
        **{one.name: getattr(profile, one.name) for one in fields(profile)},
        interval_s=evaluation_s,
        objective_ratio=settings["slo.objective_ratio"],
        labels=(*LABELS, *(label for label in labels if label not in LABELS)),
        prefix=prefix,
        selector=selector,
        triage_url=triage_url,
    )


def export(kind: str, folder: Path, plan: Plan) -> int:
    """Write the files of a kind into a folder. Returns the exit status.

    Raises:
        SettingsError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in KINDS[kind](plan).items():
            (folder / name).write_text(text, encoding="utf-8")
            click.echo(folder / name)
    except OSError as exc:
        raise SettingsError(f"{folder}: {exc.strerror or exc}") from exc
    return OK
