"""Causes in what a server has only when asked: speculation, adapters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

from kneewatch.diagnose.adapters import AdapterUse
from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.diagnose.causes.bound import bound_of
from kneewatch.diagnose.causes.drafts import PAYS_FROM, Drafts, drafts_of
from kneewatch.diagnose.derived import RECENT_SHARE
from kneewatch.diagnose.sizing.speed.speculation import break_even_acceptance_ratio
from kneewatch.rules.model import Severity

SPEC_AIM = 0.6
"""The guide's aim (9.3)."""

PAYS_WELL, PAYS_LOG_ODDS = 1.5, -0.8
"""The estimate is the best case: what gives half as much again does pay."""

SPEC_DRAFTS_MIN_PER_S = 5.0
REQUESTS_DIFFER = 0.25
"""How far requests lie from each other in what is accepted of their drafts, as a standard
deviation: half of the most that a share can have."""

ALMOST = 1e-6
"""What a count loses on its way through a rate."""

LARGE_BATCH = 32.0
DEFERRED_HELD_S = 10.0
DEFERRED_AVG = 0.5
"""So many held back in the mean are no accident, though there are scrapes without one, ..."""

SWAPPED_SETS = 3.0
"""... while the newest quarter of the window shows so many sets of running adapters: one set that
comes and goes, with the empty one between, are two."""

TOLD_ADAPTERS = 4


def spec_decode_poor(facts: Facts) -> Cause | None:
    """Fewer of the drafted tokens are accepted than the load asks for.

    Half, or the guide's aim of 60 % where the GPU is compute-bound: there each rejected token
    costs. A note where the draft still pays, which a long one does with less.
    """
    recent, mean = (told.get("spec_acceptance_ratio") for told in (facts.recent, facts.values))
    ratio = mean if recent is None else recent
    if ratio is None:
        return None
    bound = bound_of(facts)
    loaded = bound is not None and bound.kind == "compute"
    wanted = SPEC_AIM if loaded else PAYS_FROM
    drafts_per_s = facts.get("spec_draft_tokens_per_s")
    surely = _surely_below(wanted, recent, facts, RECENT_SHARE) or _surely_below(
        wanted, mean, facts, 1.0
    )
    if ratio >= wanted or not surely or drafts_per_s < SPEC_DRAFTS_MIN_PER_S:
        return None
    running, drafts = facts.get("running_avg"), drafts_of(facts.values)
    # The window's drafts are in part from before a fall that its newest part shows.
    fallen = mean is not None and _surely_below(mean, recent, facts, RECENT_SHARE)
    settled = drafts is not None and drafts.share(drafts.tokens) < wanted and not fallen
    pays = (
        drafts is not None
        and settled
        and not loaded
        and running < LARGE_BATCH
        and drafts.speedup(drafts.tokens) >= PAYS_WELL
    )
    case = Case(
        "spec_decode_poor",
        f"The model accepts {100 * ratio:.0f} % of the drafted tokens: that still pays while the "
        "batch is small."
        if pays
        else f"Speculation does not pay: the model accepts {100 * ratio:.0f} % of the drafted "
        "tokens.",
        _spec_lever(drafts if settled else None, pays=pays),
        ("6.6", "9.3"),
        Severity.INFO if pays else Severity.WARNING,
        log_odds=0.0,
    )
    case.weigh(
        "spec_acceptance_ratio",
        ratio,
        wanted,
        2.2,
        f"{100 * ratio:.0f} % of {drafts_per_s:.0f} drafted tokens a second are accepted",
        below=True,
    )
    if drafts is not None and settled:
        _weigh_drafts(case, drafts, pays=pays)
    if bound is not None and loaded:
        case.weigh(bound.signal, bound.value, bound.threshold, 0.4, bound.text)
    if running >= LARGE_BATCH / 2:
        case.weigh(
            "running_avg",
            running,
            LARGE_BATCH,
            0.3,
            f"batch of {running:.0f}: verification costs grow",
        )
    return case.close()


def _surely_below(bound: float, ratio: float | None, facts: Facts, share: float) -> bool:
    """Whether acceptance on this share of the window is below a bound by more than the few requests
    in it differ: tokens of one request are accepted alike, however many they are."""
    started = facts.get("arrival_per_s") * share * facts.window_s
    requests = facts.get("running_avg") + started
    return ratio is not None and requests > 0 and ratio + REQUESTS_DIFFER / sqrt(requests) < bound


