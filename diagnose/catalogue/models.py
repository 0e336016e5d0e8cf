"""Models of the catalogue, and any other model (with its draft heads) from `config.json`. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import WEIGHTS_FORMAT
from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.families import (
    Tower,
    family_value,
    in_group,
    is_known_family,
    refusal_by_name,
    refuse_unmodelled,
    tower_of,
)
from kneewatch.diagnose.catalogue.hf_config import Config, mapping, read_config
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layer_census import (
    depth,
    head_dim,
    heads_by_kind,
    kv_heads,
    layer_kinds,
)
from kneewatch.diagnose.catalogue.layers import (
    FullAttention,
    LatentAttention,
    Layers,
    Recurrent,
    ngram_table_bytes,
)
from kneewatch.diagnose.catalogue.parameters import (
    AdapterShape,
    Experts,
    Parameters,
    adapter_shape,
    expert_census,
    layer_widths,
    matrices,
    parameter_census,
    vision_parameters,
)
from kneewatch.diagnose.catalogue.quantization import (
    checkpoint_kv_dtype,
    checkpoint_scheme,
    scheme,
)

# EAGLE 3 reads the hidden states of three layers unless it says otherwise.
_HIDDEN_STATES = 3
_PER_LAYER = (
    "layer_types", "layer_types_count", "mlp_layer_types", "mlp_only_layers", "indexer_types",
    "layers_block_type",
)  # fmt: skip


def is_head(config: Config) -> bool:
    """Whether the configuration is that of an EAGLE head, which cannot run alone."""
    return "eagle" in config.architecture.lower()


def target_hidden_size(config: Config) -> int:
    """The hidden size of the model that a draft head is made for."""
    return config.positive("target_hidden_size", "hidden_size")


def head_parameters(config: Config, body: Parameters) -> Parameters:
    """A draft head's parameters, without the embedding, which belongs to the target model.

    EAGLE 3 heads have an output projection of their own, often for fewer tokens. Their first layer
    reads the embedding and the hidden state side by side.
    """
    hidden, size = config.positive("hidden_size"), head_dim(config)
    if "eagle3" not in config.architecture.lower():
        # Embedding and hidden state into one; the output projection is the target's.
        joined = 2.0 * hidden * hidden
        return replace(body, embedding=0.0, head=0.0, replicated=body.replicated + joined)
    kv = 2.0 * hidden * kv_heads(config) * size
    queries = float(hidden * config.positive("num_attention_heads") * size)
    section = config.section("eagle_config")
    listed = section.counts("eagle_aux_hidden_state_layer_ids") if section else ()
    states = config.count("num_aux_hidden_states", default=len(listed)) or _HIDDEN_STATES
    return replace(
        body,
        attention=body.attention + queries + kv,
        kv=body.kv + kv,
        replicated=body.replicated + float(states * target_hidden_size(config) * hidden),
        embedding=0.0,
        head=float(config.positive("draft_vocab_size", "vocab_size") * hidden),
    )


def own_layers(config: Config) -> Config | None:
    """The prediction layers that a checkpoint contains, as a configuration; None if it has none."""
    described = family_value(config, "own_drafts")
    if described is None:
        return None
    steps = config.count(
        "num_nextn_predict_layers", "mtp_num_hidden_layers", default=described.get("steps", 0)
    )
    if not steps:
        return None
    steps = 1 if described.get("first_only") else steps
    layers = {key: value * steps for key, value in described.get("layers", {}).items()}
    depth_of_step = max(map(len, described.get("layers", {}).values()), default=1)
    kept = {key: value for key, value in config.fields.items() if key not in _PER_LAYER}
    stated = {"num_hidden_layers": steps * depth_of_step, "first_k_dense_replace": 0, **layers}
    own = {**kept, **stated, "num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0}
    return Config(f"{config.name} (its own prediction layers)", own, own)


# --- The models that kneewatch knows, and any model from its published configuration. Pure --------
#
# An entry of models.json holds the fields of a `config.json` that matter here, where they are
# from, and the published total of parameters, which tests hold against the census.


# Zamba 2 shares its attention blocks and adapts them with low ranks.
_UNCOUNTED = frozenset({"zamba2"})
# vLLM applies no factor to Gemma's stated length, which has it already.
_ALREADY_STRETCHED = ("gemma3", "gemma4")
_LARGEST_FACTOR = 1024.0
# Words of names that state parameters: all, the active ones, experts.
_SIZE = re.compile(r"[ae]?\d+(\.\d+)?[bmt]|\d+x\d+b|\d+e")


class Model(Struct, frozen=True):
    """A model: what its layers store, its parameters by kind, and the source.

    - `parameters`: None if the source does not allow counting them; the user must then state the
      weights' size.
    - `quantization`: the checkpoint's own scheme, a key of `catalogue.quantization.schemes`.
    - `kv_cache_dtype`: what vLLM takes for `auto` with this checkpoint.
    - `adapters`: the LoRA shape; None like `parameters`.
    - `target_hidden_size`: hidden size of the target model that a draft head needs; else 0.
    - `own_draft`: the prediction layers that the checkpoint contains.
    - `expert_width`: the inner size of a routed expert.
    - `expert_matrices`: matrices per expert: 3 with a gate, 2 without.
    - `unfolded_dim`: elements of a head's keys and values where latent attention is off; 0 without.
    - `family`: its `model_type`.
    - `tower`: the vision tower; None without one, and where its shape is unknown.
    - `notes`: assumptions. `is_assumed`: it has the configuration of another release.
    """

    id: str
    source: str
    layers: tuple[Layers, ...]
    parameters: Parameters | None
    experts: Experts
    depth: int
    hidden_size: int
    attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int
    quantization: str
    kv_cache_dtype: str = "auto"
    multimodal: bool = False
    notes: tuple[str, ...] = ()
    adapters: AdapterShape | None = None
    target_hidden_size: int = 0
    own_draft: Model | None = None
    expert_width: int = 0
    expert_matrices: int = 3
    tower: Tower | None = None
    unfolded_dim: int = 0
    family: str = ""
    is_assumed: bool = False


UNKNOWN_MODEL = Model("", "", (), None, Experts(), 0, 0, 0, 0, 0, 0, "bf16")
"""The model of a launch that does not say which it serves."""


def model_ids() -> tuple[str, ...]:
    """Ids of the catalogue's models, in alphabetical order."""
    return tuple(sorted(_entries(), key=str.casefold))


