"""vLLM's start-up log: facts about the server, and why it did not start or why it died. Pure.

Only lines that match the tables below are kept. Facts are read only until the server is ready,
because the log contains no prompts before that. Afterwards only lines of the engine's own modules
are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Literal, cast

from msgspec import Struct, field

from kneewatch.collector.engines.engine_kind import VLLM, EngineKind, engine_kinds
from kneewatch.collector.packaged import packaged_tables, read_as
from kneewatch.diagnose.deployment.vllm_flags import (
    LARGEST,
    PRINTED,
    CommandLine,
    Version,
    variable,
)
from kneewatch.diagnose.sizing.memory.launch import parse_version
from kneewatch.diagnose.verdict import LogFact, Value

# --- Why a server did not start or died, as read from its log -------------------------------------


KV_NONE, KV_SMALL, FREE_MEMORY = "no_kv_memory", "kv_below_one_request", "gpu_memory_in_use"
GPU_MEMORY, HOST_MEMORY, FEW_STATES = "gpu_out_of_memory", "host_out_of_memory", "too_few_states"
MODEL_LEN, FLAG, OTHER = "max_model_len_above_model", "invalid_argument", "error"


class Failure(Struct, frozen=True):
    """Why the server did not start or, if `served`, why it died.

    `line` is the proof; `details` has its numbers and words by name. `kind` is "error" for a line
    that no wording matches.
    """

    kind: str
    line: str
    served: bool
    details: Mapping[str, Value] = field(default_factory=dict[str, Value])


SIZE = r"\d[\d.]{0,12} (?:[GMK]iB|bytes)"
_GIB_EACH = {"GiB": 1.0, "MiB": 1 / 1024, "KiB": 1 / 1024**2, "bytes": 1 / 2**30}
_THIS_PROCESS = "this process has"
_TORCH_RATIO = 0.75
"""Least share of a process's GPU memory that PyTorch allocates.

The rest is CUDA's context, graphs and NCCL. So the process with a matching size wrote the log line.
"""
_LEAST_GIB = 1.0
"""A process without tensors, such as a monitor or a display, uses less GPU memory than this."""


def reasons() -> Mapping[str, Mapping[str, Any]]:
    """What happened and what to do, by the kind of failure."""
    return packaged_tables("collector.engines", "vllm/startup_failures.toml")


def phases() -> Mapping[str, Mapping[str, Any]]:
    """The phases of a start in which the GPU's memory can end, the most specific first."""
    of_memory: Mapping[str, Mapping[str, Any]] = reasons()[GPU_MEMORY]["phases"]
    return of_memory


def others_gpu_gib(failure: Failure) -> float | None:
    """GiB of GPU memory that other processes use, from PyTorch's out-of-memory line; 0 if it is
    little.

    None if the line does not say. In a container, PyTorch names its own process by the node's
    process id; the process is then found by its size.
    """
    rows = re.findall(rf"([^.]+ has )({SIZE}) memory in use\.", str(failure.details.get("holders")))
    others = [_gib(size) for who, size in rows if _THIS_PROCESS not in who]
    held_gib = sum(others)
    if len(others) == len(rows):
        own_gib = size_gib(failure, "torch")
        if not own_gib or not others:
            return None
        mine_gib = min(others, key=lambda size: abs(size - own_gib))
        if not _TORCH_RATIO * mine_gib <= own_gib <= mine_gib:
            return None
        held_gib -= mine_gib
    return held_gib if held_gib >= _LEAST_GIB else 0.0


def is_fragmented(failure: Failure) -> bool:
    """Whether PyTorch had reserved much memory in pieces, more than the allocation that failed."""
    asked_gib, cached_gib = size_gib(failure, "asked"), size_gib(failure, "cached")
    return asked_gib > 0 and cached_gib >= max(asked_gib, _LEAST_GIB)


def size_gib(failure: Failure, name: str) -> float:
    """A logged size in GiB; 0 if the line does not say."""
    return _gib(str(failure.details.get(name, "")))


