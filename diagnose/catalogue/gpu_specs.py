"""The GPU specifications of the catalogue, read from TOML, by id or by driver name. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import log
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.inputs import SizingError

GIB: Final = 2**30


LINK_BYTES_PER_S: Mapping[str, float] = MappingProxyType(
    {
        "nvlink4": 450e9,  # H100: 18 links, 900 GB/s both ways together (guide 5.6)
        "pcie5": 64e9,  # x16 (guide 7.4 and 7.6; 128 in 5.6 is both ways)
        "pcie4": 32e9,  # x16 (guide 5.6 and text 003: 64 both ways)
        "infiniband-ndr": 50e9,  # 400 Gbit/s (guide 5.6)
        "roce-400": 50e9,  # RoCE v2 over 400 Gbit/s Ethernet (guide 5.6)
        "ethernet-100": 12.5e9,  # TCP over 100 Gbit/s
        "nvme": 7e9,  # one drive, sequential read (guide 7.6)
    }
)
"""Bytes/s of each link in one direction: a KV cache or weights are sent one way."""

NETWORKS: Final = ("infiniband-ndr", "roce-400", "ethernet-100")
"""The links between nodes; the first where none is stated."""
NODE_GPUS: Final = 8


class Gpu(Struct, frozen=True, kw_only=True):
    """A GPU of the catalogue. FLOP/s are dense peaks; None means that the format is not
    supported."""

    id: str
    name: str
    vendor: str
    architecture: str
    memory_sold_bytes: int
    memory_bytes: int
    """Total memory as CUDA or HIP reports it; vLLM takes its share of this figure."""
    memory_source: str
    memory_bandwidth_bytes_per_s: float
    bf16_flop_per_s: float
    pcie_bytes_per_s: float
    """Per direction."""
    power_watts: float
    usd_per_hour: float
    """A default price. State the price that you really pay."""
    price_source: str
    source: str
    names: tuple[str, ...] = ()
    short_names: tuple[str, ...] = ()
    given_name: str = ""
    """The short name that this GPU was found by, which others may have too; otherwise empty."""
    compute_capability: str | None = None
    fp8_flop_per_s: float | None = None
    fp4_flop_per_s: float | None = None
    int8_op_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    """Between GPUs, both directions together (AMD: Infinity Fabric); None if there are no such
    links."""
    nvlink_gpus: int = 1
    """Most GPUs that these links connect; 1 if there are none."""
    c2c_bytes_per_s: float | None = None
    """To a CPU on the same module, instead of over PCIe; per direction. None if there is no such
    CPU."""
    segment: str = "data-centre"
    """data-centre or workstation. A search tries data-centre GPUs only."""
    note: str = ""
    shares_host_memory: bool = False
    """Whether CPU and GPU have one memory, so that vLLM counts what the host uses."""
    nvml_memory: bool = True
    """Whether NVML reports its memory. Without it vLLM takes its defaults of small GPUs
    (`get_batch_defaults` of vllm/engine/arg_utils.py)."""

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes per second between this GPU and its CPU's memory, per direction."""
        return self.c2c_bytes_per_s or self.pcie_bytes_per_s

    @property
    def node_gpus(self) -> int:
        """GPUs of a node: 8, those of an NVL72 rack, or 1 where CPU and GPU have one memory."""
        return 1 if self.shares_host_memory else max(self.nvlink_gpus, NODE_GPUS)

    @property
    def shows_whole_memory(self) -> bool:
        """Whether a card's stated memory is more than Linux reports.

        The driver of Windows, which WSL uses, shows its reserve too.
        """
        listed = gpus().get(self.id, self)
        return self.segment != "data-centre" and self.memory_bytes > 1.01 * listed.memory_bytes

    @property
    def accumulates_at_half_rate(self) -> bool:
        """Whether 32-bit sums halve the rate of its products, as INT8's, four times it, shows."""
        return (self.int8_op_per_s or 0.0) > 3 * self.bf16_flop_per_s

    @property
    def memory_is_estimated(self) -> bool:
        """Whether `memory_bytes` is an estimate instead of a figure from a log."""
        return self.memory_source.startswith("estimated")


