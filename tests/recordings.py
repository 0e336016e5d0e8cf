"""The labelled recordings: what was true in each phase, and what must be said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from kneewatch.agent.captures import PageReader, capture_name
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.page import Page
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets

CAPTURES = Path(__file__).parent / "fixtures" / "captures"
LAB = Path(__file__).parent / "fixtures" / "lab"
"""Recordings of `python -m tests.lab.record`."""

WINDOW_S = 15.0
"""The phases last 20 to 60 s: a window of a minute would blur them."""

NO_TARGETS = Targets()

QUIET_AFTER_S = 17.0
"""A quiet phase is judged once a window and a scrape lie inside it."""

QUEUES = frozenset({"queue_saturation", "admission_limit", "past_knee"})
FIRST_CAUSES: dict[str, frozenset[str]] = {
    "preempting": frozenset({"kv_pressure"}),
    "preempting_and_queueing": frozenset({"kv_pressure"}),
    "queueing": QUEUES,
    "prefix_caching_off": frozenset({"prefix_cache_off"}),
    "prefix_hits_lost": frozenset({"prefix_reuse_lost"}),
    "prefix_churn": frozenset({"prefix_churn"}),
    "affinity_lost": frozenset({"prefix_churn", "routing_dilution"}),
    "itl_spikes": frozenset({"prefill_interference"}),
    "spec_ineffective": frozenset({"spec_decode_poor"}),
    "lora_thrash": frozenset({"adapter_thrash"}),
    "down": frozenset({"target_down"}),
    "clients_give_up": frozenset({"clients_give_up", "queue_saturation"}),
    "kv_full": frozenset({"kv_pressure"}),
    "client_errors": frozenset({"client_errors"}),
    "crashes": frozenset({"target_down", "engine_restarted"}),
    "host_contention": frozenset({"host_contention"}),
    "block_too_large": frozenset({"prefix_block_too_large"}),
    "slow_steps": frozenset({"slow_steps"}),
    "slower_launch": frozenset({"slow_steps"}),
}
STAGES: dict[str, tuple[int, int]] = {
    "preempting": (2, 4),
    "preempting_and_queueing": (3, 4),
    "queueing": (0, 1),
}
NOT_JUDGED = frozenset(
    {"prefill_bound", "draining", "warming", "filling", "long_prompts", "creeping", "never_quiet"}
)
QUIET_STAGES = (0, 1)


class Phase(Struct, frozen=True):
    """One phase of one capture. `first_causes` is empty for a quiet phase.

    `itl_mean_s`: mean seconds between tokens as the clients saw them; None if not recorded.
    """

    capture: Path
    name: str
    state: str
    from_s: float
    to_s: float
    settle_s: float
    itl_mean_s: float | None = None

    @property
    def first_causes(self) -> frozenset[str]:
        """Any of these must come first."""
        return FIRST_CAUSES.get(self.state, frozenset())

    @property
    def judged_from_s(self) -> float:
        """From when on the phase must be told right."""
        return self.from_s + (
            self.settle_s if self.first_causes else max(self.settle_s, QUIET_AFTER_S)
        )

    @property
    def stages(self) -> tuple[int, int] | None:
        """The stages that are right; None where the stage does not matter."""
        return STAGES.get(self.state) if self.first_causes else QUIET_STAGES


def phases(folder: Path = CAPTURES) -> Iterator[Phase]:
    """Every phase that is judged, in the order of the recordings."""
    for phase in every_phase(folder):
        if phase.state not in NOT_JUDGED and phase.name != "after_load":
            yield phase


def every_phase(folder: Path) -> Iterator[Phase]:
    """Every phase, in the order of the recordings."""
    labels = json.loads((folder / "labels.json").read_text())
    for recording in labels.values():
        for capture in recording["captures"]:
            for row in recording["phases"]:
                yield Phase(
                    folder / capture,
                    row["name"],
                    row.get("state") or row["expected"]["state"],
                    row["from_t"],
                    row["to_t"],
                    row["settle_s"],
                    row.get("itl_mean_s"),
                )


def diagnoses(
    capture: Path, *, window_s: float = WINDOW_S, targets: Targets = NO_TARGETS
) -> list[Verdict]:
    """Every diagnosis over a capture, oldest first."""
    profile = Profile(window_s=window_s, targets=targets)
    stream = TargetStream(capture_name(capture), profile, Limits())
    return [diagnosis for t_s, page in _pages(capture) for diagnosis in stream.judge(t_s, page)]


@lru_cache(maxsize=32)
def _pages(capture: Path) -> Sequence[tuple[float, Page | CollectError]]:
    """The pages of a capture, and their times: parsed once, judged with many targets."""
    reader = PageReader(Limits())
    return [(entry.t_s, reader.read(entry)) for entry in CaptureReader(capture)]
