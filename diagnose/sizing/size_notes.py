"""What to know before trusting a sizing: doubts about memory and load, in words. Pure."""

from __future__ import annotations

from kneewatch.diagnose.sizing.memory.budget import Memory
from kneewatch.diagnose.sizing.memory.draft import Draft
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.memory.vllm_defaults import LATEST, V1
from kneewatch.diagnose.sizing.question import Question
from kneewatch.diagnose.sizing.speed.efficiency import SOURCE
from kneewatch.diagnose.sizing.speed.roofline import Performance
from kneewatch.diagnose.sizing.steps import figure

# A stated rate this far from the predicted one is worth a second look.
_APART = 1.5
_TIGHT_RATIO = 0.99
_OLDEST = (0, 6, 0)
_MOST_RANKS = 8


def memory_notes(answer: Memory, concurrency: float) -> list[str]:
    """Doubts about what fits, with `concurrency` requests wanted on each engine."""
    notes = _sources(answer)
    setup, held, layout = answer.setup, answer.concurrency, answer.layout
    blocks = layout.blocks(answer.available_bytes.expected)
    if not answer.holds_one:
        longest = answer.longest_that_fits
        way_out = f"--max-model-len {longest} would" if longest else "no length would"
        notes.append(
            f"vLLM would not start: one request of {setup.longest_tokens:,} tokens does not fit "
            f"beside the block that vLLM keeps; {way_out}"
        )
    elif blocks * _TIGHT_RATIO <= layout.request_blocks(setup.longest_tokens):
        notes.append("the longest request takes almost the whole cache: it will wait for ever")
    if answer.available_bytes.expected > 0 > answer.available_bytes.low:
        notes.append("the band reaches below nothing: it may not start")
    if held.low < concurrency <= held.expected:
        notes.append(f"not for certain: at the band's lower end {figure(held.low)} requests fit")
    elif held.expected < concurrency <= held.high:
        notes.append(f"it may fit: at the band's upper end {figure(held.high)} requests do")
    if not setup.defaults.capacity_by_context and len(layout.groups) > 1:
        notes.append(
            "kv_capacity_tokens is what this version logs; for layers of several kinds that is no "
            "capacity: kv_tokens_at_context is"
        )
    return notes


def _sources(answer: Memory) -> list[str]:
    """Doubts about what the figures are from."""
    setup, notes = answer.setup, list[str]()
    own = setup.model.max_context_tokens
    if own and setup.longest_tokens > own:
        notes.append(
            f"--max-model-len is above the {own:,} tokens of the model: vLLM refuses that unless "
            "rope scaling or an override allows it"
        )
    if setup.gpu is not None and setup.gpu.memory_is_estimated:
        notes.append(f"{setup.gpu.id}: memory {setup.gpu.memory_source}")
    if setup.model.multimodal and setup.version < V1:
        notes.append(
            "V0 profiled a vision model with the largest images: tens of GiB may be missing here"
        )
    if not _OLDEST <= setup.version <= LATEST:
        notes.append(
            "no start-up of that vLLM version is known: its nearest known neighbour counts"
        )
    if setup.parallel.tensor > _MOST_RANKS:
        notes.append("overhead beyond eight tensor-parallel ranks was never measured")
    if setup.weights_bytes is not None and (setup.adapters or setup.draft):
        notes.append("adapters and draft come on top of the stated weights")
    if setup.draft is not None:
        notes += _draft_doubts(setup.draft, setup)
    own_scheme = setup.model.quantization
    if own_scheme not in ("bf16", "fp16") and setup.scheme.id != own_scheme:
        notes.append(
            f"the checkpoint is {own_scheme}: {setup.scheme.id} needs another checkpoint of it"
        )
    return notes


def _draft_doubts(draft: Draft, setup: Setup) -> list[str]:
    drafted, notes = draft.model, list(draft.model.notes)
    own = drafted.target_hidden_size or drafted is setup.model.own_draft
    if not own and drafted.vocab_size != setup.model.vocab_size:
        notes.append(
            f"{drafted.id} has {drafted.vocab_size:,} tokens, {setup.model.id} "
            f"{setup.model.vocab_size:,}: vLLM refuses such a draft, or newer ones take it with "
            "use_heterogeneous_vocab"
        )
    return notes


def speed_notes(question: Question, predicted: Performance | None) -> list[str]:
    """What the prediction of speed takes for granted."""
    if predicted is None:
        return []
    shares = question.efficiency
    sources = {"MFU": question.mfu_ratio, "MBU": question.mbu_ratio}
    defaults = [name for name, stated in sources.items() if stated is None]
    notes: list[str] = []
    if defaults:
        experts = (
            f" ({shares.expert_mbu_ratio:g} for routed experts)"
            if question.setup.model.experts.count and "MBU" in defaults
            else ""
        )
        told = {"MFU": f"MFU {shares.mfu_ratio:g}", "MBU": f"MBU {shares.mbu_ratio:g}{experts}"}
        notes.append(
            f"{' and '.join(told[name] for name in defaults)}: {SOURCE}; state what you measure "
            f"with {' and '.join('--' + name.lower() for name in defaults)}"
        )
    if question.setup.draft is not None and question.acceptance_ratio is None:
        notes.append(
            "speed is without speculation: no acceptance is stated (--acceptance, guide 6.6)"
        )
    return notes


def load_notes(
    *,
    source: str,
    has_target: bool,
    has_peak: bool,
    stated_requests_per_s: float | None,
    predicted: Performance | None,
) -> list[str]:
    """Doubts about the load, and why there is no fleet where there is none."""
    notes: list[str] = []
    if source == "predicted":
        notes.append("usable RPS is predicted by the roofline: measure it before buying")
    if predicted is not None and has_target:
        notes.append("targets are held against predicted means; P99 lies above them")
    if source == "unknown" and has_peak:
        why = "no load keeps the targets"
        if predicted is None or not has_target:
            why = (
                "usable RPS is not known: state --usable-rps, --benchmark, a target or a "
                "concurrency, with lengths"
            )
        notes.append(f"no fleet: {why}")
    if stated_requests_per_s is not None and predicted is not None:
        ratio = stated_requests_per_s / predicted.requests_per_s
        if not 1 / _APART <= ratio <= _APART:
            notes.append(
                f"the stated {figure(stated_requests_per_s)} usable RPS and the "
                f"{figure(predicted.requests_per_s)} predicted for one engine at the concurrency "
                "are far apart"
            )
    return notes
