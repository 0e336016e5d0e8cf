"""Causes in optional features: speculative decoding and LoRA adapters. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kneewatch.diagnose.causes.bottleneck import WHY, bound_of, bound_terms, is_bound
from kneewatch.diagnose.causes.common_conditions import (
    ARRIVALS,
    BATCH,
    KV_USAGE,
    QUEUE_RULES,
    QUEUES,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.lora_adapters import AdapterUse
from kneewatch.diagnose.causes.record import CauseRecord, Form, Level, Sidecar, term
from kneewatch.diagnose.learned.derived_signals import RECENT_SHARE
from kneewatch.diagnose.sizing.speed.speculation import (
    break_even_acceptance_ratio,
    per_token_acceptance_ratio,
)
from kneewatch.rules.baseline import ITL, LOAD, TTFT
from kneewatch.rules.conditions import ALWAYS, PYTHON, Condition, Number, Quantity
from kneewatch.rules.quantities import (
    Exposed,
    FirstOf,
    Held,
    Recent,
    Signal,
    SquareRoot,
    WindowSeconds,
)
from kneewatch.rules.rule import Severity

DRAFT_COST_RATIO = 0.1
"""One step of a small draft over one of its target (guide 6.6); n-grams cost about nothing."""

NGRAM_COST_RATIO = 0.02
PAYS_FROM = 0.5
"""Below it the guide says to switch speculation off or to retune it (9.3)."""

WORTH_SPEEDUP = 1.02
WORTH_AT_BEST = 1.1
"""Where verifying is taken to cost nothing, for its cost is not known, a gain of less than a tenth
is none: docs/lab.md has a best case of 1.01 that was 0.9 times the speed."""

LONGEST_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens drafted at a time, and what of them is accepted.

    `accepted` is the mean number accepted when so many are drafted, at each number up to that;
    `verify` what a verification of so many takes over a plain step: 1 while bandwidth binds, more
    the larger the batch. Shapes: both (tokens + 1,). `by_position`: accepted was counted so, and
    not worked out as if each token had the same chance. `worth`: the least speedup that is a gain.
    """

    tokens: int
    accepted: Sequence[float]
    cost_ratio: float
    verify: Sequence[float]
    by_position: bool
    worth: float

    def share(self, tokens: int) -> float:
        """Accepted over drafted tokens at a length of the draft."""
        return self.accepted[tokens] / tokens

    def speedup(self, tokens: int) -> float:
        """Against no speculation (guide 6.6)."""
        return (1 + self.accepted[tokens]) / (self.verify[tokens] + tokens * self.cost_ratio)

    @property
    def best(self) -> int:
        """The length that pays most, 1 at least."""
        return max(range(1, self.tokens + 1), key=self.speedup)

    @property
    def shorter(self) -> int | None:
        """Of the shorter drafts that are accepted well enough the best, where it pays more than
        this one; else None."""
        wanted = [some for some in range(1, self.tokens) if self.share(some) >= PAYS_FROM]
        best = max(wanted, key=self.speedup, default=self.tokens)
        least = max(self.speedup(self.tokens), self.worth)
        return best if best < self.tokens and self.speedup(best) > least else None


