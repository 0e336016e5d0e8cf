"""Parses a vLLM command line; knows the flags by flags.toml. Pure."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import DecodeError, Struct, field
from msgspec.json import decode
from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import ADAPTERS
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.packaged import packaged_tables, read_as

Version = tuple[int, int, int]

_SEPARATORS = "\n;|&()"


def commands(text: str) -> list[list[str]]:
    """The words of each command in a script, without comments; those of here-documents too.

    Quotes may span lines. Where one is never closed (an apostrophe in prose), each line is read by
    itself. Nothing is expanded: `$VARIABLE` stays as written.
    """
    script = re.sub(r"(?m)^[ \t]*#.*$", "", re.sub(r"\\\r?\n", " ", text))
    try:
        return list(_commands(script))
    except ValueError:
        return [words for line in script.splitlines() for words in _commands_of_line(line)]


def _commands_of_line(line: str) -> list[list[str]]:
    for part in (line, line.partition(" #")[0]):
        with suppress(ValueError):
            return list(_commands(part))
    return [line.split()]


def _commands(text: str) -> Iterator[list[str]]:
    """Raises ValueError where a quote is not closed."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.commenters, lexer.whitespace, lexer.whitespace_split = "", " \t\r", True
    words, is_comment = list[str](), False
    for word in [*lexer, "\n"]:
        if word and not word.strip(_SEPARATORS):
            is_comment = is_comment and "\n" not in word
            if words:
                yield words
            words = []
        else:
            is_comment = is_comment or word.startswith("#")
            words += [] if is_comment else [word]


# --- A vLLM command line as flags and values ------------------------------------------------------


MULTIPLES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
"""vLLM reads 4k as 4,000 and 4K as 4,096."""

_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)?)?")
COMMANDS = ("vllm", "vllm.entrypoints.cli.main")
"""Modules that `python -m` runs like the command `vllm`."""

_SCRIPTS = ("/vllm/entrypoints/openai/api_server.py", "/vllm/entrypoints/api_server.py")

ENTRIES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
LARGEST = 2.0**53
"""Above this, a float cannot represent every whole number; no count is that large."""


def number_of(text: str) -> float | None:
    """A flag's value as a number (4k and 4K are accepted); None if it is none."""
    # More digits than a float holds would not even convert.
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})([kKmMgG]?)", text)
    if match is None:
        return None
    value = float(match[1]) * MULTIPLES.get(match[2], 1)
    return value if value <= LARGEST else None


CONTAINERS = ("docker", "podman", "nerdctl")
SWITCHES = ("--rm", "-d", "-i", "-t", "-it", "-ti", "--init", "--privileged", "--detach")
"""Flags of `docker run` that take no value. Any other flag is followed by its value."""

_IMAGE = re.compile(r"[^\s=]*vllm[^\s=]*")
_VLLM_IMAGE = re.compile(
    r"(?:\S{1,200}/)?vllm(?:-(?:openai|cpu)[a-z0-9-]{0,40})?(?::([\w.-]{1,128}))?(?:@[\w:]{1,100})?"
)
"""vLLM's own images with their tag, also from other registries.

Images with other names may contain a router or a benchmark; their tags are not vLLM versions.
"""

_RELEASE = re.compile(r"v?(\d{1,3}\.\d{1,3}\.\d{1,3}(?:\.?(?:post|rc)\d{1,3})?)(?:[-+_].*)?")
_FLAG = re.compile(r"--?[A-Za-z]")
_ASSIGNMENT = re.compile(r"(?:--env=|-e)?([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")