@cache
def _entries() -> Mapping[str, Mapping[str, object]]:
    text = files("kneewatch.diagnose.catalogue").joinpath("models.json").read_text("utf-8")
    return cast("Mapping[str, Mapping[str, object]]", json.loads(text))


def model(name: str) -> Model:
    """The catalogue's model with this id, or the model of the same architecture under this name.

    Case is ignored, and the organisation may be left out.

    Raises:
        SizingError: no model matches, or several do; the message lists the most similar ids.
    """
    name = name.strip().rstrip("/")
    matches = _listed_as(name)
    if len(matches) == 1:
        return _from_entry(matches[0])
    rules = packaged_tables("diagnose.catalogue", "model_names.toml")
    lowered = name.lower()
    for pattern, family in rules["unmodelled"].items():
        if not matches and re.match(pattern, lowered.split("/")[-1]):
            raise refusal_by_name(name, family)
    alike = None if matches else _same_architecture(name)
    unread = re.search(rules["unread"]["words"], lowered)
    if unread and alike is not None:
        raise SizingError(
            f"{name}: vLLM does not load {unread[0].upper()} weights",
            name="model",
            choices=_nearest(name),
        )
    if alike is not None:
        return alike
    trouble = "matches several models" if matches else "is not in the catalogue"
    whole = name if "/" in name else f"ORGANISATION/{name}"
    raise SizingError(
        f"model {name!r} {trouble}; give an id listed by `kneewatch size --list-models`, or "
        f"run `hf download {whole} config.json` and give {whole}",
        name="model",
        choices=matches or _nearest(name),
    )


@lru_cache(maxsize=256)
def _listed_as(name: str) -> Sequence[str]:
    lowered = name.lower()
    exact = [key for key in _entries() if key.lower() == lowered]
    return exact or [key for key in _entries() if key.lower().split("/")[-1] == lowered]


