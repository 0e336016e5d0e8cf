"""What is said of incidents from issue threads and from operation."""

from __future__ import annotations

import pytest

from tests.incidents.incident import Incident, said
from tests.incidents.table import INCIDENTS


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.name)
def test_an_incident_is_said_as_expected(incident: Incident) -> None:
    assert said(incident).wrong == ""
