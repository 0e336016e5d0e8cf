"""GPUs by roofline: how long steps take, and what a DCGM exporter would say meanwhile.

Step times are those of `diagnose.sizing.speed`; a GPU whose clocks are held down computes slower,
and reads slower once its cores can no longer ask for what the memory could give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import Gpu, gpu
from kneewatch.diagnose.catalogue.models import Model, model
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.speed.performance import StepModel, step_model
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT, Costs, costs
from tests.simulator.work import Work

GIB = 1024**3
RESERVED_BYTES = 5 * GIB
"""Activations, graphs and the framework, on each GPU."""
UTILIZATION_RATIO = 0.92
SOME_TOKENS = 1000.0
READS_NEED_CLOCK = 0.65
"""Below this share of the full clock the cores no longer ask for all that the memory gives."""
SM_CLOCK_MAX_MHZ = {"h100-sxm": 1980.0, "h200": 1980.0, "b200": 1965.0}
IDLE_WATTS, COOL_C, HOT_C = 110.0, 32.0, 72.0
CHUNK_S = 0.15
TENSOR_OF_COMPUTE = 0.85
"""Share of the time in which a compute-bound kernel's tensor pipe is issuing."""


class Health(Struct):
    """What is wrong with a GPU. `clock_ratio`: its clock against the full one."""

    clock_ratio: float = 1.0
    hot: bool = False
    power_capped: bool = False
    xid: int = 0
    remap_failed: bool = False


class Busy(Struct):
    """Seconds in which something was active, since the start."""

    engine_s: float = 0.0
    dram_s: float = 0.0
    tensor_s: float = 0.0


class Hardware(Struct, frozen=True):
    """A model on GPUs."""

    model: Model
    gpu: Gpu
    tensor_parallel: int
    costs: Costs

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of a token on one GPU, windows as if they held everything."""
        windows = sum(window.kv_bytes_per_token for window in self.costs.windows)
        return self.costs.kv_bytes_per_token + windows

    def blocks(self, block_size: int = 16) -> int:
        """KV blocks that fit beside the weights."""
        weights = self.costs.weights_bytes + self.costs.experts_bytes
        left = UTILIZATION_RATIO * self.gpu.memory_bytes - weights - RESERVED_BYTES
        return int(left / (self.kv_bytes_per_token * block_size))


def chunk_tokens(device: Hardware) -> int:
    """A token budget with which a step full of a prompt is short: what a tuned server has."""
    steps, budget = GpuSteps(device), 4096
    while budget > 256 and steps.step_s(Work(24, 24e3, budget, budget * 1000.0, 1)) > CHUNK_S:
        budget //= 2
    return budget


def hardware(model_id: str, gpu_id: str, tensor_parallel: int = 1) -> Hardware:
    """A model of the catalogue on GPUs of the catalogue."""
    served_model, card = model(model_id), gpu(gpu_id)
    return Hardware(
        served_model,
        card,
        tensor_parallel,
        costs(Launch(served_model, card, Parallel(tensor_parallel))),
    )


@dataclass(slots=True)
class GpuSteps:
    """Step times of a model on GPUs, and what the steps did to the GPUs' counters."""

    hardware: Hardware
    drafted: int = 0
    draft_cost_ratio: float = 0.0
    request_s: float = 0.004
    load_adapter_s: float = 0.06
    health: Health = field(default_factory=Health)
    busy: Busy = field(default_factory=Busy)
    host_late_s: float = 0.0
    """How much longer the host takes to prepare a step than it should."""
    _step: StepModel = field(init=False)
    _read_s: float = field(init=False)
    _pair_s: float = field(init=False)

    def __post_init__(self) -> None:
        verified = 1.0 + self.drafted
        at = [
            step_model(
                self.hardware.costs,
                DEFAULT,
                context_tokens=tokens,
                prompt_context_tokens=tokens,
                tokens_per_sequence=verified,
            )
            for tokens in (0.0, SOME_TOKENS)
        ]
        none, some = at
        self._step = none
        self._read_s = (some.sequence_read_s - none.sequence_read_s) / SOME_TOKENS
        pair_s = some.prompt_token_attention_s - none.prompt_token_attention_s
        self._pair_s = pair_s / SOME_TOKENS

    def _parts_s(self, work: Work) -> tuple[float, float, float, float]:
        """Seconds of reading and of computing, of both at once, and of all the rest."""
        parts = self._step.parts(work.decodes, work.prompt_tokens)
        clock = self.health.clock_ratio
        draft_s = 1 + self.drafted * self.draft_cost_ratio
        reads = draft_s / min(1.0, clock / READS_NEED_CLOCK)
        computes = draft_s / clock
        # The step's contexts and pairs are those of its own requests.
        read_more_s = (0.0, 0.0, work.context_tokens * self._read_s)
        compute_more_s = (0.0, 0.0, work.pairs * self._pair_s)
        kinds = [
            (reads * (read_s + more_read_s), computes * (compute_s + more_compute_s))
            for read_s, compute_s, more_read_s, more_compute_s in zip(
                parts.reads_s, parts.computes_s, read_more_s, compute_more_s, strict=True
            )
        ]
        return (
            sum(read_s for read_s, _ in kinds),
            sum(compute_s for _, compute_s in kinds),
            sum(max(both) for both in kinds),
            parts.interconnect_s + parts.launch_s / clock + parts.host_s + self.host_late_s,
        )

    def step_s(self, work: Work) -> float:
        """Seconds of one step."""
        _, _, kernels_s, rest_s = self._parts_s(work)
        return kernels_s + rest_s

    def worked(self, work: Work, steps: int, step_s: float) -> None:
        """So many such steps were done."""
        read_s, compute_s, kernels_s, rest_s = self._parts_s(work)
        stretched = steps * step_s / (kernels_s + rest_s)
        # While the host is late nothing runs.
        self.busy.engine_s += stretched * (kernels_s + (rest_s - self.host_late_s) / 2)
        # While it reads as fast as it can, the bus is busy for the share that it reaches.
        self.busy.dram_s += (
            stretched
            * read_s
            * DEFAULT.mbu_ratio
            * min(1.0, self.health.clock_ratio / READS_NEED_CLOCK)
        )
        self.busy.tensor_s += stretched * compute_s * DEFAULT.mfu_ratio * TENSOR_OF_COMPUTE


