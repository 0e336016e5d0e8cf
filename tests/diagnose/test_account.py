"""The account of one engine: speed at equal work, demand and work, under loads that differ."""

from __future__ import annotations

import random
import re
from itertools import product
from math import inf, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose import account_signals as accounts
from kneewatch.diagnose.account_signals import PREFILL_SPEED
from kneewatch.diagnose.causes.bottleneck import PREFILLS_SLOW_FROM
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.reader import COUNTED
from kneewatch.diagnose.latency_split import Changed, changed
from kneewatch.diagnose.learned.account import Account, beyond_chance
from kneewatch.diagnose.learned.pace import Pace
from kneewatch.diagnose.learned.work import DecodeStep, Work
from kneewatch.diagnose.values import Values
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.diagnosis_text import changed_words
from tests.incidents import rebuilt
from tests.incidents.shares import above_whole

SCRAPE_S = 5.0
QUIET_S = 600.0


class Load(Struct, frozen=True):
    """A steady load. `callers`: a closed loop of so many; otherwise requests/s are `per_s`."""

    per_s: float = 2.0
    callers: float | None = None
    prompt_tokens: float = 500.0
    hit_ratio: float = 0.0
    answer_tokens: float = 100.0
    accepted: float = 1.0
    """Tokens per sequence and step."""


class Machine(Struct, frozen=True):
    """An engine: seconds of a step with `batch` sequences are `base_s` and `sequence_s` for each.

    `slower`: all of it takes so many times as long. `evicts`: preemptions between two scrapes.
    """

    base_s: float = 0.02
    sequence_s: float = 0.0003
    token_s: float = 0.0001
    kv_tokens: float = 400_000.0
    slower: float = 1.0
    prefill_slower: float = 1.0
    evicts: float = 0.0

    def step_s(self, batch: float, prompt_tokens: float) -> float:
        return self.slower * (self.base_s + self.sequence_s * batch + self.token_s * prompt_tokens)


class Served:
    """An account that is fed with the totals of an engine under loads, one after another.

    `counts_prefills`: whether the page has the times of prefills.
    """

    def __init__(self, *, noise: float = 0.02, counts_prefills: bool = True) -> None:
        self._prefills = float(counts_prefills)
        self.account = Account()
        self.t_s, self._totals = 0.0, [0.0] * len(COUNTED)
        self._random, self._noise = random.Random(1), noise

    def under(self, load: Load, machine: Machine, seconds: float = 120.0) -> Served:
        """Serve a load for some time."""
        for _ in range(round(seconds / SCRAPE_S)):
            self._scrape(load, machine)
        return self

    def _scrape(self, load: Load, machine: Machine) -> None:
        batch, per_s, step_s = steady(load, machine)
        step_s *= self._random.gauss(1.0, self._noise)
        computed = load.prompt_tokens * (1 - load.hit_ratio)
        context = load.prompt_tokens + load.answer_tokens / 2
        usage = min(1.0, batch * context / machine.kv_tokens)
        requests = per_s * SCRAPE_S
        gaps = requests * (load.answer_tokens / load.accepted - 1)
        prefill_s = machine.slower * machine.prefill_slower * machine.token_s * computed + step_s
        busy = min(0.95, per_s * prefill_s)
        prefill_s *= 1 + busy / 2 / (1 - busy)  # prompts wait for one another
        for at, gained in enumerate(
            (
                requests * load.answer_tokens,
                gaps * step_s,
                gaps,
                requests,
                (gaps + requests) / batch,
                requests * load.prompt_tokens,
                requests * computed,
                requests * load.prompt_tokens * load.hit_ratio,
                self._prefills * requests * prefill_s,
                self._prefills * requests,
                self._prefills * requests * computed,
                requests,
                requests * load.answer_tokens,
                machine.evicts,
                requests * (load.answer_tokens + load.prompt_tokens),
                requests,
                requests,
            )
        ):
            self._totals[at] += gained
        self.t_s += SCRAPE_S
        self.account.update(self.t_s, Values({"kv_usage_ratio": usage}, totals=tuple(self._totals)))
        self.account.learn_usual(self.t_s)

    def value(self, key: str) -> float | None:
        return self.account.values.get(key)

    @property
    def speed(self) -> float | None:
        return self.value(accounts.SPEED)

    def error(self) -> float:
        return self.value(accounts.SPEED_ERROR) or 0.0


