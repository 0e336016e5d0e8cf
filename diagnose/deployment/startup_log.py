"""vLLM's start-up log: facts about the server, and why it did not start or died. Pure.

Only lines that match the tables below are kept, and facts are read only until the server is ready:
before that there are no prompts. Afterwards only lines of the engine's own modules count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast

from kneewatch.diagnose.deployment.vllm_flags import LARGEST, Launch
from kneewatch.diagnose.sizing.memory.launch_setup import Version, parse_version

Value = str | float | int | bool
Phase = Literal["empty", "starting", "serving", "stopped"]

LONGEST_LINE = 16 * 1024
"""Bytes of a line that are read: the list of all arguments takes about 5 KiB."""

SHOWN_CHARACTERS = 360
"""Characters of a line that are kept."""

_HEADER = re.compile(
    r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,9})? "
    r"\[?(?P<file>[\w./-]{1,100}\.py):\d{1,6}\] ?"
)
"""What vLLM's logger writes before each message; up to 0.7 without the opening bracket."""

_PREFIX = re.compile(
    r"(?:[\w.-]{1,60} +\| |\S{1,40}T\S{1,40} std(?:out|err) [FP] "
    r"|[A-Z][a-z]{2} +\d{1,2} [\d:]{8} \S{1,100} [^\s:]{1,60}: "
    r"|\([A-Z]\w{1,30}(?: [\w=]{1,20}){0,2} pid=\d{1,10}\) )"
)
"""Prefixes of lines without a header: of Compose, Kubernetes, the journal and vLLM's processes."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LINE_END = re.compile(rb"[\r\n]")

_MESSAGES_OF_REQUESTS = re.compile(
    r"(?:.*/)?(?:logger|request_logger|protocol|chat_utils|serving\w*|\w*_parser|middleware)\.py"
)
"""Modules that log requests: nothing of theirs is read."""

_ENGINE_MODULES = frozenset(
    {
        "core.py", "core_client.py", "async_llm.py", "async_llm_engine.py", "engine.py",
        "client.py", "multiproc_executor.py", "multiproc_worker_utils.py", "worker_base.py",
        "ray_distributed_executor.py", "ray_executor.py", "launcher.py",
    }
)  # fmt: skip
"""Modules whose errors count once the server serves: those that end with the engine."""

_TEXT = r"(?:[^'\\]|\\.){0,500}"


@dataclass(frozen=True)
class Wording:
    """How versions from `since` up to, not including, `until` log facts.

    `facts` are the names of the groups of `regex`, in order. `ranks`: which of several processes'
    values counts.
    """

    facts: tuple[str, ...]
    regex: str
    since: Version = (0, 6, 0)
    until: Version | None = None
    ranks: Literal["least", "most", "last"] = "last"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The compiled `regex`: most commands read no log, and compiling all takes 0.1 s."""
        return re.compile(self.regex)


def _wording(
    facts: str,
    pattern: str,
    since: tuple[int, int, int] = (0, 6, 0),
    until: tuple[int, int, int] | None = None,
    ranks: Literal["least", "most", "last"] = "last",
) -> Wording:
    number = r"(-?[\d,]{1,15}(?:\.\d{1,12})?)"
    return Wording(tuple(facts.split()), pattern.replace("NUMBER", number), since, until, ranks)


_POOL = r"[A-Z]{2,5}(?: \+ host)?"
"""Where the KV cache is: GPU; the platform's own name from 0.32 on."""