_TOKEN = re.compile(r"\d+x\d+b?|\d+(?:\.\d+)?[bmt](?![a-z])|\d+(?:\.\d+)?|[a-z]+")
_ALIKE, _NEAR = 0.7, 0.45


def _nearest(name: str) -> list[str]:
    """Up to five ids that are most like the name, in family, version and size, or else those of its
    size. The organisation counts for nothing."""
    plain = "-".join(_words(name)[0]) or name
    scores = {key: _likeness(plain, key.split("/")[-1]) for key in _entries()}
    ranked = sorted(scores, key=lambda key: (-scores[key], len(key)))
    # A finetune with a name of its own still says its size.
    sizes = _size_of(_words(name)[0])[1]
    near = [key for key in ranked if scores[key] >= _NEAR]
    return (near or [key for key in ranked if sizes & _size_of(_words(key)[0])[1]])[:5]


@cache
def _tokens(name: str) -> Mapping[str, float]:
    """The words, versions and sizes of a name, each with its weight; the family's name has the
    largest, what nearly all names have the smallest."""
    tokens = _TOKEN.findall(name.lower().split("/")[-1])
    weights = {token: _weight(token) for token in tokens}
    return weights | dict.fromkeys(tokens[:1], 3.0)


def _weight(token: str) -> float:
    if re.fullmatch(r"instruct|it|chat|hf|v|\d{4}", token):
        return 0.3
    return 2.0 if token[0].isdigit() else 1.0


def _likeness(name: str, other: str) -> float:
    """How alike two names are, from 0 to 1: by what they share, and by all their letters."""
    asked, own = _tokens(name), _tokens(other)
    shared = sum(
        weight * max((_same(token, each) for each in beside), default=0.0)
        for tokens, beside in ((asked, own), (own, asked))
        for token, weight in tokens.items()
    )
    spelled = difflib.SequenceMatcher(None, "".join(asked), "".join(own)).ratio()
    return 0.8 * shared / (sum(asked.values()) + sum(own.values()) or 1.0) + 0.2 * spelled


@cache
def _same(word: str, other: str) -> float:
    """How alike two words, versions or sizes are, from 0 to 1."""
    if word == other:
        return 1.0
    if word[0].isdigit() and other[0].isdigit():
        # 32 for 32b, 33b for 32b, and 3 for 3.3.
        numbers = [float(re.sub(r"[a-z].*", "", token)) for token in (word, other)]
        if numbers[0] == numbers[1]:
            return 0.9
        is_near = min(numbers) > 0.9 * max(numbers) or int(numbers[0]) == int(numbers[1])
        return 0.5 * is_near
    ratio = difflib.SequenceMatcher(None, word, other).ratio()
    return ratio if ratio >= _ALIKE else 0.0


def is_listed(name: str) -> bool:
    """Whether exactly one entry of the catalogue has this id, with or without organisation."""
    return len(_listed_as(name)) == 1


@cache
def _words(name: str) -> tuple[tuple[str, ...], str | None]:
    """The words of a name that say its architecture, and the quantization that it states."""
    rules = packaged_tables("diagnose.catalogue", "model_names.toml")
    lowered = name.lower().split("/")[-1]
    for pattern, plain in rules["spellings"].items():
        lowered = re.sub(pattern, plain, lowered)
    lowered = lowered.replace("_", "-")
    for pattern, entry in rules["releases"].items():
        lowered = re.sub(pattern, entry, lowered)
    kept: list[str] = []
    scheme_id: str | None = None
    for word in lowered.split("-"):
        said = [named for rule, named in rules["quantizations"].items() if re.fullmatch(rule, word)]
        if said:
            scheme_id = scheme_id or said[0]
        elif not re.fullmatch(rules["others"]["words"], word):
            kept.append(word)
    return tuple(kept), scheme_id


def text_only(named: Model) -> Model:
    """The model without its vision and audio towers, as `--language-model-only` loads it."""
    kept = named.parameters and replace(named.parameters, vision=0.0)
    return replace(named, parameters=kept, multimodal=False, tower=None)


