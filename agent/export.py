"""The `export` command: rules, their tests and dashboards for a metrics system. I/O edge."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import click

from kneewatch.agent.console import OK
from kneewatch.agent.fleet.queries import checked_selector
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.names.vllm_metrics import PREFIXES
from kneewatch.collector.signals.expr import NAME
from kneewatch.dashboards.dcgm_exporter import dcgm_files
from kneewatch.dashboards.prometheus.inhibition import inhibition_files
from kneewatch.dashboards.prometheus.promtool_tests import promtool_files
from kneewatch.dashboards.prometheus.rule_files import HEAD, Flavor, rule_files, too_rare
from kneewatch.dashboards.prometheus.rule_group import LABELS, Plan
from kneewatch.rules.facts import range_s

SCRAPE_MAX_S = 120.0
"""With longer intervals one failed scrape leaves a gap in every series."""

MIN_EVALUATIONS = 3
"""Fewest evaluations in a window: with fewer, a rate may be chance."""

LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_LABELS = ("__name__", "le")
"""Labels that a rule's result cannot keep: the metric name and a bucket's bound."""

Files = Callable[[Plan, Flavor], Mapping[str, str]]


def _dashboards() -> dict[str, str]:
    """The generated Grafana dashboards, by file name."""
    folder = files("kneewatch.dashboards") / "generated" / "grafana"
    return {
        file.name: file.read_text("utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".json")
    }


KINDS: Mapping[str, Files] = {
    "prometheus-rules": lambda plan, flavor: {**rule_files(plan, flavor), **inhibition_files(plan)},
    "prometheus-tests": lambda plan, flavor: {**rule_files(plan, flavor), **promtool_files(plan)},
    "grafana": lambda _plan, _flavor: _dashboards(),
    "dcgm": lambda _plan, _flavor: dcgm_files(),
}


RULES = ("prometheus-rules", "prometheus-tests")
TESTABLE = (Flavor.PROMETHEUS, Flavor.UNKEPT)
"""Flavors whose file promtool reads."""


def plan_of(
    settings: Settings,
    *,
    evaluation_s: float,
    scrape_s: float,
    prefix: str,
    selector: str,
    labels: tuple[str, ...],
    triage_url: str,
    grafana_url: str,
    gpu_joins: tuple[str, ...],
    gpu_selector: str,
    lean: bool,
) -> Plan:
    """The plan for the rules, from settings and flags.

    Raises:
        SettingsError: the window is too short for the evaluation interval, scrapes are too rare, a
            threshold names no rule, the label of a GPU join is not kept, or a name or selector is
            invalid.
    """
    profile = settings.profile()
    if not 0 < scrape_s <= SCRAPE_MAX_S:
        raise SettingsError(
            f"--scrape-interval: {scrape_s:g} s; Prometheus shows a sample for 5 minutes at most, "
            f"so scrape every {SCRAPE_MAX_S:g} s or more often"
        )
    if range_s(profile.window_s, scrape_s) < MIN_EVALUATIONS * evaluation_s:
        raise SettingsError(
            f"window_s = {profile.window_s:g} ({settings.origin('window_s')}) holds fewer than "
            f"{MIN_EVALUATIONS} evaluations of {evaluation_s:g} s: set a longer --window or a "
            "shorter --evaluation-interval, or state the --scrape-interval"
        )
    profile.rules()
    if prefix not in PREFIXES and not NAME.fullmatch(prefix):
        raise SettingsError(f"--prefix: {prefix!r} is not a metric name prefix such as vllm:")
    for label in labels:
        if not LABEL.fullmatch(label) or label in RESERVED_LABELS:
            raise SettingsError(f"--label: {label!r} is not a label name such as zone")
    kept_labels = (*LABELS, *(label for label in labels if label not in LABELS))
    return Plan(
        **{field.name: getattr(profile, field.name) for field in fields(profile)},
        interval_s=evaluation_s,
        scrape_s=scrape_s,
        objective_ratio=settings["slo.objective_ratio"],
        labels=kept_labels,
        prefix=prefix,
        selector=checked_selector(selector, "--selector"),
        triage_url=triage_url,
        grafana_url=grafana_url,
        docs_url=settings.docs_url,
        gpu_join=tuple(_join(text, kept_labels) for text in gpu_joins),
        gpu_selector=checked_selector(gpu_selector, "--gpu-selector"),
        lean=lean,
    )


def _join(text: str, labels: tuple[str, ...]) -> tuple[str, str]:
    """The server's and DCGM's label of LABEL=DCGM_LABEL."""
    label, _, other = text.partition("=")
    if not (LABEL.fullmatch(label) and LABEL.fullmatch(other)):
        raise SettingsError(
            f"--gpu-join: {text!r} is not LABEL=DCGM_LABEL, such as pod=exported_pod"
        )
    if label not in labels:
        raise SettingsError(f"--gpu-join: the rules do not keep {label!r}: add --label {label}")
    return label, other


def export(kind: str, folder: Path, plan: Plan, flavor: str) -> int:
    """Write the files of a kind into a folder. Returns the exit status.

    Raises:
        SettingsError: the folder cannot be written, or promtool cannot read the flavor's rules.
    """
    if kind == "prometheus-tests" and flavor not in TESTABLE:
        raise SettingsError(
            f"--flavor: promtool cannot test {flavor}; {' and '.join(TESTABLE)} only"
        )
    written = KINDS[kind](plan, Flavor(flavor))
    try:
        for name, text in written.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            click.echo(path)
        if kind in RULES:
            for line in (*too_rare(plan), *_left_over(folder, written)):
                click.echo(line, err=True)
    except OSError as exc:
        raise SettingsError(f"{folder}: {exc.strerror or exc}") from exc
    return OK


def _left_over(folder: Path, written: Collection[str]) -> Iterator[str]:
    """A warning for each rule file that another export left beside the one now written."""
    head = HEAD.encode()
    for path in sorted(folder.glob("*.yml")):
        if path.name in written:
            continue
        with path.open("rb") as file:
            if file.read(len(head)) == head:
                yield f"{path} is from another export: delete it, or its rules are loaded as well"
