"""What to type: flags quoted for a shell, what they replace, what is no flag."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.reports.triage.causes import ChangeView, change_view, command


def made(*changes: Change, **fields: object) -> ChangeView:
    all_fields: dict[str, object] = {
        "id": "x", "cause": "kv_pressure", "changes": changes, "summary": "s", "predicted": {},
        "cost_usd_per_hour": 0.0, "checks": (), "risk": "", "verify": (), "guide": (), **fields,
    }  # fmt: skip
    return change_view(Recommendation(**all_fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "typed", "instead", "besides"),
    [
        (Change("--a", 1, 2), "--a 2", "--a 1", ()),
        (Change("--a", None, 0.95), "--a 0.95", "", ()),
        (Change("--a", "auto", "fp8"), "--a fp8", "--a auto", ()),
        (Change("--on", False, True), "--on", "", ()),
        (Change("--on", True, False), "--no-on", "", ()),
        (Change("--no-x", True, None), "", "", ("drop --no-x",)),
        (Change("replicas", 1, 7), "", "", ("replicas 1 → 7",)),
        (Change("--a", None, '{"k": 1}'), "--a '{\"k\": 1}'", "", ()),
    ],
)
def test_a_change(change: Change, typed: str, instead: str, besides: tuple[str, ...]) -> None:
    view = made(change)
    assert (view.command, view.instead, view.besides) == (typed, instead, besides)


def test_changes_that_belong_together_are_typed_together() -> None:
    view = made(Change("--a", 1, 2), Change("--b", None, None), Change("--c", None, "x y"))
    assert view.command == "--a 2 --c 'x y'"
    assert view.besides == ("drop --b",)
    assert view.title == "--a 1 → 2, drop --b, --c → x y"


def test_numbers_that_move() -> None:
    view = made(
        Change("--a", 1, 2),
        before={"kv_usage_ratio": 0.98, "waiting": 3.0, "itl_s": 0.02},
        predicted={"kv_usage_ratio": 0.74, "waiting": 3.0, "ttft_s": 0.5},
    )
    assert [(row.label, row.before, row.after) for row in view.numbers] == [
        ("KV usage", "98%", "74%"),
        ("TTFT", "-", "500 ms"),
    ]


@pytest.mark.parametrize(
    ("cost", "words"),
    [(0.0, "no change in price"), (None, "price unknown"), (7.5, "+7.50 USD/h")],
)
def test_what_it_costs(cost: float | None, words: str) -> None:
    assert made(Change("replicas", 1, 2), cost_usd_per_hour=cost).cost == words
    of_flag = made(Change("--a", 1, 2), cost_usd_per_hour=cost).cost
    assert of_flag == f"{words}; needs a restart, which empties the caches"


def test_a_change_that_does_not_suffice_says_so() -> None:
    assert made(Change("--a", 1, 2), predicted={"kv_demand_ratio": 1.2}).doubt
    assert not made(Change("--a", 1, 2), predicted={"kv_demand_ratio": 0.8}).doubt


@given(st.text(), st.text())
def test_a_value_is_one_word_for_a_shell(name: str, value: str) -> None:
    flag = f"--{name}"
    assert shlex.split(command([Change(flag, None, value)])) == [flag, value]
