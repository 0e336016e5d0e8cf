"""The GPU specifications of the catalogue, read from TOML, by id or by driver name. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.catalogue.inputs import SizingError

GIB: Final = 2**30
Dtype = Literal["bf16", "fp16", "fp8", "fp4", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of the catalogue; FLOP/s are dense peaks, and None is "not supported natively"."""

    id: str
    name: str
    vendor: str
    architecture: str
    memory_sold_bytes: int
    memory_bytes: int
    """What CUDA or HIP reports in total: what vLLM takes its share of."""
    memory_source: str
    memory_bandwidth_bytes_per_s: float
    bf16_flop_per_s: float
    pcie_bytes_per_s: float
    """Per direction."""
    power_watts: float
    usd_per_hour: float
    """A default, to be replaced by what is really paid."""
    price_source: str
    source: str
    names: tuple[str, ...] = ()
    compute_capability: str | None = None
    fp8_flop_per_s: float | None = None
    fp4_flop_per_s: float | None = None
    int8_op_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    """Links between GPUs (AMD: Infinity Fabric), both directions together; None where there are
    none."""
    nvlink_gpus: int = 1
    """Most GPUs that these links join; 1 where there are none."""
    c2c_bytes_per_s: float | None = None
    """Per direction to a CPU on the same module, in the place of PCIe; None where there is none."""
    segment: str = "data-centre"
    """data-centre or workstation: cards for desks are sized when asked for, not searched."""
    note: str = ""

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes per second between this GPU and its CPU's memory, per direction."""
        return self.c2c_bytes_per_s or self.pcie_bytes_per_s

    @property
    def memory_is_estimated(self) -> bool:
        """Whether no log showed `memory_bytes`."""
        return self.memory_source.startswith("estimated")

    def flop_per_s(self, dtype: Dtype) -> float | None:
        """Dense peak in a number format, in (floating-point) operations per second.

        None where the GPU does not compute in it: weights may still be stored so, and are then
        unpacked to 16 bits.
        """
        match dtype:
            case "bf16" | "fp16":
                return self.bf16_flop_per_s
            case "fp8":
                return self.fp8_flop_per_s
            case "fp4":
                return self.fp4_flop_per_s
            case "int8":
                return self.int8_op_per_s


_TEXT: Final = ("name", "vendor", "architecture", "source")
_TEXT_OPTIONAL: Final = ("compute_capability", "note", "segment", "memory_source", "price_source")
_NUMBERS: Final = (
    *("memory_sold_gib", "memory_gib", "memory_bandwidth_bytes_per_s", "bf16_flop_per_s"),
    *("pcie_bytes_per_s", "power_watts", "usd_per_hour"),
)
_NUMBERS_OPTIONAL: Final = (
    *("fp8_flop_per_s", "fp4_flop_per_s", "int8_op_per_s"),
    *("nvlink_bytes_per_s", "nvlink_gpus", "c2c_bytes_per_s"),
)
_NEEDED: Final = (*_TEXT, *_NUMBERS)
_KEYS: Final = (*_NEEDED, "names", *_TEXT_OPTIONAL, *_NUMBERS_OPTIONAL)
_SEGMENTS: Final = ("data-centre", "workstation")
_SOURCES: Final = {"memory_gib": "memory_source", "usd_per_hour": "price_source"}


def gpus_from(text: str, *, origin: str, base: Mapping[str, Gpu] | None = None) -> dict[str, Gpu]:
    """The GPUs of `base` with those of a TOML text laid over them, by id.

    An id of `base` changes in the keys that are given; a new id needs all that `gpus.toml` does
    not call optional. Memory and price that come without their source get `origin` as theirs.

    Raises:
        SettingsError: not TOML, a key that is unknown, missing or of no use, or a product name
            that two GPUs claim; it names `origin`, the id and the key.
    """
    merged = dict(base or {})
    for gpu_id, row in _rows(text, origin).items():
        where = f"{origin}: gpus.{gpu_id}"
        sources = {
            source_key: f"stated in {origin}" for key, source_key in _SOURCES.items() if key in row
        }
        fields = _fields(sources | row, where)
        if gpu_id in merged:
            spec = dataclasses.replace(merged[gpu_id], **fields)
        else:
            _check_new(gpu_id, row, where)
            spec = Gpu(id=gpu_id, **fields)
        _check_together(spec, where)
        merged[gpu_id] = spec
    _check_names(merged, origin)
    return merged