def _gib(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * _GIB_EACH[unit] if re.fullmatch(r"\d+(\.\d+)?", number) else 0.0


# --- Facts of the log, by line --------------------------------------------------------------------


Phase = Literal["empty", "starting", "serving", "stopped"]

LONGEST_LINE = 16 * 1024
"""Most bytes of a line that are read; the list of all arguments takes about 5 KiB."""

SHOWN_CHARACTERS = 360
"""Most characters of a line that are kept."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LINE_END = re.compile(rb"[\r\n]")

_TEXT = r"(?:[^'\\]|\\.){0,500}"


class Wording(Struct, frozen=True, dict=True):
    """How vLLM versions log facts, or a failure of a `kind`.

    It applies to versions from `since` up to, but not including, `until`. `facts` are the facts
    that the groups of `regex` capture, in order; the groups of a failure have names. `ranks`:
    whether the least, the most or the last of several processes' values is used.
    """

    regex: str
    facts: tuple[str, ...] = ()
    kind: str = ""
    since: Version = (0, 6, 0)
    until: Version | None = None
    ranks: str = "last"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """`regex`, compiled on first use: compiling all takes 0.1 s, and most commands read no
        log."""
        return re.compile(self.regex)


_NUMBER = r"(-?[\d,]{1,15}(?:\.\d{1,12})?)"


def _tables() -> Mapping[str, Any]:
    return packaged_tables("diagnose.deployment", "startup_log.toml")


def _one_of(patterns: str | Sequence[str]) -> str:
    """An expression that matches where one of these does."""
    return patterns if isinstance(patterns, str) else "|".join(patterns)


@cache
def _pattern(kind: str) -> re.Pattern[str]:
    """How lines of a kind begin, or what is in them."""
    return re.compile(_one_of(_tables()["lines"][kind]))


def _is(kind: str, text: str) -> bool:
    """Whether a text begins as lines of a kind do."""
    return _pattern(kind).match(text) is not None


@cache
def _words(*, serving: bool) -> re.Pattern[bytes]:
    """The words of which each line of interest contains one."""
    lines = _tables()["lines"]
    more = () if serving else lines["more_while_starting"]
    return re.compile("|".join((*lines["while_serving"], *more)).encode())


@cache
def wordings(table: Literal["facts", "failures"]) -> tuple[Wording, ...]:
    """The wordings of facts or of failures, from the packaged startup_log.toml."""
    rows: list[Wording] = []
    for row in _tables()[table]:
        regex = _one_of(row["pattern"]).replace("NUMBER", _NUMBER).replace("SIZE", SIZE)
        spans = {name: parse_version(row[name]) for name in ("since", "until") if name in row}
        rows.append(read_as({**row, **spans, "regex": regex}, Wording))
    own = (each for kind in engine_kinds() for each in kind.log_failures.items())
    rows += [Wording(regex, kind=kind) for kind, regex in own if table == "failures"]
    return tuple(rows)


@cache
def _signs() -> Mapping[bytes, EngineKind]:
    return {sign.encode(): kind for kind in engine_kinds() for sign in kind.log_signs}


_PAIR = re.compile(
    r"(?:'(?P<key>\w{1,60})': |(?<![\w.])(?P<name>\w{1,60})=)"
    rf"(?:'(?P<text>{_TEXT})'|\['(?P<listed>{_TEXT})'(?:\]|(?P<more>, ))"
    r"|(?P<bare>[\w.+-]{1,60})(?=[,)}\s]|$)|)"
)
_OPENING, _CLOSING = "{[(<", "}])>"

_TEXTS = ("model", "dtype", "quantization", "kv_cache_dtype")
"""Facts whose values are text; all other arguments are numbers or booleans."""


@cache
def _flags() -> Mapping[str, str]:
    """For each fact that an argument sets, the flag of that argument."""
    arguments = reversed(_tables()["arguments"].items())
    return {fact: "--" + key.replace("_", "-") for key, fact in arguments}


def title(fact: str) -> str:
    """A fact's name in text; for an argument, its flag."""
    return _tables()["titles"].get(fact) or _flags()[fact]


# --- Failures -------------------------------------------------------------------------------------

_PYDANTIC_INPUT = " [type="
"""In pydantic's validation errors, the whole configuration follows this text."""

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|'[^']*$|\"[^\"]*$")
_ANY_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]{0,60}")


