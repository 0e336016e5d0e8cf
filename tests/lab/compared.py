"""What a recommendation predicted beside what was measured after it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from tests.lab.diagnosed import Said
from tests.lab.load import Seen

NEAR_RATIO = 0.15
GROSS_RATIO = 0.5
"""Off by more than this a prediction misleads."""

Relation = Literal["is", "at most", "at least"]


class Pace(Struct, frozen=True):
    """Seconds per token of a fixed batch before and after a load, and CPUs that the server's
    threads waited for in the mean while it was measured."""

    before_s: float
    after_s: float
    cpus_missing: float


class Run(Struct, frozen=True):
    """One server under the load: what kneewatch said with everything stated and, at the same time,
    with no settings; what the clients saw; the server's seats; the machine's pace; the share of the
    clients that it served."""

    said: Said
    unset: Said
    seen: Seen
    seats: int | None
    pace: Pace | None = None
    share_ratio: float = 1.0

    def signal(self, key: str) -> float | None:
        """A signal's value."""
        return self.said.signal(key)


class Row(Struct, frozen=True, kw_only=True):
    """A number before, as predicted (None: not), and as measured after.

    `near` is good enough whatever the ratio. If a band was stated, only what lies in it is right.
    """

    what: str
    before: float | None
    predicted: float | None
    measured: float | None
    near: float = 0.0
    relation: Relation = "is"
    band: tuple[float, float] | None = None

    @property
    def off(self) -> float | None:
        """How far the measured number is on the wrong side of the predicted one."""
        if self.measured is None or self.predicted is None:
            return None
        if self.band is not None:
            low, high = self.band
            return max(0.0, low - self.measured, self.measured - high)
        apart = self.measured - self.predicted
        if self.relation == "at most":
            return max(0.0, apart)
        return max(0.0, -apart) if self.relation == "at least" else abs(apart)

    @property
    def right(self) -> bool:
        """Whether it is within the tolerance."""
        return self._within(NEAR_RATIO if self.band is None else 0.0)

    @property
    def gross(self) -> bool:
        """Whether it is so far off that it misleads."""
        return not self._within(GROSS_RATIO)

    @property
    def verdict(self) -> str:
        """The same in words."""
        if self.predicted is None:
            return "not predicted"
        if self.measured is None:
            return "NOT MEASURED"
        if self.right:
            return "right"
        apart = self.measured - self.predicted
        far = f"off by {apart:+.3g}"
        if self.predicted:
            far = f"off by {apart / self.predicted:+.0%}"
        return f"GROSSLY {far}" if self.gross else far

    def _within(self, ratio: float) -> bool:
        if self.predicted is None:
            return True
        return self.off is not None and self.off <= max(self.near, ratio * abs(self.predicted))


class Told(Struct, frozen=True):
    """How a predicted number is measured, in which unit, and what is near enough."""

    what: str
    near: float
    measure: Callable[[Run], float | None]


