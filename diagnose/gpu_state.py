"""The state of a target's GPUs at one moment, as records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field


class XidSeen(Struct, frozen=True):
    """An XID that a GPU reported.

    `since_s`: when it was first seen; None if the first scrape already had it. `worked_since`: the
    GPU has done work since then.
    """

    code: int
    since_s: float | None
    worked_since: bool = False


class GpuState(Struct, frozen=True):
    """One GPU now.

    `values` are the signals of collector/signals/gpu.py; None for unknown. `is_awake`: the GPU
    reports its clock and power, and uses energy.
    """

    index: str
    uuid: str
    node: str
    model: str
    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    xids: Sequence[XidSeen] = ()
    is_awake: bool = False

    @property
    def name(self) -> str:
        """The GPU's name in messages: `GPU 3 of node-7`."""
        return gpu_name(self.uuid, self.index, self.node)

    def get(self, signal: str) -> float:
        """A signal's value; 0 if it has none."""
        return self.values.get(signal) or 0.0


def gpu_name(uuid: str, index: str, node: str) -> str:
    """A GPU's name in messages: `GPU 3 of node-7`."""
    gpu = f"GPU {index or uuid}"
    return f"{gpu} of {node}" if node else gpu


class GpuReading(Struct, frozen=True):
    """GPU signals now.

    - `unknown`: a line for each signal that could not be read.
    - `joined`: how the GPUs were matched to the target. `guess`: the match is assumed.
    - `states`: the state of each GPU.
    - `lost`: a line for each GPU that no longer answers.
    - `models`: product names of the target's GPUs; empty if the match is a guess, and for MIG
      instances.
    """

    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    unknown: tuple[str, ...] = ("gpu_*: no GPU source",)
    joined: str = ""
    guess: bool = False
    states: Sequence[GpuState] = ()
    lost: Sequence[str] = ()
    models: tuple[str, ...] = ()


NO_GPUS = GpuReading()
