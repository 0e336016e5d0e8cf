"""Causes in optional features: speculative decoding and LoRA adapters. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from msgspec import Struct

from kneewatch.collector.engines.engine_kind import ADAPTER_SLOTS, SPECULATION
from kneewatch.diagnose.causes.bottleneck import bound_of, bound_terms, is_bound
from kneewatch.diagnose.causes.common_conditions import (
    ARRIVALS,
    BATCH,
    DEFERRED_AVG,
    DEFERRED_HELD,
    FIRST_TOKENS_VERY_LATE,
    KV_USAGE,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Computed, Form, cause, term
from kneewatch.diagnose.deployment.server_state import AdapterUse
from kneewatch.diagnose.speculation import per_token_acceptance_ratio
from kneewatch.rules.conditions import Condition, FirstOf, Number, Quantity
from kneewatch.rules.formatting import listed, percent, span
from kneewatch.rules.quantities import RECENT_SHARE, Live, Recent, WindowSeconds
from kneewatch.rules.rule import Severity

DRAFT_COST_RATIO = 0.1
"""Time of one step of a small draft model, divided by one step of its target model (guide 6.6).

N-gram drafts cost next to nothing.
"""

NGRAM_COST_RATIO = 0.02
PAYS_FROM = 0.5
"""Below this acceptance, the guide (9.3) turns speculation off or retunes it."""

WORTH_SPEEDUP = 1.02
WORTH_AT_BEST = 1.1
"""Least speedup worth having if the cost of verification is unknown and taken as 0.

In docs/explanation/lab.md an estimate of 1.01x without that cost really ran at 0.9x.
"""

LONGEST_DRAFT_TOKENS = 64
RIDGE_TOKENS = 300.0
"""From this number of tokens in a step on, compute is the limit instead of memory.