def drafts_of(
    values: Mapping[str, float | None],
    *,
    tokens: int | None = None,
    cost_ratio: float = DRAFT_COST_RATIO,
    verify: Sequence[float] = (),
) -> Drafts | None:
    """From vLLM's counts by position where they are there, else as if each token had one chance.

    `tokens` is the stated length of a draft; None takes the measured one. `verify` is 1 throughout
    unless it is given. None where nothing is drafted, or no length makes sense.
    """
    share = values.get("spec_acceptance_ratio")
    per_draft = values.get("spec_accepted_per_draft_tokens")
    if tokens is None and share and per_draft:
        # A share next to nothing would make any length of it.
        tokens = round(min(per_draft / share, LONGEST_DRAFT_TOKENS + 1))
    if share is None or tokens is None or not 1 <= tokens <= LONGEST_DRAFT_TOKENS:
        return None
    counts = [values.get(f"spec_acceptance_pos{at}_ratio") for at in range(tokens)]
    known = [count for count in counts if count is not None]
    by_position = len(known) == tokens
    if not by_position:
        one = per_token_acceptance_ratio(
            accepted_share_ratio=min(1.0, max(0.0, share)), draft_tokens=tokens
        )
        known = [one ** (at + 1) for at in range(tokens)]
    measured = len(verify) == tokens + 1
    return Drafts(
        tokens,
        tuple(accumulate(known, initial=0.0)),
        cost_ratio,
        verify if measured else (1.0,) * (tokens + 1),
        by_position,
        WORTH_SPEEDUP if measured else WORTH_AT_BEST,
    )


# --- Causes in what a server has only when asked: speculation, adapters ---------------------------


MEAN, RECENT = Signal("spec_acceptance_ratio"), Recent("spec_acceptance_ratio")
ACCEPTED = FirstOf((RECENT, MEAN))
PER_DRAFT = Signal("spec_accepted_per_draft_tokens")
DRAFTED_PER_S = Signal("spec_draft_tokens_per_s")
LARGE_BATCH = 32.0
SPEC_AIM = 0.6
PAYS_WELL = 1.5
"""The estimate is the best case: what gives half as much again does pay."""

LOADED = is_bound("compute")
WANTED = Sidecar(
    lambda facts: SPEC_AIM if _loaded(facts) else None,
    WHY,
    f"{SPEC_AIM:g} while the GPUs are compute-bound",
)
"""The guide's aim (9.3), where each rejected token costs arithmetic that is short."""


def _loaded(facts: Facts) -> bool:
    bound = bound_of(facts)
    return bound is not None and bound.kind == "compute"


def _surely_below(bound: Quantity | float, ratio: Quantity, share: float) -> Condition:
    """Whether acceptance on this share of the window is below a bound by more than the few requests
    in it differ (0.25, half of the most that a share can have): tokens of one request are accepted
    alike, however many they are."""
    started = WindowSeconds(share) * ARRIVALS.otherwise(0.0)
    requests = BATCH.otherwise(0.0) + started
    return ratio + 0.25 / SquareRoot(requests) < bound


def _poor(bound: Quantity | float) -> Condition:
    surely = _surely_below(bound, RECENT, RECENT_SHARE) | _surely_below(bound, MEAN, 1.0)
    return (ACCEPTED < bound) & surely


FALLEN = _surely_below(MEAN, RECENT, RECENT_SHARE).assume(unknown=False)
"""The window's drafts are in part from before a fall that its newest part shows."""

SPEEDUP = (1.0 + PER_DRAFT) / (1.0 + DRAFT_COST_RATIO * PER_DRAFT / MEAN)
"""Over no speculation, of drafts of accepted over share tokens, where verifying costs nothing."""

PAYS = ((SPEEDUP >= PAYS_WELL) & (BATCH < LARGE_BATCH) & ~FALLEN & ~LOADED).assume(unknown=False)


def _settled(facts: Facts) -> Drafts | None:
    """What is known of the drafts, where the window's are those of now."""
    drafts = drafts_of(facts.values)
    wanted = SPEC_AIM if _loaded(facts) else PAYS_FROM
    low = drafts is not None and drafts.share(drafts.tokens) < wanted
    return drafts if low and not _FALLEN(facts) else None


_FALLEN = FALLEN.compile(PYTHON)


def _per_draft(facts: Facts) -> str:
    drafts = _settled(facts)
    if drafts is None:
        return f"{facts.get('spec_accepted_per_draft_tokens'):.2f} draft tokens accepted per step"
    even = break_even_acceptance_ratio(
        draft_tokens=drafts.tokens, draft_cost_ratio=drafts.cost_ratio
    )
    needs = "" if even is None else f"; a small draft model breaks even at {100 * even:.0f}% each"
    return f"{drafts.accepted[-1]:.2f} of {drafts.tokens} draft tokens accepted{needs}"


