"""The flags of `size`, one row each. Does not import the sizing code, which takes time to load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from kneewatch.agent.settings.options import PAIR, SPAN

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of `size`. `multiple`: it may be given several times; `also`: its name in the help,
    where that is not `name`, which the HTTP API calls it by."""

    name: str
    kind: click.ParamType[Any] | type
    help: str
    metavar: str | None = None
    default: Any = None
    multiple: bool = False
    also: str | None = None

    @property
    def names_file(self) -> bool:
        """Whether its value is or contains a file name."""
        return isinstance(self.kind, click.Path) or self.kind is PAIR


FLAGS = (
    Flag("--model", str, "catalogue id, a config.json, its folder, or an id on this disk", "ID"),
    Flag("--gpu", str, "catalogue id such as h100-sxm, or the driver's name", "ID"),
    Flag("--gpus", int, "GPUs in total; a multiple of TP x PP x DP gives replicas"),
    Flag("--tp", int, "tensor parallel size", also="--tensor-parallel"),
    Flag("--pp", int, "pipeline parallel size", default=1),
    Flag("--dp", int, "data parallel engines of one replica", default=1),
    Flag("--dcp", int, "decode context parallel size", default=1),
    Flag("--quantization", str, "bf16, fp8, awq, nvfp4, ...; default: the checkpoint's", "SCHEME"),
    Flag("--kv-cache-dtype", str, "dtype of the KV cache", "DTYPE", default="auto"),
    Flag("--gpu-memory-utilization", float, "default: the vLLM version's"),
    Flag("--max-model-len", int, "longest request; default: the model's"),
    Flag("--max-num-seqs", int, "default: that of version and GPU"),
    Flag("--max-num-batched-tokens", int, "default: that of version and GPU"),
    Flag("--block-size", int, "tokens per KV block; default: vLLM's choice"),
    Flag("--vllm-version", str, "default: the newest known", "X.Y.Z"),
    Flag("--context", int, "tokens per request for concurrency; default: the longest"),
    Flag("--concurrency", float, "requests in flight over all replicas; default: one each"),
    Flag("--overhead", str, "guide (plan with it) or fitted (predict with it)", "guide|fitted"),
    Flag("--max-loras", int, "LoRA adapters per batch; their buffers take memory"),
    Flag("--max-lora-rank", int, "largest rank of an adapter; default 16"),
    Flag("--draft-model", str, "draft model for speculative decoding: as --model, or mtp", "ID"),
    Flag("--num-speculative-tokens", int, "tokens that the draft model proposes per step"),
    Flag("--acceptance", float, "probability that a draft token is accepted, 0 to 1"),
    Flag("--weights-gib", float, "weights per GPU as vLLM logs them, without adapters and draft"),
    Flag("--available-kv-gib", float, "available KV memory per GPU as vLLM logs it"),
    Flag("--input-tokens", float, "mean prompt length"),
    Flag("--output-tokens", float, "mean output length"),
    Flag("--peak-rps", float, "requests per second at the fleet's peak"),
    Flag("--usable-rps", float, "measured requests per second of one replica at its SLO"),
    Flag("--ttft-slo", SPAN, "TTFT target, e.g. 2s"),
    Flag("--itl-slo", SPAN, "ITL target, e.g. 50ms"),
    Flag("--mfu", float, "share of the compute peak in prefill; default: from measured points"),
    Flag("--mbu", float, "share of the bandwidth in decode; default: from measured points"),
    Flag("--safety", float, "safety factor on replicas; default 1.3"),
    Flag("--usd-per-gpu-hour", float, "default: the catalogue's"),
    Flag(
        "--benchmark", click.Path(), "measured sweep (CSV or a tool's JSON); gives the usable RPS"
    ),
    Flag(
        "--benchmark-by-tensor-parallel",
        PAIR,
        "one sweep per tensor parallel size: finds the best per GPU; the launch's own size gives "
        "the usable RPS",
        "TP=FILE",
        default=(),
        multiple=True,
    ),
    Flag("--plan", click.Path(), "workload profile (TOML) for the 13-step sizing plan", "PROFILE"),
    Flag("--utilization", float, "average share of the capacity in use; default: at the peak"),
)

SWITCHES = (
    ("--search", "find the cheapest launch that meets the targets"),
    ("--expert-parallel", "experts split over all ranks"),
    ("--enforce-eager", "no CUDA graphs"),
    ("--no-enable-prefix-caching", "recurrent layers keep one state less per request"),
    ("--disable-hybrid-kv-cache-manager", "every layer stores the whole context"),
)


def _list_gpus(context: click.Context, _: click.Parameter, given: bool) -> None:
    if not given or context.resilient_parsing:
        return
    # Lazy: slow to import.
    from kneewatch.diagnose.catalogue.gpu_specs import gpus

    for gpu_id, gpu in gpus().items():
        click.echo(f"{gpu_id:22}{gpu.name}")
    context.exit()


def _list_models(context: click.Context, _: click.Parameter, given: bool) -> None:
    if not given or context.resilient_parsing:
        return
    # Lazy: slow to import.
    from kneewatch.diagnose.catalogue.models import model_ids

    for model_id in model_ids():
        click.echo(model_id)
    context.exit()


def size_options(command: Command) -> Command:
    """All flags of `size`."""
    for name, callback, of in (
        ("--list-models", _list_models, "--model"),
        ("--list-gpus", _list_gpus, "--gpu"),
    ):
        command = click.option(
            name,
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=callback,
            help=f"print the catalogue's ids of {of} and exit",
        )(command)
    for name, text in reversed(SWITCHES):
        command = click.option(name, is_flag=True, help=text)(command)
    for flag in reversed(FLAGS):
        command = click.option(
            *filter(None, (flag.also, flag.name)),
            flag.name.removeprefix("--").replace("-", "_"),
            type=flag.kind,
            default=flag.default,
            show_default=flag.default not in (None, ()),
            multiple=flag.multiple,
            metavar=flag.metavar,
            help=flag.help,
        )(command)
    return command