FLOP/s divided by bytes/s of an H100 in 16 bits (990e12 / 3.35e12). Earlier and later GPUs have
about the same ratio.
"""


class Drafts(Struct, frozen=True):
    """Draft tokens per step, and how many of them are accepted.

    - `accepted[n]`: mean number of accepted tokens if n tokens are drafted.
    - `verify[n]`: time of a step that verifies n tokens, divided by a plain step. It is 1 while
      bandwidth is the limit, and more for larger batches.
    - `by_position`: acceptance was measured by position; otherwise every token has the same chance.
    - `worth`: the least speedup that counts as a gain.

    Shape of `accepted` and `verify`: (tokens + 1,).
    """

    tokens: int
    accepted: Sequence[float]
    cost_ratio: float
    verify: Sequence[float]
    by_position: bool
    worth: float

    def share(self, tokens: int) -> float:
        """Accepted tokens divided by drafted tokens, for drafts of this length."""
        return self.accepted[tokens] / tokens

    def speedup(self, tokens: int) -> float:
        """Estimated speed as a multiple of the speed without speculation."""
        return (1 + self.accepted[tokens]) / (self.verify[tokens] + tokens * self.cost_ratio)

    @property
    def best(self) -> int:
        """The draft length with the highest speedup, at least 1."""
        return max(range(1, self.tokens + 1), key=self.speedup)

    @property
    def shorter(self) -> int | None:
        """The best shorter draft length with enough acceptance; None if none is faster than the
        present one."""
        lengths = [tokens for tokens in range(1, self.tokens) if self.share(tokens) >= PAYS_FROM]
        best = max(lengths, key=self.speedup, default=self.tokens)
        least = max(self.speedup(self.tokens), self.worth)
        return best if best < self.tokens and self.speedup(best) > least else None


def drafts_of(
    values: Mapping[str, float | None],
    *,
    newest: float | None = None,
    tokens: int | None = None,
    cost_ratio: float = DRAFT_COST_RATIO,
    verify: Sequence[float] = (),
) -> Drafts | None:
    """Drafts with vLLM's acceptance per position, or else with the same chance for every token.

    `newest` is the acceptance at the end of the window; None uses that of the whole window.
    `tokens` is the stated draft length; None uses the measured one. `verify` is by default what the
    cause assumes for the batch. None if nothing is drafted or the length is implausible.
    """
    share = values.get("spec_acceptance_ratio")
    per_draft = values.get("spec_accepted_per_draft_tokens")
    if tokens is None and share and per_draft:
        # With almost no acceptance the quotient could be any length.
        tokens = round(min(per_draft / share, LONGEST_DRAFT_TOKENS + 1))
    if share is None or tokens is None or not 1 <= tokens <= LONGEST_DRAFT_TOKENS:
        return None
    counts = [values.get(f"spec_acceptance_pos{at}_ratio") for at in range(tokens)]
    accepted = [count for count in counts if count is not None]
    by_position = len(accepted) == tokens
    now = share if newest is None else newest
    if by_position:
        scale = now / share if share else 1.0
        accepted = [min(1.0, scale * count) for count in accepted]
    else:
        chance = per_token_acceptance_ratio(
            accepted_share_ratio=min(1.0, max(0.0, now)), draft_tokens=tokens
        )
        accepted = [chance ** (at + 1) for at in range(tokens)]
    measured = len(verify) == tokens + 1
    batch = values.get("running_avg") or 0.0
    assumed = [max(1.0, batch * (1 + drafted) / RIDGE_TOKENS) for drafted in range(tokens + 1)]
    return Drafts(
        tokens,
        tuple(accumulate(accepted, initial=0.0)),
        cost_ratio,
        verify if measured else assumed,
        by_position,
        WORTH_SPEEDUP if measured else WORTH_AT_BEST,
    )


# --- Speculative decoding -------------------------------------------------------------------------

MEAN, RECENT = Live("spec_acceptance_ratio"), Recent("spec_acceptance_ratio")
ACCEPTED = FirstOf((RECENT, MEAN))
PER_DRAFT = Live("spec_accepted_per_draft_tokens")
DRAFTED_PER_S = Live("spec_draft_tokens_per_s")
LARGE_BATCH = 32.0
SPEC_AIM = 0.6
LOADED = is_bound("compute")
AIM = Computed(
    lambda facts: SPEC_AIM if _loaded(facts) else None,
    f"{SPEC_AIM:g} while the GPUs are compute-bound",
)
"""Acceptance that the guide aims at (9.3) if compute is the limit: rejected tokens cost compute."""


def _loaded(facts: Facts) -> bool:
    bound = bound_of(facts)
    return bound is not None and bound.kind == "compute"


def _surely_below(bound: Quantity | float, ratio: Quantity, share: float) -> Condition:
    """The condition that acceptance over a share of the window is certainly below a bound.

    Certainly means by more than chance. The margin is half of the greatest possible standard
    deviation of a share. It counts requests, not tokens, because the tokens of one request are
    accepted alike.
    """
    started = WindowSeconds(share) * ARRIVALS.otherwise(0.0)
    requests = BATCH.otherwise(0.0) + started
    return ratio + 0.25 / requests.root() < bound


def _poor(bound: Quantity | float) -> Condition:
    surely = _surely_below(bound, RECENT, RECENT_SHARE) | _surely_below(bound, MEAN, 1.0)
    return (ACCEPTED < bound) & surely


FALLEN = _surely_below(MEAN, RECENT, RECENT_SHARE).assume(unknown=False)
"""Acceptance fell within the window, so the window's mean still contains drafts from before."""

DRAFT_TOKENS = PER_DRAFT / MEAN
NEWEST = ACCEPTED * DRAFT_TOKENS
"""Accepted tokens per draft at the newest acceptance."""

CHECK_COST = (BATCH.otherwise(0.0) * (1.0 + DRAFT_TOKENS) / RIDGE_TOKENS).at_least(1.0)
"""Time of a step that verifies the batch's drafts, divided by a plain step."""

SPEEDUP = (1.0 + NEWEST) / (CHECK_COST + DRAFT_COST_RATIO * DRAFT_TOKENS)
"""Estimated speed divided by the speed without speculation, at this batch and newest acceptance."""

