"""What is written instead of an unknown name."""

from __future__ import annotations

from kneewatch.collector.spelling import FEW, did_you_mean

MANY = [f"setting.number_{number}" for number in range(FEW + 1)]


def test_only_a_similar_name_is_suggested() -> None:
    assert did_you_mean("windows_s", ["gpus", "window_s"]) == "did you mean window_s?"
    assert did_you_mean("kv-evic", ["KV-EVICT"]) == "did you mean KV-EVICT?"
    assert did_you_mean("unknown_key", ["url", "name"]) == "valid: url, name"


def test_many_names_are_not_listed_where_there_is_another_way() -> None:
    assert did_you_mean("bananas", MANY, "see the list") == "see the list"
    assert did_you_mean("bananas", MANY) == f"valid: {', '.join(MANY)}"
    assert did_you_mean("bananas", MANY[:FEW], "see the list") == f"valid: {', '.join(MANY[:FEW])}"


def test_in_a_section_only_the_last_part_is_compared() -> None:
    names = ["listen", "store.file", "store.keep_s", "store.max_bytes"]
    assert did_you_mean("store.path", names) == "valid: store.file, store.keep_s, store.max_bytes"
    assert did_you_mean("store.keeps", names) == "did you mean store.keep_s?"
    assert did_you_mean("stores.file", names) == "did you mean store.file?"