def plain_name(name: str) -> str:
    """A product name in lower case, without punctuation and without the vendor's name in front."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return " ".join(words[1:] if words[:1] in (["nvidia"], ["amd"]) else words)


# --- GPUs of the catalogue by id, or by the name that a driver gives. Pure ------------------------
#
# They come from the packaged `gpus.toml`, which is read at the first call.


@cache
def gpus() -> Mapping[str, Gpu]:
    """The packaged GPUs by id; read from their file on first use. Tests check the file."""
    rows: dict[str, dict[str, Any]] = packaged_tables("diagnose.catalogue", "gpus.toml")["gpus"]
    return MappingProxyType({gpu_id: _gpu(gpu_id, **row) for gpu_id, row in rows.items()})


def _gpu(
    gpu_id: str,
    *,
    memory_gib: float,
    memory_sold_gib: float,
    names: Sequence[str] = (),
    short_names: Sequence[str] = (),
    **fields: Any,  # noqa: ANN401 - a field has its own type
) -> Gpu:
    return Gpu(
        id=gpu_id,
        memory_bytes=round(memory_gib * GIB),
        memory_sold_bytes=round(memory_sold_gib * GIB),
        names=tuple(names),
        short_names=tuple(short_names),
        **fields,
    )


def gpu(gpu_id: str) -> Gpu:
    """The packaged GPU with this id or short name.

    Raises:
        SizingError: there is no such GPU; the message lists the most similar ids.
    """
    typed = _letters(gpu_id)
    for spec in gpus().values():
        if typed in map(_letters, (spec.id, spec.id.removeprefix("rtx-"))):
            return spec
        if typed in map(_letters, spec.short_names):
            return replace(spec, given_name=gpu_id.strip())
    near = nearest_ids(gpu_id)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise SizingError(
        f"unknown GPU {gpu_id!r}; {meant}`kneewatch size --list-gpus` lists all; "
        "or set --gpu-memory-gib and --gpu-bandwidth",
        name="gpu",
    )


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold()).removeprefix("nvidia").removeprefix("geforce")


def stated_gpu(
    named: Gpu | None, memory_bytes: float | None, bandwidth_bytes_per_s: float | None
) -> Gpu:
    """A GPU with this memory and bandwidth.

    What is not stated is that of `named`, or of the GPU of the catalogue that is most alike.
    """
    like = named or min(
        gpus().values(),
        key=lambda each: sum(
            abs(log(stated / own))
            for stated, own in (
                (memory_bytes, each.memory_bytes),
                (bandwidth_bytes_per_s, each.memory_bandwidth_bytes_per_s),
            )
            if stated
        ),
    )
    gpu = replace(
        like,
        memory_bytes=round(memory_bytes or like.memory_bytes),
        memory_bandwidth_bytes_per_s=bandwidth_bytes_per_s or like.memory_bandwidth_bytes_per_s,
        memory_source="stated",
    )
    if named is not None:
        return gpu
    note = f"FLOP/s, links and price are those of {like.id}, the GPU most like it"
    return replace(gpu, id="stated", name="the stated GPU", memory_sold_bytes=0, note=note)


def nearest_ids(text: str) -> list[str]:
    """Up to three valid ids for an unknown one: by product name, otherwise by similar spelling."""
    if (named := recognise(text)) is not None:
        return [named.id]
    plain_id = plain_name(text).replace(" ", "-")
    within = [
        gpu_id for gpu_id in gpus() if plain_id and (plain_id in gpu_id or gpu_id in plain_id)
    ]
    return within[:3] or difflib.get_close_matches(plain_id, gpus(), n=3, cutoff=0.6)


def recognise(name: str) -> Gpu | None:
    """The GPU with this product name in NVML, DCGM or the AMD tools; None if that is not certain.

    MIG devices, vGPUs and partitions are only part of a GPU. The result is None for those with
    names of their own. DCGM reports a MIG device under the whole GPU's name; the result is then the
    whole GPU.
    """
    plain = plain_name(name)
    return next((spec for spec in gpus().values() if plain in map(plain_name, spec.names)), None)