WORDINGS: tuple[Wording, ...] = (
    _wording("version", r"vLLM API server version v?(\d+\.\d+[\w.+-]{0,60})"),
    _wording("version", r"[\s▀▄█]*\bversion v?(\d+\.\d+[\w.+-]{0,60})$", (0, 16, 0)),
    _wording("version", r"Initializing an? (?:V[01] )?LLM engine \(v(\d+\.\d+[\w.+-]{0,60})\)"),
    _wording("max_model_len", r"Using max model len (\d{1,15})$", (0, 8, 5)),
    _wording("weights_gib", r"Loading model weights took NUMBER G", until=(0, 8, 0), ranks="most"),
    _wording(
        "weights_gib load_s",
        r"Model loading took NUMBER Gi?B (?:memory )?and NUMBER seconds",
        (0, 7, 3),
        ranks="most",
    ),
    _wording(
        "gpu_memory_gib gpu_memory_utilization",
        r"the current vLLM instance can use total_gpu_memory \(NUMBER ?GiB\) x "
        r"gpu_memory_utilization \(NUMBER\)",
        (0, 6, 6),
        (0, 12, 0),
        "least",
    ),
    _wording(
        "available_kv_gib",
        r"model weights take .{1,200}; the rest of the memory reserved for KV Cache is NUMBER ?GiB",
        (0, 6, 6),
        (0, 12, 0),
        "least",
    ),
    _wording(
        "gpu_memory_gib available_kv_gib gpu_memory_utilization",
        r"Memory profiling results: .{0,60}total_gpu_memory=NUMBER ?GiB .{1,200}"
        r"kv_cache_size=NUMBER ?GiB gpu_memory_utilization=NUMBER",
        (0, 6, 3),
        (0, 6, 6),
        "least",
    ),
    _wording(
        "available_kv_gib", r"Available KV cache memory: NUMBER GiB", (0, 8, 5), ranks="least"
    ),
    _wording(
        "available_kv_gib",
        r"Initial free memory .{1,60} reserved NUMBER GiB memory for KV Cache as specified by "
        r"kv_cache_memory_bytes",
        (0, 11, 0),
        ranks="least",
    ),
    _wording(
        "gpu_blocks",
        r"# (?:GPU|CUDA|cuda|rocm|cpu|xpu|hpu) blocks: NUMBER",
        until=(0, 12, 0),
        ranks="least",
    ),
    _wording(
        "available_kv_gib",
        r"(?:Explicitly|Auto) set \(NUMBER/[\d.]{1,12}\) GiB for KV cache on node",
        (0, 20, 0),
        ranks="least",
    ),
    _wording("kv_cache_tokens", rf"{_POOL} KV cache size: NUMBER tokens", (0, 8, 0), ranks="least"),
    _wording(
        "concurrency_tokens max_concurrency",
        rf"(?:{_POOL} KV cache size: [\d,]{{1,20}} tokens, )?"
        r"Maximum concurrency for NUMBER tokens per request: NUMBER ?x",
        (0, 6, 4),
    ),
    _wording("graph_s", r"Graph capturing finished in NUMBER secs?", ranks="most"),
    _wording(
        "graph_s graph_gib",
        r"Graph capturing finished in NUMBER secs?, took NUMBER GiB",
        (0, 6, 5),
        ranks="most",
    ),
    _wording(
        "attention_backend",
        r"Using ((?:Aiter )?Flash Attention|FlashInfer|FlashMLA|XFormers|Torch SDPA"
        r"|ROCmFlashAttention|(?:FlashAttention|Cutlass|CUTLASS|AITER|Triton) MLA|Triton"
        r"(?: Attention)?|Pallas(?: V1)?|FlexAttention) backend(?: on V[01] engine)?\.?$",
        until=(0, 12, 0),
    ),
    _wording(
        "attention_backend",
        r"Using AttentionBackendEnum\.(\w{1,40}) backend",
        (0, 12, 0),
        (0, 14, 0),
    ),
    _wording(
        "attention_backend",
        r"Using (\w{1,40}) attention backend out of potential backends",
        (0, 13, 0),
    ),
)
"""One row for each wording. Checked against logs and sources of vLLM 0.6 to 0.29 that users
published, and against logs of 0.32 on a CPU; where a version is not known to the patch, the row
starts early and ends late."""

