"""Labelled hard cases: one fault or two, at several scales, on several versions' pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from random import Random

from msgspec import Struct

from kneewatch.collector.captures.format import Entry
from tests.simulator.faults import FAULTS, Fault
from tests.simulator.gpus import Hardware, chunk_tokens, hardware
from tests.simulator.page import NEWEST, WITH_SPECULATION
from tests.simulator.scheduler import Launch
from tests.simulator.server import SCRAPE_S, Begin, Server, Setting

BEGINS_S, LASTS_S = 300.0, 360.0
SETTLE_S = 150.0
"""A fault is judged from then on: two windows and a half."""

MACHINES: dict[str, tuple[str, str, int]] = {
    "8B on H100": ("meta-llama/Llama-3.1-8B-Instruct", "h100-sxm", 1),
    "70B on 4 H100": ("meta-llama/Llama-3.3-70B-Instruct", "h100-sxm", 4),
    "32B on H200": ("Qwen/Qwen3-32B", "h200", 1),
    "70B FP8 on B200": ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "b200", 1),
    "235B MoE on 4 B200": ("Qwen/Qwen3-235B-A22B-FP8", "b200", 4),
}
FULLER = ("32B on H200",)
"""Machines whose exporter has the fields that tell why a clock is held down."""

VERSIONS = ("0.10.0-rendered", "0.14.0-rendered", "0.20.2-rendered", "0.28.0-loaded")
PAIRS = (
    ("spec_decode_poor", "kv_pressure"),
    ("prefix_reuse_lost", "kv_pressure"),
    ("spec_decode_poor", "admission_limit"),
    ("prefix_cache_off", "spec_decode_poor"),
    ("prefix_churn", "spec_decode_poor"),
    ("prefix_reuse_lost", "adapter_thrash"),
    ("adapter_thrash", "spec_decode_poor"),
    ("gpu_throttled", "spec_decode_poor"),
    ("gpu_throttled", "kv_pressure"),
    ("runaway_generation", "spec_decode_poor"),
)
"""Causes of different mechanisms, each of which shows while the other holds."""

REASONS = "num_requests_waiting_by_reason"
Strip = Callable[[str], str]


class Case(Struct, frozen=True, kw_only=True):
    """A case. `strip` takes metrics off its pages, `gpu_page` says whether the GPUs' is there.

    `wanted` are the causes that must be told; `accepted` are causes that may come first as well, a
    dash among them where nothing at warning is right. `trouble` is there from the server's start,
    the faults from `begins_s` on.
    """

    group: str
    name: str
    faults: tuple[Fault, ...]
    machine: str
    form: str = NEWEST
    strip: Strip | None = None
    gpu_page: bool = True
    wanted: frozenset[str]
    accepted: frozenset[str] = frozenset()
    trouble: Fault | None = None
    begins_s: float = BEGINS_S
    scrape_s: float = SCRAPE_S

    @property
    def ends_s(self) -> float:
        """When the last scrape is, in seconds from the server's start."""
        return self.begins_s + LASTS_S

    @property
    def judged_from_s(self) -> float:
        """From when on it must be told right, in seconds from the server's start."""
        return self.begins_s + SETTLE_S

    @property
    def also(self) -> frozenset[str]:
        """Causes that are as true: what follows, and what is planted and need not be told."""
        planted = self.faults if self.trouble is None else (self.trouble, *self.faults)
        return frozenset(each.cause for each in planted).union(*(each.also for each in planted))

    def healthy_setting(self) -> Setting:
        """What a server without faults is started with."""
        device = hardware_of(self.machine)
        return Setting(
            hardware=device,
            launch=Launch(
                num_gpu_blocks=device.blocks(), max_num_batched_tokens=chunk_tokens(device)
            ),
            form=self.form,
            fuller_gpu_page=self.machine in FULLER,
        )

    def setting(self) -> Setting:
        """What the server is started with."""
        case_setting = self.healthy_setting()
        for fault in self.faults if self.trouble is None else (self.trouble, *self.faults):
            fault.start(case_setting)
        if case_setting.launch.num_speculative_tokens:
            case_setting.form = WITH_SPECULATION
        return case_setting

    def server(self, seed: int) -> Server:
        """The server, not yet started."""
        return Server(self.setting(), Random(f"{seed} {self.machine} {self.name}"))

    def events(self) -> dict[float, Begin]:
        """What is done to the server, and when, in seconds from its start."""
        at: dict[float, Begin] = {self.begins_s: self._begin}
        if self.trouble is not None:
            at[0.0] = self.trouble.begin
        return at

    def _begin(self, server: Server) -> None:
        for fault in self.faults:
            fault.begin(server)

    def stripped(self, entry: Entry) -> Entry:
        """The entry as kneewatch gets to see it."""
        if self.strip is None or entry.body is None:
            return entry
        return Entry(entry.t_s, self.strip(entry.body), status=entry.status)


