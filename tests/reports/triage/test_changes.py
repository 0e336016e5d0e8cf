"""What to type: flags quoted for a shell, what they replace, what is no flag."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.recommend.advice import Advice, FlagChange
from kneewatch.reports.advice_text import besides, command, doubt, moved, replaced
from kneewatch.reports.triage.engine import cost, title


def made(*changes: FlagChange, **fields: object) -> Advice:
    all_fields: dict[str, object] = {
        "id": "x", "cause": "kv_pressure", "changes": changes, "summary": "s", "predicted": {},
        "cost_usd_per_hour": 0.0, "checks": (), "risk": "", "verify": (), "guide": (), **fields,
    }  # fmt: skip
    return Advice(**all_fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "typed", "instead", "others"),
    [
        (FlagChange("--a", 1, 2), "--a 2", "--a 1", ()),
        (FlagChange("--a", None, 0.95), "--a 0.95", "", ()),
        (FlagChange("--a", "auto", "fp8"), "--a fp8", "--a auto", ()),
        (FlagChange("--on", False, True), "--on", "", ()),
        (FlagChange("--on", True, False), "--no-on", "", ()),
        (FlagChange("--no-x", True, None), "", "", ("drop --no-x",)),
        (FlagChange("replicas", 1, 7), "", "", ("replicas 1 -> 7",)),
        (FlagChange("--a", None, '{"k": 1}'), "--a '{\"k\": 1}'", "", ()),
    ],
)
def test_a_change(change: FlagChange, typed: str, instead: str, others: tuple[str, ...]) -> None:
    assert (command([change]), replaced([change])) == (typed, instead)
    assert tuple(besides([change])) == others


def test_changes_that_belong_together_are_typed_together() -> None:
    advice = made(
        FlagChange("--a", 1, 2), FlagChange("--b", None, None), FlagChange("--c", None, "x y")
    )
    assert command(advice.changes) == "--a 2 --c 'x y'"
    assert besides(advice.changes) == ["drop --b"]
    assert title(advice) == "--a 2 (now 1), drop --b, --c x y"
    assert title(made()) == "s"


def test_numbers_that_move() -> None:
    advice = made(
        FlagChange("--a", 1, 2),
        before={"kv_usage_ratio": 0.98, "waiting": 3.0, "itl_s": 0.02},
        predicted={"kv_usage_ratio": 0.74, "waiting": 3.0, "ttft_s": 0.5},
    )
    assert moved(advice) == [("mean KV usage", "98%", "74%"), ("TTFT", "", "500 ms")]


def test_predicted_numbers_are_as_round_as_the_measured_ones_beside_them() -> None:
    advice = made(
        FlagChange("--a", 1, 2),
        before={"preemption_per_s": 0.0447, "ttft_s": 1.254},
        predicted={"preemption_per_s": 0.0, "ttft_s": 0.0576},
    )
    assert moved(advice) == [("preemptions", "2.7/min", "0/s"), ("TTFT", "1.3 s", "58 ms")]


@pytest.mark.parametrize(
    ("usd_per_hour", "words"),
    [(0.0, "no change in price"), (None, "price unknown"), (7.5, "+7.50 USD/h")],
)
def test_what_it_costs(usd_per_hour: float | None, words: str) -> None:
    assert cost(made(FlagChange("replicas", 1, 2), cost_usd_per_hour=usd_per_hour)) == words
    of_flag = made(FlagChange("--a", 1, 2), cost_usd_per_hour=usd_per_hour)
    assert cost(of_flag) == f"{words}; needs a restart, which empties the caches"


def test_a_change_that_does_not_suffice_says_so() -> None:
    assert doubt(made(FlagChange("--a", 1, 2), suffices=False))
    assert not doubt(made(FlagChange("--a", 1, 2), suffices=True))
    assert not doubt(made(FlagChange("--a", 1, 2))), "unknown"


@given(st.text(), st.text(min_size=1))
def test_a_value_is_one_word_for_a_shell(name: str, value: str) -> None:
    flag = f"--{name}"
    glued = [f"{flag}={value}"] if value.startswith("-") else [flag, value]
    assert shlex.split(command([FlagChange(flag, None, value)])) == glued