class StartupLog:
    """Reads a log piece by piece. If the log contains another start, earlier lines are forgotten.

    Memory is bounded: one unfinished line of at most `LONGEST_LINE` bytes, and one line per fact.
    """

    def __init__(self) -> None:
        self._rest, self._cut = b"", False
        self.starts = 0
        """Number of server starts in what was read, plus 1."""
        self._begin()

    def _begin(self) -> None:
        self.starts += 1
        self.facts: dict[str, LogFact] = {}
        self.failure: Failure | None = None
        self.phase: Phase = "empty"
        self._complete = False
        self._given: dict[str, str] = {}
        """The flags of a complete list of arguments; a variable for a value that is not kept."""
        self._listed: list[str] = []
        """The flags of these with further values."""
        self.kind = VLLM
        """The engine whose log it is."""
        self._uncaught = False
        """Whether a traceback was written without vLLM's logger: its process ends."""
        self._frame = ""
        """The most specific phase of a start that the lines since the last fact name."""
        self._suspect: Failure | None = None
        """The first error since the server was last seen to work; one of a known kind replaces one
        that is not."""

    def restart(self, *, mid_line: bool = False) -> None:
        """Drop the unfinished line, because the file was rotated or truncated.

        With `mid_line`, the next bytes begin inside a line, which is skipped.
        """
        self._rest, self._cut = b"", mid_line

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the log; they may be split at any place."""
        *lines, rest = _LINE_END.split(data)
        for line in lines:
            if not self._cut:
                self._line(self._rest + line)
            self._rest, self._cut = b"", False
        self._rest = (self._rest + rest)[: LONGEST_LINE + 1]
        if len(self._rest) > LONGEST_LINE and not self._cut:
            self._line(self._rest)
            self._cut = True

    def close(self) -> None:
        """Read the last line, which has no line ending."""
        self.feed(b"\n")

    @property
    def launch(self) -> CommandLine | None:
        """The logged arguments as a command line; None if the log has none."""
        flags = {
            _flags()[fact]: str(logged.value)
            for fact, logged in self.facts.items()
            if fact in _flags() and fact != "model"
        }
        model = self.facts.get("model")
        if model is None:
            return None
        for flag, value in list(flags.items()):
            if value in ("True", "False"):
                del flags[flag]
                flags["--no-" + flag[2:] if value == "False" else flag] = ""
        return CommandLine(
            str(model.value), {**self._given, **flags}, self._complete, tuple(self._listed)
        )

    def number(self, fact: str) -> float | None:
        """A fact that is a number; None if the log lacks the fact."""
        logged = self.facts.get(fact)
        value = None if logged is None else logged.value
        return float(value) if isinstance(value, int | float) else None

    @property
    def version(self) -> Version | None:
        """The version of vLLM; None if the log has none."""
        logged = self.facts.get("version")
        # The pattern matches versions only, so parsing cannot fail.
        return None if logged is None else parse_version(str(logged.value))

    @property
    def not_logged(self) -> list[str]:
        """Facts that this version of vLLM usually logs at start-up, but that are missing from this
        log."""
        version = self.version
        if version is None:
            return []
        return list(
            dict.fromkeys(
                fact
                for wording in wordings("facts")
                if wording.since <= version and (wording.until is None or version < wording.until)
                for fact in wording.facts
                if fact not in self.facts
            )
        )

    # --- lines ------------------------------------------------------------------------------------

    def _line(self, raw: bytes) -> None:
        words = _words(serving=self.phase == "serving")
        signs = () if self.phase == "serving" else _signs().items()
        kind = next((kind for sign, kind in signs if sign in raw), None)
        if kind is None and not words.search(raw):
            return
        text = _ANSI.sub("", raw[:LONGEST_LINE].decode("utf-8", "replace"))
        self.kind = kind or self.kind
        for module, message in _messages(text.strip()):
            if message:
                self._message(module, message)

    def _message(self, module: str, message: str) -> None:
        if _pattern("of_requests").fullmatch(module):
            return
        if self.phase == "serving":
            self._serving(module, message)
        else:
            self._starting(module, message)

    def _serving(self, module: str, message: str) -> None:
        if _starts(module, message):
            self._begin()
            self._starting(module, message)
        elif _is("statistics", message):
            # This line shows that the engine works: earlier errors did not end it.
            self.failure = self._suspect = None
        elif _is("stopped", message) and self.failure is None:
            self.phase = "stopped"
        elif _pattern("of_engine").fullmatch(module):
            self._error(message)
            if self.failure or _is("dead", message):
                self._fail(_shown(message))
        elif not module and (failure := _known_failure(message)) and failure.kind == HOST_MEMORY:
            self._suspect = Failure(failure.kind, failure.line, served=True)
            self._fail(failure.line)

    def _starting(self, module: str, message: str) -> None:
        if _starts(module, message) and (self.failure or self.phase == "stopped" or self._loaded):
            self._begin()
        if any(_is(kind, message) for kind in ("ready", "statistics", "request")):
            self.failure = self._suspect = None
            self.phase = "serving"
        elif self.phase != "stopped":
            if self._facts_of(message):
                self.phase = "starting"
                # The start goes on, so the traceback was not from a process of the server.
                self._uncaught, self._frame = False, ""
                if self.failure is not None and self.failure.kind == OTHER:
                    self.failure = self._suspect = None
            self._uncaught = self._uncaught or (not module and _is("uncaught", message))
            self._frame = _phase(message, self._frame)
            self._error(message)
            root_logged = self._suspect is not None and self._suspect.kind != OTHER
            ended = self._uncaught and _is("exception", message)
            if (
                root_logged or ended or self.failure
                or _is("not_started", message) or _is("dead", message)
            ):  # fmt: skip
                self._fail(_without_quotes(message))

    @property
    def _phase_reached(self) -> str:
        """The phase of the start; "" if neither a traceback nor a fact shows it."""
        if self._frame or "weights_gib" not in self.facts:
            return self._frame
        return "warm_up" if self.facts.keys() & {"available_kv_gib", "gpu_blocks"} else "profile"

    @property
    def _loaded(self) -> bool:
        return "weights_gib" in self.facts or "kv_cache_tokens" in self.facts

    def _error(self, message: str) -> None:
        """Remember the first error; an error that a wording matches is preferred."""
        if self._suspect is not None and self._suspect.kind != OTHER:
            return
        served = self.phase == "serving"
        failure = _known_failure(message)
        if failure is not None:
            details = failure.details
            if failure.kind == GPU_MEMORY and not served and (phase := self._phase_reached):
                details = {**details, "phase": phase}
            self._suspect = Failure(failure.kind, failure.line, served, details)
        elif self._suspect is None and _is("exception", message) and not _is("no_root", message):
            self._suspect = Failure(OTHER, _without_quotes(message), served)

    def _fail(self, line: str) -> None:
        """Record that the server did not start or died.

        The proof is the suspect line if there is one, otherwise `line`.
        """
        if self.failure is None or self.failure.kind == OTHER:
            served = self.phase == "serving"
            self.failure = self._suspect or self.failure or Failure(OTHER, line, served)

    def _facts_of(self, message: str) -> bool:
        before = len(self.facts)
        for wording in wordings("facts"):
            match = wording.pattern.match(message)
            if match is None:
                continue
            for fact, text in zip(wording.facts, match.groups(), strict=True):
                value = _value(text.replace(",", "")) if _is_number(text) else text.strip()
                if fact == "version":
                    value = text
                self._add(fact, value, _shown(message), wording.ranks)
        if opened := _pattern("arguments").match(message):
            is_complete = _is("given_arguments", message)
            self._complete = self._complete or is_complete
            for key, value, is_first in _arguments(message[opened.end() - 1 :]):
                fact = _tables()["arguments"].get(key)
                typed = _constant(value) if isinstance(value, str) else value
                is_wanted = fact in _TEXTS or not isinstance(typed, str)
                if fact is not None and typed is not None and is_wanted and not is_first:
                    self._add(fact, typed, f"{opened[0]}... {fact}={typed}", "last")
                if is_complete and fact != "model":
                    self._give(f"--{key.replace('_', '-')}", value, is_first=is_first)
        return len(self.facts) > before

    def _give(self, flag: str, value: Value | None, *, is_first: bool) -> None:
        """Keep a flag. The value is a variable's name unless it is a number or may be printed."""
        if isinstance(value, bool):
            self._given[flag if value else "--no-" + flag[2:]] = ""
            return
        shown = value is not None and (flag in PRINTED or not isinstance(value, str))
        self._given[flag] = str(value) if shown else f"${variable(flag)}"
        if is_first and shown:
            self._listed.append(flag)

    def _add(self, fact: str, value: Value, line: str, ranks: str) -> None:
        if isinstance(value, int | float) and abs(value) > LARGEST:
            return
        held = self.facts.get(fact)
        if held is not None and ranks != "last" and isinstance(value, int | float):
            held_value = cast("float", held.value)
            if (value >= held_value) if ranks == "least" else (value <= held_value):
                return
        self.facts[fact] = LogFact(value, _shown(line))


