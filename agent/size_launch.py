"""A whole vLLM command line as the question of `size`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kneewatch.agent.size_options import FLAGS
from kneewatch.collector.engines.engine_kind import EngineKind, engine_kinds
from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.deployment.vllm_flags import (
    VLLM,
    WITHOUT_EFFECT,
    Launch,
    commands,
    image_version,
    parse_launch,
)

# `--cudagraph-capture-sizes 1 2 4`: several values of one flag.
_SIZES = re.compile(r"--cudagraph-capture-sizes((?:[\s=]+\d{1,6})+)")
_NO_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix", "medusa")


def with_words(given: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The flags with the words behind them: a vLLM command line, quoted or not, or a model's id."""
    if not words:
        return given
    text = words[0] if len(words) == 1 else shlex.join(words)
    return given | {"launch" if len(text.split()) > 1 else "model": text}


def with_launch(given: dict[str, Any]) -> dict[str, Any]:
    """The flags with those of the vLLM command line `launch`; a flag of `size` goes before.

    Raises:
        SizingError: the text has no vLLM command.
    """
    text = given["launch"]
    if text is None:
        return given
    try:
        launch = parse_launch(text, origin="the command line")
    except SettingsError as error:
        kind = next((each for each in engine_kinds() if _starts(each, text)), None)
        why = (
            f"it starts {kind.title}, and size knows vLLM only. {kind.memory}"
            if kind
            else f"{error}"
        )
        raise SizingError(why, name="launch") from error
    stated = {flag.parameter: flag.read(launch) for flag in FLAGS if flag.launch}
    stated |= _speculation(_document(launch, "--speculative-config"))
    sizes = _SIZES.search(text)
    captured = _document(launch, "--compilation-config").get("cudagraph_capture_sizes")
    stated["cudagraph_capture_sizes"] = sizes[1] if sizes else captured and str(captured)
    if "--enable-lora" not in launch.flags:
        stated["max_loras"] = stated["max_lora_rank"] = None
    stated["model"] = launch.model or None
    given = given | {"ignored": ignored_flags(launch)}
    versions = (image_version(word) for line in commands(text) for word in line)
    stated["vllm_version"] = next((version for version in versions if version), None)
    defaults = {flag.parameter: flag.default for flag in FLAGS}
    return given | {
        name: value
        for name, value in stated.items()
        if value is not None and given[name] == defaults[name]
    }


def _starts(kind: EngineKind, text: str) -> bool:
    return any(launcher in text for launcher in kind.launchers)


def ignored_flags(launch: Launch) -> tuple[str, ...]:
    """The flags of a command line that are not counted and may matter, and what they may change."""
    counted = {flag.launch for flag in FLAGS} | {
        "--speculative-config",
        "--cudagraph-capture-sizes",
    }
    drafts = _speculation(_document(launch, "--speculative-config"))
    listed = list[str]()
    for flag, value in launch.flags.items():
        name = flag.split(".")[0]
        is_read = name in counted and (drafts or name != "--speculative-config")
        is_plain = name == "--dtype" and value.lower() in ("auto", "bfloat16", "half", "float16")
        if is_read or is_plain or WITHOUT_EFFECT.fullmatch(name):
            continue
        row = VLLM.get(name)
        listed.append(f"{name} ({(row and row.may_change) or 'unknown to kneewatch'})")
    if not listed:
        return ()
    return (f"flags of the command line that are not counted: {', '.join(dict.fromkeys(listed))}",)


def _document(launch: Launch, flag: str) -> Mapping[str, Any]:
    """A flag's JSON value, with the keys that are given as flags of their own behind a dot."""
    dotted = {
        name.partition(".")[2].replace("-", "_"): int(value) if value.isdigit() else value
        for name, value in launch.flags.items()
        if name.startswith(f"{flag}.")
    }
    try:
        return msgspec.json.decode(launch.text(flag) or "{}", type=dict[str, Any]) | dotted
    except msgspec.DecodeError:
        return dotted


def _speculation(config: Mapping[str, Any]) -> dict[str, Any]:
    method, tokens = str(config.get("method") or ""), config.get("num_speculative_tokens")
    if not isinstance(tokens, int) or method in _NO_DRAFT_MODEL:
        return {}
    drafts = "mtp" if method.endswith("mtp") else config.get("model")
    return {"draft_model": drafts, "num_speculative_tokens": tokens} if drafts else {}
