"""A draft beside its target: weights, KV cache, speed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model, model, model_from_config
from kneewatch.diagnose.sizing.configuration_search import search
from kneewatch.diagnose.sizing.memory.budget import fewest_gpus, kv_layout_of, memory
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.memory_arithmetic import draft_token_bytes, memory_steps
from kneewatch.diagnose.sizing.memory.weights import Draft, Parallel
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.size import size
from kneewatch.diagnose.sizing.speed.performance import Drafting
from kneewatch.diagnose.speculation import tokens_per_pass
from kneewatch.rules.facts import Targets
from tests.diagnose.catalogue.test_drafts import HEAD

LARGE = Launch(
    model=model("meta-llama/Llama-3.3-70B-Instruct"),
    gpu=gpu("h200"),
    parallel=Parallel(4),
    max_model_len=8192,
)
SMALL = Draft(model("meta-llama/Llama-3.2-1B"), 4)
DRAFTED = replace(LARGE, draft=SMALL)


def head(**changed: object) -> Model:
    """An EAGLE 3 head, with other fields."""
    return model_from_config("head", HEAD | changed)


def test_weights_and_cache_of_the_draft_come_on_top() -> None:
    plain, drafted = memory(LARGE), memory(DRAFTED)

    # 1.236 billion parameters in 16 bit over 4 ranks.
    assert drafted.draft_bytes == pytest.approx(1.2358e9 * 2 / 4, rel=1e-3)
    assert plain.available_bytes.expected - drafted.available_bytes.expected == drafted.draft_bytes
    # 16 layers x 2 heads a GPU x (64 + 64) x 2 bytes beside 80 x 2 x (128 + 128) x 2.
    assert draft_token_bytes(drafted) == 16 * 2 * 128 * 2
    assert drafted.layout.token_bytes == 81_920 + 8_192
    assert drafted.concurrency.expected < plain.concurrency.expected


def test_the_arithmetic_names_the_draft() -> None:
    lines = [step.line() for step in memory_steps(memory(DRAFTED))]

    (draft,) = [line for line in lines if "Llama-3.2-1B" in line]
    assert "attention + MLP + embeddings + norms, routers and positions = " in draft
    assert f"= {memory(DRAFTED).draft_bytes / 2**30:.2f} GiB" in draft
    assert any(
        line.startswith("KV cache per token, draft model") and "16 x 512" in line for line in lines
    )
    assert any("80 x 2 x (128 + 128) x 2 = 81,920 B" in line for line in lines)


def test_the_last_of_the_stages_holds_all_of_the_draft() -> None:
    staged = replace(DRAFTED, parallel=Parallel(4, pipeline=4))

    assert memory(staged).draft_bytes == memory(DRAFTED).draft_bytes
    assert kv_layout_of(staged).token_bytes == 81_920 / 4 + 8_192


def test_own_prediction_layers_share_the_latent_cache() -> None:
    base_model = model("deepseek-ai/DeepSeek-R1")
    assert base_model.own_draft is not None
    plain = Launch(model=base_model, gpu=gpu("h200"), parallel=Parallel(8), max_model_len=8192)
    drafted = memory(replace(plain, draft=Draft(base_model.own_draft, 1)))

    assert drafted.layout.token_bytes == 62 * 576 * 2
    assert 1.4e9 < drafted.draft_bytes < 1.8e9


def test_a_recurrent_layer_keeps_a_state_for_each_drafted_token() -> None:
    plain = Launch(
        model=model("Qwen/Qwen3-Next-80B-A3B-Instruct"), gpu=gpu("h200"), parallel=Parallel(4),
        max_model_len=8192,
    )  # fmt: skip
    drafted = replace(plain, draft=Draft(model("Qwen/Qwen3-0.6B"), 3))

    before, after = kv_layout_of(plain).settings, kv_layout_of(drafted).settings
    assert after.state_blocks == before.state_blocks + 3


@pytest.mark.parametrize(
    ("draft", "flag", "message"),
    [
        pytest.param(replace(SMALL, tokens=0), "num_speculative_tokens", "above 0", id="none"),
        pytest.param(replace(SMALL, tokens=999), "num_speculative_tokens", "64", id="absurd"),
        pytest.param(Draft(head(), 4), "draft_model", "8,192", id="another target's head"),
        pytest.param(
            Draft(model("Qwen/Qwen2.5-0.5B-Instruct"), 4), "draft_model", "14", id="14 heads over 4"
        ),
    ],
)
def test_what_cannot_draft_is_refused(draft: Draft, flag: str, message: str) -> None:
    with pytest.raises(SizingError, match=message) as refused:
        memory(replace(LARGE, draft=draft))
    assert refused.value.name == flag


def test_a_head_alone_is_no_model() -> None:
    with pytest.raises(SizingError, match="cannot run alone"):
        memory(Launch(model=head(), gpu=gpu("h100-sxm"), max_model_len=2048))


def test_a_head_fits_its_target() -> None:
    target = model("meta-llama/Llama-3.1-8B-Instruct")
    launch = Launch(model=target, gpu=gpu("h100-sxm"), max_model_len=8192, draft=Draft(head(), 3))

    assert memory(launch).draft_bytes == 2 * (head().parameters or pytest.fail("none")).total


def test_fewest_gpus_skips_what_the_draft_does_not_split_over() -> None:
    wanted = replace(
        LARGE, parallel=Parallel(2), draft=Draft(model("Qwen/Qwen2.5-0.5B-Instruct"), 4)
    )

    fewest = fewest_gpus(wanted, concurrency=1)

    assert fewest.spread == Parallel(2)


ASKED = Question(
    launch=DRAFTED, concurrency=8, input_tokens=1000, output_tokens=200, acceptance_ratio=0.8
)


def test_acceptance_makes_it_faster_and_its_absence_is_told() -> None:
    fast, plain = size(ASKED), size(replace(ASKED, acceptance_ratio=None))

    assert fast.performance is not None
    assert plain.performance is not None
    assert fast.performance.itl_s < plain.performance.itl_s
    assert fast.performance.tokens_per_pass == tokens_per_pass(acceptance_ratio=0.8, draft_tokens=4)
    assert any("without speculation" in note for note in plain.notes)
    assert not any("without speculation" in note for note in fast.notes)


def test_a_small_draft_costs_a_small_share_of_a_step() -> None:
    answer = size(ASKED)
    assert answer.performance is not None
    drafting = answer.performance.loop.load.drafting

    assert isinstance(drafting, Drafting)
    # 1.2 of 70.6 billion parameters, and 16 of 80 layers' kernels.
    assert 0.02 < drafting.cost_ratio < 0.2


def test_drafts_that_are_never_accepted_only_cost() -> None:
    useless, plain = (
        size(replace(ASKED, acceptance_ratio=0.0)),
        size(replace(ASKED, launch=LARGE, acceptance_ratio=None)),
    )

    assert useless.performance is not None
    assert plain.performance is not None
    assert useless.performance.itl_s > plain.performance.itl_s


def test_another_vocabulary_is_doubted() -> None:
    other = replace(LARGE, parallel=Parallel(2), draft=Draft(model("Qwen/Qwen3-0.6B"), 4))

    answer = size(replace(ASKED, launch=other))

    assert any("use_heterogeneous_vocab" in note for note in answer.notes)


def test_a_search_carries_the_draft_along() -> None:
    launch = replace(DRAFTED, gpu=gpu("h200"), parallel=Parallel())

    winner = search(replace(ASKED, launch=launch, targets=Targets(2.0))).winner

    assert winner is not None
    assert winner.launch.draft == SMALL


def test_acceptance_needs_a_draft() -> None:
    with pytest.raises(SizingError, match="needs a draft model") as refused:
        size(replace(ASKED, launch=LARGE))
    assert refused.value.name == "acceptance"