def takes_no_media(named: Model, limits: Sequence[tuple[str, int]]) -> bool:
    """Whether these limits per prompt are 0 for all that the towers read: vLLM leaves them out."""
    most = dict(limits)
    read = named.tower.modalities if named.tower else ()
    return bool(read) and all(most.get(modality) == 0 for modality, *_ in read)


def _size_of(words: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[str]]:
    """The words that name a release, and those that say how large it is."""
    sizes = frozenset(word for word in words if _SIZE.fullmatch(word))
    return tuple(word for word in words if word not in sizes), sizes


def _sizes(key: str) -> frozenset[str]:
    """What the name of an entry says of its size; without that, its number of parameters."""
    counted = _from_entry(key).parameters
    whole = () if counted is None else (f"{counted.total / 1e9:.0f}b",)
    return _size_of(_words(key)[0])[1] or frozenset(whole)


def _sized_alike(words: tuple[str, ...]) -> list[str]:
    """The entries of this release and size, if the name has no size, or not all parts of it.

    Empty if the release has several sizes that the name may mean.
    """
    release, sizes = _size_of(words)
    alike = [key for key in _entries() if _size_of(_words(key)[0])[0] == release]
    alike = [key for key in alike if sizes <= _sizes(key)]
    return alike if len({_words(key)[0] for key in alike}) == 1 else []


def _named_in(words: tuple[str, ...]) -> list[str]:
    """The entries whose words begin or end these, a size or two words at least; the longest ones.

    The others name who made the weights or how; they may stand in front of the size. Empty if they
    name another architecture.
    """
    different = packaged_tables("diagnose.catalogue", "model_names.toml")["different"]
    release, stated = _size_of(words)
    best: dict[int, list[str]] = {}
    for key in _entries():
        named = _words(key)[0]
        count, (own, sizes) = len(named), _size_of(named)
        # A release with a number is distinct without its size: llama 3, and not falcon.
        is_numbered = any(character.isdigit() for character in "".join(own))
        is_head = words[:count] == named or (
            is_numbered and sizes == stated and release[: len(own)] == own
        )
        is_distinct = count > 1 or sizes
        if count < len(words) and (is_head or words[-count:] == named) and is_distinct:
            rest = [word for word in words if word not in named]
            same = not any(re.fullmatch(different["words"], word) for word in rest)
            same &= bool(sizes) or not (
                is_head and re.fullmatch(different["release"], "".join(rest[:1]))
            )
            best.setdefault(count, []).extend([key] * same)
    return best[max(best)] if best else []


def _closest(name: str, keys: list[str]) -> str:
    """Of entries with one architecture, the one with most words of the name.

    Of several, one with the quantization that most have.
    """
    said = re.split("[-/]", name.lower())
    stored = Counter(_from_entry(key).quantization for key in keys)
    shared = {key: len({*said} & {*re.split("[-/]", key.lower())}) for key in keys}
    return max(keys, key=lambda key: (shared[key], stored[_from_entry(key).quantization]))


def _same_architecture(name: str) -> Model | None:
    """The model of the entry that differs from this name in release and quantization only."""
    architecture, said = _words(name)
    alike = [key for key in _entries() if _words(key)[0] == architecture]
    alike = alike or _sized_alike(architecture) or _named_in(architecture)
    if not alike:
        return None
    # An entry of the same quantization knows which parts are quantized.
    same = [key for key in alike if _words(key)[1] == said]
    entry = _from_entry(_closest(name, same or alike))
    # A maker's quantization of an entry is not that of the model it was made from.
    stated = said or ("bf16" if _words(entry.id)[1] and not same else entry.quantization)
    kept = same or scheme(entry.quantization).stated_as == stated
    quantization = entry.quantization if kept else stated
    rules = packaged_tables("diagnose.catalogue", "model_names.toml")
    if any(isinstance(p.kind, Recurrent) for p in entry.layers):
        stands_for = rules["recurrent_schemes"]["mixture" if entry.experts.count else "dense"]
        quantization = stands_for.get(quantization, quantization)
    for pattern, made in rules["checkpoints"].items():
        quantization = made if re.match(pattern, name.lower()) else quantization
    note = f"sized with the architecture of {entry.id}; check it with --model PATH of config.json"
    if said in rules["assumed"] and not re.search(rules["assumed"][said], name.lower()):
        note = f"{note}; the name has no GGUF type: {said} is assumed, or state {WEIGHTS_FORMAT}"
    draft = entry.own_draft
    # vLLM does not find a checkpoint without its organisation and last word (-Instruct, -it).
    is_short = _tail(entry.id).rpartition("-")[0] == name.lower()
    # Its context is that of the release that it begins with (Qwen3-4B-Instruct-2507-FP8).
    begins = [key for key in alike if _tail(name).startswith(_tail(key))]
    release = max(begins, key=len, default=entry.id)
    return replace(
        entry,
        max_context_tokens=_from_entry(release).max_context_tokens,
        id=entry.id if is_short else name,
        quantization=quantization,
        kv_cache_dtype=_kv_cache_dtype(name),
        is_assumed=not is_short,
        own_draft=draft and replace(draft, quantization=_draft_scheme(quantization)),
        notes=(*entry.notes, note),
    )