@cache
def hardware_of(machine: str) -> Hardware:
    """The model and the GPUs of a machine."""
    return hardware(*MACHINES[machine])


def fault(cause: str) -> Fault:
    """The first fault with that cause."""
    return next(candidate for candidate in FAULTS if candidate.cause == cause)


def lacking(*families: str) -> Strip:
    """Takes families off a page, with their HELP and TYPE."""
    names = "|".join(families)
    pattern = re.compile(rf"(?m)^(?:# \w+ )?vllm:(?:{names})(?:_\w+)?(?:{{.*}})? .*\n")
    return partial(pattern.sub, "")


def _one(
    group: str,
    fault: Fault,
    machine: str,
    *,
    name: str = "",
    form: str = NEWEST,
    strip: Strip | None = None,
    gpu_page: bool = True,
    wanted: frozenset[str] | None = None,
    accepted: frozenset[str] = frozenset(),
) -> Case:
    return Case(
        group=group,
        accepted=accepted,
        name=name or fault.name,
        faults=(fault,),
        machine=machine,
        form=form,
        strip=strip,
        gpu_page=gpu_page,
        wanted=frozenset({fault.cause}) if wanted is None else wanted,
    )


def cases() -> Iterator[Case]:
    """Every case, in the order of the tables."""
    for machine in MACHINES:
        for planted_fault in FAULTS:
            yield _one("one fault", planted_fault, machine)
    for first, second in PAIRS:
        for machine in ("8B on H100", "70B FP8 on B200"):
            both = fault(first), fault(second)
            yield Case(
                group="two faults",
                name=f"{both[0].name}; {both[1].name}",
                faults=both,
                machine=machine,
                wanted=frozenset({first, second}),
            )
    for form in VERSIONS:
        for cause in VERSION_CAUSES:
            yield _one("other versions", fault(cause), "32B on H200", form=form,
                       name=f"vLLM {form.split('-')[0]}: {fault(cause).name}")  # fmt: skip
    yield from _lacking()


VERSION_CAUSES = (
    "kv_pressure",
    "queue_saturation",
    "admission_limit",
    "prefix_reuse_lost",
    "prefix_churn",
    "prefill_interference",
)


def _lacking() -> Iterator[Case]:
    """Cases whose pages lack something: what is left must do, or the gap must be said."""
    missing = frozenset({"metrics_missing"})
    for cause, families, wanted in (
        ("kv_pressure", (REASONS,), frozenset({"kv_pressure"})),
        ("kv_pressure", ("num_preemptions",), missing),
        ("kv_pressure", ("kv_cache_usage_perc",), missing),
        ("queue_saturation", (REASONS,), frozenset({"queue_saturation"})),
        ("queue_saturation", ("num_requests_waiting",), missing),
        ("prefix_reuse_lost", ("prompt_tokens_by_source",), frozenset({"prefix_reuse_lost"})),
        ("prefix_churn", ("request_prefill_kv_computed_tokens",), frozenset({"prefix_churn"})),
        ("prefill_interference", ("time_to_first_token_seconds",), missing),
    ):
        yield _one("missing metrics", fault(cause), "8B on H100", wanted=wanted,
                   strip=lacking(*families), name=f"{cause} without {families[0]}")  # fmt: skip
    for cause, unseen in (
        ("gpu_throttled", frozenset({"slow_steps", "unexplained_latency"})),
        ("kv_pressure", frozenset[str]()),
    ):
        # Without the GPUs' page nobody can tell a slow GPU; that steps are slow is seen.
        seen = frozenset[str]() if unseen else None
        yield _one("missing metrics", fault(cause), "8B on H100", wanted=seen, accepted=unseen,
                   gpu_page=False, name=f"{cause} without a GPU page")  # fmt: skip