_LIST = re.compile(r"non-default args: \{|args: Namespace\(|Initializing an? (?:V[01] )?LLM engine")
_START = re.compile(
    r"vLLM API server version|[\s▀▄█]*\bversion v?\d+\.\d+|non-default args: \{|args: Namespace\("
)
_COMPLETE_LIST = re.compile(r"non-default args: \{")
_PAIR = re.compile(
    r"(?:'(?P<key>\w{1,60})': |(?<![\w.])(?P<name>\w{1,60})=)"
    rf"(?:'(?P<text>{_TEXT})'|\['(?P<listed>{_TEXT})'\]|(?P<bare>[\w.+-]{{1,60}})(?=[,)}}\s]|$))"
)
_OPENING, _CLOSING = "{[(<", "}])>"

ARGUMENTS: Mapping[str, str] = {
    "model": "model",
    "model_tag": "model",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "max_model_len": "max_model_len",
    "max_seq_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "num_gpu_blocks_override": "num_gpu_blocks_override",
    "block_size": "block_size",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel",
    "enable_expert_parallel": "enable_expert_parallel",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "enforce_eager": "enforce_eager",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "max_cpu_loras": "max_cpu_loras",
    "kv_offloading_size": "kv_offloading_size",
}
"""Arguments that are kept, and the facts they are. All others may hold keys, names or templates."""

_TEXTS = ("model", "dtype", "quantization", "kv_cache_dtype")
"""Facts that are texts; the other arguments are numbers and booleans."""

TITLES: Mapping[str, str] = {
    "version": "vLLM",
    "model": "model",
    "weights_gib": "model weights",
    "load_s": "loading the model",
    "gpu_memory_gib": "GPU memory",
    "available_kv_gib": "available KV cache memory",
    "gpu_blocks": "KV cache blocks",
    "kv_cache_tokens": "KV cache size in tokens",
    "concurrency_tokens": "request length of the maximum concurrency",
    "max_concurrency": "maximum concurrency",
    "graph_s": "capturing CUDA graphs",
    "graph_gib": "memory of CUDA graphs",
    "attention_backend": "attention backend",
}
"""How facts that no argument sets are called in text."""

_FLAGS = {fact: "--" + key.replace("_", "-") for key, fact in reversed(list(ARGUMENTS.items()))}


def title(fact: str) -> str:
    """What a fact is called in text: an argument by its flag."""
    return TITLES.get(fact) or _FLAGS[fact]


# --- Failures -------------------------------------------------------------------------------------

KV_NONE, KV_SMALL, FREE_MEMORY, GPU_MEMORY, HOST_MEMORY = (
    "no_kv_memory", "kv_below_one_request", "gpu_memory_in_use", "gpu_out_of_memory",
    "host_out_of_memory",
)  # fmt: skip
MODEL_LEN, FLAG, QUANTIZATION, NCCL, PORT, HOST_MEMORY_IN_USE, MODEL_PATH, OTHER = (
    "max_model_len_above_model", "invalid_argument", "quantization_unsupported", "nccl_error",
    "port_in_use", "host_memory_in_use", "model_not_found", "error",
)  # fmt: skip


