"""Pages of a DCGM exporter with its default CSV, in the label sets that were published."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.collector.exposition import PageParser
from kneewatch.collector.gpu.page import GpuNote, GpuPage
from kneewatch.collector.names.dcgm_fields import resolve_gpus

FIELDS: Mapping[str, float] = {
    "DEV_SM_CLOCK": 1755,
    "DEV_GPU_TEMP": 58,
    "DEV_POWER_USAGE": 412.5,
    "DEV_TOTAL_ENERGY_CONSUMPTION": 5_000_000,
    "DEV_FB_USED": 70_000,
    "DEV_FB_FREE": 10_000,
    "DEV_XID_ERRORS": 0,
    "PROF_GR_ENGINE_ACTIVE": 0.87,
    "PROF_DRAM_ACTIVE": 0.42,
}


def labels(
    index: int,
    *,
    host: str = "gpu-node-1",
    pod: str = "",
    namespace: str = "llm",
    mig: int | None = None,
    exported: bool = False,
) -> str:
    """The labels of a GPU. `exported`: as Prometheus leaves them without honorLabels."""
    text_labels = (
        f'gpu="{index}",UUID="GPU-{host}-{index}",pci_bus_id="00000000:53:00.0",'
        f'device="nvidia{index}",modelName="NVIDIA H100 80GB HBM3",Hostname="{host}"'
    )
    if mig is not None:
        text_labels += f',GPU_I_PROFILE="1g.10gb",GPU_I_ID="{mig}"'
    if exported:
        text_labels += ',namespace="gpu-operator",pod="nvidia-dcgm-exporter-x2x"'
    if pod:
        lead = "exported_" if exported else ""
        text_labels += f',{lead}container="main",{lead}namespace="{namespace}",{lead}pod="{pod}"'
    return text_labels


def body(gpus: Mapping[str, Mapping[str, float]]) -> str:
    """A page: what each label set says, over what all say."""
    return "".join(
        f"DCGM_FI_{name}{{{who}}} {value}\n"
        for who, own in gpus.items()
        for name, value in {**FIELDS, **own}.items()
    )


def node(count: int, **own: float) -> str:
    """A node of so many GPUs; GPU 1 is 0.1 busier than GPU 0, and so on."""
    return body(
        {
            labels(at): {"PROF_GR_ENGINE_ACTIVE": round(0.1 * (at + 1), 3), **own}
            for at in range(count)
        }
    )


class Pages:
    """Readings as one exporter gives them: the layout is kept while it is the same."""

    def __init__(self) -> None:
        self._parser = PageParser()

    def __call__(self, text: str, *notes: GpuNote) -> GpuPage:
        page = self._parser.parse(text)
        return GpuPage(page, resolve_gpus(page.layout), notes)
