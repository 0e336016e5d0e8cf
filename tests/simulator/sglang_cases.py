"""Faults and quiet loads of SGLang, and their recorded pages.

`python -m tests.lab.sglang` records them with SGLang's own collector classes. A page is stored as
the values that differ from the page before.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from kneewatch.agent.captures import PageReader
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.collector.gpu.page import GpuPage
from kneewatch.collector.names.dcgm_fields import resolve_gpus
from tests.hard_judging import Books, Incident
from tests.simulator.cases import Case, fault
from tests.simulator.faults import QUIET, Fault
from tests.simulator.server import Setting
from tests.simulator.sglang_incidents import incidents

STORED = Path(__file__).parents[1] / "fixtures" / "sglang-0.5.23.jsonl.xz"
CAUSES = (
    "kv_pressure",
    "queue_saturation",
    "admission_limit",
    "spec_decode_poor",
    "prefix_reuse_lost",
    "prefix_churn",
    "prefill_interference",
    "engine_stalled",
    "decode_bound",
    "prefill_bound",
    "gpu_throttled",
    "target_down",
)
"""Causes that an SGLang page shows."""

MACHINES = ("8B on H100", "32B on H200", "70B FP8 on B200")


def _few_summaries(setting: Setting) -> None:
    setting.load_ratio = 0.2
    QUIET["summaries"](setting)


SHAPES = {
    "chat": QUIET["chat"],
    "documents": QUIET["documents"],
    "few summaries": _few_summaries,
    "few long answers": QUIET["few long answers"],
}
"""Loads that SGLang serves without pauses: prompts come first, so vLLM's quiet summaries pause
streams."""


def sglang_cases() -> Iterator[Case]:
    """Twelve faults of a machine, four quiet loads of three, and loads whose prompts stall streams
    from the start."""
    for cause in CAUSES:
        planted = fault(cause)
        yield Case(
            group="SGLang",
            name=f"SGLang: {planted.name}",
            faults=(planted,),
            machine="8B on H100",
            wanted=frozenset({cause}),
        )
    for machine in MACHINES:
        for shape, start in SHAPES.items():
            quiet = Fault(cause="", name=shape, start=start)
            yield Case(
                group="SGLang",
                name=f"SGLang, quiet: {shape}",
                faults=(quiet,),
                machine=machine,
                wanted=frozenset(),
            )
    for machine in MACHINES[1:]:
        stalls = Fault(cause="prefill_interference", name="summaries", start=QUIET["summaries"])
        yield Case(
            group="SGLang",
            name="SGLang: prompts come first, and streams pause",
            faults=(stalls,),
            machine=machine,
            begins_s=0.0,
            wanted=frozenset({stalls.cause}),
        )
    yield from incidents()


Changes = list[tuple[int, str]]
"""Values of a page that differ from the page before, by line."""


class StoredText(Struct, omit_defaults=True):
    """A page of a text; `lines` if it has other series than the page before, or none was before.
    Without either nothing answered."""

    t_s: float
    lines: list[str] | None = None
    changes: Changes | None = None


class StoredCase(Struct):
    """A case as it went; `follows`: what was true by the engine's own books."""

    machine: str
    name: str
    follows: list[str]
    pages: list[StoredText] = field(default_factory=list[StoredText])
    gpu_pages: list[StoredText] = field(default_factory=list[StoredText])


def stored(texts: Sequence[tuple[float, str | None]]) -> list[StoredText]:
    """Pages as they are stored; of a page, what the page before does not have."""
    pages: list[StoredText] = []
    before: list[str] = []
    for t_s, text in texts:
        if text is None:
            pages.append(StoredText(t_s))
            continue
        lines = text.splitlines()
        heads = [line.rpartition(" ")[0] for line in lines]
        if heads != [line.rpartition(" ")[0] for line in before]:
            pages.append(StoredText(t_s, lines=lines))
        else:
            both = enumerate(zip(lines, before, strict=True))
            changed = [(at, line.rpartition(" ")[2]) for at, (line, old) in both if line != old]
            pages.append(StoredText(t_s, changes=changed))
        before = lines
    return pages


def restored(pages: Sequence[StoredText]) -> Iterator[tuple[float, str | None]]:
    """Stored pages as texts."""
    lines: list[str] = []
    for page in pages:
        lines = list(page.lines) if page.lines is not None else lines
        for at, value in page.changes or ():
            lines[at] = f"{lines[at].rpartition(' ')[0]} {value}"
        gone = page.lines is None and page.changes is None
        yield page.t_s, None if gone else "\n".join([*lines, ""])


def store(cases: Sequence[StoredCase]) -> None:
    """Write the recorded cases."""
    text = b"\n".join(msgspec.json.encode(case) for case in cases)
    STORED.write_bytes(lzma.compress(text, preset=9))


def recorded() -> list[StoredCase]:
    """The recorded cases."""
    lines = lzma.decompress(STORED.read_bytes()).splitlines()
    return [msgspec.json.decode(line, type=StoredCase) for line in lines]


class Follows(Books):
    """Books of a recorded case, of which only the result is stored."""

    stored: frozenset[str] = frozenset()

    @property
    def follows(self) -> frozenset[str]:
        return self.stored


def replayed(case: Case, own: StoredCase) -> Incident:
    """A recorded case as it went."""
    reader, gpu_parser = PageReader(Limits()), PageParser(Limits())
    gpu_pages: dict[float, Any] = dict(restored(own.gpu_pages))
    incident = Incident(case, books=Follows(stored=frozenset(own.follows)))
    for t_s, body in restored(own.pages):
        gpus = None
        if t_s in gpu_pages:
            page = gpu_parser.parse(gpu_pages[t_s])
            gpus = GpuPage(page, resolve_gpus(page.layout))
        entry = Entry(t_s, body, status=200) if body is not None else Entry(t_s, None, error="gone")
        incident.pages.append((t_s, gpus, reader.read(entry)))
    return incident
