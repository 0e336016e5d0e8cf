"""Bits per parameter of quantization schemes, and which parameters stay in 16 bit. Pure.

Embeddings, the output projection, norms, routers and vision towers stay in 16 bit under every
scheme here, as in published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.diagnose.catalogue.families import in_group
from kneewatch.diagnose.catalogue.hf_config import Config, mapping
from kneewatch.diagnose.catalogue.inputs import SizingError

FULL_BITS = 16.0
"""Bits of parameters that are not quantized, unless the launch computes in float32."""
_FLOAT32_BITS = 32.0


class Scheme(Struct, frozen=True):
    """Bits per parameter by kind of parameter, including scales and zero points.

    `attention_bits` None means `linear_bits` in a dense model and 16 in a mixture of experts.
    `full_bits` are those of parameters that are not quantized. `compute` is the arithmetic: bf16,
    fp8, fp4, int8 or float32. `dtypes` are those of activations that vLLM takes, `capability` is
    the lowest compute capability with kernels. `stated_as` is the id of the simpler scheme whose
    name users give for this one. `unpacking_ratio` is the speed of the routed experts' kernels on
    GPUs that must unpack them, divided by that of other formats' kernels. From the version `until`
    on, vLLM has no kernels of its own for it, and needs the `plugin`.
    """

    id: str
    linear_bits: float
    expert_bits: float
    compute: str
    source: str
    attention_bits: float | None = None
    stated_as: str = ""
    head_bits: float = FULL_BITS
    unpacking_ratio: float = 1.0
    full_bits: float = FULL_BITS
    dtypes: Sequence[str] = ("bfloat16", "float16")
    capability: float = 0.0
    until: tuple[int, int, int] | None = None
    plugin: str = ""

    @property
    def in_float32(self) -> Scheme:
        """The scheme of weights that are not quantized, in 32 bit."""
        names = "linear_bits", "expert_bits", "attention_bits", "head_bits", "full_bits"
        wide = dict.fromkeys(names, _FLOAT32_BITS)
        return replace(self, id="float32", compute="float32", **wide)

    def attention_bits_of(self, *, mixture: bool) -> float:
        """Bits per attention parameter in a mixture of experts, or in a dense model."""
        if self.attention_bits is not None:
            return self.attention_bits
        return FULL_BITS if mixture else self.linear_bits


def _tables() -> Mapping[str, Mapping[str, Any]]:
    return packaged_tables("diagnose.catalogue", "quantization.toml")


@cache
def schemes() -> Mapping[str, Scheme]:
    """The packaged schemes by id."""
    rows = _tables()["schemes"].items()
    return {name: read_as({"id": name, **row}, Scheme) for name, row in rows}


def scheme(name: str) -> Scheme:
    """The scheme with this id, or with another usual name such as vLLM's.

    Raises:
        SizingError: the name is unknown; the choices are listed.
    """
    key = name.lower()
    stored = schemes().get(_tables()["aliases"].get(key, key))
    if stored is None:
        why = _tables()["refused"].get(key, f"unknown quantization {name!r}")
        raise SizingError(why, name="quantization", choices=tuple(schemes()))
    return stored


def is_format(name: str) -> bool:
    """Whether a stated quantization names a format, whose checkpoints have several
    schemes."""
    return name.lower().replace("auto_round", "auto-round") in _tables()["formats"]["names"]


def checkpoint_scheme(config: Config) -> str:
    """The id of the scheme that a configuration's quantization section describes.

    Raises:
        SizingError: the scheme is not modelled.
    """
    section = config.quantization()
    if section is None:
        return "bf16"
    # What ModelOpt writes to hf_quant_config.json stands one level deeper.
    nested = section.section("quantization")
    section = nested if nested is not None else section
    method = section.word("quant_method").lower()
    if not method and section.has("quant_algo"):
        method = "modelopt"
    if in_group(config, "compressed") and method in ("fp8", "deepseek_v4_fp8"):
        if section.word("moe_quant_algo").upper() == "NVFP4":
            return "fp8-nvfp4"
        return "fp8-mxfp4" if config.word("expert_dtype", default="fp4") == "fp4" else "fp8"
    reader = _READERS.get(method)
    if reader is not None:
        return reader(section)
    named: str = _tables()["aliases"].get(method, method)
    if named not in schemes():
        raise _not_modelled(section, f"quant_method {method!r}")
    return named


def checkpoint_kv_dtype(config: Config) -> str:
    """The dtype of the KV cache that vLLM takes for `auto`: FP8 where the section asks for it.

    Source: `resolve_kv_cache_dtype_string` of vllm/utils/torch_utils.py (0.32).
    """
    section = config.quantization()
    if section is None or not section.word("quant_method").startswith(_KV_METHODS):
        return "auto"
    stated = section.fields.get("kv_cache_scheme") or section.fields.get("kv_cache_quant_algo")
    described = mapping(stated) or {}
    is_float = described.get("num_bits") == 8 and described.get("type") == "float"
    return "fp8" if stated == "FP8" or is_float else "auto"


def _weight_bits(section: Config) -> str:
    """The scheme id of GPTQ or AWQ weights with 4 or 8 bits."""
    method = section.word("quant_method").lower()
    bits = section.count("bits", "w_bit", default=4)
    if bits not in _WHOLE_BITS:
        raise _not_modelled(section, f"{method} of {bits} bits")
    # The scales of a group weigh a little; those of 128 and more are what the scheme counts.
    return _WHOLE_BITS[bits] or method


def _bitsandbytes(section: Config) -> str:
    if section.flag("load_in_8bit", default=False):
        return "int8"
    if section.flag("load_in_4bit", default=False) or section.has("bnb_4bit_quant_type"):
        return "bitsandbytes"
    raise _not_modelled(section, "bitsandbytes without load_in_4bit or load_in_8bit")


def _modelopt(section: Config) -> str:
    algorithm = section.word("quant_algo", default="FP8").upper()
    if algorithm == "MIXED_PRECISION" and "NVFP4" in str(section.fields.get("quantized_layers")):
        # FP8 in attention; a few more layers in FP8 are within a percent.
        return "nvfp4-mlp"
    scheme_id: str | None = _tables()["modelopt"].get(algorithm)
    if scheme_id is None:
        raise _not_modelled(section, f"quant_algo {algorithm!r}")
    return _spared(scheme_id, section.words("exclude_modules") or section.words("ignore"))


def _quark(section: Config) -> str:
    whole = section.section("global_quant_config")
    weight = whole.section("weight") if whole is not None else None
    dtype = weight.word("dtype") if weight is not None else ""
    scheme_id: str | None = _tables()["quark"].get(dtype)
    if scheme_id is None:
        raise _not_modelled(section, f"quark weights of dtype {dtype!r}")
    return scheme_id


def _compressed_tensors(section: Config) -> str:
    groups = section.section("config_groups")
    if groups is None or not groups.fields:
        raise _not_modelled(section, "a section without config_groups")
    scheme_ids = {_group_scheme(section, groups, key) for key in groups.fields}
    if len(scheme_ids) > 1:
        raise _not_modelled(section, f"groups of {' and '.join(sorted(scheme_ids))} side by side")
    name = scheme_ids.pop()
    return _spared(name, section.words("ignore"))


def _fp8(section: Config) -> str:
    """The scheme id of FP8 weights (also FBGEMM's), depending on the parts left in 16 bit."""
    return _spared("fp8", section.words("modules_to_not_convert"))


def _spared(name: str, ignored: Sequence[str]) -> str:
    """The scheme with 16 bit for those parts that the checkpoint does not quantize.

    Norms and indexers of attention are in 16 bit in any case.
    """
    name = "nvfp4-linear" if name == "nvfp4" and ignored else name
    if not any(re.search(r"self_attn(?!.*(norm|index))", word) for word in ignored):
        return name
    if any("shared_expert" in word for word in ignored):
        return _EXPERTS_ALONE.get(name, name)
    return _ATTENTION_SPARED.get(name, name)


def _group_scheme(section: Config, groups: Config, key: str) -> str:
    group = groups.section(key)
    weights = group.section("weights") if group is not None else None
    if weights is None:
        raise _not_modelled(section, f"config_groups {key} without weights")
    kind, bits = weights.word("type", default="int"), weights.count("num_bits", default=0)
    scheme_id: str | None = _tables()["compressed"].get(f"{kind}{bits}")
    if scheme_id is None:
        raise _not_modelled(section, f"weights of {bits} bit {kind}")
    # Floats of 4 bit come with scales for 16 (NVFP4) or for 32 (MXFP4).
    wide = scheme_id == "nvfp4" and weights.count("group_size", default=16) == _MX_GROUP
    return "mxfp4" if wide else scheme_id


def _not_modelled(section: Config, what: str) -> SizingError:
    return SizingError(
        f"{section.name}: {what} is not modelled; state the quantization",
        name="quantization",
        choices=tuple(schemes()),
    )


_KV_METHODS = ("modelopt", "compressed-tensors")
_MX_GROUP = 32
_WHOLE_BITS = {4: "", 8: "int8"}
# Checkpoints that leave attention in 16 bit: Meta's FP8, Kimi K2's experts in INT4.
_ATTENTION_SPARED = {"int4": "int4-experts", "fp8": "fp8-mlp", "nvfp4-linear": "nvfp4-ffn"}
# Their shared experts, too.
_EXPERTS_ALONE = {"int4": "int4-experts", "fp8": "fp8-experts", "nvfp4-linear": "nvfp4-experts"}
_READERS: Mapping[str, Callable[[Config], str]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "awq": _weight_bits,
    "gptq": _weight_bits,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "quark": _quark,
    "compressed-tensors": _compressed_tensors,
}
