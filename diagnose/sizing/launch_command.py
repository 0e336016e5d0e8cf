"""The `vllm serve` command of a sized launch. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from kneewatch.collector.engines.engine_kind import (
    ADAPTERS,
    LONGEST_TOKENS,
    SPECULATION,
    EngineKind,
)
from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.catalogue.quantization import FULL_BITS, Scheme, scheme
from kneewatch.diagnose.deployment.vllm_flags import is_hidden, printed_words
from kneewatch.diagnose.sizing.memory.launch import Launch, set_values
from kneewatch.diagnose.sizing.memory.weights import weights_per_gpu

# No method of 0.32 (vllm/model_executor/layers/quantization/__init__.py).
_BITSANDBYTES_UNTIL = (0, 32, 0)
# Before, the weights of all layers are in GPU memory in 16 bit first (pull requests 31914, 32773).
_BY_LAYER_FROM = (0, 15, 0)


def sized_command(launch: Launch) -> str:
    """The command of a sized launch; a shell comment says where it needs another checkpoint."""
    others = dict(launch.other_flags)
    values = {flag: value for flag, value in flag_values(launch).items() if flag not in others}
    if launch.slack is None:
        flags = [_words(flag, value) for flag, value in values.items()]
        command = " ".join(["vllm serve", shlex.quote(launch.model.id), *flags])
    else:
        command = _own_command(launch.kind, launch.model.id, values)
    words = [printed_words(*other) for other in others.items()]
    variables = [word for word in words if not word.startswith("-")]
    command = " ".join([*variables, command, *(word for word in words if word.startswith("-"))])
    own = scheme(launch.model.quantization)
    other = (
        launch.scheme.id not in (own.id, own.in_float32.id) and _quantized_at_load(launch) is None
    )
    return f"{command}  # needs a checkpoint in {launch.scheme.id}" if other else command


def _own_command(kind: EngineKind, model: str, values: Mapping[str, str | float | bool]) -> str:
    """The command of an engine that is not vLLM, in its flags."""
    flags: list[str] = []
    for flag, value in values.items():
        spelled = kind.flags.get(flag, "")
        value = kind.values.get(f"{value}", value) if isinstance(value, str) else value
        flags += [_words(spelled, value)] if spelled else []
    return " ".join([f"python -m {kind.launchers[0]} --model-path", shlex.quote(model), *flags])


def _quantized_at_load(launch: Launch) -> str | None:
    """The method with which vLLM quantizes the model while it loads it.

    None for quantized checkpoints, which state theirs, and for schemes that need one.
    """
    chosen, own = launch.scheme.id, scheme(launch.model.quantization)
    loads = chosen == "fp8" and _holds_all(launch, own)
    loads = loads or (chosen == "bitsandbytes" and launch.version < _BITSANDBYTES_UNTIL)
    return chosen if own.expert_bits == FULL_BITS and loads else None


def _holds_all(launch: Launch, own: Scheme) -> bool:
    """Whether the GPU holds what vLLM loads before it is quantized."""
    if launch.version >= _BY_LAYER_FROM or launch.gpu is None:
        return True
    vendor, parallel = launch.gpu.vendor, launch.parallel
    whole = weights_per_gpu(launch.model, own, parallel, vendor=vendor)
    return sum(whole.values()) < launch.gpu.memory_bytes


def flag_values(launch: Launch) -> Mapping[str, str | float | bool]:
    """The values of the flags that the launch sets; True for a switch."""
    values: dict[str, str | float | bool] = {}
    for flag, value in set_values(launch):
        if flag.field == "adapters.slots":
            values[ADAPTERS] = True
        if flag.field == "quantization":
            if method := _quantized_at_load(launch):
                values[flag.launch] = method
        elif flag.kind == "sizes":
            # Versions that lack the flag of its own have this one.
            values["--compilation-config"] = json.dumps({flag.field: value})
        elif flag.launch:
            written = _WRITTEN.get(flag.kind)
            values[flag.launch] = value if written is None else written(value)
    if launch.auto_context:
        values[LONGEST_TOKENS] = "auto"
    draft = launch.draft
    if draft is not None:
        own = draft.model == launch.model.own_draft
        values[SPECULATION] = json.dumps(
            ({"method": "mtp"} if own else {"model": draft.model.id})
            | {"num_speculative_tokens": draft.tokens}
        )
    return values


def shown_flags(launch: Launch) -> dict[str, str | float | bool]:
    """The flags of the launch, without values that may be secrets."""
    others = {flag: text for flag, text in launch.other_flags if not is_hidden(flag, text)}
    return {**flag_values(launch), **others}


_WRITTEN: Mapping[str, Callable[[Any], str | float | bool]] = {
    "switch": lambda _: True,
    "gib": lambda value: value / GIB,
    "bytes": int,
    "limits": lambda value: json.dumps(dict(value)),
}
"""The value of a flag in a command, from that of its field, by the kind of the flag."""


def _words(flag: str, value: str | float | bool) -> str:
    if isinstance(value, bool):
        return flag
    return f"{flag} {shlex.quote(f'{value:g}' if isinstance(value, float) else str(value))}"
