"""The table of DCGM's fields, and the values by which DCGM says that it has none."""

from __future__ import annotations

import math
import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.names.dcgm_fields import Field, field_table, is_sentinel

TABLE = field_table()
DEFAULT = [field.name for field in TABLE.fields.values() if field.csv == "default"]
BLANK = "9223372036854775794"


@pytest.mark.parametrize("field", TABLE.fields.values(), ids=lambda field: field.name)
def test_a_row_is_complete(field: Field) -> None:
    assert field.kind in ("gauge", "counter")
    assert field.unit
    assert field.help.endswith(".")
    assert field.csv in ("", "default", "fuller")
    names = [name for name in TABLE.names.values() if name.field is field]
    assert sorted(name.rank for name in names) == list(range(len(names)))
    assert all(math.isfinite(name.scale) and name.scale > 0 for name in names)
    assert TABLE.names[field.name].field is field


def test_the_default_fields_are_those_of_the_exporter() -> None:
    assert len(DEFAULT) == 25
    assert all("EXP_" not in name and "ECC" not in name for name in DEFAULT)
    assert field_table() is TABLE


def test_the_packaged_file_has_no_key_that_is_not_read() -> None:
    file = resources.files("kneewatch.collector.names").joinpath("dcgm_metrics.toml")
    text = file.read_text("utf-8")
    document = tomllib.loads(text)
    assert document.keys() == {"fields"}
    keys = {key for row in document["fields"].values() for key in row}
    assert keys == {
        *("kind", "unit", "help", "scale", "newer", "former"),
        *("csv", "labels", "wide", "note"),
    }
    newer = [name for row in document["fields"].values() for name in row.get("newer", ())]
    assert {key for name in newer for key in name} == {"name", "scale"}


@pytest.mark.parametrize(
    ("text", "wide", "blank"),
    [
        (BLANK, False, True),
        (BLANK, True, True),
        ("9223372036854775792", True, True),
        ("1.8446744073709552e+19", True, True),
        ("2147483632", False, True),
        ("2147483647", False, True),
        ("2147483647", True, False),  # an energy counter passes it within the hour
        ("2147483631", False, False),
        ("2147483648", False, False),
        ("140737488355330", False, True),
        ("140737488355330", True, False),
        ("140737488355344", False, False),
        ("NaN", True, True),
        ("0", False, False),
        ("-1", False, False),
    ],
)
def test_blanks_of_dcgm_are_no_values(text: str, wide: bool, blank: bool) -> None:
    assert is_sentinel(float(text), wide=wide) is blank


@given(st.integers(0, 2**31 - 17) | st.floats(0, 1e9), st.booleans())
def test_ordinary_values_are_values(number: float, wide: bool) -> None:
    assert not is_sentinel(number, wide=wide)


@given(st.integers(0, 15))
def test_every_reason_for_a_blank_is_a_blank(reason: int) -> None:
    assert is_sentinel(float(0x7FFFFFF0 + reason))
    assert is_sentinel(float(0x7FFFFFFFFFFFFFF0 + reason), wide=True)
    assert is_sentinel(2.0**47 + reason)