@dataclass(frozen=True)
class FailureWording:
    """How a failure is logged; the groups of `regex` are its numbers and words, by name."""

    kind: str
    regex: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The compiled `regex`."""
        return re.compile(self.regex)


FAILURES: tuple[FailureWording, ...] = (
    FailureWording(KV_NONE, r"(?:ValueError: )?No available memory for the cache blocks\."),
    FailureWording(
        KV_SMALL,
        r"(?:ValueError: )?To serve at least one request with the models?'s max seq len "
        r"\((?P<max_model_len>\d{1,12})\), \(?(?P<needed_gib>[\d.]{1,12}) GiB KV cache is needed, "
        r"which is larger than the available KV cache memory \((?P<available_gib>-?[\d.]{1,12}) GiB"
        r"\)(?:.{0,60}estimated maximum model length is (?P<longest_tokens>\d{1,12}))?",
    ),
    FailureWording(
        KV_SMALL,
        r"(?:ValueError: )?The model's max seq len \((?P<max_model_len>\d{1,12})\) is larger than "
        r"the maximum number of tokens that can be stored in KV cache "
        r"\((?P<longest_tokens>\d{1,12})\)",
    ),
    FailureWording(
        FREE_MEMORY,
        r"(?:ValueError: )?Free memory on device .{0,20}\((?P<free_gib>[\d.]{1,12})/"
        r"(?P<gpu_memory_gib>[\d.]{1,12}) GiB\) on startup is less than desired GPU memory "
        r"utilization \((?P<gpu_memory_utilization>[\d.]{1,12}), ",
    ),
    FailureWording(
        HOST_MEMORY_IN_USE,
        r"(?:ValueError: )?Available memory on node \d{1,4} \([\d./]{1,30} GiB\) on (?:startup is "
        r"less than desired CPU memory utilization|kv cache allocation is less than requested "
        r"memory for kv)",
    ),
    FailureWording(
        MODEL_PATH,
        r"(?:[\w.]{0,60}(?:HFValidationError|RepositoryNotFoundError): |OSError: .{1,300} is not a "
        r"local folder and is not a valid model identifier"
        r"|OSError: We couldn't connect to '.{1,100}' to load the files)",
    ),
    FailureWording(
        GPU_MEMORY,
        r"(?:[\w.]{0,40}OutOfMemoryError|RuntimeError): (?:CUDA|HIP|XPU)(?: error:)? out of memory"
        r"(?: occurred when warming up sampler with (?P<max_num_seqs>\d{1,9}) dummy requests)?"
        r"(?:.{0,120}? total capac\w{1,4} of (?P<gpu_memory_gib>[\d.]{1,12}) GiB of which "
        r"[\d.]{1,12} (?:[GMK]iB|bytes) is free\.(?P<holders>(?: [^.]{4,60} has "
        r"[\d.]{1,12} [GMK]iB memory in use\.){0,16})"
        r"(?: Of the allocated memory (?P<torch>[\d.]{1,12} [GMK]iB))?)?",
    ),
    FailureWording(
        MODEL_LEN,
        r"(?:ValueError: |Value error, )?User-specified max_model_len "
        r"\((?P<max_model_len>\d{1,12})\) is greater than the derived max_model_len "
        r"\([\w.]{1,60}=(?P<longest_tokens>\d{1,12})",
    ),
    FailureWording(
        QUANTIZATION,
        r"(?:ValueError|RuntimeError|AssertionError): (?:The quantization method "
        r"(?P<quantization>[\w-]{1,40}) is not supported for the current GPU|\(?'?Quantization "
        r"scheme is not supported for)",
    ),
    FailureWording(
        QUANTIZATION,
        r"(?:ValueError: |Value error, )Unknown quantization method: (?P<quantization>[\w-]{1,40})",
    ),
    FailureWording(NCCL, r"(?:[\w.]{0,60}DistBackendError|RuntimeError): NCCL error"),
    FailureWording(
        PORT,
        r"(?:OSError|ERROR): +\[Errno (?:98|48)\] (?:[Aa]ddress already in use"
        r"|error while attempting to bind on address \('[^']{0,60}', (?P<port>\d{1,5})\))",
    ),
    FailureWording(
        FLAG,
        r"(?:vllm(?: \w{1,12})?|(?:\w{1,20}\.)?api_server\.py|__main__\.py): error: "
        r"(?:unrecognized arguments: |argument |ambiguous option: )",
    ),
    FailureWording(
        HOST_MEMORY,
        r"(?:Out of memory: )?Killed(?: process \d{1,10}.{0,80})?$"
        r"|.{0,80}(?:OOMKilled|exited with code 137|[Ee]xit [Cc]ode:? 137|killed by the OOM killer"
        r"|code=killed, status=9/KILL)",
    ),
)

_NOT_STARTED = re.compile(
    r"EngineCore (?:failed to start|hit an exception)|(?:RuntimeError: )?Engine core initialization"
    r" failed|(?:RuntimeError: )?Engine process failed to start"
)
_DEAD = re.compile(
    r"EngineCore encountered a fatal error|(?:[\w.]{0,60}\.)?(?:Async|MQ)?EngineDeadError\b"
    r"|Engine core proc \S{1,40} died|Worker proc \S{1,40} died|Engine background task failed"
)
_EXCEPTION = re.compile(
    r"(?P<type>(?:\w{1,60}\.){0,6}[A-Z]\w{0,60}(?:Error|Exception))(?:: |$)|Value error, "
)
_NO_ROOT = re.compile(
    r"(?:\w+\.){0,6}(?:(?:Async|MQ)?EngineDeadError|CancelledError)|[\w.]{0,60}\bValidationError: "
)
"""Exceptions that say that there was one: what counts is another line."""

_UNCAUGHT = re.compile(r"Traceback \(most recent call last\):")
_PYDANTIC_INPUT = " [type="
"""What follows is the whole configuration, in a validation error of pydantic."""

_READY = re.compile(r"(?:INFO: +)?Application startup complete\.?$")
_STATISTICS = re.compile(r"(?:Engine \d+: )?Avg prompt throughput: ")
_REQUEST = re.compile(r'(?:INFO: +)?[\w.:\[\]]{1,60} - "[A-Z]{3,7} /\S{0,200} HTTP/')
_STOPPED = re.compile(r"(?:INFO: +)?(?:Shutting down|Application shutdown complete\.?)$")
_SERVING_WORDS = (
    b"rror|xception|died|failed|out of memory|Kill|KILL|OOM|137|version|args: |LLM engine"
    b"|Avg prompt|Shutting down|shutdown"
)
_WHILE_SERVING = re.compile(_SERVING_WORDS)
_WHILE_STARTING = re.compile(
    _SERVING_WORDS + b"|model len|took |GiB|blocks|KV|concurrency|backend|Graph|memory|seq len"
    b"|max_model_len|uantization|NCCL|Errno|local folder|couldn't|Engine|startup complete|HTTP/"
    b"|Traceback"
)
"""One of the words is in every line that counts, while the server serves or before. Other lines,
nearly all of requests, must not cost time."""

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|'[^']*$|\"[^\"]*$")
_ANY_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]{0,60}")


@dataclass(frozen=True, slots=True)
class LogFact:
    """A fact about the server, and the line it came from."""

    value: Value
    line: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the server did not start, or `served`, why it died.

    `line` proves it; `details` has its numbers and words by name. `kind` is "error" where the
    line is none that is known.
    """

    kind: str
    line: str
    served: bool
    details: Mapping[str, Value] = field(default_factory=dict[str, Value])


