"""The DCGM fields of a page: names, units and the GPU each series belongs to. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Literal
from weakref import WeakKeyDictionary

from msgspec import Struct

from kneewatch.collector.errors import CollectError
from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.collector.page import Layout, Series

BY_NAMESPACE = attrgetter("namespace", "pod", "container")


class Field(Struct, frozen=True):
    """A row of the table of DCGM fields.

    A value on a page times the scale of its name is a value in `unit`. `csv` is the list of fields
    that contains this one: dcgm-exporter's `default`, or kneewatch's recommended `fuller`.
    """

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    help: str
    csv: str = ""
    labels: tuple[str, ...] = ()
    wide: bool = False


class FieldName(Struct, frozen=True):
    """The field and scale of a name on a page; if a page has several names of a field, the lowest
    `rank` wins."""

    field: Field
    scale: float
    rank: int


class FieldTable(Struct, frozen=True):
    """All fields by canonical name, and all names that pages use for them."""

    fields: Mapping[str, Field]
    names: Mapping[str, FieldName]


@cache
def field_table() -> FieldTable:
    """The packaged table; read from its file on first use."""
    fields: dict[str, Field] = {}
    names: dict[str, FieldName] = {}
    for name, row in packaged_tables("collector.names", "dcgm_metrics.toml")["fields"].items():
        field = fields[name] = read_as({"name": name, **row}, Field)
        scale = float(row.get("scale", 1))
        spellings = [(newer["name"], newer.get("scale", 1)) for newer in row.get("newer", ())]
        spellings += [(old, scale) for old in (name, *row.get("former", ()))]
        for rank, (spelling, factor) in enumerate(spellings):
            names[spelling] = FieldName(field, float(factor), rank)
    return FieldTable(fields, names)


# Which GPU each value of a DCGM exporter's page belongs to, and its unit; once per layout. Pure.
#
# Fields keep DCGM's names. The exporter renamed many of them, changed their units and spells labels
# in several ways; a Prometheus in between renames the workload's labels. All of that is undone
# here.


# In the order of trust. NVLink series say gpu_uuid and model_name, all others UUID and modelName;
# the host's label was capitalised until 4.8.3.
_UUID = ("UUID", "uuid", "gpu_uuid")
_INDEX = ("gpu",)
_MODEL = ("modelName", "model_name")
_HOST = ("Hostname", "hostname", "exported_Hostname", "exported_hostname")
_MIG = ("GPU_I_ID",)

# DCGM's blanks: the base is "no value", the next 15 say why (not found, not supported, ...).
_BLANK_32 = 0x7FFFFFF0
_BLANK_64 = float(0x7FFFFFFFFFFFFFF0)  # as a float this is 2**63, as are the 15 after it
_BLANK_DOUBLE = 2.0**47
_BLANKS = 16

Labels = tuple[tuple[str, str], ...]


class GpuKey(Struct, frozen=True):
    """A GPU, or one of its MIG instances if `mig` is not empty."""

    uuid: str
    index: str
    model_name: str
    hostname: str
    mig: str = ""


class Workload(Struct, frozen=True):
    """The container that uses a GPU."""

    namespace: str
    pod: str
    container: str


class GpuSlot(Struct, frozen=True):
    """The position of a value in `Page.values`, its own labels, and the conversion to its unit."""

    position: int
    labels: Labels
    scale: float
    wide: bool

    def value(self, values: Sequence[float]) -> float | None:
        """The value in the field's unit; None if DCGM has no value."""
        raw = values[self.position]
        return None if is_sentinel(raw, wide=self.wide) else raw * self.scale


class GpuFields(Struct, frozen=True):
    """The fields of one GPU or MIG instance. A field with several slots has one per NVLink."""

    key: GpuKey
    fields: Mapping[str, tuple[GpuSlot, ...]]
    workloads: tuple[Workload, ...]


Gpus = tuple[GpuFields, ...]
"""The GPUs of a page layout, each with the positions of its values."""

_resolved: WeakKeyDictionary[Layout, Gpus] = WeakKeyDictionary()
"""The GPUs of each layout in use."""


def is_sentinel(value: float, *, wide: bool = False) -> bool:
    """Whether a raw value means "no value".

    For `wide` fields, the sentinels of 32-bit and floating-point fields are ordinary values.
    """
    if math.isnan(value) or value >= _BLANK_64:
        return True
    return not wide and any(b <= value < b + _BLANKS for b in (_BLANK_32, _BLANK_DOUBLE))