class CommandLine(Struct, frozen=True):
    """A command line: `flags` by their full name with dashes; "" for a flag without a value.

    `model` is the served model; "" if the command line does not name one. `complete` is false if
    flags may be set elsewhere: in a `--config` file or in a shell variable. `cut` are the flags of
    which only the first of several values is in `flags`. `environment` are the variables that are
    set for the command or before it. `overridden` are flags that a later one
    contradicts, each with the later one, as written.
    """

    model: str = ""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    complete: bool = True
    cut: tuple[str, ...] = ()
    overridden: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def text(self, flag: str) -> str | None:
        """A flag's value as written; None if it is not given or contains a variable."""
        value = self.flags.get(flag)
        return None if value is None or "$" in value else value

    def number(self, flag: str) -> float | None:
        """A flag's value as a number (4k and 4K are accepted); None if not given or not a
        number."""
        return number_of(self.flags.get(flag) or "")

    def count(self, flag: str) -> int | None:
        """A flag's value as a whole number; None if not given or not a number."""
        value = self.number(flag)
        return None if value is None else int(value)

    def unreadable(self, flag: str) -> bool:
        """Whether the flag is given, needs a number, and has a value that is not a number."""
        given = self.flags.get(flag)
        return given not in (None, "auto") and self.number(flag) is None

    def document(self, flag: str) -> Mapping[str, Any]:
        """A flag's JSON value, with the keys that are given as flags of their own behind a dot."""
        dotted = {
            name.partition(".")[2].replace("-", "_"): int(value) if value.isdigit() else value
            for name, value in self.flags.items()
            if name.startswith(f"{flag}.")
        }
        try:
            return decode(self.text(flag) or "{}", type=dict[str, Any]) | dotted
        except DecodeError:
            return dotted

    def absent(self, flag: str) -> bool:
        """Whether the flag is certainly not given."""
        return self.complete and flag not in self.flags

    def switched(self, feature: str) -> bool | None:
        """True for `--feature`, False for `--no-feature`; None if neither is given."""
        if f"--no-{feature}" in self.flags:
            return False
        given = self.flags.get(f"--{feature}")
        return None if given is None else given.lower() != "false"


def parse_command(text: str, *, origin: str) -> CommandLine:
    """The first vLLM command line in a text such as a shell script.

    Comments, line continuations and wrappers before it are skipped. Flags
    may be `--flag value` or `--flag=value`, with underscores or dashes.

    Raises:
        SettingsError: the text has no vLLM command; the message names `origin`.
    """
    lines = commands(text)
    for arguments_of in (_arguments, _contained):
        before = list[str]()
        for words in lines:
            arguments = arguments_of(words)
            if arguments is not None:
                before += words[: len(words) - len(arguments)]
                return replace(_parsed(arguments), environment=_assigned(before))
            before += words
    everything = [word for words in lines for word in words]
    if everything and everything[0].startswith("--"):
        return _parsed(everything)
    raise SettingsError(
        f"{origin}: no vLLM command line found; write `vllm serve MODEL --flag value ...`"
    )


def process_command(words: Sequence[str]) -> CommandLine | None:
    """The launch from a process's own arguments; None if the process does not serve vLLM.

    The program must be vLLM itself, or a Python that runs it. `vllm serve` among later arguments is
    no proof.
    """
    rest = list(words)
    if rest and _PYTHON.fullmatch(rest[0].split("/")[-1]):
        rest = rest[1:]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[2 if rest[0] in ("-X", "-W") else 1 :]
        if rest[:1] == ["-m"]:
            module, after = "".join(rest[1:2]), rest[2:]
            if module in ENTRIES:
                return _parsed(after)
            return _parsed(after[1:]) if module in COMMANDS and after[:1] == ["serve"] else None
    program = "".join(rest[:1])
    if program.split("/")[-1] == "vllm" and rest[1:2] == ["serve"]:
        return _parsed(rest[2:])
    return _parsed(rest[1:]) if program.endswith(_SCRIPTS) else None


def image_command(image: str, arguments: Sequence[str]) -> CommandLine | None:
    """The launch of a container that sets only arguments.

    None if the image is not vLLM's: its command is unknown.
    """
    return _parsed(list(arguments)) if _VLLM_IMAGE.fullmatch(image) else None


def image_version(image: str) -> str | None:
    """The vLLM release in the tag of a vLLM image; None if the tag names none."""
    match = _VLLM_IMAGE.fullmatch(image)
    release = None if match is None else _RELEASE.fullmatch(match[1] or "")
    return None if release is None else release[1]


