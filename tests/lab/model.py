"""A tiny Llama as vLLM reads it from a folder: configuration and word-level tokenizer, no weights.

vLLM fills the weights with small random numbers (`--load-format dummy`). I/O edge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 2048
SPECIAL = ("<unk>", "<s>", "</s>")
LAYERS, HIDDEN, HEADS, KV_HEADS = 8, 512, 8, 4
CONTEXT_TOKENS = 32768

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": CONTEXT_TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
WORDS = {word: i for i, word in enumerate(SPECIAL)} | {
    f"w{i}": i for i in range(len(SPECIAL), VOCABULARY)
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"},
}
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": CONTEXT_TOKENS,
}


def write(folder: Path, config: Mapping[str, Any] = CONFIG) -> None:
    """Write the model's files; the folder is made when it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