SURE_SPEEDUP = 1.2
"""From this estimate on, speculation certainly pays.

The estimate assumes that a draft token costs a tenth of a step. If it costs a fifth, an estimate of
1.2x for drafts of three tokens is no gain.
"""

PAYS = ((SPEEDUP >= SURE_SPEEDUP) & ~LOADED).assume(unknown=False)
PAYS_LITTLE = ((SPEEDUP >= WORTH_AT_BEST) & ~LOADED).assume(unknown=False)
PAYS_NOT = ((SPEEDUP < WORTH_AT_BEST) & ~LOADED).assume(unknown=False)


def _settled(facts: Facts, newest: float | None = None) -> Drafts | None:
    """The window's drafts; None if acceptance fell within the window, or is not below the aim."""
    drafts = drafts_of(facts.values, newest=newest)
    aim = SPEC_AIM if _loaded(facts) else PAYS_FROM
    low = drafts is not None and drafts.share(drafts.tokens) < aim
    return drafts if low and not has_fallen(facts) else None


has_fallen, _NEWEST = FALLEN.python(), NEWEST.read()


def newest_acceptance(facts: Facts) -> float | None:
    """The acceptance at the end of the window; None if unknown."""
    return facts.recent.get("spec_acceptance_ratio")


def _per_draft(facts: Facts) -> str:
    drafts = _settled(facts, newest_acceptance(facts))
    if drafts is None:
        return f"{_NEWEST(facts) or 0.0:.2f} draft tokens accepted per step"
    return f"{drafts.accepted[-1]:.2f} of {drafts.tokens} draft tokens accepted"


def _by_position(facts: Facts) -> str:
    drafts = _settled(facts)
    if drafts is None:
        return ""
    shares = [after - before for before, after in pairwise(drafts.accepted)]
    return f"accepted by position: {', '.join(f'{percent(share)}' for share in shares)}"


def _first_position(facts: Facts) -> float | None:
    drafts = _settled(facts)
    return drafts.accepted[1] if drafts is not None and drafts.by_position else None


def _lever(facts: Facts) -> str:
    """Whether to keep, shorten, retune or disable speculation."""
    drafts = _settled(facts, newest_acceptance(facts))
    shorter = drafts.shorter if drafts is not None else None
    if drafts is not None and shorter is not None:
        return f"Draft {shorter} token{'s' if shorter > 1 else ''} at a time, not {drafts.tokens}."
    if _PAYS(facts):
        return "Keep it at this batch, and retune the draft for this traffic."
    if drafts is not None and drafts.speedup(drafts.best) < drafts.worth:
        return f"Disable speculation (drop {SPECULATION}): no draft length pays."
    return f"Disable speculation (drop {SPECULATION}), draft fewer tokens, or retune the draft."


_PAYS = PAYS.python()

SPEC_DECODE_POOR = cause(
    "spec_decode_poor",
    Form(
        gate=(_poor(PAYS_FROM) | _poor(AIM)) & (DRAFTED_PER_S >= 5.0),
        terms=(
            term(
                ACCEPTED,
                FirstOf((AIM, Number(PAYS_FROM))),
                2.2,
                "{value:%} of {spec_draft_tokens_per_s} draft tokens/s are accepted",
                below=True,
            ),
            *(
                term(
                    NEWEST.otherwise(0.0),
                    1.0 if below else None,
                    weight,
                    _per_draft,
                    when=when,
                    below=below,
                    signal="spec_accepted_per_draft_tokens",
                )
                for weight, when, below in (
                    (0.6, ~FALLEN & (NEWEST < 1.0) & ~PAYS, True),
                    (0.0, ~FALLEN & (NEWEST >= 1.0) & ~PAYS, False),
                    (-0.8, PAYS, False),
                )
            ),
            term(
                Computed(_first_position, "the acceptance of the first draft token"),
                None,
                0.0,
                _by_position,
                signal="spec_acceptance_pos0_ratio",
            ),
            bound_terms("compute", 0.4)[0],
            term(
                BATCH,
                LARGE_BATCH,
                0.3,
                "batch of {value}: large batches make verification dearer",
                when=BATCH >= LARGE_BATCH / 2,
            ),
        ),
        levels=((Severity.WARNING, ~PAYS),),
        severity=Severity.INFO,
        instead=(
            (
                PAYS,
                "Draft acceptance is low ({accepted:%}), but speculation still pays: an "
                "estimated {speedup:.2f}x the speed without it at this batch.",
            ),
            (
                PAYS_LITTLE,
                "Speculation gains little: {accepted:%} of draft tokens are accepted, at "
                "best an estimated {speedup:.2f}x the speed without it at this batch.",
            ),
            (
                PAYS_NOT,
                "Speculation does not pay: {accepted:%} of draft tokens are accepted, an "
                "estimated {speedup:.2f}x the speed without it at this batch.",
            ),
            (
                LOADED & ~FALLEN,
                "Draft acceptance of {accepted:%} is low for a compute-bound GPU, where each "
                "rejected token costs time of other requests.",
            ),
        ),
        say="Draft acceptance is low: {accepted:%} of draft tokens are accepted.",
        words=(("accepted", ACCEPTED), ("speedup", SPEEDUP)),
        lever=_lever,
    ),
    unusual=FALLEN,
)