def steady(load: Load, machine: Machine) -> tuple[float, float, float]:
    """Batch, requests/s and seconds of a step in the steady state, by Little's law."""
    steps = load.answer_tokens / load.accepted
    computed = load.prompt_tokens * (1 - load.hit_ratio)
    batch, per_s, step_s = load.callers or 1.0, load.per_s, machine.base_s
    for _ in range(200):
        step_s = machine.step_s(batch, computed / steps * batch)
        if load.callers is None:
            batch = max(1.0, load.per_s * steps * step_s)
        else:
            batch, per_s = load.callers, load.callers / (steps * step_s)
    return batch, per_s, step_s


MACHINE = Machine()
LONG_PROMPTS = Load(per_s=0.8, prompt_tokens=4000.0)


def words_of(split: Changed) -> str:
    return changed_words(
        Verdict(t_s=0.0, target="t", engine="0", model="m", health="ok", changed=split)
    )


def slowed(times: float) -> Machine:
    return Machine(slower=times)


@pytest.mark.parametrize("times", [1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(), id="open loop"),
        pytest.param(Load(callers=8.0), id="closed loop"),
        pytest.param(Load(callers=1.0), id="single caller"),
    ],
)
def test_slow_steps_are_seen_whatever_the_batch_does(load: Load, times: float) -> None:
    served = Served().under(load, MACHINE, QUIET_S)
    assert served.speed == pytest.approx(1.0, abs=0.02)
    served.under(load, slowed(times))
    assert served.speed is not None
    assert served.speed <= 0.75
    assert abs(served.speed - 1 / times) <= served.error() + 0.05


@pytest.mark.parametrize("times", [3.0, 5.0, 7.0])
@pytest.mark.parametrize("prompt_tokens", [20.0, 200.0])
def test_a_batch_that_grew_as_much_as_its_steps_leaves_the_speed_unknown(
    times: float, prompt_tokens: float
) -> None:
    """Nothing limits the time of such a step: no prefill shows what a token takes."""
    load = Load(per_s=1.0, prompt_tokens=prompt_tokens)
    served = Served(counts_prefills=False).under(load, MACHINE, QUIET_S)
    served.under(load, slowed(times), QUIET_S)
    assert served.speed is None
    (line,) = served.account.unknown(served.t_s)
    assert "not seen in quiet times" in line
    split = changed(served.account.values, served.t_s)
    assert split is not None
    assert "unknown: engine speed" in words_of(split)
    assert split.since_s is not None
    assert not words_of(split).startswith("as usual")


@pytest.mark.parametrize(("slower", "speed"), [(2.0, 0.5), (3.0, 0.35)])
def test_a_restart_of_the_daemon_forgets_no_slow_speed(slower: float, speed: float) -> None:
    """What is known of it outlives the daemon, also where the load is one that was never seen."""
    served = (
        Served().under(Load(per_s=0.3), MACHINE, QUIET_S).under(Load(per_s=0.3), slowed(slower))
    )
    state = served.account.state()
    served.account = Account()
    served.account.restore(state)
    assert served.under(Load(per_s=2.0), slowed(slower), QUIET_S).speed == speed


def test_steps_of_unseen_work_are_learned_once_the_engine_is_as_fast_as_ever() -> None:
    pace = Pace(first_samples=1, noise=0.02, creeps=True)
    for at in range(20):
        pace.learn(DecodeStep(0.02, 1.0 + at % 3, 0.0, 5.0, 1.0), float(at))
        pace.settle(inf)
    busy = DecodeStep(0.045, 40.0, 0.05, 40.0, 1.0)
    wide = pace.limits(busy, 0.0002)
    assert wide is not None
    assert wide.most_s > 2 * wide.least_s
    for is_usual in (False, True):
        pace.learn_unsure(busy, 30.0)
        unsure = pace.limits(busy, 0.0002)
        assert unsure is not None
        assert unsure.least_s == wide.least_s
        assert busy.took_s < unsure.most_s < wide.most_s
        pace.judge_unsure(0.0002, is_usual=is_usual)
        judged = pace.limits(busy, 0.0002)
        assert judged is not None
        assert (judged.least_s > 0.9 * busy.took_s) == is_usual
        assert (judged.most_s < wide.most_s) == is_usual