def _weigh_drafts(case: Case, drafts: Drafts, *, pays: bool) -> None:
    per_draft = drafts.accepted[-1]
    even = break_even_acceptance_ratio(
        draft_tokens=drafts.tokens, draft_cost_ratio=drafts.cost_ratio
    )
    needs = "" if even is None else f"; a small draft model breaks even at {100 * even:.0f} % each"
    told = f"{per_draft:.2f} of {drafts.tokens} drafted tokens are accepted a verification{needs}"
    if pays:
        case.weigh("spec_accepted_per_draft_tokens", per_draft, None, PAYS_LOG_ODDS, told)
    else:
        weight = 0.6 if per_draft < 1 else 0.0
        signal = "spec_accepted_per_draft_tokens"
        case.weigh(signal, per_draft, 1.0, weight, told, below=True)
    if drafts.by_position:
        each = [now - before for before, now in pairwise(drafts.accepted)]
        told = ", ".join(f"{100 * share:.0f}" for share in each)
        text = f"by position {told} % are accepted"
        case.weigh("spec_acceptance_pos0_ratio", each[0], None, 0.0, text)


def _spec_lever(drafts: Drafts | None, *, pays: bool) -> str:
    """Keep, shorten, retune or disable."""
    shorter = drafts.shorter if drafts is not None else None
    if drafts is not None and shorter is not None:
        return f"Draft {shorter} token{'s' if shorter > 1 else ''} at a time, not {drafts.tokens}."
    if pays:
        return "Keep it while batches are small, and retune the draft for this traffic."
    if drafts is not None and drafts.speedup(drafts.best) < drafts.worth:
        return "Disable speculation (drop --speculative-config): no length of draft pays."
    return (
        "Disable speculation (drop --speculative-config), draft fewer tokens, or retune the draft."
    )


def adapter_thrash(facts: Facts) -> Cause | None:
    """LoRA adapters compete for too few slots: requests are held back though there is capacity."""
    slots, average = facts.values.get("lora_max"), facts.get("waiting_deferred_avg")
    held = max(facts.get("waiting_deferred"), average)
    changes_per_s = facts.recent.get("lora_change_per_s") or 0.0
    swapping = changes_per_s * RECENT_SHARE * facts.window_s >= SWAPPED_SETS - ALMOST
    on_and_off = average >= DEFERRED_AVG and swapping
    if slots is None or not (facts.held("deferred", DEFERRED_HELD_S) or on_and_off):
        return None
    case = Case(
        "adapter_thrash",
        f"Adapters compete for {slots:.0f} slot{'s' if slots != 1 else ''}: {held:.0f} "
        "requests are held back while the batch has room.",
        "Raise --max-loras (memory allowing), lower the adapters' rank, or spread adapters over "
        "replicas.",
        ("2.5", "8.5", "9.3"),
        Severity.WARNING,
        log_odds=0.3,
    )
    case.weigh(
        "waiting_deferred", average, 1.0, 1.4, f"{average:.1f} requests are held back on average"
    )
    changes = facts.get("lora_change_per_s")
    if changes > 0.1:
        case.weigh("lora_change_per_s", changes, 0.1, 0.6, "the running adapters keep changing")
    running = facts.values.get("lora_running")
    if running is not None and running >= slots:
        case.weigh("lora_running", running, slots, 0.6, "all adapter slots are taken")
    if len(facts.adapters) > 1:
        turns = sum(one.turns for one in facts.adapters)
        case.weigh("lora_turns", turns, None, 0.0, _turns_words(facts.adapters))
    usage = facts.get("kv_usage_avg_ratio")
    if usage > 0.9:
        case.weigh("kv_usage_avg_ratio", usage, 0.9, -0.8, "the KV cache is full as well")
    return case.close()


def _turns_words(adapters: Sequence[AdapterUse]) -> str:
    """Who takes turns how often, and who has waited longest for the next one."""
    most = ", ".join(f"{one.name} {one.turns}" for one in adapters[:TOLD_ADAPTERS])
    more = len(adapters) - TOLD_ADAPTERS
    rest = f" and {more} more" if more > 0 else ""
    longest = max(adapters, key=lambda one: one.unseen_s)
    return (
        f"adapters came into a slot so often, at least: {most}{rest}; {longest.name} has not had "
        f"one for {longest.unseen_s:.0f} s"
    )
