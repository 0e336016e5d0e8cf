"""Each record gives its stored verdicts, each of its numbers matters, and it forgets no part."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.ranking import BY_ID, CAUSES, EXAMINED
from kneewatch.diagnose.recommend.adviser import LEVERS
from kneewatch.rules.facts import NO_TARGETS
from kneewatch.rules.rule import FAMILIES
from tests.contract import golden
from tests.contract.mutations import survivors
from tests.contract.situations import SITUATIONS

EACH = pytest.mark.parametrize("record", CAUSES, ids=list(BY_ID))


@pytest.mark.parametrize("name", golden.read())
def test_a_record_gives_its_stored_verdicts(name: str) -> None:
    record = BY_ID[name.partition(":")[0]]
    assert golden.differs(record, name, golden.read()[name]) == ""


def test_the_stored_verdicts_cover_each_edge_and_unknown() -> None:
    stale = "run `python -m tests.contract.golden` and read the diff"
    computed = golden.computed()
    assert set(computed) == set(golden.read()), stale
    for name, rows in computed.items():
        assert len(rows["rows"]) == len(golden.read()[name].rows), f"{name}: {stale}"


def test_every_number_of_a_record_matters() -> None:
    left, tried = survivors()
    assert tried > 500
    assert [str(each) for each in left] == []


@pytest.mark.parametrize("record", EXAMINED, ids=[record.id for record in EXAMINED])
def test_a_cause_that_is_examined_has_a_situation(record: CauseRecord) -> None:
    assert record.id in SITUATIONS, "add it to CONCLUSIVE in tests/diagnose/situations.py"


@EACH
def test_a_record_has_all_its_parts(record: CauseRecord) -> None:
    assert record.title
    assert set(record.explains) <= set(BY_ID), "explains"
    assert set(record.moves) <= set(FAMILIES), "moves"
    assert set(record.levers) <= set(LEVERS), "levers"
    assert record.levers or not record.enough, "enough is what a lever must bring to 0"
    assert not (record.forms and record.judge), "one way to conclude it"
    for form in record.forms:
        assert bool(form.summary) == (len(record.forms) > 1), "heading of the variant on its page"
        assert record.guide, "guide"
        assert form.terms, "terms"
        severities = [*(severity for severity, _ in form.levels), form.severity]
        assert severities == sorted(severities, reverse=True), "levels: worst first"


def test_no_term_names_the_signal_that_it_is_listed_under_anyway() -> None:
    for record in CAUSES:
        for each in (each for form in record.forms for each in form.terms):
            if isinstance(each.signal, str) and each.signal:
                unnamed = replace(each, signal="").key(Facts({}, NO_TARGETS))
                assert each.signal != unnamed, f"{record.id}: {each.say}"
            elif not each.signal:
                assert each.key(Facts({}, NO_TARGETS)), f"{record.id} has evidence without a signal"