def _signal(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.signal(key)


def holds(run: Run) -> float | None:
    """Requests of the present size that the KV cache and the seats hold."""
    usage, running = run.signal("kv_usage_avg_ratio"), run.signal("running_avg")
    if not usage or running is None:
        return None
    most = running / usage
    return most if run.seats is None else min(most, run.seats)


MEASURED: Mapping[str, Told] = {
    "kv_capacity_tokens": Told("KV cache, tokens", 64, _signal("kv_capacity_tokens")),
    "kv_usage_ratio": Told("KV usage, mean", 0.03, _signal("kv_usage_avg_ratio")),
    "preemption_per_s": Told("preemptions per s", 0.05, _signal("preemption_per_s")),
    "max_concurrency": Told("requests that fit at once", 1, holds),
    "waiting": Told("waiting, mean", 1, _signal("waiting_avg")),
    "queue_wait_s": Told("wait in the queue, s", 0.05, _signal("queue_mean_s")),
    "ttft_s": Told("TTFT, mean, s", 0.02, _signal("ttft_mean_s")),
    "output_tokens_per_s": Told("output tokens per s", 1, _signal("generation_tokens_per_s")),
    "itl_s": Told("ITL, mean, s", 0.002, _signal("itl_mean_s")),
    "prefill_mean_s": Told("prefill, mean, s", 0.01, _signal("prefill_mean_s")),
    "prefill_p99_s": Told("prefill, P99, s", 0.05, _signal("prefill_p99_s")),
    "itl_stall_per_s": Told("outputs 0.5 s late, per s", 0.05, _signal("itl_stall_per_s")),
    "itl_stall_time_ratio": Told("stalled share", 0.01, _signal("itl_stall_time_ratio")),
    "longest_step_s": Told(
        "longest step, as clients see it, s", 0.01, lambda run: run.seen.itl_longest_s
    ),
    "spec_acceptance_ratio": Told("accepted", 0.05, _signal("spec_acceptance_ratio")),
    "draft_tokens": Told(
        "drafted tokens per s", 0, lambda run: run.signal("spec_draft_tokens_per_s") or 0.0
    ),
}

TAILS: Mapping[str, str] = {"TTFT, P99, s": "ttft_p99", "ITL, P99, s": "itl_p99"}

SHOWN: Mapping[str, str] = {
    "TTFT, mean, s": "ttft_mean_s",
    "ITL, mean, s": "itl_mean_s",
    **{what: f"{key}_s" for what, key in TAILS.items()},
    "output tokens per s": "generation_tokens_per_s",
}
"""What is shown though nothing was said of it: a cure can hurt elsewhere."""


def compared(recommendation: Mapping[str, Any], before: Run, after: Run) -> list[Row]:
    """A row for each number that the recommendation predicts and that can be measured."""
    predicted: Mapping[str, float] = recommendation["predicted"]
    rows = [
        Row(
            what=quantity.what,
            before=quantity.measure(before),
            predicted=predicted[key],
            measured=quantity.measure(after),
            near=quantity.near,
        )
        for key, quantity in MEASURED.items()
        if key in predicted and (key != "draft_tokens" or predicted[key] == 0)
    ]
    rows += [*_running(predicted, before, after), *_promised(recommendation, before, after)]
    rows += _tails(predicted, before, after)
    return rows + [
        Row(what=what, before=before.signal(key), predicted=None, measured=after.signal(key))
        for what, key in SHOWN.items()
        if what not in [row.what for row in rows]
    ]


def _running(predicted: Mapping[str, float], before: Run, after: Run) -> Iterator[Row]:
    """Concurrency: of the clients that ran or waited before, those that are said to fit."""
    running, waiting = before.signal("running_avg"), before.signal("waiting_avg")
    if "max_concurrency" in predicted and running is not None and waiting is not None:
        yield Row(
            what="running, mean",
            before=running,
            predicted=min(after.share_ratio * (running + waiting), predicted["max_concurrency"]),
            measured=after.signal("running_avg"),
            near=1,
        )


def _tails(predicted: Mapping[str, float], before: Run, after: Run) -> Iterator[Row]:
    """P99 of TTFT and ITL, each with the band that was stated."""
    for what, key in TAILS.items():
        if f"{key}_s" not in predicted and f"{key}_high_s" in predicted:
            yield Row(
                what=what,
                before=before.signal(f"{key}_s"),
                predicted=predicted[f"{key}_high_s"],
                measured=after.signal(f"{key}_s"),
                relation="at most",
            )
        if f"{key}_s" in predicted:
            yield Row(
                what=what,
                before=before.signal(f"{key}_s"),
                predicted=predicted[f"{key}_s"],
                measured=after.signal(f"{key}_s"),
                band=(predicted[f"{key}_low_s"], predicted[f"{key}_high_s"]),
            )


def _promised(recommendation: Mapping[str, Any], before: Run, after: Run) -> Iterator[Row]:
    """What a recommendation says by relation: it does not know the number beforehand."""
    hits = after.signal("prefix_hit_ratio") or 0.0
    if recommendation["id"] == "prefix-caching":
        yield Row(
            what="prefix hit ratio",
            before=before.signal("prefix_hit_ratio"),
            predicted=0.02,
            measured=hits,
            near=0,
            relation="at least",
        )
        prefill_s, step_s = before.signal("prefill_mean_s"), before.signal("itl_p50_s")
        if prefill_s is not None and step_s is not None:
            yield Row(
                what="prefill, mean, s (by the hits)",
                before=prefill_s,
                predicted=step_s + (prefill_s - step_s) * (1 - hits),
                measured=after.signal("prefill_mean_s"),
                near=0.005,
            )
    faster, then = (
        recommendation[when].get("speedup_at_most_ratio") for when in ("before", "predicted")
    )
    tpot_s = before.signal("tpot_mean_s")
    if faster and then and tpot_s is not None:
        yield Row(
            what="TPOT, mean, s",
            before=tpot_s,
            predicted=tpot_s * faster / then,
            measured=after.signal("tpot_mean_s"),
            near=0.002,
            relation="at most",
        )


READ_FACTS = ("vllm_version", "model", "max_num_seqs", "kv_cache_size_tokens")
"""Version, model, a launch flag and KV tokens: kneewatch finds them without a setting."""


def unread(unset: Said) -> list[str]:
    """The facts that kneewatch did not find."""
    facts = {fact["name"] for fact in unset.document.get("server", {}).get("facts", [])}
    return [f"with no settings: {name} is unknown" for name in READ_FACTS if name not in facts]


def levers_apart(stated: Said, unset: Said) -> list[str]:
    """The complaint that the first levers of two diagnoses differ.

    The same flags are the same lever, whatever the values: the two did not read the same pages.
    """
    if _first_lever(stated) == _first_lever(unset):
        return []
    return [f"with no settings the first lever is {lever(unset)}, stated: {lever(stated)}"]


def lever(said: Said) -> str:
    """The first cause, its first recommendation and the changes in a few words."""
    cause = said.causes[0][0] if said.causes else "no cause"
    if not said.recommendations:
        return f"{cause}: none"
    first = said.recommendations[0]
    changes = [f"{each['flag']} {each['from']} -> {each['to']}" for each in first["changes"]]
    return f"{cause}: {', '.join([first['id'], *changes])}"


def _first_lever(said: Said) -> tuple[object, ...]:
    first: Mapping[str, Any] = said.recommendations[0] if said.recommendations else {}
    flags = tuple(change["flag"] for change in first.get("changes", ()))
    return tuple(said.causes[:1]), first.get("id"), flags


def number(value: float | None) -> str:
    """A number for the table; a dash for none."""
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as a Markdown table."""
    lines = ["| | Before | Predicted | Measured | |", "| --- | ---: | ---: | ---: | --- |"]
    for row in rows:
        word = "" if row.relation == "is" else f"{row.relation} "
        ends = "" if row.band is None else " ({} to {})".format(*map(number, row.band))
        lines.append(
            f"| {row.what} | {number(row.before)} | {word}{number(row.predicted)}{ends} "
            f"| {number(row.measured)} | {row.verdict} |"
        )
    return lines