def _tail(name: str) -> str:
    """A name without its organisation."""
    return name.lower().split("/")[-1]


def known_model(name: str) -> Model | None:
    """The catalogue's model with this id; None if no model matches, or several do."""
    return model(name) if is_listed(name) else None


@cache
def _from_entry(key: str) -> Model:
    entry = _entries()[key]
    base: Mapping[str, object] = _entries()[str(entry["base"])] if "base" in entry else {}
    described = {**base, **entry}
    config = {**(mapping(base.get("config")) or {}), **(mapping(entry.get("config")) or {})}
    listed = _model(
        read_config(key, config),
        source=str(described["source"]),
        vision=float(cast("float", described.get("vision_parameters", 0.0))),
        quantization=str(described.get("quantization", "bf16")),
        notes=tuple(cast("list[str]", described.get("notes", []))),
    )
    return replace(listed, kv_cache_dtype=_kv_cache_dtype(key))


def _kv_cache_dtype(name: str) -> str:
    """What vLLM takes for a KV cache in `auto` with the checkpoint of this name."""
    rules = packaged_tables("diagnose.catalogue", "model_names.toml")["kv_caches"]
    return next((kept for rule, kept in rules.items() if re.match(rule, name.lower())), "auto")


def model_from_config(name: str, document: object) -> Model:
    """The model of a parsed `config.json`.

    Raises:
        SizingError: the architecture is not modelled, or a field is missing or wrong.
    """
    config = read_config(name, document)
    refuse_unmodelled(config)
    vision = vision_parameters(config)
    notes: list[str] = []
    if not is_known_family(config):
        family = config.model_type or "its model_type"
        notes.append(f"{family} is not in the catalogue: sized as a Llama-style decoder")
    if config.multimodal and (vision is None or "audio_config" in config.outer):
        notes.append("the weights exclude vision and audio towers: set --weights-gib")
    elif vision is not None:
        notes.append("the vision tower is estimated from its configuration, within a few percent")
    return _model(
        config,
        source=name,
        vision=vision or 0.0,
        quantization=checkpoint_scheme(config),
        notes=tuple(notes),
    )


def _model(
    config: Config, *, source: str, vision: float, quantization: str, notes: tuple[str, ...]
) -> Model:
    # Report an architecture that is not modelled before any field that is missing.
    layers = layer_kinds(config)
    experts, parameters, adapters = _census(config, vision=vision)
    if parameters is None:
        notes = (*notes, "the number of parameters is unknown: set --weights-gib")
    tables_bytes = ngram_table_bytes(config)
    if tables_bytes:
        notes = (
            *notes,
            f"its tables of n-grams take {tables_bytes / (1 << 30):.0f} GiB of host memory a "
            "replica: vLLM keeps them off the GPUs",
        )
    if config.model_type == "mllama":
        notes = (
            *notes,
            "cross-attention layers are sized as in vLLM V0; V1 does not support this model",
        )
    return Model(
        id=config.name,
        source=source,
        layers=layers,
        parameters=parameters,
        experts=experts,
        depth=depth(config),
        hidden_size=config.count("hidden_size", default=0),
        attention_heads=config.count("num_attention_heads", default=0),
        intermediate_size=_intermediate_size(config),
        vocab_size=config.count("vocab_size", default=0),
        max_context_tokens=_max_context_tokens(config),
        quantization=quantization,
        kv_cache_dtype=checkpoint_kv_dtype(config),
        multimodal=config.multimodal or vision > 0,
        notes=notes,
        adapters=adapters,
        target_hidden_size=target_hidden_size(config) if is_head(config) else 0,
        own_draft=_own_draft(config, source=source, quantization=quantization),
        expert_width=config.count("moe_intermediate_size", "intermediate_size", default=0)
        if experts.count
        else 0,
        expert_matrices=matrices(config),
        tower=tower_of(config) if config.multimodal or vision > 0 else None,
        unfolded_dim=_unfolded_dim(config),
        family=config.model_type,
    )


