"""GPUs of the catalogue by id, or by the name that a driver gives. Pure.

They come from the packaged `gpus.toml`, which is read at the first call.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final

from kneewatch.diagnose.catalogue.gpu_table import DTYPES, GIB, Dtype, Gpu, gpus_from, plain_name
from kneewatch.diagnose.sizing.inputs import SizingError

__all__ = [
    "DTYPES",
    "GIB",
    "Dtype",
    "Gpu",
    "gpu",
    "gpus",
    "gpus_from",
    "nearest_ids",
    "recognise",
]

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
    known = gpus() if catalogue is None else catalogue
    found = known.get(gpu_id.strip().casefold())
    if found is not None:
        return found
    near = nearest_ids(gpu_id, known)
    way_out = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    raise SizingError(
        f"gpu is {gpu_id!r}, which is not in the catalogue; {way_out}",
        name="gpu",
        choices=tuple(known),
    )


def nearest_ids(text: str, catalogue: Mapping[str, Gpu]) -> list[str]:
    """Ids that may have been meant: that of a product name, else those alike; three at most."""
    if (named := recognise(text, catalogue=catalogue)) is not None:
        return [named.id]
    wanted = plain_name(text).replace(" ", "-")
    within = [known for known in catalogue if wanted and (wanted in known or known in wanted)]
    return within[:3] or difflib.get_close_matches(wanted, catalogue, n=3, cutoff=0.6)


def recognise(
    name: str, *, memory_bytes: float | None = None, catalogue: Mapping[str, Gpu] | None = None
) -> Gpu | None:
    """The GPU that NVML, DCGM or the AMD tools name so; None where it is not known for certain.

    MIG devices, vGPUs and partitions are not the whole GPU and give None: by their names, or by
    `memory_bytes`, the total that is reported beside the name. DCGM gives a MIG device the whole
    GPU's name: pass its memory, or don't ask.
    """
    known = gpus() if catalogue is None else catalogue
    plain = plain_name(name)
    for candidate in known.values():
        if plain in map(plain_name, candidate.names):
            if memory_bytes is None:
                return candidate
            off_ratio = abs(memory_bytes / candidate.memory_bytes - 1)
            return candidate if off_ratio <= MEMORY_TOLERANCE_RATIO else None
    return None