def with_config_file(launch: CommandLine, document: Mapping[str, object]) -> CommandLine:
    """The launch with the flags of its `--config` file; the command line's flags override them.

    The launch is not `complete` if a value in the file is false, or of a kind that vLLM does not
    accept in a file.
    """
    flags: dict[str, str] = {}
    complete = True
    for key, value in document.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            complete = complete and value
            if value:
                flags[flag] = ""
        elif isinstance(value, str | int | float):
            flags[flag] = str(value)
        elif isinstance(value, Mapping | list):
            flags[flag] = json.dumps(value, default=str)
        else:
            complete = False
    model = flags.pop("--model", "") or flags.pop("--model-tag", "")
    flags |= launch.flags
    return replace(launch, model=launch.model or model, flags=flags, complete=complete)


def _arguments(words: list[str]) -> list[str] | None:
    for at, word in enumerate(words):
        after = words[at + 1 :]
        if word.split("/")[-1] == "vllm" and after[:1] == ["serve"]:
            return after[1:]
        if word == "-m" and after[:1] and after[0] in ENTRIES:
            return after[1:]
    return None


def _assigned(words: list[str]) -> dict[str, str]:
    """The environment variables among the words in front of a command."""
    pairs = (_ASSIGNMENT.fullmatch(word) for word in words)
    return {pair[1]: pair[2] for pair in pairs if pair is not None}


def _contained(words: list[str]) -> list[str] | None:
    """The arguments that `docker run` passes to a vLLM image; None for other commands."""
    names = [word.split("/")[-1] for word in words]
    if "run" not in words or not any(name in CONTAINERS for name in names):
        return None
    for at in range(words.index("run") + 1, len(words)):
        word, before = words[at], words[at - 1]
        is_value = before.startswith("-") and "=" not in before and before not in SWITCHES
        if not is_value and not word.startswith("-") and _IMAGE.fullmatch(word):
            return words[at + 1 :] or None
    return None


def _parsed(words: list[str]) -> CommandLine:
    flags: dict[str, str] = {}
    cut, overridden = list[str](), list[tuple[str, str]]()
    model, at, complete = "", 0, True
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith(("$", "<", ">")) and model:
            # A variable may hold flags; a redirection holds none.
            complete = complete and not word.startswith("$")
            at += word in ("<", ">", ">>")
            continue
        if not _FLAG.match(word):
            last = "".join([*flags][-1:])
            if last in VLLM and VLLM[last].kind == "sizes" and word.isdigit():
                flags[last] += f" {word}"
                continue
            # `--lora-modules a=x b=y`: the second value of a flag.
            cut += [last] if model and last else []
            model = model or word
            continue
        name, equals, value = word.partition("=")
        if not equals and at < len(words) and not _FLAG.match(words[at]):
            value = words[at]
            at += 1
        head, dot, key = re.sub(r"^-O(?=\d)", "-O ", name).partition(".")
        head, _, level = head.partition(" ")
        if head == "-O" and (level or value.isdigit()):
            head, value = "--optimization-level", level or value
        flag = f"{_SPELLINGS.get(head, head)}{dot}{key}".replace("_", "-")
        opposite = flag.replace("--no-", "--", 1) if "--no-" in flag else f"--no-{flag[2:]}"
        for earlier in (flag, opposite):
            before = flags.pop(earlier, value if earlier == flag else None)
            if before is not None and (earlier == opposite or before != value):
                overridden.append((f"{earlier} {before}".strip(), f"{flag} {value}".strip()))
        flags[flag] = value
    complete = complete and "--config" not in flags and model not in ("$@", "$*")
    served = flags.pop("--model", "") or model
    return CommandLine(served, flags, complete, tuple(dict.fromkeys(cut)), tuple(overridden))


# --- Which vLLM versions know a flag, and what they take by default -------------------------------


def parameter_of(flag: str) -> str:
    """A flag's name in Python, in JSON and in query strings, such as `max_model_len`."""
    return flag.removeprefix("--").replace("-", "_")


