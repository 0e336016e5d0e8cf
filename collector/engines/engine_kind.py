"""The kinds of engines: what is in each engine's folder, and which of them a page comes from. Pure.

Signals, rules and causes refer to metrics by one canonical name each. An engine's table says which
of its own metrics is which canonical one. vLLM's table, with all its versions, is
vllm/metrics.toml.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables, read_as

FOLDERS = "collector.engines"
Texts = dict[str, str]


class Source(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """One of an engine's metrics, and the canonical metric that it is.

    - `name`: the sample's name without the engine's prefix; of a counter without `_total`, of a
      histogram without the suffixes of its parts.
    - `is_`: the canonical metric; the same name if empty.
    - `where`: labels that a series must have, as anchored regular expressions; "" also selects
      series without the label.
    - `labels`: labels of the canonical series. `renamed`: canonical labels by the engine's own.
    - `over`: the value is divided by this gauge's. `scale`: it is multiplied by this number.
      `less`: so much is then subtracted from a gauge, down to 0.
    - `age`: of several sources of a metric, those with the lowest age on the page are used.
      `without`: used only on pages that lack this sample, `beside`: only on those that have it.
    - `fold`: how several series of one canonical series become one value.
    """

    name: str
    is_: str = field(default="", name="is")
    where: Texts = field(default_factory=dict[str, str])
    labels: Texts = field(default_factory=dict[str, str])
    renamed: Texts = field(default_factory=dict[str, str])
    over: str = ""
    scale: float = 1.0
    less: float = 0.0
    age: int = 0
    without: str = ""
    beside: str = ""
    fold: Literal["sum", "max"] = "sum"

    @property
    def metric(self) -> str:
        return self.is_ or self.name

    def is_for(self, names: Collection[str], prefix: str) -> bool:
        """Whether it is used on a page with these names."""
        lacks = not self.without or prefix + self.without not in names
        return lacks and (not self.beside or prefix + self.beside in names)

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a series has the labels of `where`."""
        return all(re.fullmatch(text, labels.get(name, "")) for name, text in self.where.items())