def test_a_closed_loop_is_told_from_an_open_one() -> None:
    for load, follows in ((Load(), False), (Load(callers=8.0), True)):
        served = Served().under(load, MACHINE, QUIET_S).under(load, slowed(3.0))
        split = changed(served.account.values, served.t_s)
        assert split is not None
        assert split.follows is follows


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(per_s=1.0), id="half the load"),
        pytest.param(Load(per_s=4.0), id="twice the load"),
        pytest.param(Load(per_s=8.0), id="four times the load"),
        pytest.param(Load(prompt_tokens=1000.0), id="longer prompts"),
        pytest.param(Load(answer_tokens=300.0), id="longer answers"),
        pytest.param(Load(hit_ratio=0.9), id="prompts that hit"),
    ],
)
def test_another_load_is_not_a_slow_engine(load: Load) -> None:
    served = Served().under(Load(), MACHINE, QUIET_S).under(load, MACHINE, 300.0)
    assert served.speed is None or 0.8 <= served.speed <= 1.25


def test_a_saturated_engine_with_more_callers_is_not_slow() -> None:
    """Throughput is at its maximum: tokens take as many times as long as there are callers."""
    machine = Machine(base_s=0.005, sequence_s=0.0004, token_s=0.0002)
    served = Served()
    for callers in (64.0, 128.0, 256.0):
        served.under(Load(callers=callers, prompt_tokens=20.0), machine, QUIET_S)
        assert served.speed is None or served.speed >= 0.8


def test_speculation_with_longer_steps_that_yield_more_is_not_slow() -> None:
    served = Served().under(Load(accepted=1.8), MACHINE, QUIET_S)
    served.under(Load(accepted=4.0), slowed(1.8))
    assert served.speed is None or served.speed >= 0.8
    assert served.value(accounts.DRAFTS) == pytest.approx(4.0 / 1.8, rel=0.2)


def test_fewer_accepted_drafts_are_work_and_not_speed() -> None:
    served = Served().under(Load(accepted=3.0), MACHINE, QUIET_S)
    served.under(Load(accepted=1.5), MACHINE)
    assert served.speed == pytest.approx(1.0, abs=0.05)
    assert served.value(accounts.DRAFTS) == pytest.approx(0.5, abs=0.11)


def test_a_lost_speed_stays_lost_while_a_larger_load_hides_it() -> None:
    slow, load = replace(MACHINE, slower=2.5), Load(per_s=0.8, prompt_tokens=1000.0)
    served = Served().under(load, MACHINE, QUIET_S).under(load, slow, 60.0)
    lost = served.speed
    assert lost is not None
    assert lost < 0.6
    more = replace(load, prompt_tokens=2500.0)
    speeds = [served.under(more, slow, 10.0).speed for _ in range(30)]
    assert all(speed is not None and speed <= lost + 0.1 for speed in speeds)
    assert served.under(more, MACHINE, 120.0).speed != lost
    assert served.under(load, MACHINE, 120.0).speed == 1.0


def test_an_engine_that_slows_down_over_an_hour_is_no_noise() -> None:
    load = Load(per_s=1.0)
    served = Served().under(load, MACHINE, QUIET_S)
    for minute in range(60):
        served.under(load, replace(MACHINE, slower=1.0 + minute / 60), 60.0)
    assert served.speed is not None
    assert served.speed <= 0.75


def test_answers_of_one_token_show_the_speed_of_prefills() -> None:
    load = Load(per_s=1.0, prompt_tokens=1500.0, answer_tokens=1.0)
    served = Served().under(load, MACHINE, QUIET_S)
    assert served.value(PREFILL_SPEED) == 1.0
    assert served.value(accounts.DEMAND) == 1.0
    served.under(load, replace(MACHINE, slower=2.5))
    slowed = served.value(PREFILL_SPEED)
    assert slowed is not None
    assert slowed <= 0.6
    assert served.speed is None


def test_usual_work_is_that_of_two_hours() -> None:
    longer = replace(LONG_PROMPTS, answer_tokens=1000.0)
    served = Served().under(LONG_PROMPTS, MACHINE, 3600.0).under(longer, MACHINE, 1800.0)
    assert served.value(accounts.ANSWERS) == pytest.approx(10.0)
    assert served.under(longer, MACHINE, 3600.0).value(accounts.ANSWERS) == pytest.approx(1.0)


