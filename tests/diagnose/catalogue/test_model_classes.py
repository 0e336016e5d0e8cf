"""Parameters and caches of a configuration, against vLLM's own class of it without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    Recurrent,
    SlidingAttention,
)
from kneewatch.diagnose.catalogue.models import Model, model_from_config

# Written by tests/lab/model_classes.py.
_FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "vllm-0.32.0.json"
BUILT: Mapping[str, Mapping[str, Any]] = json.loads(_FIXTURE.read_text("utf-8"))["models"]
ELEMENT_BYTES = 2


def described(name: str) -> Model:
    return model_from_config(name, BUILT[name]["config"])


@pytest.mark.parametrize("name", BUILT)
def test_parameters_are_those_of_vllms_class(name: str) -> None:
    parameters = described(name).parameters
    assert parameters is not None
    assert parameters.total == pytest.approx(BUILT[name]["parameters"], rel=0.005)


@pytest.mark.parametrize("name", BUILT)
def test_each_layer_keeps_what_vllms_layer_registers(name: str) -> None:
    own = [{"layers": part.count, **facts(part.kind)} for part in described(name).layers]
    registered = BUILT[name]["caches"]
    assert len(own) == len(registered)
    assert all(layers in registered for layers in own)


def facts(kind: LayerKind) -> dict[str, Any]:
    """What a layer of that kind keeps, in the words of the fixture."""
    match kind:
        case FullAttention():
            token_bytes = ELEMENT_BYTES * kind.kv_heads * (kind.key_dim + kind.value_dim)
            return {"kind": "FullAttention", "token_bytes": token_bytes}
        case SlidingAttention():
            token_bytes = ELEMENT_BYTES * kind.kv_heads * (kind.key_dim + kind.value_dim)
            window = kind.window_tokens
            return {"kind": "SlidingWindow", "token_bytes": token_bytes, "window": window}
        case LatentAttention():
            row_bytes = ELEMENT_BYTES * (kind.latent_dim + kind.rope_dim)
            return {"kind": "MLAAttention", "token_bytes": row_bytes}
        case CompressedAttention():
            return {"kind": "MLAAttention", "token_bytes": kind.vector_bytes}
        case Recurrent():
            conv = (kind.conv_elements, float(ELEMENT_BYTES))
            states = [conv, (kind.state_elements, kind.state_bytes_per_element)]
            return {"kind": "Mamba", "states": [list(part) for part in states if part[0]]}
        case _:
            raise AssertionError(kind)
