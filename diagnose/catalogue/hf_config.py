"""Reads a Hugging Face `config.json` strictly, with the defaults of its model family. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from msgspec import Struct

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.inputs import SizingError

# Parts of a configuration whose fields are read as if they stood beside them (DBRX).
_FLATTENED = ("attn_config", "ffn_config")
# Fields that a file always states at its top level: class defaults fill them in nested parts only.
_STATED = {
    "num_hidden_layers", "n_layer", "n_layers", "hidden_size", "n_embd", "d_model", "vocab_size",
    "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "intermediate_size",
    "ffn_dim", "moe_intermediate_size", "n_routed_experts", "num_experts", "num_local_experts",
    "num_experts_per_tok", "max_position_embeddings", "n_positions", "kv_lora_rank",
    "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim",
    "index_n_heads", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
    "global_head_dim", "sliding_window", "num_kv_shared_layers",
}  # fmt: skip


def _aliases() -> Mapping[str, Sequence[str]]:
    """Names that older families use for a field; the first name that the file has is used."""
    return packaged_tables("diagnose.catalogue", "field_aliases.toml")


def mapping(value: object) -> Mapping[str, object] | None:
    """The value if it is a JSON object, else None."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else None


_GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def completed(
    fields: Mapping[str, object], *, family: str, outer: Mapping[str, object]
) -> Mapping[str, object]:
    """The fields, with the defaults of the family's configuration class added.

    `outer` is the whole file. Nested parts get all defaults, because publishers leave them out
    there. The top level gets only the defaults of fields that no published file states.
    """
    flat = dict(fields)
    for key in _FLATTENED:
        flat = {**(mapping(flat.get(key)) or {}), **flat}
    flat = {**_global_heads(flat), **flat}
    nested = fields is not outer
    defaults = packaged_tables("diagnose.catalogue", "defaults.toml").get(family, {})
    return {
        **{
            key: value
            for key, value in defaults.items()
            if (nested or key not in _STATED)
            and not _named(key, flat)
            and not (key == "tie_word_embeddings" and key in outer)
        },
        **flat,
    }