def test_chance_in_few_requests_is_no_growth() -> None:
    served = Served().under(Load(per_s=0.3), MACHINE, QUIET_S)
    assert served.under(Load(per_s=0.39), MACHINE, 60.0).value(accounts.DEMAND) == 1.0
    more = served.under(Load(per_s=1.2), MACHINE, 60.0).value(accounts.DEMAND)
    assert more is not None
    assert more > 3.0


@pytest.mark.parametrize(
    ("ratio", "requests", "seen"),
    [(1.3, 20, 1.0), (3.0, 20, 3.0), (0.4, 20, 0.4), (0.8, 20, 1.0), (1.4, 400, 1.4)],
)
def test_lengths_differ_by_chance_in_few_requests(
    ratio: float, requests: float, seen: float
) -> None:
    assert beyond_chance(ratio, requests) == pytest.approx(seen)


def test_a_slow_prefill_is_seen() -> None:
    served = Served().under(Load(), MACHINE, QUIET_S)
    served.under(Load(), Machine(prefill_slower=4.0), 180.0)
    assert served.speed == pytest.approx(1.0, abs=0.05)
    prefill = served.value(PREFILL_SPEED)
    assert prefill is not None
    assert prefill <= 0.5


def test_prefills_that_wait_for_one_another_are_not_slow() -> None:
    served = Served().under(LONG_PROMPTS, MACHINE, QUIET_S)
    served.under(replace(LONG_PROMPTS, per_s=2 * LONG_PROMPTS.per_s), MACHINE, 180.0)
    prefill = served.value(PREFILL_SPEED)
    assert prefill is None or prefill > PREFILLS_SLOW_FROM


def test_prompts_that_waited_for_one_another_do_not_make_more_of_them_look_fast() -> None:
    machine = Machine(base_s=0.009, sequence_s=0.00026, token_s=0.00006, kv_tokens=600_000.0)
    few = Load(callers=8.0, prompt_tokens=560.0, answer_tokens=40.0)
    served = Served(noise=0.03)
    for callers in (8.0, 10.0, 6.0, 9.0, 7.0, 10.0, 8.0):
        served.under(replace(few, callers=callers), machine, 240.0)
    for callers in (32.0, 44.0, 40.0, 36.0, 46.0) * 12:
        served.under(replace(few, callers=callers), machine, 60.0)
        assert served.speed in (None, 1.0)
    for callers in (36.0, 44.0, 40.0) * 6:
        served.under(replace(few, callers=callers), replace(machine, slower=2.0), 20.0)
    assert served.speed is not None
    assert served.speed < 0.75


def test_slow_prefills_that_wait_for_one_another_have_their_own_speed() -> None:
    served = Served().under(LONG_PROMPTS, MACHINE, QUIET_S)
    served.under(LONG_PROMPTS, Machine(prefill_slower=2.0), 180.0)
    assert served.value(PREFILL_SPEED) == pytest.approx(0.5, abs=0.1)


def test_prompts_that_no_longer_hit_are_not_computed_faster() -> None:
    """More is computed in the same time: how long prompts waited for one another is a guess."""
    hits = Load(per_s=2.0, prompt_tokens=2000.0, hit_ratio=0.9)
    served = Served().under(hits, MACHINE, QUIET_S)
    for _ in range(12):
        prefill = served.under(replace(hits, hit_ratio=0.0), MACHINE, 10.0).value(PREFILL_SPEED)
        assert prefill is None or 0.8 <= prefill <= 1.25


def test_the_prefill_of_an_evicted_request_says_nothing() -> None:
    served = Served().under(LONG_PROMPTS, MACHINE, QUIET_S)
    served.under(LONG_PROMPTS, Machine(prefill_slower=2.0, evicts=1.0), 60.0)
    assert served.value(PREFILL_SPEED) is None


