"""Which intervals are one incident."""

from __future__ import annotations

from kneewatch.diagnose.change import Interval
from kneewatch.reports.weekly.incidents import episodes
from kneewatch.reports.weekly.observed import Episode
from kneewatch.rules.rule import Severity

INFO, WARNING, CRITICAL = Severity.INFO, Severity.WARNING, Severity.CRITICAL


def cause(name: str, start_s: float, end_s: float | None, severity: Severity = WARNING) -> Interval:
    """A cause's interval."""
    last_s = start_s + 10.0 if end_s is None else end_s
    ended = "" if end_s is None else "ended"
    return Interval("cause", name, severity, start_s, last_s, end_s, ended)


def stage(number: int, start_s: float, end_s: float, severity: Severity = WARNING) -> Interval:
    """A stage's interval."""
    return Interval("stage", str(number), severity, start_s, end_s, end_s, "ended")


def told(*held: Interval) -> list[Episode]:
    """The incidents of some intervals."""
    return episodes(held, from_s=0.0, to_s=1e6)


def test_a_cascade_has_its_stages_and_what_follows_from_it() -> None:
    (episode,) = told(
        stage(0, 0, 900, Severity.OK),
        stage(1, 900, 1000, INFO),
        stage(2, 1000, 1060, WARNING),
        stage(3, 1060, 1200, CRITICAL),
        stage(2, 1200, 1230, WARNING),
        stage(0, 1230, 9000, Severity.OK),
        cause("queue_saturation", 980, 1010),
        cause("kv_pressure", 1010, 1240, CRITICAL),
        cause("past_knee", 1245, 1290),
    )
    assert (episode.kind, episode.cause, episode.severity) == ("cascade", "kv_pressure", CRITICAL)
    assert [held.id for held in episode.stages] == ["1", "2", "3", "2"]
    assert [held.id for held in episode.causes] == ["queue_saturation", "kv_pressure", "past_knee"]
    assert (episode.start_s, episode.last.end_s) == (980, 1290)


def test_what_is_milder_than_a_warning_is_shown_but_is_no_part_of_the_incidents_time() -> None:
    """As in notifications and on the page of a target."""
    (episode,) = told(
        stage(2, 960, 968, INFO),
        stage(3, 1000, 1100, CRITICAL),
        cause("kv_pressure", 1000, 1102, CRITICAL),
        stage(2, 1120, 1130, INFO),
    )
    assert (episode.start_s, episode.until_s) == (1000, 1102)
    assert [held.start_s for held in episode.stages] == [960, 1000, 1120]


def test_what_comes_first_may_still_follow_from_it() -> None:
    (episode,) = told(cause("past_knee", 100, 110), cause("queue_saturation", 110, 900))
    assert episode.cause == "queue_saturation"
    assert episode.start_s == 100


def test_a_worse_symptom_is_told_with_its_cause() -> None:
    (episode,) = told(cause("prefix_reuse_lost", 0, 900), cause("slo_conflict", 30, 890, CRITICAL))
    assert (episode.cause, episode.severity) == ("prefix_reuse_lost", CRITICAL)


def test_a_note_hides_nothing() -> None:
    (episode,) = told(cause("prefix_reuse_lost", 0, 900, INFO), cause("slo_conflict", 30, 890))
    assert episode.cause == "slo_conflict"


def test_unrelated_causes_are_incidents_of_their_own() -> None:
    all_episodes = told(
        cause("spec_decode_poor", 0, 9000), cause("target_down", 3000, 3100, CRITICAL)
    )
    assert [episode.cause for episode in all_episodes] == ["spec_decode_poor", "target_down"]


def test_repeats_are_one_incident_until_a_quarter_of_an_hour_apart() -> None:
    first, again = cause("spec_decode_poor", 0, 100), cause("spec_decode_poor", 1000, 1100)
    (episode,) = told(first, again)
    assert (episode.start_s, episode.last.end_s, len(episode.causes)) == (0, 1100, 2)
    assert len(told(first, cause("spec_decode_poor", 1001, 1100))) == 2


def test_two_cascades_far_apart_are_two() -> None:
    all_episodes = told(
        stage(2, 0, 100), stage(0, 100, 5000, Severity.OK), stage(2, 5000, 5100),
        cause("kv_pressure", 0, 110), cause("kv_pressure", 5000, 5110),
    )  # fmt: skip
    assert [(episode.start_s, episode.last.end_s) for episode in all_episodes] == [
        (0, 110),
        (5000, 5110),
    ]


def test_notes_are_none_but_restarts() -> None:
    all_episodes = told(
        cause("underused", 0, 9000, INFO),
        cause("engine_restarted", 500, 560, INFO),
        stage(2, 8000, 8010, INFO),
    )
    assert [episode.cause for episode in all_episodes] == ["engine_restarted"]


def test_an_outage_is_told_with_the_restart_that_ends_it() -> None:
    (episode,) = told(
        cause("target_down", 0, 240, CRITICAL), cause("engine_restarted", 240, 300, INFO)
    )
    assert episode.cause == "target_down"
    assert episode.severity == CRITICAL


def test_an_outage_amid_a_cascade_does_not_own_it() -> None:
    cascade, outage = told(
        stage(2, 905, 940),
        stage(3, 940, 1000, CRITICAL),
        stage(3, 1045, 1150, CRITICAL),
        cause("kv_pressure", 910, 1000, CRITICAL),
        cause("queue_saturation", 930, 1000),
        cause("target_down", 1000, 1038, CRITICAL),
        cause("engine_restarted", 1038, 1098, INFO),
        cause("kv_pressure", 1050, 1160, CRITICAL),
        cause("queue_saturation", 1060, 1150),
    )
    assert (cascade.cause, cascade.start_s, cascade.last.end_s) == ("kv_pressure", 905, 1160)
    assert (outage.cause, outage.start_s) == ("target_down", 1000)
    assert {held.id for held in outage.causes} == {"target_down", "engine_restarted"}


def test_what_an_outage_leaves_behind_is_its_effect() -> None:
    (episode,) = told(
        cause("engine_stalled", 970, 1000, CRITICAL),
        cause("target_down", 1000, 1038, CRITICAL),
        cause("kv_pressure", 1045, 1100, CRITICAL),
        stage(3, 1045, 1100, CRITICAL),
    )
    assert episode.cause == "target_down"


def test_outages_of_a_crash_loop_are_the_loops() -> None:
    (episode,) = told(
        cause("target_down", 0, 50, CRITICAL),
        cause("engine_restarted", 50, 90, INFO),
        cause("target_down", 90, 140, CRITICAL),
        cause("engine_restarted", 140, 600),
    )
    assert (episode.cause, episode.start_s, episode.last.end_s) == ("engine_restarted", 0, 600)
    outage, loop = told(cause("target_down", 0, 9e3, CRITICAL), cause("engine_restarted", 9e3, 9e3))
    assert (outage.cause, loop.cause) == ("target_down", "engine_restarted")


def test_what_goes_on_has_no_end() -> None:
    (episode,) = told(cause("spec_decode_poor", 0, None))
    assert episode.last.end_s is None
    assert episode.until_s == 10.0


def test_what_is_outside_is_not_told() -> None:
    held = [cause("spec_decode_poor", 0, 100), cause("target_down", 900, 950)]
    assert [episode.cause for episode in episodes(held, from_s=500.0, to_s=1000.0)] == [
        "target_down"
    ]
    assert not episodes(held, from_s=200.0, to_s=900.0)
