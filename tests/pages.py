"""Recorded pages with other values, or with lines less: what tests make of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

COUNTED = r"(?:total|bucket|sum|count)"
TROUBLE = re.compile(r"preemptions|rejections|corrupted|finished_reason=\"(?!stop|length)")


def grown(body: str, factor: float) -> str:
    """The page with all of vLLM's counters and histograms times a factor."""

    def times(line: re.Match[str]) -> str:
        return f"{line[1]} {float(line[2]) * factor!r}"

    return re.sub(rf"(?m)^(vllm:\w+_{COUNTED}(?:{{.*}})?) (\S+)$", times, body)


def with_values(body: str, values: Mapping[str, float]) -> str:
    """The page with a value for every series of some names; `vllm:` may be left out."""
    for name, value in values.items():
        body, replaced = re.subn(
            rf"(?m)^((?:vllm:)?{name}(?:{{.*}})?) \S+$", rf"\g<1> {value}", body
        )
        assert replaced, f"{name} is not on the page"
    return body


def without(body: str, *families: str) -> str:
    """The page without some of vLLM's families: samples, HELP and TYPE."""
    for family in families:
        body, removed = re.subn(
            rf"(?m)^(?:# \w+ )?vllm:{family}(?:_\w+)?(?:{{.*}})? .*\n", "", body
        )
        assert removed, f"{family} is not on the page"
    return body


def without_process(body: str) -> str:
    """The page without what the process says about itself."""
    return re.sub(r"(?m)^(?:# \w+ )?process_.*\n", "", body)


def multiprocess(body: str) -> str:
    """The page as several API servers give it: no times of creation, nothing of a process."""
    return re.sub(r"(?m)^(?:# \w+ )?vllm:\w+_created.*\n", "", without_process(body))


def recreated(body: str, later_s: float) -> str:
    """The page with all of vLLM's times of creation moved."""

    def move(line: re.Match[str]) -> str:
        return f"{line[1]} {float(line[2]) + later_s!r}"

    return re.sub(r"(?m)^(vllm:\w+_created(?:{.*})?) (\S+)$", move, body)


def restarted(body: str, start_s: float = 1_799_000_000.0) -> str:
    """The page with another start time of the process."""
    return with_values(body, {"process_start_time_seconds": start_s})


def counted(body: str, more: float) -> str:
    """The page with so much more in vLLM's counters and histograms, in every bucket.

    What counts trouble stays: preemptions, errors, rejections.
    """

    def add(line: re.Match[str]) -> str:
        return line[0] if TROUBLE.search(line[1]) else f"{line[1]} {float(line[2]) + more!r}"

    return re.sub(rf"(?m)^(vllm:\w+_{COUNTED}(?:{{.*}})?) (\S+)$", add, body)


def engine_only(body: str) -> str:
    """The page with nothing but vLLM's own samples, to stand beside another engine's."""
    return "".join(f"{line}\n" for line in body.splitlines() if line.startswith("vllm:"))
