"""A vLLM command line as flags and values. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kneewatch.collector.base import SettingsError
from kneewatch.diagnose.recommend.shell import commands

ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-O": "--compilation-config",
    "--tp": "--tensor-parallel-size",
}
MULTIPLES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
"""vLLM reads 4k as 4,000 and 4K as 4,096."""

ENTRIES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
NUMBERS = (
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--max-model-len",
    "--max-cpu-loras",
    "--long-prefill-token-threshold",
)
"""Flags whose numbers the recommendations use."""

LARGEST = 2.0**53
"""Above it a number is no whole number any more, and no count of anything."""

CONTAINERS = ("docker", "podman", "nerdctl")
SWITCHES = ("--rm", "-d", "-i", "-t", "-it", "-ti", "--init", "--privileged", "--detach")
"""Switches of `docker run`: what follows another flag of it is that flag's value."""

_IMAGE = re.compile(r"[^\s=]*vllm[^\s=]*")
_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line: `flags` by their full name with dashes, "" where a flag has no value.

    `model` is what is served, "" where the line does not say. `complete` is false where more
    flags may be in force than are written: in a `--config` file or in a shell variable.
    """

    model: str = ""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    complete: bool = True

    def text(self, flag: str) -> str | None:
        """A flag's value as it was written; None where it is not given or a variable's."""
        value = self.flags.get(flag)
        return None if value is None or "$" in value else value

    def number(self, flag: str) -> float | None:
        """A flag's value as a number, 4k and 4K understood; None: not given, or not readable."""
        text = self.flags.get(flag)
        # More digits than a float holds would not even convert.
        found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgG]?)", text or "")
        if found is None:
            return None
        value = float(found[1]) * MULTIPLES.get(found[2], 1)
        return value if value <= LARGEST else None

    def count(self, flag: str) -> int | None:
        """The same as a whole number."""
        value = self.number(flag)
        return None if value is None else int(value)

    def unreadable(self, flag: str) -> bool:
        """Whether a number's flag is given, and what it is cannot be read."""
        given = self.flags.get(flag)
        return given not in (None, "auto") and self.number(flag) is None

    def absent(self, flag: str) -> bool:
        """Whether the flag is certainly not given."""
        return self.complete and flag not in self.flags

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
        SettingsError: no vLLM command in it; it names `origin`.
    """
    found = commands(text)
    for words in found:
        arguments = _arguments(words)
        if arguments is not None:
            return _parsed(arguments)
    for words in found:
        arguments = _contained(words)
        if arguments:
            return _parsed(arguments)
    everything = [word for words in found for word in words]
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


def _contained(words: list[str]) -> list[str]:
    """What `docker run` hands to an image of vLLM; empty where it is none."""
    names = [word.split("/")[-1] for word in words]
    if "run" not in words or not any(name in CONTAINERS for name in names):
        return []
    for at in range(words.index("run") + 1, len(words)):
        word, before = words[at], words[at - 1]
        is_value = before.startswith("-") and "=" not in before and before not in SWITCHES
        if not is_value and not word.startswith("-") and _IMAGE.fullmatch(word):
            return words[at + 1 :]
    return []


def _parsed(words: list[str]) -> Launch:
    flags: dict[str, str] = {}
    model, at, complete = "", 0, True
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith(("$", "<", ">")) and model:
            # A variable may hold flags; a redirection holds none.
            complete = complete and not word.startswith("$")
            continue
        if not _FLAG.match(word):
            model = model or word
            continue
        name, equals, value = word.partition("=")
        if not equals and at < len(words) and not _FLAG.match(words[at]):
            value = words[at]
            at += 1
        name = ALIASES.get(name, name)
        flags[name.replace("_", "-")] = value
    complete = complete and "--config" not in flags and model not in ("$@", "$*")
    return Launch(flags.pop("--model", "") or model, flags, complete)