class Flag(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of flags.toml: a flag of vLLM, of `size`, or of both. `launch` is vLLM's name.

    vLLM has it from version `since` on and before version `until`. `label` is its name in the
    labels of cache_config_info. If a page has the label, the running version has the flag.
    """

    name: str
    kind: str = "text"
    launch: str = ""
    short: tuple[str, ...] = ()
    since: Version | None = None
    until: Version | None = None
    choices: str = ""
    label: str = ""
    field: str = ""
    sets: Any = None
    shown: bool = False
    printed: bool = False
    needs: str = ""
    excludes: str = ""
    keys: tuple[str, ...] = ()
    members: str = ""
    least: float | str | None = None
    lengthens: bool = False
    may_change: str = ""
    help: str = ""
    first: bool = False
    profile: str = ""
    input: str = ""
    alias: str | None = None
    metavar: str | None = None
    multiple: bool = False
    default: Any = None

    @property
    def parameter(self) -> str:
        """The flag's name in Python, in JSON and in query strings, such as `max_model_len`."""
        return parameter_of(self.name)

    @property
    def profile_key(self) -> str:
        """The table and key of a workload profile that have the flag's value; empty if none has.

        A flag of the launch has a key of its own name, but adapters have a table of theirs.
        """
        in_launch = self.launch and self.help and not self.field.startswith("adapters.")
        return self.profile or (f"deployment.{self.parameter}" if in_launch else "")

    @property
    def names_file(self) -> bool:
        """Whether the flag's value is, or contains, a file name."""
        return self.kind in ("file", "pair")

    def text(self, value: bool | float | str) -> str:
        """A value as a command line has it."""
        return (
            ""
            if self.kind == "switch"
            else f"{value:g}"
            if isinstance(value, float)
            else f"{value}"
        )

    def read(self, launch: CommandLine) -> bool | float | str | None:
        """The value in a command line; None if it says nothing."""
        if self.kind == "switch":
            return launch.flags.get(self.launch, "false").lower() != "false" or None
        if self.kind == "count":
            return launch.count(self.launch)
        if self.kind in ("number", "gib"):
            return launch.number(self.launch)
        if self.kind == "limits" and (listed := launch.document(self.launch)):
            return json.dumps(listed)
        return launch.text(self.launch) or None


_TABLES = packaged_tables("collector.engines", "vllm/flags.toml")
_UNSET: dict[str, dict[str, Any]] = {"switch": {"default": False}, "pair": {"default": ()}}
FLAGS = (
    *(
        read_as({"name": f"--{name}", **_UNSET.get(row["kind"], {}), **row}, Flag)
        for name, row in _TABLES["size"].items()
    ),
    *(
        read_as({"name": f"--{name}", "launch": f"--{name}", **row}, Flag)
        for name, row in _TABLES["vllm"].items()
    ),
)
"""All flags; sources of their versions: vllm/engine/arg_utils.py of the releases up to 0.33."""

VLLM: Mapping[str, Flag] = {flag.launch: flag for flag in FLAGS if flag.launch}
"""vLLM's flags."""

COUNTS = tuple(name for name, flag in VLLM.items() if flag.kind == "count")
"""vLLM's flags whose values are whole numbers."""

SHOWN = frozenset(name for name, flag in VLLM.items() if flag.shown or flag.help)
"""vLLM's flags whose values become facts."""

PRINTED = SHOWN | {name for name, flag in VLLM.items() if flag.printed}
"""Flags whose values are printed. Values of others may be secrets (--api-key)."""


def variable(flag: str) -> str:
    """The name of the shell variable that a printed command has for a flag's hidden value."""
    return flag.lstrip("-").replace("-", "_").replace(".", "_").upper()


def printed_words(flag: str, value: str, *, is_new: bool = False) -> str:
    """A flag and its value, quoted for a shell; a value that may be a secret is a shell variable,
    unless it is new."""
    if not flag.startswith("-"):
        return f'{flag}="${flag}"' if is_hidden(flag, value) else f"{flag}={shlex.quote(value)}"
    if not value:
        return shlex.quote(flag)
    if not is_new and is_hidden(flag, value):
        return f'{flag} "${variable(flag)}"'
    if _VARIABLE.fullmatch(value):
        return f'{shlex.quote(flag)} "{value}"'
    if flag in VLLM and VLLM[flag].kind == "sizes" and value.replace(" ", "").isdigit():
        return f"{flag} {value}"
    glue = "=" if value.startswith("-") else " "
    return f"{shlex.quote(flag)}{glue}{shlex.quote(value)}"


def is_hidden(flag: str, value: str) -> bool:
    """Whether the value of a flag or of an environment variable may be a secret."""
    if not flag.startswith("-"):
        return _PLAIN_VARIABLE.fullmatch(flag) is None
    return flag.split(".")[0] not in PRINTED and not value.replace(".", "", 1).isdigit()


UNKNOWN = "unknown to kneewatch"
_PLAIN_VARIABLE = re.compile(r"(?!.*(KEY|TOKEN))(VLLM|CUDA|NCCL|HIP|PYTORCH|TORCH|OMP)_\w+")
UNREAD_VARIABLES: Mapping[str, str] = _TABLES["unread_variables"]
"""Variables that vLLM no longer reads, and the flag that replaces each."""
UNREAD_SINCE: Version = (0, 32, 0)
_DROPPED = re.compile(_TABLES["dropped"]["flags"])
_SPELLED_ALIKE = 0.8
_WITHOUT_EFFECT = re.compile(_TABLES["without_effect"]["flags"])
_EFFECTS: Mapping[str, str] = _TABLES["effects"]
_SPELLINGS = {short: name for name, flag in VLLM.items() for short in flag.short}


def effect_of(flag: str) -> str:
    """What a flag or variable that is not counted may change; empty if nothing that is predicted.

    `--no-FEATURE` changes what `--FEATURE` does, or nothing where a version has no row of its own.
    """
    positive = flag.replace("--no-", "--", 1)
    for name in (flag, positive):
        if name in VLLM and VLLM[name].may_change:
            return VLLM[name].may_change
    for what, rule in _EFFECTS.items():
        if re.fullmatch(rule, positive):
            return what
    by_default = positive != flag and positive in VLLM
    if by_default or not flag.startswith("-") or _WITHOUT_EFFECT.fullmatch(positive):
        return ""
    return UNKNOWN


def is_dropped(flag: str, version: Version) -> bool:
    """Whether this version refuses the flag, which earlier ones had."""
    row = VLLM.get(flag)
    if row is not None and row.until is not None:
        return row.until <= version
    return version >= UNREAD_SINCE and _DROPPED.fullmatch(flag) is not None


def nearest_flag(flag: str) -> str | None:
    """The flag of vLLM that is spelled like this one; None if none is."""
    return next(iter(difflib.get_close_matches(flag, VLLM, n=1, cutoff=_SPELLED_ALIKE)), None)


def command_values(launch: CommandLine) -> dict[str, Any]:
    """The values of a command line, by the parameters of `size`; a flag that is not given is
    absent."""
    read = {flag.parameter: flag.read(launch) for flag in VLLM.values() if flag.help}
    if not read["cudagraph_capture_sizes"]:
        captured = launch.document("--compilation-config").get("cudagraph_capture_sizes")
        read["cudagraph_capture_sizes"] = captured and str(captured)
    has_adapters = ADAPTERS in launch.flags
    read["max_loras"] = (read["max_loras"] or 1) if has_adapters else None
    read["max_lora_rank"] = read["max_lora_rank"] if has_adapters else None
    return {name: value for name, value in read.items() if value is not None}


CACHING_BY_DEFAULT: Version = (0, 9, 0)
"""From this version on, prefix caching and chunked prefill are on by default (V1 only)."""

FP8_KV_SINCE: Version = (0, 8, 3)
"""Older V1 engines accepted fp8 for the KV cache and then ignored or refused it (vLLM 14221)."""

FROM_LABELS: tuple[tuple[str, Version], ...] = (
    ("kv_cache_size_tokens", (0, 24, 0)),
    ("kv_cache_memory_bytes", (0, 11, 0)),
)
"""Labels of cache_config_info that a version added; a page with the label is of that version or
later."""


def oldest_version(config: Mapping[str, str]) -> Version | None:
    """The oldest vLLM version whose page has these labels; None if the labels do not show it."""
    return next((version for label, version in FROM_LABELS if label in config), None)


def supports_flag(flag: str, *, version: Version | None, config: Mapping[str, str]) -> bool:
    """Whether the running version has the flag; true for names that are not flags of vLLM.

    If the version is unknown: true for flags that every version in use has, and for flags whose
    label is on the page.
    """
    if not flag.startswith("--"):
        return True
    entry = VLLM.get(flag.partition(".")[0])
    if entry is None or entry.since is None:
        return False
    if entry.label and entry.label in config:
        return True
    at = version or oldest_version(config) or (0, 6, 0)
    return entry.since <= at and (entry.until is None or at < entry.until)