_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ([GMK])iB")
_GIB_EACH = {"G": 1.0, "M": 1 / 1024, "K": 1 / 1024**2}
_THIS_PROCESS = "this process has"
_TORCH_RATIO = 0.75
"""The least share of a process's GPU memory that PyTorch allocated: the rest is CUDA's context,
graphs and NCCL. A process of which it allocated that much is the one that wrote the line."""


def others_gpu_gib(failure: Failure) -> float | None:
    """GiB of the GPU that other processes hold, by PyTorch's line about exhausted GPU memory; None
    where the line does not say. In a container it names its own process by the node's id."""
    holders = str(failure.details.get("holders", ""))
    rows = re.findall(r"([^.]+ has )([\d.]+ [GMK]iB) memory in use\.", holders)
    others = [_gib(size) for who, size in rows if _THIS_PROCESS not in who]
    if len(others) < len(rows):
        return sum(others)
    allocated = failure.details.get("torch")
    own = _gib(str(allocated)) if allocated is not None else 0.0
    if not own or not others:
        return None
    mine = min(others, key=lambda size: abs(size - own))
    return sum(others) - mine if _TORCH_RATIO * mine <= own <= mine else None


def _gib(text: str) -> float:
    match = _SIZE.fullmatch(text)
    return 0.0 if match is None else float(match[1]) * _GIB_EACH[match[2]]