def _messages(line: str) -> Iterator[tuple[str, str]]:
    """The (module, message) pairs of a line; a JSON record may contain several lines."""
    if line.startswith("{"):
        try:
            record: object = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict):
            return
        fields = cast("dict[str, object]", record)
        module = next(
            (
                str(fields[key]).rpartition(".py")[0].rpartition(".")[2] + ".py"
                if str(fields[key]).endswith(".py")
                else str(fields[key])[:200].rpartition(".")[2] + ".py"
                for key in ("filename", "name", "logger")
                if isinstance(fields.get(key), str)
            ),
            "",
        )
        for key in ("message", "msg", "log", "exc_info"):
            text = fields.get(key)
            if isinstance(text, str):
                for part in text.splitlines():
                    yield from ((of or module, message) for of, message in _plain(part))
        return
    yield from _plain(line)


def _plain(line: str) -> Iterator[tuple[str, str]]:
    header = _pattern("header").search(line[:400])
    if header is not None:
        yield header["file"], line[header.end() :].rstrip()
        return
    while prefix := _pattern("prefix").match(line):
        line = line[prefix.end() :]
    yield "", line.strip()


def _starts(module: str, message: str) -> bool:
    """Whether the line is one of the first that a server logs; no request can cause such a line."""
    return bool(module) and _is("start", message)


