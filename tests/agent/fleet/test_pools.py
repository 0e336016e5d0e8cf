"""Each engine's own KV blocks, where a replica shows those of all its engines."""

from __future__ import annotations

from kneewatch.agent.fleet.snapshot import capacity_tokens, kv_pools
from tests.diagnose.fleet.example_fleets import pod, shaped

ENGINES = [("a", "0"), ("a", "1"), ("b", "0")]


def test_a_replica_shows_the_sum_over_its_engines() -> None:
    """Two engines show 2,000 blocks of 16 tokens each: 16,000 tokens for one. A replica of one
    engine shows its own."""
    shape = shaped([pod(name, engine=engine) for name, engine in ENGINES])
    shown = {"num_gpu_blocks": "2000", "block_size": "16"}
    own = kv_pools({member.key: shown for member in shape.members}, shape.members)
    tokens = {member.name: capacity_tokens(own[member.key]) for member in shape.members}
    assert tokens == {"a engine 0": 16_000, "a engine 1": 16_000, "b": 32_000}


def test_engines_that_show_their_own_keep_it() -> None:
    shape = shaped([pod("a", engine="0"), pod("a", engine="1")])
    first, second = shape.members
    shown = {
        first.key: {"num_gpu_blocks": "2000", "block_size": "16"},
        second.key: {"num_gpu_blocks": "500", "block_size": "16"},
    }
    assert kv_pools(shown, shape.members) == shown


def test_an_engine_without_a_row_is_left_out() -> None:
    shape = shaped([pod("a", engine="0"), pod("a", engine="1")])
    shown = {shape.members[0].key: {"num_gpu_blocks": "2000", "block_size": "16"}}
    assert kv_pools(shown, shape.members) == shown