def plain_name(name: str) -> str:
    """A product name without case, punctuation and the vendor's name in front."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return " ".join(words[1:] if words[:1] in (["nvidia"], ["amd"]) else words)


def _rows(text: str, origin: str) -> dict[str, dict[str, object]]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise SettingsError(f"{origin}: not TOML: {exc}") from exc
    for key in document:
        if key != "gpus":
            raise SettingsError(f"{origin}: unknown key {key}; GPUs are tables [gpus.ID]")
    rows: object = document.get("gpus", {})
    if not isinstance(rows, dict):
        raise SettingsError(f"{origin}: gpus is not a table; GPUs are tables [gpus.ID]")
    for gpu_id, row in cast("dict[str, object]", rows).items():
        if not isinstance(row, dict):
            raise SettingsError(f"{origin}: gpus.{gpu_id} is not a table")
    return cast("dict[str, dict[str, object]]", rows)


def _fields(row: Mapping[str, object], where: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in row.items():
        if key not in _KEYS:
            raise SettingsError(f"{where}.{key}: unknown key; known are {', '.join(_KEYS)}")
        if key == "names":
            fields[key] = _names(value, where)
        elif key in (*_TEXT, *_TEXT_OPTIONAL):
            if not isinstance(value, str) or not (value.strip() or key == "note"):
                raise SettingsError(f"{where}.{key} is {value!r}; it must be a text")
            fields[key] = value
        elif key.endswith("_gib"):
            fields[f"{key.removesuffix('_gib')}_bytes"] = round(_number(value, where, key) * GIB)
        else:
            fields[key] = _number(value, where, key)
    return fields


def _number(value: object, where: str, key: str) -> float:
    kinds = int if key == "nvlink_gpus" else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
        kind = "a whole number" if key == "nvlink_gpus" else "a number"
        raise SettingsError(f"{where}.{key} is {value!r}; it must be {kind}")
    if value <= 0:
        raise SettingsError(f"{where}.{key} is {value:g}; it must be above 0")
    return value


def _names(value: object, where: str) -> tuple[str, ...]:
    names = cast("list[object]", value) if isinstance(value, list) else [None]
    texts = tuple(name for name in names if isinstance(name, str) and plain_name(name))
    if len(texts) < len(names):
        raise SettingsError(f"{where}.names is {value!r}; it must be a list of product names")
    return texts


def _check_new(gpu_id: str, row: Mapping[str, object], where: str) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", gpu_id):
        raise SettingsError(f"{where}: an id has lower-case letters, digits and hyphens only")
    for key in _NEEDED:
        if key not in row:
            raise SettingsError(f"{where}.{key} is missing; a new GPU needs it")


def _check_together(spec: Gpu, where: str) -> None:
    if spec.segment not in _SEGMENTS:
        raise SettingsError(
            f"{where}.segment is {spec.segment!r}; it must be one of {', '.join(_SEGMENTS)}"
        )
    if spec.memory_bytes > spec.memory_sold_bytes:
        raise SettingsError(
            f"{where}.memory_gib is {spec.memory_bytes / GIB:g}, above memory_sold_gib, which is "
            f"{spec.memory_sold_bytes / GIB:g}"
        )
    if (spec.nvlink_gpus > 1) != (spec.nvlink_bytes_per_s is not None):
        raise SettingsError(
            f"{where}: nvlink_bytes_per_s and an nvlink_gpus above 1 go together or not at all"
        )


def _check_names(merged: Mapping[str, Gpu], origin: str) -> None:
    owners: dict[str, str] = {}
    for gpu in merged.values():
        for name in gpu.names:
            owner = owners.setdefault(plain_name(name), gpu.id)
            if owner != gpu.id:
                raise SettingsError(
                    f"{origin}: gpus.{gpu.id}.names has {name!r}, which is {owner}'s; "
                    f"leave it out, or change {owner} itself"
                )


# --- GPUs of the catalogue by id, or by the name that a driver gives. Pure ------------------------
#
# They come from the packaged `gpus.toml`, which is read at the first call.


MEMORY_TOLERANCE_RATIO: Final = 0.1
"""Totals of one GPU differ by 9 % at most: NVML's and CUDA's, and GDDR cards with and without ECC.
The next smaller thing that may have its name, a slice or a partition, has at most half."""


@cache
def gpus() -> Mapping[str, Gpu]:
    """The packaged GPUs by id, read at the first call."""
    text = resources.files("kneewatch.diagnose.catalogue").joinpath("gpus.toml").read_text("utf-8")
    return MappingProxyType(gpus_from(text, origin="gpus.toml"))


def gpu(gpu_id: str, *, catalogue: Mapping[str, Gpu] | None = None) -> Gpu:
    """The GPU of an id, from the packaged catalogue unless another is given.

    Raises:
        SizingError: there is none; it names the nearest ids, and `choices` has all.
    """
    specs = gpus() if catalogue is None else catalogue
    spec = specs.get(gpu_id.strip().casefold())
    if spec is not None:
        return spec
    near = nearest_ids(gpu_id, specs)
    way_out = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(specs)}"
    raise SizingError(
        f"gpu is {gpu_id!r}, which is not in the catalogue; {way_out}",
        name="gpu",
        choices=tuple(specs),
    )


def nearest_ids(text: str, catalogue: Mapping[str, Gpu]) -> list[str]:
    """Ids that may have been meant: that of a product name, else those alike; three at most."""
    if (named := recognise(text, catalogue=catalogue)) is not None:
        return [named.id]
    plain_id = plain_name(text).replace(" ", "-")
    within = [
        gpu_id for gpu_id in catalogue if plain_id and (plain_id in gpu_id or gpu_id in plain_id)
    ]
    return within[:3] or difflib.get_close_matches(plain_id, catalogue, n=3, cutoff=0.6)


def recognise(
    name: str, *, memory_bytes: float | None = None, catalogue: Mapping[str, Gpu] | None = None
) -> Gpu | None:
    """The GPU that NVML, DCGM or the AMD tools name so; None where it is not known for certain.

    MIG devices, vGPUs and partitions are not the whole GPU and give None: by their names, or by
    `memory_bytes`, the total that is reported beside the name. DCGM gives a MIG device the whole
    GPU's name: pass its memory, or don't ask.
    """
    specs = gpus() if catalogue is None else catalogue
    plain = plain_name(name)
    for candidate in specs.values():
        if plain in map(plain_name, candidate.names):
            if memory_bytes is None:
                return candidate
            off_ratio = abs(memory_bytes / candidate.memory_bytes - 1)
            return candidate if off_ratio <= MEMORY_TOLERANCE_RATIO else None
    return None