def _phase(message: str, before: str) -> str:
    """The more specific of the phase before and the one that a line names."""
    for name, phase in phases().items():
        if name == before or re.search(phase["frames"], message):
            return name
    return ""


def _known_failure(message: str) -> Failure | None:
    for wording in wordings("failures"):
        match = wording.pattern.match(message)
        if match is not None:
            details = {
                name: _value(text) if _is_number(text) else text
                for name, text in match.groupdict().items()
                if text is not None
            }
            line = _shown(message)
            if wording.kind == FLAG:
                # What follows a flag may be a secret.
                line = match[0] + " ".join(_ANY_FLAG.findall(message[match.end() :][:500]))
            return Failure(wording.kind, _shown(line), served=False, details=details)
    return None


def _arguments(text: str) -> Iterator[tuple[str, Value | None, bool]]:
    """The arguments of a printed dictionary, namespace or configuration, each once: its key, its
    value, and whether that is the first of several.

    Nothing is evaluated. The value of a nested argument is None; one that is None or the default
    is left out.
    """
    at, seen = 0, set[str]()
    base = 1 if text[:1] in _OPENING else 0
    depth = 0
    while at < len(text):
        match = _PAIR.match(text, at) if depth <= base else None
        if match is not None:
            key, bare = match["key"] or match["name"], match["bare"]
            value = _constant(bare) if bare is not None else match["text"] or match["listed"]
            if key not in seen and (value is not None or bare is None):
                seen.add(key)
                yield key, value, bool(match["more"])
            depth += bool(match["more"])
            at = match.end()
            continue
        char = text[at]
        if char == "'":
            # A text is passed over as a whole: it may hold anything.
            end = re.compile(r"'(?:[^'\\]|\\.)*'").match(text, at)
            at = len(text) if end is None else end.end()
            continue
        depth += (char in _OPENING) - (char in _CLOSING)
        at += 1


def _constant(text: str) -> Value | None:
    if text in ("True", "False"):
        return text == "True"
    if text in ("None", "auto", ""):
        return None
    return _value(text) if _is_number(text) else text.removeprefix("torch.")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d,]{1,20}(?:\.\d{0,20})?", text) is not None and any(
        char.isdigit() for char in text
    )


def _value(text: str) -> float | int:
    return float(text) if "." in text else int(text)


def _without_quotes(message: str) -> str:
    """An exception's line without quoted texts, because these may be from a prompt."""
    return _shown(_QUOTED.sub("'...'", message.partition(_PYDANTIC_INPUT)[0]))


def _shown(line: str) -> str:
    """A line without control characters, shortened."""
    plain = "".join(char if char.isprintable() else " " for char in line[: 2 * SHOWN_CHARACTERS])
    return plain if len(plain) <= SHOWN_CHARACTERS else plain[: SHOWN_CHARACTERS - 3] + "..."
