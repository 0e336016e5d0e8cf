"""Builds Grafana's JSON for the dashboards with its foundation SDK. `make docs` writes the files.
Pure."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as prometheus_model

from tests.dashboards.boards import BOARDS, Board, Panel

COLOURS = {"info": "blue", "warning": "orange", "critical": "red"}
KINDS: dict[str, Any] = {
    "line": timeseries.Panel,
    "number": stat.Panel,
    "states": statetimeline.Panel,
    "rows": table.Panel,
}
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
VARIABLES = (
    ("cluster", "Cluster", "label_values(kneewatch:running, cluster)"),
    ("namespace", "Namespace", "label_values(kneewatch:running, namespace)"),
    ("tier", "Tier", "label_values(kneewatch:running, tier)"),
    (
        "model",
        "Model (pool)",
        'label_values(kneewatch:running{namespace=~"$namespace"}, model_name)',
    ),
    (
        "pod",
        "Pod",
        'label_values(kneewatch:running{namespace=~"$namespace", model_name=~"$model"}, pod)',
    ),
    (
        "replica",
        "Replica (address)",
        'label_values(kneewatch:running{namespace=~"$namespace", model_name=~"$model"}, instance)',
    ),
    ("node", "GPU node", "label_values(DCGM_FI_DEV_GPU_TEMP, Hostname)"),
)
SDK_KEYS = ("auto", "auto_count", "auto_min", "id", "style", "footer")
"""Keys that the SDK writes in dashboards, variables and options although the schema of Grafana 11
or 12 lacks them."""

TALL = {"states": 6, "number": 5}


def dashboards() -> dict[str, str]:
    """The JSON of each dashboard, by file name."""
    return {f"{board.uid}.json": _json(board) for board in BOARDS}


def _json(board: Board) -> str:
    encoded = JSONEncoder(sort_keys=True, indent=2).encode(_dashboard(board).build())
    document: dict[str, Any] = json.loads(encoded)
    options = [panel["options"] for panel in document["panels"] if "options" in panel]
    for part in (document, *document["templating"]["list"], *options):
        for key in SDK_KEYS:
            part.pop(key, None)
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _dashboard(board: Board) -> dashboard.Dashboard:
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["kneewatch", "vllm"])
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .readonly()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("kneewatch")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["kneewatch"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    for name, label, query in VARIABLES:
        built.with_variable(
            dashboard.QueryVariable(name)
            .label(label)
            .query(query)
            .datasource(SOURCE)
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    built.with_variable(
        dashboard.TextBoxVariable("triage_url").label("Triage page").default_value("")
    ).with_variable(
        dashboard.TextBoxVariable("usd_per_hour").label("USD per replica-hour").default_value("2")
    )
    for row in board.rows:
        built.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            built.with_panel(_panel(panel))
    return built


def _panel(panel: Panel) -> Any:  # noqa: ANN401 - the SDK's panels share no type
    built = (
        KINDS[panel.kind]()
        .title(panel.title)
        .description(panel.description)
        .datasource(SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(TALL.get(panel.kind, 8))
        .thresholds(_thresholds(panel))
    )
    if panel.kind == "line":
        built.min(0).fill_opacity(5).legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.LIST)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        if panel.bounds:
            lines = common.GraphThresholdsStyleConfig().mode(
                common_model.GraphTresholdsStyleMode.LINE
            )
            built.thresholds_style(lines)
    # Without any option the SDK writes null, which Grafana's schema does not allow.
    elif panel.kind == "number":
        built.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    elif panel.kind == "rows":
        built.show_header(True)
    else:
        built.show_value(common_model.VisibilityMode.AUTO)
    if panel.triage:
        built.data_links(
            [
                dashboard.DashboardLink("Triage")
                .type(model.DashboardLinkType.LINK)
                .url("${triage_url}/${__field.labels.instance}")
                .target_blank(True)
            ]
        )
    for place, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + place))
        target.legend_format(query.legend).datasource(SOURCE)
        if panel.kind in ("rows", "number"):
            target.instant()
        if panel.kind == "rows":
            target.format(prometheus_model.PromQueryFormat.TABLE)
        built.with_target(target)
    return built


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    """The thresholds of a panel. The range without a problem is green: below the first bound or,
    with `below`, above the last one."""
    steps = [(None, "green"), *((value, COLOURS[word]) for value, word in panel.bounds)]
    if panel.below:
        values = [None, *(value for value, _ in panel.bounds)]
        steps = list(zip(values, [*(COLOURS[w] for _, w in panel.bounds), "green"], strict=True))
    return (
        dashboard.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value=value, color=colour) for value, colour in steps])
    )