def _unfolded_dim(config: Config) -> int:
    if not config.has("kv_lora_rank"):
        return 0
    names = ("qk_nope_head_dim", "qk_rope_head_dim")
    return sum(config.count(name, default=0) for name in names)


def without_latents(model: Model) -> Model:
    """The model as vLLM runs it with VLLM_MLA_DISABLE: keys and values of each head."""
    size = model.unfolded_dim
    each = FullAttention(model.attention_heads, size, size)
    layers = tuple(
        replace(part, kind=each) if size and isinstance(part.kind, LatentAttention) else part
        for part in model.layers
    )
    return replace(model, layers=layers)


def _census(
    config: Config, *, vision: float
) -> tuple[Experts, Parameters | None, AdapterShape | None]:
    """Experts, parameters and LoRA shape; the last two are None if the fields do not allow
    counting."""
    by_kind = heads_by_kind(config)
    uneven = config.model_type in _UNCOUNTED or len(dict(by_kind)) < len(by_kind)
    if uneven or not config.has("hidden_size"):
        seen = expert_census(config) if config.has("num_experts_per_tok") else Experts()
        return seen, None, None
    experts = expert_census(config)
    parameters = parameter_census(config, experts=experts, vision=vision)
    if is_head(config):
        parameters = head_parameters(config, parameters)
    uncounted = in_group(config, "compressed", "own_blocks", "expanded_latent")
    adapters = None if uncounted else adapter_shape(config, experts)
    return experts, parameters, adapters


def _draft_scheme(quantization: str) -> str:
    """The scheme of a checkpoint's prediction layers, which stay in 16 bit in NVFP4 checkpoints.

    Source: vllm/model_executor/models/qwen3_5_mtp.py (0.32).
    """
    return "bf16" if scheme(quantization).compute == "fp4" else quantization


def _own_draft(config: Config, *, source: str, quantization: str) -> Model | None:
    own = own_layers(config)
    if own is None or not config.has("hidden_size"):
        return None
    kept = _draft_scheme(quantization)
    try:
        draft = _model(own, source=source, vision=0.0, quantization=kept, notes=())
    except SizingError:
        # The model itself can be sized without them.
        return None
    if draft.parameters is None:
        return None
    # Its tables are those of the model; each layer joins embedding and hidden state by a matrix.
    joined = 2.0 * own.positive("hidden_size") ** 2 * own.positive("num_hidden_layers")
    kept_small = draft.parameters.small + joined
    parameters = replace(draft.parameters, embedding=0.0, head=0.0, small=kept_small)
    return replace(draft, parameters=parameters)


def _intermediate_size(config: Config) -> int:
    if isinstance(config.fields.get("intermediate_size"), list):
        return max(layer_widths(config))
    return config.count("intermediate_size", "moe_intermediate_size", default=0)


def _max_context_tokens(config: Config) -> int:
    """The longest context that vLLM derives: YaRN and linear scaling extend the stated context."""
    stated = config.count("max_position_embeddings", default=0)
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    if scaling is None or config.model_type.startswith(_ALREADY_STRETCHED):
        return stated
    kind = scaling.fields.get("rope_type") or scaling.fields.get("type")
    factor = scaling.fields.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return stated
    if not 1 <= factor < _LARGEST_FACTOR:
        raise scaling.wrong("factor", factor, f"a number from 1 to {_LARGEST_FACTOR:g}")
    if kind == "yarn":
        stated = scaling.count("original_max_position_embeddings", default=stated)
    return int(stated * factor)