def _by_position(facts: Facts) -> str:
    drafts = _settled(facts)
    if drafts is None:
        return ""
    each = [after - before for before, after in pairwise(drafts.accepted)]
    return f"accepted by position: {', '.join(f'{100 * share:.0f}%' for share in each)}"


def _first_position(facts: Facts) -> float | None:
    drafts = _settled(facts)
    return drafts.accepted[1] if drafts is not None and drafts.by_position else None


def _lever(facts: Facts) -> str:
    """Keep, shorten, retune or disable."""
    drafts = _settled(facts)
    shorter = drafts.shorter if drafts is not None else None
    if drafts is not None and shorter is not None:
        return f"Draft {shorter} token{'s' if shorter > 1 else ''} at a time, not {drafts.tokens}."
    if _PAYS(facts):
        return "Keep it while batches are small, and retune the draft for this traffic."
    if drafts is not None and drafts.speedup(drafts.best) < drafts.worth:
        return "Disable speculation (drop --speculative-config): no draft length pays."
    return (
        "Disable speculation (drop --speculative-config), draft fewer tokens, or retune the draft."
    )


_PAYS = PAYS.compile(PYTHON)

SPEC_DECODE_POOR = CauseRecord(
    id="spec_decode_poor",
    title="Speculative decoding rejected most drafts",
    means="Fewer of the draft tokens are accepted than pays at this load; a note where the draft "
    "still pays.",
    forms=(
        Form(
            gate=(_poor(PAYS_FROM) | _poor(WANTED)) & (DRAFTED_PER_S >= 5.0),
            start=Number(0.0),
            terms=(
                term(
                    ACCEPTED,
                    FirstOf((WANTED, Number(PAYS_FROM))),
                    2.2,
                    "{value:%} of {spec_draft_tokens_per_s} draft tokens/s are accepted",
                    below=True,
                    signal="spec_acceptance_ratio",
                ),
                term(
                    PER_DRAFT,
                    1.0,
                    0.6,
                    _per_draft,
                    when=~FALLEN & (PER_DRAFT < 1.0) & ~PAYS,
                    below=True,
                ),
                term(
                    PER_DRAFT,
                    None,
                    0.0,
                    _per_draft,
                    when=~FALLEN & (PER_DRAFT >= 1.0) & ~PAYS,
                ),
                term(PER_DRAFT, None, -0.8, _per_draft, when=PAYS),
                term(
                    Sidecar(
                        _first_position,
                        "acceptance by position is not recorded",
                        "the acceptance of the first draft token",
                    ),
                    None,
                    0.0,
                    _by_position,
                    signal="spec_acceptance_pos0_ratio",
                    sidecar="acceptance by position is not recorded",
                ),
                bound_terms("compute", 0.4)[0],
                term(
                    BATCH,
                    LARGE_BATCH,
                    0.3,
                    "batch of {value}: verification costs grow",
                    when=BATCH >= LARGE_BATCH / 2,
                ),
            ),
            levels=(Level(Severity.WARNING, ~PAYS), Level(Severity.INFO)),
            say=(
                (
                    PAYS,
                    "{accepted:%} of the draft tokens are accepted: that still pays while the "
                    "batch is small.",
                ),
                (
                    ALWAYS,
                    "Speculation does not pay: {accepted:%} of the draft tokens are accepted.",
                ),
            ),
            words=(("accepted", ACCEPTED),),
            summary="Speculation does not pay: most drafted tokens are rejected",
            lever=_lever,
            action="Disable speculation, draft fewer tokens, or retune the draft.",
            guide=("6.6", "9.3"),
        ),
    ),
    explains=("decode_bound", "slo_conflict"),
    covers=("SPEC-ACCEPT",),
    moves=(ITL,),
    levers=("shorter_draft", "no_speculation"),
)