class OwnMetric(Struct, frozen=True, forbid_unknown_fields=True):
    """A canonical metric that vLLM does not have. `labels`: those of an engine that it keeps."""

    kind: Literal["gauge", "counter"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()


class EngineKind(Struct, frozen=True, dict=True, forbid_unknown_fields=True, eq=False):
    """An engine's folder.

    - `title`: its name in texts. `prefixes`: of its metric names.
    - `signs`: names without prefix; a page with one of them is this engine's. With `beside`, a page
      of another engine is served by this program if a name on it begins with that; its signs, after
      that beginning, are read from a metrics system.
    - `same`: metrics with the canonical name. `sources`: all others. `quantities`: canonical
      metrics that only such engines have.
    - `bounds`: bucket bounds of a canonical histogram from which signals count in PromQL, where it
      lacks vLLM's.
    - `of_page`: canonical metrics that a page has once for all its engines.
    - `engine_label`: the label that numbers the engines of a page. `ranks`: labels of processes
      that repeat the same values; the lowest is used. `own_labels`: labels to leave out.
    - `zeros`: canonical counters that the page shows only once they are not 0, if it has the
      metric `zeros_with`.
    - `live_tokens`: whether the counter of generated tokens moves before a request ends.
    - `expected`: canonical metrics without which a page is incomplete; None: all core metrics.
    - `switch_on`: what to do if expected metrics are missing.
    - `flags`: its flag for each of vLLM's; `values`: its word for values of vLLM's; `levers`: what
      to do first about a cause; `words`: what its texts say instead.
    - `images`: parts of the names of its container images. `path`: where its page is; empty at
      /metrics.
    - `launchers`: words of a command line that starts it; `memory`: how large its KV cache is, and
      where a running server shows it. `slack`: the rule by which it is sized
      (`SlackRule` of launch.py).
    - `unjudged`: what cannot be judged from its page, and why.
    - `log_signs`: parts of lines that only its log has. `log_failures`: the kind of failure, as in
      vLLM's startup_failures.toml, and the beginning of its line as a regular expression.
    """

    title: str
    prefixes: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    beside: str = ""
    same: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    quantities: dict[str, OwnMetric] = field(default_factory=dict[str, OwnMetric])
    bounds: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    of_page: frozenset[str] = frozenset()
    engine_label: str = ""
    ranks: tuple[str, ...] = ()
    own_labels: tuple[str, ...] = ()
    zeros: frozenset[str] = frozenset()
    zeros_with: str = ""
    live_tokens: bool = True
    expected: frozenset[str] | None = None
    switch_on: str = ""
    flags: Texts = field(default_factory=dict[str, str])
    values: Texts = field(default_factory=dict[str, str])
    levers: Texts = field(default_factory=dict[str, str])
    words: Texts = field(default_factory=dict[str, str])
    images: tuple[str, ...] = ()
    path: str = ""
    launchers: tuple[str, ...] = ()
    memory: str = ""
    slack: dict[str, Any] = field(default_factory=dict[str, Any])
    unjudged: Texts = field(default_factory=dict[str, str])
    log_signs: tuple[str, ...] = ()
    log_failures: Texts = field(default_factory=dict[str, str])

    @cached_property
    def all_sources(self) -> tuple[Source, ...]:
        """`sources`, and one for each metric of `same`."""
        return (*self.sources, *(Source(name) for name in self.same))

    @cached_property
    def shows(self) -> frozenset[str]:
        """Canonical metrics that its page can show."""
        return frozenset(source.metric for source in self.all_sources)

    def served_by(self, program: EngineKind) -> EngineKind:
        """This kind, on pages of a program that passes on a part of its metrics."""
        title = f"{self.title} ({program.title})"
        return replace(self, title=title, expected=program.expected)

    def expects(self, metrics: Collection[str]) -> bool:
        """Whether a page without any of these metrics is incomplete."""
        return self.expected is None or not self.expected.isdisjoint(metrics)

    def lacks(self, metrics: Collection[str]) -> str:
        """Why a signal of these canonical metrics has no value."""
        own = [each.name for each in self.all_sources if each.metric in metrics]
        if not own:
            return f"not reported by {self.title}"
        return f"{self.prefixes[0]}{own[0]} is not on the page"

    def prefix_of(self, names: Collection[str]) -> str | None:
        """The prefix of its metrics among these names; None if it is not this engine's page."""
        return next(
            (each for each in self.prefixes if any(each + sign in names for sign in self.signs)),
            None,
        )

    def canonical(self, labels: Mapping[str, str]) -> Texts:
        """The labels that a series has as a canonical one."""
        own = {*self.own_labels, *self.ranks, self.engine_label}
        kept = {name: value for name, value in labels.items() if name not in own}
        if self.engine_label in labels:
            kept["engine"] = labels[self.engine_label]
        return kept

    @cached_property
    def _spoken(self) -> re.Pattern[str]:
        words = sorted((*self.words, *self.flags), key=len, reverse=True)
        return re.compile("|".join(f"{re.escape(word)}(?![-_a-z])" for word in words) or r"(?!)")

    def said(self, text: str) -> str:
        return self._spoken.sub(
            lambda match: self.words.get(match[0]) or self.flags[match[0]], text
        )


VLLM = EngineKind("vLLM", images=("vllm",))

# The levers, by vLLM's flags; `flags` of an engine's folder has its own for each.
ADAPTERS, ADAPTER_SLOTS = "--enable-lora", "--max-loras"
API_SERVERS = "--api-server-count"
BLOCK_SIZE = "--block-size"
CONTEXT_SPLIT = "--decode-context-parallel-size"
KV_DTYPE, WEIGHTS_FORMAT = "--kv-cache-dtype", "--quantization"
LONGEST_TOKENS = "--max-model-len"
MEMORY_SHARE, OFFLOAD_GIB = "--gpu-memory-utilization", "--kv-offloading-size"
MFU_METRICS = "--enable-mfu-metrics"
NO_GRAPHS = "--enforce-eager"
NO_PREFIX_CACHE = "--no-enable-prefix-caching"
NO_CHUNKS = "--no-enable-chunked-prefill"
QUEUE_LIMIT = "--max-num-queued-reqs"
SEATS, STEP_TOKENS = "--max-num-seqs", "--max-num-batched-tokens"
SPECULATION = "--speculative-config"
STAGE_SPLIT = "--pipeline-parallel-size"
TENSOR_SPLIT = "--tensor-parallel-size"

PROGRAM = "kneewatch_program"
"""Label in the results of queries: the title of an engine that is not vLLM."""


@cache
def engine_kinds() -> tuple[EngineKind, ...]:
    """All engines with a folder, by its name; read on first use."""
    folders = sorted(
        entry.name
        for entry in files(f"kneewatch.{FOLDERS}").iterdir()
        if entry.joinpath("engine.toml").is_file()
    )
    tables = (packaged_tables(FOLDERS, f"{folder}/engine.toml") for folder in folders)
    return tuple(read_as(each, EngineKind) for each in tables)


@cache
def other_quantities() -> frozenset[str]:
    """The metrics that only engines other than vLLM have."""
    return frozenset(name for kind in engine_kinds() for name in kind.quantities)


@cache
def sized_kinds() -> tuple[EngineKind, ...]:
    return (VLLM, *(kind for kind in engine_kinds() if kind.slack))


def kind_named(title: str | None) -> EngineKind:
    """The engines with this title, which may be followed by the program that serves their page."""
    return next((kind for kind in engine_kinds() if (title or "").startswith(kind.title)), VLLM)


@cache
def kind_of(prefix: str) -> EngineKind:
    """The engines whose metric names begin with this prefix."""
    return next((kind for kind in engine_kinds() if prefix in kind.prefixes), VLLM)


def canonical_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """The canonical labels of a sample that a query returned."""
    kind = kind_named(labels.get(PROGRAM))
    return labels if kind is VLLM else kind.canonical(labels)