# --- LoRA adapters --------------------------------------------------------------------------------

CHANGES = Live("lora_change_per_s")
SLOTS, TAKEN = Live("lora_max"), Live("lora_running")
TAKING_TURNS = (DEFERRED_AVG >= 0.5) & (
    Recent("lora_change_per_s") * WindowSeconds(RECENT_SHARE) >= 3.0 - 1e-6
)
"""Requests waited while at least three sets of adapters took turns recently.

Three, because a single set that comes and goes makes two changes. The 1e-6 is needed because a
count computed from a rate is slightly low.
"""

ADAPTERS_NAMED = 4


def _waiting_for_slot(facts: Facts) -> str:
    slots = facts.get("lora_max")
    deferred = max(facts.get("waiting_deferred"), facts.get("waiting_deferred_avg"))
    return (
        f"LoRA adapters compete for {slots:.0f} slot{'s' if slots != 1 else ''}: "
        f"{deferred:.0f} {'request is' if round(deferred) == 1 else 'requests are'} waiting for "
        f"one."
    )


ADAPTER_THRASH = cause(
    "adapter_thrash",
    Form(
        gate=(DEFERRED_HELD | TAKING_TURNS) & Live("lora_max").known,
        start=Number(0.3),
        terms=(
            term(
                DEFERRED_AVG.otherwise(0.0),
                1.0,
                1.4,
                "{value:.1f} requests waiting for a slot on average",
                signal="waiting_deferred",
            ),
            term(
                CHANGES, 0.1, 0.6, "the set of running adapters keeps changing", when=CHANGES > 0.1
            ),
            term(TAKEN, SLOTS, 0.6, "all adapter slots are taken", when=TAKEN >= SLOTS),
            term(
                Computed(lambda facts: _turns(facts), "the number of adapter turns"),
                None,
                0.0,
                lambda facts: _turns_text(facts.adapters),
                signal="lora_turns",
            ),
            term(KV_USAGE, 0.9, -0.8, "the KV cache is full as well", when=KV_USAGE > 0.9),
        ),
        levels=((Severity.CRITICAL, FIRST_TOKENS_VERY_LATE),),
        say=_waiting_for_slot,
        lever=f"Raise {ADAPTER_SLOTS} (if memory allows), lower the adapters' rank, or spread "
        "adapters over replicas.",
    ),
)


def _turns(facts: Facts) -> float | None:
    return sum(adapter.turns for adapter in facts.adapters) if len(facts.adapters) > 1 else None


def _turns_text(adapters: Sequence[AdapterUse]) -> str:
    """The adapters with the most turns, and the adapter that has not run for longest, as text."""
    most = listed([f"{use.name} {use.turns}" for use in adapters], ADAPTERS_NAMED)
    longest = max(adapters, key=lambda use: use.unseen_s)
    return (
        f"least number of turns in a slot: {most}; {longest.name} last ran "
        f"{span(longest.unseen_s)} ago"
    )