def test_a_prefill_that_takes_longer_than_the_window_is_seen() -> None:
    """A single caller: a prefill of 90 s without a token, then 100 tokens within 5 s."""
    account, t_s, totals = Account(), 0.0, [0.0] * len(COUNTED)

    def speed_after(requests: int, *, prefill_s: float) -> float | None:
        nonlocal t_s
        for _ in range(requests):
            for _ in range(round(prefill_s / SCRAPE_S)):
                t_s += SCRAPE_S
                account.update(t_s, Values({}, totals=tuple(totals)))
            step_s, answer = SCRAPE_S / 100, 100.0
            gained = [answer, (answer - 1) * step_s, answer - 1, 1.0, answer, 9e4, 9e4, 0.0]
            gained += [prefill_s, 1.0, 9e4, 1.0, answer, 0.0, answer + 9e4, 1.0, 1.0, 9e4]
            totals[:] = [total + more for total, more in zip(totals, gained, strict=True)]
            t_s += SCRAPE_S
            account.update(t_s, Values({}, totals=tuple(totals)))
        return account.values.get(PREFILL_SPEED)

    assert speed_after(16, prefill_s=90.0) == pytest.approx(1.0, abs=0.1)
    slow = speed_after(8, prefill_s=270.0)
    assert slow is not None
    assert slow == pytest.approx(1 / 3, abs=0.1)


def test_speculation_that_ends_shows_in_the_tokens_of_a_stream() -> None:
    served = Served().under(Load(accepted=3.0), MACHINE, QUIET_S)
    assert served.value(accounts.STREAM) == pytest.approx(1.0, abs=0.11)
    served.under(Load(accepted=1.0), MACHINE)
    assert served.speed is None or served.speed == pytest.approx(1.0, abs=0.1)
    assert served.value(accounts.STREAM) == pytest.approx(0.35, abs=0.1)


def test_a_speed_within_a_bucket_of_the_histogram_is_seen() -> None:
    """12 ms and 20 ms lie in the same bucket of vLLM's histogram, 10 to 25 ms."""
    machine = Machine(base_s=0.012, sequence_s=0.0, token_s=0.00001)
    served = Served().under(Load(callers=1.0), machine, QUIET_S)
    served.under(Load(callers=1.0), Machine(0.012, 0.0, 0.00001, slower=1.66))
    assert served.speed == pytest.approx(0.6, abs=0.06)


def test_the_speed_is_unknown_while_clients_give_up() -> None:
    served = Served().under(Load(), MACHINE, QUIET_S)
    gone = {"given_up_ratio": 0.5, "kv_usage_ratio": 0.1}
    served.account.update(served.t_s + SCRAPE_S, Values(gone, totals=(0.0,) * len(COUNTED)))
    assert served.speed is None


def test_the_seats_are_what_runs_while_requests_queue() -> None:
    account, totals = Account(), (0.0,) * len(COUNTED)
    for scrape, (running, queued) in enumerate([(3, 0), (6, 9), (5, 9), (6, 9)]):
        signals = {"running": float(running), "waiting_by_capacity": float(queued)}
        account.update(scrape * SCRAPE_S, Values(signals, totals=totals))
    assert account.values[accounts.SEATED] == pytest.approx(17 / 3, abs=0.01)
    account.update(20.0, Values({"running": 2.0}, totals=totals))
    assert account.values[accounts.SEATED] is None


def test_no_fault_is_learned() -> None:
    served = Served().under(Load(), MACHINE, QUIET_S).under(Load(), slowed(3.0), 6 * 3600.0)
    assert served.account.is_slow
    assert served.speed is not None
    assert served.speed <= 0.5
    served.under(Load(), MACHINE, 300.0)
    assert served.speed == pytest.approx(1.0, abs=0.05)
    assert not served.account.is_slow


def test_a_speed_that_is_accepted_is_the_new_usual_one() -> None:
    served = Served().under(Load(), MACHINE, QUIET_S).under(Load(), slowed(3.0), 300.0)
    served.account.accept()
    served.under(Load(), slowed(3.0), 300.0)
    assert served.speed == pytest.approx(1.0, abs=0.05)


def test_a_slowdown_that_creeps_is_seen() -> None:
    served = Served().under(Load(), MACHINE, QUIET_S)
    for minute in range(1, 6):
        served.under(Load(), slowed(1 + 0.4 * minute), 60.0)
    served.under(Load(), slowed(3.0), 60.0)
    assert served.speed is not None
    assert served.speed <= 0.6


def test_the_old_process_is_what_a_new_one_is_compared_with() -> None:
    served = Served().under(Load(callers=1.0), MACHINE, QUIET_S)
    served.account.restarted()
    assert served.speed is None
    served.under(Load(callers=1.0), slowed(7.0))
    assert served.speed == pytest.approx(1 / 7, abs=0.05)


