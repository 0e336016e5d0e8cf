"""The GPUs' dashboard, from dcgm-exporter's own series. Pure."""

from __future__ import annotations

from kneewatch.dashboards.grafana.model import Board, Panel, Query, Row

ENOUGH = "On in dcgm-exporter's default list of fields."
FULLER = "Needs the recommended list of fields (kneewatch export dcgm)."
GPU = "{{Hostname}}{{hostname}} {{gpu}}"


def _of(field: str) -> str:
    return f'DCGM_FI_{field}{{Hostname=~"$node|"}}'


def _panel(
    title: str,
    what: str,
    expr: str,
    unit: str = "short",
    bounds: tuple[tuple[float, str], ...] = (),
) -> Panel:
    return Panel(title, what, (Query(expr, GPU),), unit, bounds=bounds)


GPUS = Board(
    "kneewatch-gpus",
    "kneewatch: GPUs",
    "Is it the GPU? Bandwidth, compute, clocks, heat and errors beside the servers' signals.",
    (
        Row(
            "Work",
            (
                _panel("Engine active", f"A kernel ran; not a load figure. {ENOUGH}",
                       _of("PROF_GR_ENGINE_ACTIVE"), "percentunit"),
                _panel("Memory bandwidth active", f"High: bound by memory (decode). {ENOUGH}",
                       _of("PROF_DRAM_ACTIVE"), "percentunit"),
                _panel("Tensor pipe active", f"High: bound by compute (prefill). {ENOUGH}",
                       _of("PROF_PIPE_TENSOR_ACTIVE"), "percentunit"),
            ),
        ),
        Row(
            "Limits",
            (
                _panel("Power", ENOUGH, _of("DEV_POWER_USAGE"), "watt"),
                _panel("Temperature", ENOUGH, _of("DEV_GPU_TEMP"), "celsius",
                       ((83.0, "warning"), (90.0, "critical"))),
                _panel("SM clock", f"Falling under load: throttled. {ENOUGH}",
                       f"1e6 * {_of('DEV_SM_CLOCK')}", "hertz"),
                _panel("Memory used", f"vLLM takes its share at the start: this is no KV pressure. "
                       f"{ENOUGH}", f"1048576 * {_of('DEV_FB_USED')}", "bytes"),
            ),
        ),
        Row(
            "Errors",
            (
                _panel("XID", f"The newest code, not a count. {ENOUGH}", _of("DEV_XID_ERRORS")),
                _panel("Row remap failed", f"Replace the GPU. {ENOUGH}",
                       _of("DEV_ROW_REMAP_FAILURE"), bounds=((1.0, "critical"),)),
                _panel("PCIe replays", f"A second. {ENOUGH}",
                       f"rate({_of('DEV_PCIE_REPLAY_COUNTER')}[5m])"),
                _panel("Double-bit errors", FULLER, _of("DEV_ECC_DBE_VOL_TOTAL"),
                       bounds=((1.0, "critical"),)),
            ),
        ),
    ),
)  # fmt: skip
