"""What is learned of an engine: the knee is that of one launch."""

from __future__ import annotations

from kneewatch.diagnose.learned import Learned
from kneewatch.diagnose.profile import Profile
from tests.diagnose.test_knee import made

LAUNCH = {"num_gpu_blocks": "1000", "block_size": "16", "enable_prefix_caching": "True"}
LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def learned() -> Learned:
    """An engine whose knee is known."""
    one = Learned(Profile())
    one.launched(LAUNCH)
    for turn, load in enumerate(3 * LOADS, 1):
        one.knee.update(60.0 * turn, made(load, knee_at=8.0))
    return one


def known(one: Learned) -> bool:
    """Whether its knee is known."""
    return one.knee.update(10_000.0, {}) is not None


def test_a_server_that_comes_back_as_it_was_has_the_same_knee() -> None:
    one = learned()
    one.begin_anew()
    one.launched({**LAUNCH, "num_gpu_blocks": "1010"})
    one.launched({})  # a page that tells no configuration
    one.launched(LAUNCH)
    assert known(one)


def test_a_server_that_was_launched_otherwise_has_another_knee() -> None:
    for other in ({"num_gpu_blocks": "2000"}, {"enable_prefix_caching": "False"}):
        one = learned()
        one.launched({**LAUNCH, **other})
        assert not known(one)
        assert not one.knee.asked, "whoever keeps the past is asked for that of this launch"
