"""Differences between model families, from families.toml, and which models cannot be sized.
Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.diagnose.catalogue.hf_config import Config
from kneewatch.diagnose.catalogue.inputs import SizingError

_ENCODER_CLASSES = ("ForMaskedLM", "ForImageClassification", "ForTokenClassification")
# Fields that describe an unusual kind of cache or state, in any family...
_MEMORY = re.compile(r"ssm|mamba|recurr|compress|rwkv|retention|yoco|kv_shar|share_kv|cla_|use_cla")
# ...and fields that an unknown family must not have.
_DOUBTFUL = re.compile(
    r"slid|window|swa|conv|state|linear_|lightning|delta|hybrid|block_type|block_config|layer_type"
    r"|pattern|shared_layer|cross_|lru|index|latent|memory|lora_rank|layers_type|attn_type"
)
_HARMLESS = frozenset({
    "add_cross_attention", "attention_chunk_size", "audio_token_index", "compression_config",
    "image_token_index", "layer_types", "layer_types_count", "max_window_layers",
    "num_kv_shared_layers", "output_hidden_states", "pad_token_index", "projector_hidden_act",
    "quantization_config", "return_hidden_states", "sliding_window", "sliding_window_pattern",
    "use_mamba_kernels", "use_mambapy", "use_sliding_window", "video_token_index",
})  # fmt: skip


class Tower(Struct, frozen=True):
    """A vision tower, as far as encoding takes memory.

    - `width`, `inner`: of its rows and of its MLP, which has a gate or not.
    - `patch_elements`: elements of a patch of pixels.
    - `modalities`: patches and tokens of the largest item, by modality.
    - `levels`: rows of output per token: the last layer's, and those of deeper features.
    - `whole`: every tensor-parallel rank holds and computes all of it, instead of a part.
    - `frame_patches`: of a frame, where vLLM encodes frames in batches whose size it estimates from
      `positions`; 0 where it encodes all at once.
    - `whole_items`: an item is prefilled in one step, because its tokens attend to each other.
    """

    width: int
    inner: int
    modalities: tuple[tuple[str, int, int], ...]
    patch_elements: int
    gated: bool = False
    whole: bool = False
    levels: int = 1
    positions: int = 0
    frame_patches: int = 0
    whole_items: bool = False

    @property
    def step_tokens(self) -> int:
        """The least default budget of a step."""
        return max(tokens for _, _, tokens in self.modalities) if self.whole_items else 0


def tower_of(config: Config) -> Tower | None:
    """The family's vision tower; None if families.toml does not describe it."""
    described = _tables()["towers"].get(config.model_type)
    if described is None:
        return None
    # Tuples: results are kept by launch, so a launch must be hashable.
    rows = [(name, *sizes) for name, sizes in described["modalities"].items()]
    whole = config.word("use_bidirectional_attention") == "vision"
    return read_as({**described, "modalities": rows, "whole_items": whole}, Tower)


def _tables() -> Mapping[str, Mapping[str, Any]]:
    return packaged_tables("diagnose.catalogue", "families.toml")


def in_group(config: Config, *groups: str) -> bool:
    """Whether the model family belongs to at least one of these groups of families.toml."""
    return family_in(config.model_type, *groups)


def family_in(family: str, *groups: str) -> bool:
    """Whether a `model_type` belongs to at least one of these groups of families.toml."""
    members = _tables()["groups"]
    return any(family in members[group] for group in groups)


def family_value(
    config: Config,
    table: Literal["full_every", "recurrences", "learned_positions", "own_drafts", "rotary"],
) -> Any:  # noqa: ANN401 - a table has its own type
    """The family's value in a table of families.toml; None if the table does not list the
    family."""
    return _tables()[table].get(config.model_type)


def layer_names(
    table: Literal["layer_types", "pattern_letters"],
) -> Mapping[str, Sequence[str]]:
    """The kinds of a layer, by the names that configurations use for it."""
    return _tables()[table]


def recurrent_families() -> list[str]:
    """The families with recurrent layers, in alphabetical order."""
    return sorted(_tables()["recurrences"])


def is_known_family(config: Config) -> bool:
    """Whether the layers of this model family are known."""
    return (
        in_group(
            config,
            *("plain", "all_sliding", "switched_sliding", "listed_sliding", "latent"),
            *("compressed", "block_indexed", "own_sliding_heads", "expanded_latent", "own_blocks"),
        )
        or family_value(config, "full_every") is not None
        or family_value(config, "recurrences") is not None
    )


def refuse_unmodelled(config: Config) -> None:
    """Check that the model can be sized.

    Raises:
        SizingError: the model is not a decoder, or has a cache or state that is not modelled.
    """
    family = config.model_type
    # A model with several parts may call its text part by the name of a family that is modelled.
    outer = str(config.outer.get("model_type", family))
    family = outer if outer in _tables()["refused"] else family
    reason = _tables()["refused"].get(family)
    if in_group(config, "attention_free"):
        reason = "has no attention layers, which is not modelled"
    if reason:
        raise _refusal(config, f"{family} {reason}")
    encoder = in_group(config, "encoders") or config.architecture.endswith(_ENCODER_CLASSES)
    if encoder or config.flag("is_encoder_decoder", default=False):
        raise _encoder(config.name, family or config.architecture)
    if "_class_name" in config.outer:
        raise _refusal(config, "the file configures a diffusion pipeline, not a decoder")
    if not in_group(config, "shared_kv") and config.count("num_kv_shared_layers", default=0):
        raise _refusal(config, f"num_kv_shared_layers is not modelled for {family or 'this model'}")
    if config.has("kv_lora_rank") and not in_group(config, "latent", "expanded_latent"):
        raise _refusal(config, f"kv_lora_rank is not modelled for {family or 'this model'}")
    if config.has("per_layer_config") and not config.has("global_head_dim"):
        raise _refusal(config, "per_layer_config gives layers heads of their own, not modelled")
    _refuse_fields(config)


def _refuse_fields(config: Config) -> None:
    family = config.model_type
    if family_value(config, "recurrences") or in_group(config, "compressed"):
        return
    strange = not is_known_family(config)
    for key, value in config.fields.items():
        if not value or key in _HARMLESS or key.startswith("vision_"):
            continue
        if _MEMORY.search(key) or (strange and _DOUBTFUL.search(key)):
            raise _refusal(config, f"{key} is not modelled for {family or 'this model'}")
    if strange and not config.has("num_key_value_heads"):
        raise config.missing("num_key_value_heads")


def refusal_by_name(name: str, family: str) -> SizingError:
    """The error for a model whose name says that its family is refused."""
    if family == "encoders":
        return _encoder(name, "it")
    return _refused(name, f"{family} {_tables()['refused'][family]}")


def _encoder(name: str, what: str) -> SizingError:
    return SizingError(
        f"{name}: {what} is not a decoder and has no KV cache that grows with a request: a GPU "
        "that holds its weights (the size of its files) and one batch serves it",
        name="model",
    )


def _refusal(config: Config, reason: str) -> SizingError:
    return _refused(config.name, reason)


def _refused(name: str, reason: str) -> SizingError:
    return SizingError(
        f"{name}: it cannot be sized, because {reason}. Start it once: vLLM logs the "
        "capacity of its KV cache",
        name="model",
    )