def _global_heads(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Gemma 4's heads of layers with full attention, as transformers writes them since 5.15: for
    each of these layers the same entry in `per_layer_config`."""
    by_layer, kinds = mapping(fields.get("per_layer_config")), fields.get("layer_types")
    if not by_layer or not isinstance(kinds, Sequence):
        return {}
    listed = enumerate(cast("Sequence[object]", kinds))
    full = {f"{at:02d}" for at, kind in listed if kind == "full_attention"}
    first, *others = (mapping(entry) or {} for entry in by_layer.values())
    same = full == {at.zfill(2) for at in by_layer} and all(entry == first for entry in others)
    return (
        {_GLOBAL[key]: first[key] for key in first} if same and set(first) <= set(_GLOBAL) else {}
    )


def _named(key: str, fields: Mapping[str, object]) -> bool:
    # A null in the file counts as stated: only fields that are absent are filled in.
    groups = ((name, *also) for name, also in _aliases().items())
    same = next((group for group in groups if key in group), (key,))
    return any(name in fields for name in same)


# --- A Hugging Face `config.json`, read with care: what is needed and absent is an error ----------


# Where multimodal configurations keep the language model's own fields.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def _whole(value: object) -> bool:
    # The largest field in the wild is a context of some million.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


class Config(Struct, frozen=True):
    """The fields of a language model's configuration; `name` is its name in errors."""

    name: str
    fields: Mapping[str, object]
    outer: Mapping[str, object]

    @property
    def model_type(self) -> str:
        """The model family of the language model, without a `_text` or `_unified` ending."""
        if self.architecture.startswith("BailingMoeV3"):
            # Its files have the model_type of the release before.
            return "bailing_moe_v3"
        value = self.fields.get("model_type") or self.outer.get("model_type") or ""
        return str(value).removesuffix("_model").removesuffix("_text").removesuffix("_unified")

    @property
    def architecture(self) -> str:
        """The class that vLLM would load; "" if the file does not say."""
        listed = self.outer.get("architectures") or self.fields.get("architectures")
        if isinstance(listed, Sequence) and not isinstance(listed, str) and listed:
            return str(cast("Sequence[object]", listed)[0])
        return ""

    @property
    def multimodal(self) -> bool:
        """Whether the file describes a vision or audio tower beside the language model."""
        return any(
            key.endswith("vision_config") or key == "audio_config"
            for key, value in self.outer.items()
            if value is not None
        )

    def stated(self, key: str) -> tuple[str, object]:
        """The name that this file uses for a field, and the field's value; the value is None if
        absent."""
        for name in (key, *_aliases().get(key, ())):
            value = self.fields.get(name)
            if value is not None:
                return name, value
        return key, None

    def has(self, *keys: str) -> bool:
        """Whether one of the fields is present and not null, under any of its usual names."""
        return any(self.stated(key)[1] is not None for key in keys)

    def count(self, *keys: str, default: int | None = None) -> int:
        """A whole number of 0 or more, from the first field that is present.

        Raises:
            SizingError: no field is present and there is no default, or the value is not a whole
                number.
        """
        for key in keys:
            name, value = self.stated(key)
            if value is None:
                continue
            if not _whole(value):
                raise self.wrong(name, value, "a whole number")
            return cast("int", value)
        if default is None:
            raise self.missing(keys[0])
        return default

    def positive(self, *keys: str, default: int | None = None) -> int:
        """Like `count`, but 1 or more."""
        value = self.count(*keys, default=default)
        if value < 1:
            raise self.wrong(keys[0], value, "1 or more")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean. If the language model's part lacks the field, the file's outer part is read.

        Raises:
            SizingError: the value is not a boolean.
        """
        value = self.fields.get(key)
        if value is None:
            value = self.outer.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def word(self, key: str, *, default: str = "") -> str:
        """A text field; `default` if absent.

        Raises:
            SizingError: the value is not text.
        """
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty if absent.

        Raises:
            SizingError: the field is not a list.
        """
        value = self.fields.get(key)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.wrong(key, value, "a list")
        return tuple(str(word) for word in cast("Sequence[object]", value))

    def indices(self, key: str, *, below: int) -> frozenset[int]:
        """A list of layer numbers below `below`; higher numbers are dropped. Empty if absent.

        Raises:
            SizingError: the field is not a list of whole numbers.
        """
        return frozenset(layer for layer in self.counts(key) if layer < below)

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of 0 or more; empty if absent.

        Raises:
            SizingError: the field is not a list of such numbers.
        """
        self.words(key)
        listed = tuple(cast("Sequence[object]", self.fields.get(key) or ()))
        if not all(_whole(entry) for entry in listed):
            raise self.wrong(key, list(listed), "a list of whole numbers")
        return cast("tuple[int, ...]", listed)

    def section(self, key: str) -> Config | None:
        """A nested part of the file as a `Config`; None if absent.

        Raises:
            SizingError: the field is not a JSON object.
        """
        value = self.fields.get(key)
        if value is None:
            return None
        members = mapping(value)
        if members is None:
            raise self.wrong(key, value, "a JSON object")
        return Config(f"{self.name}: {key}", members, members)

    def sections(self, key: str) -> tuple[Config, ...]:
        """A list of nested parts; empty if absent.

        Raises:
            SizingError: the field is not a list of JSON objects.
        """
        self.words(key)
        listed = cast("Sequence[object]", self.fields.get(key) or ())
        entries = [mapping(entry) for entry in listed]
        if any(members is None for members in entries):
            raise self.wrong(key, "its entries", "a list of JSON objects")
        return tuple(
            Config(f"{self.name}: {key}[{at}]", members or {}, members or {})
            for at, members in enumerate(entries)
        )

    def quantization(self) -> Config | None:
        """The checkpoint's quantization section; None for a 16-bit checkpoint."""
        for place in (self.outer, self.fields):
            for key in _QUANTIZATION_KEYS:
                members = mapping(place.get(key))
                if members:
                    return Config(f"{self.name}: {key}", members, members)
        return None

    def missing(self, key: str) -> SizingError:
        """The error for a required field that is absent."""
        return SizingError(
            f"{self.name}: the configuration has no {key}; add it to the file", name="model"
        )

    def wrong(self, key: str, value: object, expected: str) -> SizingError:
        """The error for a field with an invalid value."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return SizingError(f"{self.name}: {key} is {shown}, expected {expected}", name="model")


def read_config(name: str, document: object) -> Config:
    """The configuration of a parsed `config.json`, with the family's defaults (see `completed`).

    Raises:
        SizingError: the document is not a JSON object.
    """
    outer = mapping(document)
    if outer is None:
        raise SizingError(f"{name}: a model configuration is a JSON object", name="model")
    fields, depth = outer, 0
    # thinker_config.text_config is the deepest in the wild.
    while depth < 3:
        inner = next((section for key in _TEXT_KEYS if (section := mapping(fields.get(key)))), None)
        if inner is None:
            break
        fields, depth = inner, depth + 1
    family = Config(name, fields, outer).model_type
    return Config(name, completed(fields, family=family, outer=outer), outer)