class StartupLog:
    """Reads a log piece by piece. A new start in it forgets the one before.

    Memory is bounded: an unfinished line of at most `LONGEST_LINE` bytes, and one line a fact.
    """

    def __init__(self) -> None:
        self._rest, self._cut = b"", False
        self.starts = 0
        """How many starts of a server were read, and one more."""
        self._begin()

    def _begin(self) -> None:
        self.starts += 1
        self.facts: dict[str, LogFact] = {}
        self.failure: Failure | None = None
        self.phase: Phase = "empty"
        self._complete = False
        self._uncaught = False
        """Whether a traceback was written without vLLM's logger: its process ends."""
        self._suspect: Failure | None = None
        """The first error since the server was last seen to work; one of a known kind replaces one
        that is not."""

    def restart(self, *, mid_line: bool = False) -> None:
        """Drop an unfinished line: the file was rotated or truncated. `mid_line`: what follows
        begins inside a line, which is not read."""
        self._rest, self._cut = b"", mid_line

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the log, split anywhere."""
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
        """Read the last line, which has no line end."""
        self.feed(b"\n")

    @property
    def launch(self) -> Launch | None:
        """The logged arguments as a command line; None where the log has none."""
        flags = {
            _FLAGS[fact]: str(logged.value)
            for fact, logged in self.facts.items()
            if fact in _FLAGS and fact != "model"
        }
        model = self.facts.get("model")
        if model is None:
            return None
        for flag, value in list(flags.items()):
            if value in ("True", "False"):
                del flags[flag]
                flags["--no-" + flag[2:] if value == "False" else flag] = ""
        return Launch(str(model.value), flags, self._complete)

    def number(self, fact: str) -> float | None:
        """A fact that is a number; None where the log has none."""
        logged = self.facts.get(fact)
        value = None if logged is None else logged.value
        return float(value) if isinstance(value, int | float) else None

    @property
    def version(self) -> Version | None:
        """The logged version; None where it is not logged."""
        logged = self.facts.get("version")
        # The pattern lets nothing else through.
        return None if logged is None else parse_version(str(logged.value))

    @property
    def not_logged(self) -> list[str]:
        """Facts that this version logs when it starts, and this log lacks."""
        version = self.version
        if version is None:
            return []
        return list(
            dict.fromkeys(
                fact
                for wording in WORDINGS
                if wording.since <= version and (wording.until is None or version < wording.until)
                for fact in wording.facts
                if fact not in self.facts
            )
        )

    # --- lines ------------------------------------------------------------------------------------

    def _line(self, raw: bytes) -> None:
        words = _WHILE_SERVING if self.phase == "serving" else _WHILE_STARTING
        if not words.search(raw):
            return
        text = _ANSI.sub("", raw[:LONGEST_LINE].decode("utf-8", "replace"))
        for module, message in _messages(text.strip()):
            if message:
                self._message(module, message)

    def _message(self, module: str, message: str) -> None:
        if _MESSAGES_OF_REQUESTS.fullmatch(module):
            return
        if self.phase == "serving":
            self._serving(module, message)
        else:
            self._starting(module, message)

    def _serving(self, module: str, message: str) -> None:
        if _starts(module, message):
            self._begin()
            self._starting(module, message)
        elif _STATISTICS.match(message):
            # The engine works.
            self.failure = self._suspect = None
        elif _STOPPED.match(message) and self.failure is None:
            self.phase = "stopped"
        elif module.rpartition("/")[2] in _ENGINE_MODULES:
            self._error(message)
            if self.failure or _DEAD.match(message):
                self._fail(_shown(message))
        elif not module and (failure := _known_failure(message)) and failure.kind == HOST_MEMORY:
            self._suspect = Failure(failure.kind, failure.line, served=True)
            self._fail(failure.line)

    def _starting(self, module: str, message: str) -> None:
        if _starts(module, message) and (self.failure or self.phase == "stopped" or self._loaded):
            self._begin()
        if _READY.match(message) or _STATISTICS.match(message) or _REQUEST.match(message):
            self.failure = self._suspect = None
            self.phase = "serving"
        elif self.phase != "stopped":
            if self._facts_of(message):
                self.phase = "starting"
                # The start goes on, so that what failed was no process of the server.
                self._uncaught = False
                if self.failure is not None and self.failure.kind == OTHER:
                    self.failure = self._suspect = None
            self._uncaught = self._uncaught or (not module and bool(_UNCAUGHT.match(message)))
            self._error(message)
            root_logged = self._suspect is not None and self._suspect.kind != OTHER
            ended = self._uncaught and _EXCEPTION.match(message)
            if (
                root_logged or ended or self.failure
                or _NOT_STARTED.match(message) or _DEAD.match(message)
            ):  # fmt: skip
                self._fail(_without_quotes(message))

    @property
    def _loaded(self) -> bool:
        return "weights_gib" in self.facts or "kv_cache_tokens" in self.facts

    def _error(self, message: str) -> None:
        """Remember the first error, a known one before any other."""
        if self._suspect is not None and self._suspect.kind != OTHER:
            return
        served = self.phase == "serving"
        failure = _known_failure(message)
        if failure is not None:
            self._suspect = Failure(failure.kind, failure.line, served, failure.details)
        elif self._suspect is None and _EXCEPTION.match(message) and not _NO_ROOT.match(message):
            self._suspect = Failure(OTHER, _without_quotes(message), served)

    def _fail(self, line: str) -> None:
        """The server did not start or died: by the suspect, else by `line` itself."""
        if self.failure is None or self.failure.kind == OTHER:
            served = self.phase == "serving"
            self.failure = self._suspect or self.failure or Failure(OTHER, line, served)

    def _facts_of(self, message: str) -> bool:
        before = len(self.facts)
        for wording in WORDINGS:
            match = wording.pattern.match(message)
            if match is None:
                continue
            for fact, text in zip(wording.facts, match.groups(), strict=True):
                value = _value(text.replace(",", "")) if _is_number(text) else text.strip()
                if fact == "version":
                    value = text
                self._add(fact, value, _shown(message), wording.ranks)
        if opened := _LIST.match(message):
            self._complete = self._complete or bool(_COMPLETE_LIST.match(message))
            for fact, value in _arguments(message[opened.end() - 1 :]):
                self._add(fact, value, f"{opened[0]}... {fact}={value}", "last")
        return len(self.facts) > before

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
    """The (module, message) pairs of a line; a JSON record may hold several lines."""
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
    header = _HEADER.search(line[:400])
    if header is not None:
        yield header["file"], line[header.end() :].rstrip()
        return
    while prefix := _PREFIX.match(line):
        line = line[prefix.end() :]
    yield "", line.strip()


def _starts(module: str, message: str) -> bool:
    """Whether the line is among the first that a server logs; requests cannot cause it."""
    return bool(module) and _START.match(message) is not None


def _known_failure(message: str) -> Failure | None:
    for wording in FAILURES:
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


def _arguments(text: str) -> Iterator[tuple[str, Value]]:
    """The kept arguments of a printed dictionary, namespace or configuration; nothing is
    evaluated, and what is nested is passed over."""
    at, seen = 0, set[str]()
    base = 1 if text[:1] in _OPENING else 0
    depth = 0
    while at < len(text):
        match = _PAIR.match(text, at) if depth <= base else None
        if match is not None:
            fact = ARGUMENTS.get(match["key"] or match["name"])
            value = _constant(match["bare"] or match["text"] or match["listed"] or "")
            if isinstance(value, str) and fact not in _TEXTS:
                value = None
            if fact is not None and value is not None and fact not in seen:
                seen.add(fact)
                yield fact, value
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
    """An exception's line without the texts that it quotes: they may be a prompt's."""
    return _shown(_QUOTED.sub("'...'", message.partition(_PYDANTIC_INPUT)[0]))


def _shown(line: str) -> str:
    """A line without control characters, cut."""
    plain = "".join(char if char.isprintable() else " " for char in line[: 2 * SHOWN_CHARACTERS])
    return plain if len(plain) <= SHOWN_CHARACTERS else plain[: SHOWN_CHARACTERS - 3] + "..."