DEFERRED, DEFERRED_AVG = Signal("waiting_deferred"), Signal("waiting_deferred_avg")
CHANGES = Signal("lora_change_per_s")
SLOTS, TAKEN = Signal("lora_max"), Signal("lora_running")
TAKING_TURNS = (DEFERRED_AVG >= 0.5) & (
    Recent("lora_change_per_s") * WindowSeconds(RECENT_SHARE) >= 3.0 - 1e-6
)
"""Some held back on average while three sets of adapters took turns on the window's newest part (a
count loses a little on its way through a rate): one set that comes and goes, with the empty one
between, are two."""

TOLD_ADAPTERS = 4


def _held_back(facts: Facts) -> str:
    slots = facts.get("lora_max")
    held = max(facts.get("waiting_deferred"), facts.get("waiting_deferred_avg"))
    return (
        f"Adapters compete for {slots:.0f} slot{'s' if slots != 1 else ''}: {held:.0f} requests "
        "are held back while the batch has room."
    )


ADAPTER_THRASH = CauseRecord(
    id="adapter_thrash",
    title="LoRA adapters swapped in and out",
    means="LoRA adapters compete for too few slots: requests are held back though there is "
    "capacity.",
    forms=(
        Form(
            gate=(Held("deferred", DEFERRED >= 1.0, Number(10.0)) | TAKING_TURNS)
            & Exposed("lora_requests_info", "lora_max"),
            start=Number(0.3),
            terms=(
                term(
                    DEFERRED_AVG.otherwise(0.0),
                    1.0,
                    1.4,
                    "{value:.1f} requests held back on average",
                    signal="waiting_deferred",
                ),
                term(CHANGES, 0.1, 0.6, "the running adapters keep changing", when=CHANGES > 0.1),
                term(
                    TAKEN,
                    SLOTS,
                    0.6,
                    "all adapter slots are taken",
                    when=TAKEN >= SLOTS,
                    sidecar="the number of slots stands inside a label",
                ),
                term(
                    Sidecar(
                        lambda facts: _turns(facts),
                        "turns follow from labels over time",
                        "how often adapters took turns",
                    ),
                    None,
                    0.0,
                    lambda facts: _turns_words(facts.adapters),
                    signal="lora_turns",
                    sidecar="which adapters take turns follows from labels over time",
                ),
                term(KV_USAGE, 0.9, -0.8, "the KV cache is full as well", when=KV_USAGE > 0.9),
            ),
            levels=(Level(Severity.WARNING),),
            say=((ALWAYS, _held_back),),
            summary="LoRA adapters compete for too few slots",
            lever="Raise --max-loras (memory allowing), lower the adapters' rank, or spread "
            "adapters over replicas.",
            guide=("2.5", "8.5", "9.3"),
        ),
    ),
    explains=QUEUES,
    covers=("LORA-WAIT", "LORA-CHANGE", *QUEUE_RULES),
    moves=(TTFT, LOAD),
    symptoms=("S7",),
    levers=("more_adapter_slots", "adapter_routing"),
    enough="waiting_deferred",
    onset_s=Number(0.0),
)


def _turns(facts: Facts) -> float | None:
    return sum(each.turns for each in facts.adapters) if len(facts.adapters) > 1 else None


def _turns_words(adapters: Sequence[AdapterUse]) -> str:
    """Who takes turns how often, and who has waited longest for the next one."""
    most = ", ".join(f"{one.name} {one.turns}" for one in adapters[:TOLD_ADAPTERS])
    more = len(adapters) - TOLD_ADAPTERS
    rest = f" and {more} more" if more > 0 else ""
    longest = max(adapters, key=lambda one: one.unseen_s)
    return (
        f"adapters took a slot at least this often: {most}{rest}; {longest.name} has not had one "
        f"for {longest.unseen_s:.0f} s"
    )