def resolve_gpus(layout: Layout) -> Gpus:
    """Positions of each GPU's values on pages of this layout; cached per layout.

    Raises:
        CollectError: of kind `not_metrics`, if the page has no DCGM_FI_ series.
    """
    if (gpus := _resolved.get(layout)) is not None:
        return gpus
    if not any(series.name.startswith("DCGM_FI_") for series in layout.series):
        raise CollectError(
            "no DCGM_FI_ series on this page",
            kind="not_metrics",
            hint="check that this is dcgm-exporter's /metrics, and its GPU and list of fields",
        )
    table = field_table()
    fields = [
        (position, series, table.names[series.name])
        for position, series in enumerate(layout.series)
        if series.name in table.names
    ]
    found = list(islice(_gpus(fields), GPUS_MAX + 1))
    if len(found) > GPUS_MAX:
        raise CollectError(
            f"more than {GPUS_MAX} GPUs on this page",
            kind="too_large",
            hint="give the page of the server's own node",
        )
    gpus = _resolved[layout] = tuple(sorted(found, key=lambda gpu: _order(gpu.key)))
    return gpus


GPUS_MAX = 512
"""Most GPUs and MIG instances on a page; a node has up to 112."""

_Found = tuple[int, Series, FieldName]


def _gpus(fields: Sequence[_Found]) -> Iterable[GpuFields]:
    # Most fields of a GPU carry the same labels: they are read once.
    by_labels: dict[Labels, list[_Found]] = {}
    for entry in fields:
        by_labels.setdefault(entry[1].labels, []).append(entry)
    rows = [(dict(labels), same) for labels, same in by_labels.items()]
    uuids = _uuids(labels for labels, _ in rows)
    # A Prometheus that adds its own pod labels renames the workload's to exported_*.
    exported = "exported_" if any("exported_pod" in labels for labels, _ in rows) else ""
    groups: dict[tuple[str, str], list[tuple[Mapping[str, str], list[_Found]]]] = {}
    for row in rows:
        labels, _ = row
        at = (_first(labels, _HOST), _first(labels, _INDEX))
        gpu = _first(labels, _UUID) or uuids.get(at) or (at[1] and "/".join(at))
        if gpu:  # the rest are NVSwitches, their links, and CPUs
            groups.setdefault((gpu, _first(labels, _MIG)), []).append(row)
    for group in groups.values():
        same = sorted((entry for _, ones in group for entry in ones), key=lambda entry: entry[0])
        yield _gpu([labels for labels, _ in group], same, exported)


def _uuids(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], str]:
    """The UUID of each GPU by host and index, for series that have only the index."""
    uuids: dict[tuple[str, str], str] = {}
    for labels in rows:
        uuid, index = _first(labels, _UUID), _first(labels, _INDEX)
        if uuid and index:
            uuids.setdefault((_first(labels, _HOST), index), uuid)
    return uuids


def _gpu(rows: Sequence[Mapping[str, str]], fields: Sequence[_Found], exported: str) -> GpuFields:
    def said(names: Sequence[str]) -> str:
        return next(filter(None, (_first(labels, names) for labels in rows)), "")

    workloads = {
        Workload(*(labels.get(exported + name, "") for name in ("namespace", "pod", "container")))
        for labels in rows
    }
    return GpuFields(
        key=GpuKey(said(_UUID), said(_INDEX), said(_MODEL), said(_HOST), said(_MIG)),
        fields=_fields(fields),
        workloads=tuple(sorted((w for w in workloads if w.pod), key=BY_NAMESPACE)),
    )


def _fields(group: Sequence[_Found]) -> dict[str, tuple[GpuSlot, ...]]:
    best: dict[str, int] = {}
    for _, _, name in group:
        best[name.field.name] = min(name.rank, best.get(name.field.name, name.rank))
    slots: dict[str, dict[Labels, GpuSlot]] = {}
    for position, series, name in group:
        field = name.field
        if name.rank == best[field.name]:
            own = tuple(pair for pair in series.labels if pair[0] in field.labels)
            # A GPU that pods share is on the page once per pod, with the same value; of repeated
            # lines the first counts.
            slot = GpuSlot(position, own, name.scale, field.wide)
            slots.setdefault(field.name, {}).setdefault(own, slot)
    return {field: tuple(by_labels.values()) for field, by_labels in slots.items()}


def _first(labels: Mapping[str, str], names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _order(key: GpuKey) -> tuple[str, int, str, str, int, str]:
    return (
        key.hostname,
        int(key.index) if key.index.isdecimal() else -1,
        key.index,
        key.uuid,
        int(key.mig) if key.mig.isdecimal() else -1,
        key.mig,
    )
