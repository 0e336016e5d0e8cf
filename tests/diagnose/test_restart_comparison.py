"""After a restart the old values stay the reference, and what changed with it is named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.deployment.deployment import NOTHING
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.latency_split import launch_changes
from kneewatch.diagnose.verdict import Server, Verdict
from kneewatch.diagnose.verdict_json import decode, encode
from kneewatch.reports.diagnosis_text import changed_words
from kneewatch.rules.rule import Severity
from tests.incidents.incident import BEGUN_S
from tests.incidents.pages import SERVING, Load, pages
from tests.incidents.rebuilt import entries

LAST_OF_THE_OLD = 19
"""Scrapes from the first failed one to the last page that the old process left."""


def version(number: str) -> Server:
    """Facts with this version."""
    return Server(launch={"vllm_version": number})


def told(name: str) -> Verdict:
    """The last verdict on a capture in which the server was restarted with another version."""
    stream, verdicts = TargetStream("gpu-7", Profile(), Limits()), list[Verdict]()
    answered_again = 0
    for entry in entries(name):
        answered_again += bool(entry.error) or answered_again > 0
        restarted = answered_again > LAST_OF_THE_OLD
        labels = 'gpu_memory_utilization="0.92"', 'gpu_memory_utilization="0.8"'
        body = entry.body.replace(*labels) if restarted and entry.body else entry.body
        verdicts += stream.replay(replace(entry, body=body))
        stream.monitor.set_server(version("0.33.0" if restarted else "0.32.0"), NOTHING)
    return verdicts[-1]


def test_the_restart_is_named_with_what_changed() -> None:
    verdict = told("nvfp4_regress")
    changed = verdict.changed
    assert changed is not None
    words = changed_words(verdict)
    assert words.startswith("since the restart at 22:31 with vLLM 0.33.0 (0.32.0 before)")
    assert "gpu_memory_utilization 0.8 (0.92 before)" in words
    assert "18 instead of 130 tokens/s a stream" in words
    (evidence,) = [e for e in verdict.causes[0].evidence if e.signal == "process_start"]
    assert "18 instead of 130 tokens/s a stream" in evidence.text
    assert decode(encode(verdict)).changed == changed


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({"num_gpu_blocks": "4096"}, {"num_gpu_blocks": "4100"}, ()),
        ({"max_num_seqs": 64}, {"max_num_seqs": 8}, ("max_num_seqs 8 (64 before)",)),
        ({"max_num_seqs": 64}, {}, ()),
        (
            {"model_path": "m"},
            {"model_path": "m", "enforce_eager": True},
            ("enforce_eager True (not set before)",),
        ),
    ],
)
def test_changes_of_a_launch(
    before: Mapping[str, object], after: Mapping[str, object], changes: tuple[str, ...]
) -> None:
    assert launch_changes(before, after) == changes


def down_after(last: Load) -> Severity:
    """The severity 20 s after the end of a server whose last page shows this load."""
    stream = TargetStream("gpu-7", Profile(), Limits())
    for at_s, page in pages([lambda at_s: last if at_s >= 120.0 else SERVING], 120.0):
        stream.replay(Entry(BEGUN_S + at_s, page, status=200))
    refused = CollectError("connection refused", kind="refused")
    verdicts = [stream.judge(BEGUN_S + 125.0 + 5.0 * failed, refused) for failed in range(4)]
    return verdicts[-1][0].severity


def test_a_drained_server_is_no_page_when_it_goes() -> None:
    drained = replace(SERVING, running=1.0, first_tokens_per_s=0.0, prompt_per_s=0.0)
    assert down_after(drained) == Severity.WARNING
    assert down_after(SERVING) == Severity.CRITICAL
    assert down_after(replace(SERVING, running=1.0)) == Severity.CRITICAL, "requests still came"