LABELS = (
    'gpu="{at}",UUID="GPU-{host}-{at}",pci_bus_id="00000000:{bus:02X}:00.0",device="nvidia{at}",'
    'modelName="{name}",Hostname="{host}",DCGM_FI_DRIVER_VERSION="580.105.08"'
)


class Exporter:
    """A DCGM exporter beside the engine: its default fields, and with `fuller` those that tell
    why clocks are held down."""

    def __init__(self, steps: GpuSteps, rng: Random, *, fuller: bool = False) -> None:
        self._steps, self._rng, self._fuller = steps, rng, fuller
        self._last, self._last_s = replace(steps.busy), 0.0
        self._energy_mj = 1e9
        self._held_ns = {"THERMAL_VIOLATION": 0.0, "POWER_VIOLATION": 0.0}
        self._temperature_c = COOL_C + 10

    def page(self, now_s: float) -> str:
        """The page now; means are since the page before."""
        busy, last = self._steps.busy, self._last
        over_s = max(now_s - self._last_s, 1e-9)
        ratios = {
            "PROF_GR_ENGINE_ACTIVE": (busy.engine_s - last.engine_s) / over_s,
            "PROF_DRAM_ACTIVE": (busy.dram_s - last.dram_s) / over_s,
            "PROF_PIPE_TENSOR_ACTIVE": (busy.tensor_s - last.tensor_s) / over_s,
        }
        self._last, self._last_s = replace(busy), now_s
        fields = {name: min(1.0, ratio) for name, ratio in ratios.items()}
        self._physics(fields, over_s)
        lines = list[str]()
        for name, value in fields.items():
            kind = "counter" if name.endswith(COUNTED) else "gauge"
            lines.append(f"# HELP DCGM_FI_{name} {name}.\n# TYPE DCGM_FI_{name} {kind}\n")
            for at in range(self._steps.hardware.tensor_parallel):
                labels = LABELS.format(
                    at=at, host="node-1", bus=0x53 + at, name=self._steps.hardware.gpu.names[0]
                )
                lines.append(f"DCGM_FI_{name}{{{labels}}} {value:.10g}\n")
        return "".join(lines)

    def _physics(self, fields: dict[str, float], over_s: float) -> None:
        hardware, health = self._steps.hardware, self._steps.health
        limit = hardware.gpu.power_watts
        load = 0.55 * fields["PROF_DRAM_ACTIVE"] + 1.3 * fields["PROF_PIPE_TENSOR_ACTIVE"]
        load += 0.2 * fields["PROF_GR_ENGINE_ACTIVE"]
        watts = min(limit, IDLE_WATTS + (limit - IDLE_WATTS) * load * health.clock_ratio**1.5)
        if health.power_capped:
            watts = min(watts, limit * health.clock_ratio)
        warm_c = HOT_C + 15 if health.hot else COOL_C + (HOT_C - COOL_C) * watts / limit
        # A heat sink takes half a minute.
        self._temperature_c += (warm_c - self._temperature_c) * min(1.0, over_s / 30)
        held = health.clock_ratio < 1
        reason = "THERMAL_VIOLATION" if health.hot else "POWER_VIOLATION"
        self._held_ns[reason] += over_s * 1e9 * held
        self._energy_mj += watts * over_s * 1000
        most = SM_CLOCK_MAX_MHZ[hardware.gpu.id]
        used = UTILIZATION_RATIO * hardware.gpu.memory_bytes / 2**20
        fields |= {
            "DEV_SM_CLOCK": round(most * health.clock_ratio),
            "DEV_MEM_CLOCK": 2619,
            "DEV_GPU_TEMP": round(self._temperature_c + self._rng.random()),
            "DEV_MEMORY_TEMP": round(self._temperature_c + 8),
            "DEV_POWER_USAGE": watts,
            "DEV_TOTAL_ENERGY_CONSUMPTION": self._energy_mj,
            "DEV_PCIE_REPLAY_COUNTER": 0,
            "DEV_GPU_UTIL": round(100 * fields["PROF_GR_ENGINE_ACTIVE"]),
            "DEV_MEM_COPY_UTIL": round(60 * fields["PROF_DRAM_ACTIVE"]),
            "DEV_XID_ERRORS": health.xid,
            "DEV_FB_USED": round(used),
            "DEV_FB_FREE": round(hardware.gpu.memory_bytes / 2**20 - used),
            "DEV_NVLINK_BANDWIDTH_TOTAL": 0,
            "DEV_UNCORRECTABLE_REMAPPED_ROWS": int(health.remap_failed),
            "DEV_CORRECTABLE_REMAPPED_ROWS": 0,
            "DEV_ROW_REMAP_FAILURE": int(health.remap_failed),
        }
        if self._fuller:
            fields |= {f"DEV_{name}": value for name, value in self._held_ns.items()}
            fields["DEV_MAX_SM_CLOCK"] = most


COUNTED = ("CONSUMPTION", "COUNTER", "REMAPPED_ROWS", "VIOLATION")
