"""A vLLM command line as flags and values. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from kneewatch.collector.base import SettingsError

ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-O": "--compilation-config",
    "--tp": "--tensor-parallel-size",
}
MULTIPLES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
"""vLLM reads 4k as 4,000 and 4K as 4,096."""

ENTRIES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line: `flags` by their full name with dashes, "" where a flag has no value.

    `model` is what is served, "" where the line does not say.
    """

    model: str = ""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])

    def text(self, flag: str) -> str | None:
        """A flag's value as it was written; None where it is not given."""
        return self.flags.get(flag)

    def number(self, flag: str) -> float | None:
        """A flag's value as a number, 4k and 4K understood; None where it is not given.

        Raises:
            SettingsError: it is given and no number.
        """
        text = self.flags.get(flag)
        if text is None or text == "auto":
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
        if found is None:
            raise SettingsError(f"launch file: {flag} is {text!r}, which is no number")
        return float(found[1]) * MULTIPLES.get(found[2], 1)

    def count(self, flag: str) -> int | None:
        """The same as a whole number."""
        value = self.number(flag)
        return None if value is None else int(value)

    def switched(self, feature: str) -> bool | None:
        """Whether `--feature` or `--no-feature` is given; None where neither is."""
        if f"--no-{feature}" in self.flags:
            return False
        given = self.flags.get(f"--{feature}")
        return None if given is None else given.lower() != "false"


def parse_launch(text: str, *, origin: str) -> Launch:
    """The vLLM command line in a text such as a shell script's; the first one counts.

    Comments, continued lines, environment and wrappers in front of it are skipped; flags may be
    `--flag value` or `--flag=value`, with underscores or dashes.

    Raises:
        SettingsError: quotes that do not close, or no vLLM command in it; it names `origin`.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = [line for line in joined.splitlines() if line.strip()]
    try:
        commands = [shlex.split(line, comments=True) for line in lines]
    except ValueError as exc:
        raise SettingsError(f"{origin}: not a command line: {exc}") from exc
    for words in commands:
        arguments = _arguments(words)
        if arguments is not None:
            return _parsed(arguments)
    everything = [word for words in commands for word in words]
    if everything and everything[0].startswith("--"):
        return _parsed(everything)
    raise SettingsError(
        f"{origin}: no vLLM command line in it; write `vllm serve MODEL --flag value ...`"
    )


def _arguments(words: list[str]) -> list[str] | None:
    for at, word in enumerate(words):
        after = words[at + 1 :]
        if word.split("/")[-1] == "vllm" and after[:1] == ["serve"]:
            return after[1:]
        if word == "-m" and after[:1] and after[0] in ENTRIES:
            return after[1:]
    return None


def _parsed(words: list[str]) -> Launch:
    flags: dict[str, str] = {}
    model, at = "", 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.match(r"--?[A-Za-z]", word):
            model = model or word
            continue
        name, equals, value = word.partition("=")
        if not equals and at < len(words) and not re.match(r"--?[A-Za-z]", words[at]):
            value = words[at]
            at += 1
        name = ALIASES.get(name, name)
        flags[name.replace("_", "-")] = value
    return Launch(flags.pop("--model", "") or model, flags)
