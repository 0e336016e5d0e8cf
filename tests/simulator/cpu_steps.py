"""How long a step takes on the machine of the recordings: three costs, fitted to three of them.

The fit looks at three recordings; the others are predicted. A token costs the same in a prompt and
in a decode; what a long prompt's tokens attend to is left out. Each equation is a whole phase: its
time is what its steps took.
"""

from __future__ import annotations

import json

import numpy as np
from msgspec import Struct

from tests.recordings import CAPTURES
from tests.simulator.recorded import Scrape, finished, scrapes
from tests.simulator.work import Work

REQUEST_S = 0.003
"""HTTP and tokens to text, on a machine that the load generator shared."""

FITTED_ON = ("knee_sweep", "long_output_decode_heavy", "itl_smooth_chunked")


class CpuSteps(Struct, frozen=True):
    """Seconds of a step: a constant, by token, and by token that a decode attends to."""

    base_s: float
    token_s: float
    context_token_s: float
    request_s: float = REQUEST_S
    load_adapter_s: float = 0.0

    def step_s(self, work: Work) -> float:
        """Seconds of one step."""
        return (
            self.base_s
            + (work.decodes * work.verified + work.prompt_tokens) * self.token_s
            + work.context_tokens * self.context_token_s
        )

    def worked(self, work: Work, steps: int, step_s: float) -> None:
        """A CPU has no counters that anybody reads."""


def phases_of(name: str) -> dict[str, tuple[float, float, float]]:
    """Phases of a recording by name: from, to, and from when on they are settled."""
    labels = json.loads((CAPTURES / "labels.json").read_text())
    return {
        row["name"]: (row["from_t"], row["to_t"], row["from_t"] + row["settle_s"])
        for row in labels[name]["phases"]
    }


def settled(rows: list[Scrape], phase: tuple[float, float, float]) -> list[Scrape]:
    """The scrapes of a phase's settled part."""
    return [row for row in rows if phase[2] <= row.t_s <= phase[1]]


def fitted() -> CpuSteps:
    """The least squares of relative errors over phases in which the server never rested."""
    left, right = list[list[float]](), list[float]()
    for name in FITTED_ON:
        rows = scrapes(CAPTURES / f"{name}.jsonl.gz")
        for label, phase in phases_of(name).items():
            stretch = settled(rows, phase)
            if label in ("fresh", "after_load") or len(stretch) < 2:
                continue
            left.append(_equation(stretch))
            right.append(1.0)
    coefficients, *_ = np.linalg.lstsq(np.array(left), np.array(right), rcond=None)
    base_s, token_s, context_token_s = (
        max(0.0, float(coefficient)) for coefficient in coefficients
    )
    return CpuSteps(base_s, token_s, context_token_s)


def _equation(stretch: list[Scrape]) -> list[float]:
    first, last = stretch[0].values, stretch[-1].values

    def gained(name: str) -> float:
        return last.get(name, 0.0) - first.get(name, 0.0)

    decoded = gained("generation_tokens_total")
    requests = finished(last) - finished(first)
    computed = gained("prompt_tokens_by_source_total|source=local_compute")
    prompt = gained("request_prompt_tokens_sum") / requests
    output = gained("request_generation_tokens_sum") / requests
    context = decoded * (prompt + output / 2)
    # The time outside the engine, where few requests are in flight: nothing is computed then.
    idle_s = REQUEST_S * requests / (1 + _in_flight(stretch))
    over_s = stretch[-1].t_s - stretch[0].t_s - idle_s
    steps = gained("iteration_tokens_total_count")
    return [steps / over_s, (decoded + computed) / over_s, context / over_s]


def _in_flight(stretch: list[Scrape]) -> float:
    both = ("num_requests_running", "num_requests_waiting")
    return sum(row.values[name] for row in stretch for name in both) / len(stretch)
