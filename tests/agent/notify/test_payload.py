"""What Alertmanager posts: read, or refused with the place of what is wrong."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent.notify.events import ALERTS_MAX, payload_of
from kneewatch.diagnose.verdict_json import DocumentError
from tests.agent.notify.posts import alert, post
from tests.reports.diagnoses import NOW_S


def test_a_post_is_read() -> None:
    payload = payload_of(post(alert(instance="a:1"), alert("resolved"), truncatedAlerts=3))
    firing, resolved = payload.alerts
    assert (payload.status, payload.truncated_alerts) == ("firing", 3)
    assert (firing.name, firing.starts_s, firing.ends_s) == ("SlowFirstToken", NOW_S, None)
    assert firing.labels["instance"] == "a:1"
    assert resolved.ends_s == NOW_S + 60


@pytest.mark.parametrize(
    ("text", "t_s"),
    [
        ("2026-11-21T00:06:40Z", NOW_S),
        ("2026-11-21T00:06:40.123456789Z", NOW_S + 0.123456),
        ("2026-11-21T02:06:40+02:00", NOW_S),
        ("0001-01-01T00:00:00Z", 0.0),
        ("0001-01-01T00:00:00+14:00", 0.0),
        ("9999-12-31T23:59:59-14:00", 253_402_214_400.0),
    ],
)
def test_times(text: str, t_s: float) -> None:
    (row,) = payload_of(post({**alert(), "startsAt": text})).alerts
    assert row.starts_s == pytest.approx(t_s, abs=1e-3)


def test_without_a_fingerprint_the_labels_make_one() -> None:
    rows = [{**alert(pod=pod), "fingerprint": None} for pod in ("a", "a", "b")]
    prints = [row.fingerprint for row in payload_of(post(*rows)).alerts]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        pytest.param([], "Expected `object`, got `array`", id="no object"),
        pytest.param({}, "missing required field `version`", id="nothing"),
        pytest.param(post(version="3"), "Invalid enum value '3' - at `$.version`", id="version"),
        pytest.param(
            post(alerts={}), "Expected `array`, got `object` - at `$.alerts`", id="no list"
        ),
        pytest.param(post(*[alert()] * (ALERTS_MAX + 1)), "set max_alerts", id="too many"),
        pytest.param(post(status="odd"), "at `$.status`", id="status"),
        pytest.param(post(truncatedAlerts=-1), "at `$.truncatedAlerts`", id="count"),
        pytest.param(post(alert(), 7), "at `$.alerts[1]`", id="no alert"),  # type: ignore[arg-type]
        pytest.param(post({**alert(), "status": "on"}), "at `$.alerts[0].status`", id="state"),
        pytest.param(
            post({**alert(), "labels": {"a": 1}}), "at `$.alerts[0].labels[...]`", id="label"
        ),
        pytest.param(post({**alert(), "labels": None}), "at `$.alerts[0].labels`", id="no labels"),
        pytest.param(post({**alert(), "annotations": None}), None, id="no annotations"),
        pytest.param(
            post({**alert(), "startsAt": "today"}), "Invalid RFC3339 encoded datetime", id="time"
        ),
        pytest.param(
            post({**alert(), "startsAt": "2026-11-21T00:06:40"}),
            "at `$.alerts[0].startsAt`",
            id="no zone",
        ),
        pytest.param(
            post({**alert(), "fingerprint": 1}), "at `$.alerts[0].fingerprint`", id="print"
        ),
        pytest.param(
            post(version="\x1b[31m" + "x" * 500), "value '\\x1b[31mxxx", id="what is shown is safe"
        ),
    ],
)
def test_what_is_none_is_refused_with_its_place(document: Any, said: str | None) -> None:  # noqa: ANN401
    if said is None:
        payload_of(document)
        return
    with pytest.raises(DocumentError) as caught:
        payload_of(document)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 250


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.data())
def test_any_change_is_read_or_refused(data: st.DataObject) -> None:
    document = json.loads(json.dumps(post(alert(), alert("resolved"))))
    where: Any = document if data.draw(st.booleans()) else document["alerts"][0]
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(VALUES)
    with contextlib.suppress(DocumentError):
        assert len(payload_of(document).alerts) <= ALERTS_MAX