def test_an_engine_that_was_always_slow_has_no_usual_speed() -> None:
    served = Served().under(Load(), slowed(3.0), QUIET_S)
    assert served.speed == pytest.approx(1.0, abs=0.05)
    (line,) = served.account.unknown(served.t_s)
    assert "slow from its start on" in line
    served.under(Load(), slowed(3.0), 3600.0)
    assert served.account.unknown(served.t_s) == []


def test_nothing_is_known_at_first_and_while_nothing_runs() -> None:
    served = Served().under(Load(), MACHINE, 60.0)
    assert served.speed is None
    served.under(Load(), MACHINE, QUIET_S).under(Load(per_s=0.0), MACHINE, 300.0)
    assert served.speed is None


def test_noise_of_quiet_times_is_not_a_change() -> None:
    served = Served(noise=0.3).under(Load(), MACHINE, QUIET_S)
    speeds = [served.under(Load(), MACHINE, SCRAPE_S).speed for _ in range(120)]
    assert all(speed is None or 0.8 <= speed <= 1.25 for speed in speeds)


def test_a_loss_that_lasts_is_seen_though_single_samples_are_as_noisy() -> None:
    callers = Load(callers=4.0)
    served = Served(noise=0.25).under(callers, MACHINE, QUIET_S)
    served.under(callers, slowed(1.4), 120.0)
    assert served.speed is not None
    assert served.speed == pytest.approx(1 / 1.4, abs=0.1)


@given(most=st.floats(0.001, 50.0), share=st.floats(0.0, 1.0), samples=st.integers(1, 3))
def test_any_limits_give_a_speed_between_them_or_none(
    most: float, share: float, samples: int
) -> None:
    speed = Pace(first_samples=1, noise=0.05).speed(share * most, most, samples)
    if speed is not None:
        assert 0.0 < speed.ratio <= max(1.0, most)


def test_slow_steps_after_prompts_so_long_that_nothing_limits_them_from_below() -> None:
    pace = Pace(first_samples=1, noise=0.05)
    for at in range(50):
        pace.learn(DecodeStep(0.05, 10.0, 0.3, 4000.0, 1.0), 10.0 * at)
    pace.settle(inf)
    limits_s = pace.limits(DecodeStep(0.2, 10.0, 0.3, 10.0, 1.0), 5e-5)
    assert limits_s is not None
    assert limits_s[0] == 0.0
    speed = pace.speed(0.0, limits_s[1] / 0.2, 3)
    assert speed is not None
    assert 0.1 < speed.ratio < 0.3


def test_steps_so_much_smaller_than_known_ones_that_the_line_ends_before_them() -> None:
    pace = Pace(first_samples=1, noise=0.02)
    for took_s, size, prompts in ((0.05, 1.0, 300.0), (5.0, 1.0, 8000.0), (5.0, 3.0, 8000.0)):
        for at in range(20):
            pace.learn(DecodeStep(took_s, size, 0.6, prompts, 1.0), float(at))
        pace.settle(inf)
    limits_s = pace.limits(DecodeStep(0.08, 1.0, 0.6, 1.0, 1.0))
    assert limits_s is not None
    assert 0.0 < limits_s.least_s < 0.08
    assert limits_s.most_s > 0.05


@pytest.mark.parametrize("token_s", [None, 5e-5])
def test_a_small_share_of_the_cache_explains_no_slow_step(token_s: float | None) -> None:
    pace = Pace(first_samples=1, noise=0.05)
    pace.learn(DecodeStep(0.01, 3.0, 0.005, 0.0, 1.0), 0.0)
    pace.settle(inf)
    limits_s = pace.limits(DecodeStep(0.016, 3.0, 0.01, 0.0, 1.0), token_s)
    assert limits_s is not None
    assert limits_s[1] < 0.013


def test_a_night_of_many_kinds_of_steps_does_not_push_the_days_out() -> None:
    pace, day = Pace(first_samples=1, noise=0.05), DecodeStep(0.05, 40.0, 0.3, 300.0, 1.0)
    for at in range(200):
        pace.learn(day, 10.0 * at)
    pace.settle(2000.0)
    limits_s = pace.limits(day)
    for at, (size, prompts) in enumerate(product((1.0, 1.5, 2.0, 3.0), (0.0, 4.0, 20.0, 80.0))):
        pace.learn(DecodeStep(0.02, size, 0.01, prompts, 1.0), 3000.0 + 10.0 * at)
    pace.settle(4000.0)
    assert pace.limits(day) == pytest.approx(limits_s, rel=0.05)


