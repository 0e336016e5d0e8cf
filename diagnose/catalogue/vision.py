"""The parameters of the vision tower that a configuration describes. Pure.

Source: the vision transformers of transformers and vLLM: attention of four square projections, an
MLP, a projection of the patches, and what carries the result into the language model.
"""

from __future__ import annotations

from kneewatch.diagnose.catalogue.config import Config

# Towers whose MLPs have a gate.
_GATED = frozenset({"pixtral", "qwen2_5_vl"})


def vision_parameters(config: Config) -> float | None:
    """The parameters of the file's `vision_config` and its projector.

    None where there is none or where its fields are not the usual ones.

    Raises:
        SizingError: a usual field with an unusual value.
    """
    whole = Config(config.name, config.outer, config.outer)
    tower = whole.section("vision_config")
    if tower is None:
        return None
    # Qwen2-VL calls its output `hidden_size` and its own width `embed_dim`.
    width = tower.count("embed_dim", "vt_hidden_size", "hidden_size", default=0)
    layers = tower.count("depth", "vt_num_hidden_layers", "num_hidden_layers", default=0)
    patch = tower.count("patch_size", default=0)
    ratio = tower.count("mlp_ratio", default=0) if "embed_dim" in tower.fields else 0
    inner = tower.count("vt_intermediate_size", "intermediate_size", default=ratio * width)
    if not (width and layers and patch and inner):
        return None
    gated = tower.model_type in _GATED or config.model_type in _GATED
    blocks = layers * (4.0 * width * width + (3 if gated else 2) * width * inner)
    frames = tower.count("temporal_patch_size", default=1)
    patches = float(tower.count("in_channels", "num_channels", default=3))
    patches *= frames * patch * patch * width
    positions = tower.count("num_position_embeddings", default=0) * width
    return blocks + patches + positions + _projector(tower, width, config)


def _projector(tower: Config, width: int, config: Config) -> float:
    text = config.count("hidden_size", default=width)
    # Kimi names a side of its kernel each way.
    sides = tower.counts("merge_kernel_size")
    merge = tower.count("spatial_merge_size", default=sides[0] if sides else 0)
    if not merge:
        return float(width * text + text * text)
    # Neighbouring patches are joined, mixed once, and brought to the language model's width.
    joined = width * merge * merge
    taps = len(tower.words("deepstack_visual_indexes"))
    out = tower.count("out_hidden_size", default=text)
    return (1.0 + taps) * (joined * joined + joined * out)
