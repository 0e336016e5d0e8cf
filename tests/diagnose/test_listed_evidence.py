"""What is listed as evidence for or against a cause."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.causes.evidence import Case
from kneewatch.rules.rule import Severity


@pytest.mark.parametrize(
    ("value", "below", "listed"),
    [
        pytest.param(0.0, False, False, id="nothing of it"),
        pytest.param(0.9, False, False, id="under half the threshold"),
        pytest.param(1.0, False, True, id="half the threshold"),
        pytest.param(2.0, False, True, id="the threshold"),
        pytest.param(4.1, True, False, id="over twice a threshold to be under"),
        pytest.param(4.0, True, True, id="twice a threshold to be under"),
    ],
)
@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_a_value_far_short_of_its_threshold_is_on_neither_side(
    value: float, weight: float, *, below: bool, listed: bool
) -> None:
    case = Case("kv_pressure", "", "", Severity.WARNING, log_odds=3.0)
    case.weigh("waiting", value, 2.0, weight, "a sentence", below=below)
    side = case.evidence if weight > 0 else case.against
    assert [item.value for item in side] == ([value] if listed else [])
    assert len(case.evidence) + len(case.against) == listed