def test_steps_that_only_become_slower_are_not_learned_as_noise() -> None:
    pace = Pace(first_samples=8, noise=0.06, creeps=True)
    speeds = list[float]()
    for at in range(160):
        prompt_tokens = 135.0 + 60.0 * sin(2.1 * at) + 80.0 * (at % 9 == 0)
        slower = min(1.0, max(0.0, at - 40) / 100)
        took_s = 0.026 * (1 + 0.15 * slower) + 1.5e-4 * prompt_tokens * (1 + 1.6 * slower)
        step = DecodeStep(took_s, 3.8, 0.07, prompt_tokens, 1.0)
        limits_s = pace.limits(step)
        if pace.may_learn(took_s, limits_s):
            pace.learn(step, 15.0 * at)
            pace.settle(15.0 * at - 60.0)
        else:
            pace.doubt()
        if limits_s is not None:
            pace.follow(limits_s[1] / took_s)
            speed = pace.speed(limits_s[0] / took_s, limits_s[1] / took_s, 3)
            speeds.append(1.0 if speed is None else speed.ratio)
    assert speeds[0] == 1.0
    assert max(speeds[-10:]) < 0.75


def test_the_split_is_one_line() -> None:
    served = Served().under(Load(), MACHINE, QUIET_S).under(Load(), slowed(3.0))
    split = changed(served.account.values, 1_795_000_000.0)
    assert split is not None
    assert split.since_s is not None
    words = words_of(split)
    assert "; as usual: requests/s, prompt length, answer length, prefix cache hits" in words
    assert re.match(r"since \d\d:\d\d: compared with quiet times engine speed x0\.", words)
    assert changed({}, 0.0) is None


def test_an_unknown_factor_is_said() -> None:
    split = changed({accounts.DEMAND: 1.0}, 0.0)
    assert split is not None
    assert words_of(split) == (
        "as usual: requests/s; unknown: prompt length, answer length, prefix cache hits, "
        "engine speed"
    )


@pytest.mark.parametrize(
    ("name", "window_s"),
    [
        pytest.param(
            name,
            window_s,
            marks=[pytest.mark.xfail(reason=case.wrong, strict=True)] if case.wrong else [],
        )
        for name, case in rebuilt.cases().items()
        for window_s in (rebuilt.WINDOWS_S[:1] if case.page is None else rebuilt.WINDOWS_S)
    ],
)
def test_a_rebuilt_incident_is_told_right(name: str, window_s: float) -> None:
    case = rebuilt.cases()[name]
    said = rebuilt.said(name, case, rebuilt.diagnoses(name, Profile(window_s=window_s)))
    assert said.right, rebuilt.table([said])
    assert [text for each in said.judged for text in above_whole(each)] == []
    if window_s == Profile().window_s:
        assert said.wrong_message == ""


FULL = Work(
    seconds=30.0, usage=0.97, tokens=600.0, gaps_s=300.0, gaps=590.0, first_tokens=10.0, steps=60.0,
    prompt_tokens=50_000.0, computed=50_000.0, hits=0.0, prefills_s=400.0, prefills=10.0,
    prefilled=50_000.0, answers=10.0, answer_tokens=600.0, preemptions=20.0, step_tokens=150_600.0,
)  # fmt: skip
"""Each of 20 evicted requests is computed again: 150,000 tokens for 10 prompts of 5,000."""


def test_prefills_beside_evictions_are_timed_by_their_tokens() -> None:
    prefill = FULL.prefill(FULL.step, 0.02)
    assert prefill is not None
    assert prefill.took_s == pytest.approx((30.0 - 60 * 2 * 0.02) / 30)
    assert replace(FULL, step_tokens=50_600.0).prefill(FULL.step, 0.02) is None, "not counted again"
    assert FULL.prefill(FULL.step, 0.2) is None, "steps without prompts may take all of the time"


def test_a_page_without_computed_tokens_tells_the_time_of_a_prompt_token() -> None:
    """vLLM before 0.13 does not count what prefills computed."""
    old = replace(FULL, preemptions=0.0, prefilled=0.0)
    prefill = old.prefill(old.step, 0.02)
    assert prefill is not None
    assert prefill.prompt_tokens == 5000.0
