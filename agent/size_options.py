"""The flags of `size`, one row each. The module does not import the sizing code, because that
import is slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from msgspec import Struct

from kneewatch.agent.settings.table import PAIR, SPAN

Command = TypeVar("Command", bound=Callable[..., Any])


class Flag(Struct, frozen=True):
    """A flag of `size`. A flag of kind `bool` is a switch. `multiple`: the flag may be given
    several times. `alias` is a longer name, which the help shows first."""

    name: str
    kind: click.ParamType[Any] | type
    help: str
    metavar: str | None = None
    default: Any = None
    multiple: bool = False
    alias: str | None = None

    @property
    def parameter(self) -> str:
        """The flag's name in Python, in JSON and in query strings, such as `max_model_len`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def names_file(self) -> bool:
        """Whether the flag's value is, or contains, a file name."""
        return isinstance(self.kind, click.Path) or self.kind is PAIR


FLAGS = (
    Flag(
        "--model",
        str,
        "catalogue id, path of a config.json or of its folder, or id in the HF cache",
        "ID",
    ),
    Flag("--gpu", str, "catalogue id such as h100-sxm, or the driver's name", "ID"),
    Flag("--gpus", int, "total GPUs, a multiple of TP x PP x DP; the multiple is the replicas"),
    Flag("--tp", int, "tensor parallel size", alias="--tensor-parallel"),
    Flag("--pp", int, "pipeline parallel size", default=1),
    Flag("--dp", int, "data parallel size of one replica", default=1),
    Flag("--dcp", int, "decode context parallel size", default=1),
    Flag("--quantization", str, "bf16, fp8, awq, nvfp4, ...; default: the checkpoint's", "SCHEME"),
    Flag("--kv-cache-dtype", str, "dtype of the KV cache", "DTYPE", default="auto"),
    Flag("--gpu-memory-utilization", float, "default: the vLLM version's"),
    Flag("--max-model-len", int, "longest request in tokens; default: the model's"),
    Flag("--max-num-seqs", int, "default: that of the vLLM version and GPU"),
    Flag("--max-num-batched-tokens", int, "default: that of the vLLM version and GPU"),
    Flag("--block-size", int, "tokens per KV block; default: vLLM's choice"),
    Flag("--vllm-version", str, "default: the newest that kneewatch knows", "X.Y.Z"),
    Flag("--context", int, "tokens per request, for the concurrency; default: --max-model-len"),
    Flag("--concurrency", float, "concurrent requests over all replicas; default: 1 per replica"),
    Flag(
        "--overhead",
        str,
        "memory overhead model: guide, to plan; fitted, to predict",
        "guide|fitted",
    ),
    Flag("--max-loras", int, "LoRA adapters per batch; their buffers take GPU memory"),
    Flag("--max-lora-rank", int, "largest rank of an adapter; default 16"),
    Flag(
        "--draft-model", str, "draft model for speculative decoding: as for --model, or mtp", "ID"
    ),
    Flag("--num-speculative-tokens", int, "draft tokens per step"),
    Flag("--acceptance", float, "probability that a draft token is accepted, 0 to 1"),
    Flag(
        "--weights-gib", float, "weights per GPU from vLLM's log, without adapters and draft model"
    ),
    Flag("--available-kv-gib", float, "available KV cache memory per GPU from vLLM's log"),
    Flag("--input-tokens", float, "mean prompt length in tokens"),
    Flag("--output-tokens", float, "mean output length in tokens"),
    Flag("--peak-rps", float, "requests/s at the fleet's peak"),
    Flag("--usable-rps", float, "measured requests/s of one replica within its SLO"),
    Flag("--ttft-slo", SPAN, "TTFT target, e.g. 2s"),
    Flag("--itl-slo", SPAN, "ITL target, e.g. 50ms"),
    Flag("--mfu", float, "MFU in prefill, 0 to 1; default: from measured points"),
    Flag("--mbu", float, "MBU in decode, 0 to 1; default: from measured points"),
    Flag("--safety", float, "safety factor on replicas; default 1.3"),
    Flag("--usd-per-gpu-hour", float, "default: the catalogue's"),
    Flag("--benchmark", click.Path(), "measured sweep (CSV or a tool's JSON), for the usable RPS"),
    Flag(
        "--benchmark-by-tensor-parallel",
        PAIR,
        "a sweep per tensor parallel size: compares throughput per GPU; that of the launch's own "
        "size gives the usable RPS",
        "TP=FILE",
        default=(),
        multiple=True,
    ),
    Flag("--plan", click.Path(), "workload profile (TOML) for the 13-step sizing plan", "PROFILE"),
    Flag(
        "--utilization",
        float,
        "average share of the capacity in use, for the cost; default: at the peak",
    ),
    Flag("--search", bool, "find the cheapest launch that meets the targets", default=False),
    Flag("--expert-parallel", bool, "split experts over all ranks", default=False),
    Flag("--enforce-eager", bool, "no CUDA graphs", default=False),
    Flag(
        "--no-enable-prefix-caching",
        bool,
        "no prefix cache: recurrent layers store one state less per request",
        default=False,
    ),
    Flag(
        "--disable-hybrid-kv-cache-manager",
        bool,
        "every layer stores the whole context",
        default=False,
    ),
)


def _print_ids(context: click.Context, option: click.Parameter, given: bool) -> None:
    """Print the ids of the catalogue and exit. click calls this for --list-models and
    --list-gpus."""
    if not given or context.resilient_parsing:
        return
    # Lazy: slow to import.
    from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpus
    from kneewatch.diagnose.catalogue.models import model_ids

    listed = [
        f"{gpu_id:22}{gpu.name:52}{gpu.memory_sold_bytes / GIB:4.0f} GB"
        f" ({gpu.memory_bytes / GIB:.1f} GiB usable)"
        for gpu_id, gpu in gpus().items()
    ]
    click.echo("\n".join(model_ids() if option.name == "list_models" else listed))
    context.exit()


def size_options(command: Command) -> Command:
    """Add all flags of `size` to a command."""
    for name, of in (("--list-models", "--model"), ("--list-gpus", "--gpu")):
        command = click.option(
            name,
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_ids,
            help=f"print the catalogue's ids for {of} and exit",
        )(command)
    for flag in reversed(FLAGS):
        command = click.option(
            *filter(None, (flag.alias, flag.name)),
            flag.parameter,
            type=flag.kind,
            is_flag=flag.kind is bool,
            default=flag.default,
            show_default=flag.default not in (None, (), False),
            multiple=flag.multiple,
            metavar=flag.metavar,
            help=flag.help,
        )(command)
    return command
