"""Changes that last: an engine that stays slower, answers that stay short. None becomes usual."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.account_signals import LEARNED_FROM, SPEED
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.simulator.days import KINDS, setting_of
from tests.simulator.gpus import GpuSteps
from tests.simulator.page import START_S
from tests.simulator.quick import QuickEngine
from tests.simulator.quick_pages import QuickPages
from tests.simulator.server import Server
from tests.simulator.work import Steps, Work

SCRAPE_S, HOUR_S = 15.0, 3600.0
SETTLED_S = 180.0


class SlowSteps(Struct, frozen=True):
    """Steps that all take so many times as long; only their prompts, if `prompts_only`."""

    usual: Steps
    times: float
    prompts_only: bool = False

    @property
    def request_s(self) -> float:
        return self.usual.request_s

    @property
    def load_adapter_s(self) -> float:
        return self.usual.load_adapter_s

    def step_s(self, work: Work) -> float:
        step_s = self.usual.step_s(work)
        if self.prompts_only:
            decodes = replace(work, prompt_tokens=0.0, pairs=0.0)
            return step_s + (self.times - 1.0) * (step_s - self.usual.step_s(decodes))
        return self.times * step_s

    def worked(self, work: Work, steps: int, step_s: float) -> None:
        self.usual.worked(work, steps, step_s)


class Watched:
    """An engine of 7 requests/s at most, and what is said of it. `rate_per_s`: of an open loop."""

    def __init__(self, rate_per_s: float, kind_name: str = "chat", drafts: int = 3) -> None:
        self._setting = setting_of(dict(KINDS)[kind_name], "32B on H200")
        if self._setting.launch.num_speculative_tokens:
            self._setting.launch.num_speculative_tokens = drafts
        self._server = Server(self._setting, Random(1))
        self.rate_per_s, self.t_s = rate_per_s, 0.0
        self.stream = TargetStream("sim", Profile(), Limits())
        kind, rng = self._server.source.kind, self._server.rng
        self._engine = QuickEngine(
            self._setting.launch, self._server.steps, kind, lambda _now_s: self.rate_per_s, rng
        )
        self._pages = QuickPages(self._engine, form=self._setting.form)

    def slow(self, times: float, *, prompts_only: bool = False) -> None:
        """Let each step, or its prompts only, take so many times as long as at first."""
        self._engine.use(SlowSteps(self._server.steps, times, prompts_only))

    def stop_drafts(self, times: float) -> None:
        """Draft no tokens; steps take so many times as long as those without drafts."""
        self._engine.stop_drafts(SlowSteps(GpuSteps(self._setting.hardware), times))

    def ask(self, *, answers: float = 1.0, prompts: float = 1.0) -> None:
        """Let answers and prompts be so many times as long as at first."""
        shape = self._setting.shape
        shape = replace(shape, output=answers * shape.output, prompt=prompts * shape.prompt)
        self._engine.ask([(shape.kind([]), 1.0)])

    def ask_both(self, *, short: float, short_share: float) -> None:
        """Let a share of the requests have answers so many times as long as the others'."""
        shape = self._setting.shape
        few_tokens = replace(shape, output=short * shape.output)
        self._engine.ask([(shape.kind([]), 1.0 - short_share), (few_tokens.kind([]), short_share)])

    def after(self, seconds: float) -> Iterator[Verdict]:
        """The verdicts of so many seconds."""
        for _ in range(round(seconds / SCRAPE_S)):
            self.t_s += SCRAPE_S
            self._engine.run(self.t_s)
            (verdict,) = self.stream.judge(START_S + self.t_s, self._pages.page())
            yield verdict


def names(verdicts: Iterator[Verdict]) -> list[set[str]]:
    """The ids of the causes of each verdict, once it is settled."""
    said = [{cause.id for cause in verdict.causes} for verdict in verdicts]
    return said[round(SETTLED_S / SCRAPE_S) :]


@pytest.mark.parametrize(
    ("night_per_s", "times"),
    [
        pytest.param(None, 1.6, id="by day"),
        pytest.param(0.1, 1.6, id="after a quiet night"),
        pytest.param(0.1, 2.0, id="twice as slow after a quiet night"),
    ],
)
def test_a_constant_slowdown_is_told_for_as_long_as_it_lasts(
    night_per_s: float | None, times: float
) -> None:
    engine = Watched(2.1)
    assert all("slow_steps" not in each for each in names(engine.after(HOUR_S)))
    if night_per_s is not None:
        engine.rate_per_s = night_per_s
        assert all("slow_steps" not in each for each in names(engine.after(HOUR_S)))
        engine.rate_per_s = 2.1
    engine.slow(times)
    said = names(engine.after(HOUR_S))
    assert sum("slow_steps" in each for each in said) >= 0.95 * len(said)
    engine.slow(1.0)
    assert all("slow_steps" not in each for each in names(engine.after(900.0)))


def test_a_load_that_returns_after_a_quiet_night_is_not_slow() -> None:
    engine = Watched(2.1)
    for rate_per_s in (2.1, 0.1, 2.1, 4.2):
        engine.rate_per_s = rate_per_s
        assert all("slow_steps" not in each for each in names(engine.after(HOUR_S)))


def speeds(verdicts: Iterator[Verdict]) -> list[float | None]:
    """The speed of each verdict, once it is settled; None if the verdict says it is unknown."""
    settled = list(verdicts)[round(SETTLED_S / SCRAPE_S) :]
    for each in settled:
        assert each.values[SPEED] is not None or any(SPEED in line for line in each.unknown)
    return [each.values[SPEED] for each in settled]


@pytest.mark.parametrize(("times", "load"), [(1.4, 10.0), (2.0, 5.0), (2.0, 10.0), (3.0, 5.0)])
def test_a_slowdown_stays_told_at_a_load_that_was_never_seen(times: float, load: float) -> None:
    engine = Watched(0.3)
    list(engine.after(HOUR_S))
    engine.slow(times)
    assert all("slow_steps" in each for each in names(engine.after(900.0)))
    engine.rate_per_s *= load
    said = names(engine.after(HOUR_S))
    assert sum("slow_steps" in each for each in said) >= 0.95 * len(said)
    engine.slow(1.0)
    assert all("slow_steps" not in each for each in names(engine.after(900.0)))


@pytest.mark.parametrize(("times", "load"), [(1.4, 5.0), (1.4, 10.0), (2.0, 10.0)])
def test_an_engine_that_slows_down_as_its_load_rises_has_no_known_speed(
    times: float, load: float
) -> None:
    engine = Watched(0.3)
    list(engine.after(HOUR_S))
    engine.slow(times)
    engine.rate_per_s *= load
    assert set(speeds(engine.after(HOUR_S))) == {None}
    engine.rate_per_s = 0.3
    assert all("slow_steps" in each for each in names(engine.after(900.0)))
    engine.slow(1.0)
    assert all("slow_steps" not in each for each in names(engine.after(900.0)))


@pytest.mark.parametrize(
    ("answers", "prompts", "times"),
    [
        pytest.param(3.0, 1.0, 1.6, id="longer answers"),
        pytest.param(0.3, 1.0, 1.6, id="shorter answers"),
        pytest.param(1.0, 0.25, 1.6, id="shorter prompts"),
        pytest.param(1.0, 4.0, 1.6, id="longer prompts"),
        pytest.param(0.3, 4.0, 2.5, id="longer prompts, shorter answers"),
    ],
)
def test_an_engine_that_slows_down_as_its_requests_change_has_no_usual_speed(
    answers: float, prompts: float, times: float
) -> None:
    engine = Watched(1.0)
    list(engine.after(2700.0))
    engine.ask(answers=answers, prompts=prompts)
    engine.slow(times)
    assert all(each is None or each <= 0.8 for each in speeds(engine.after(1800.0)))
    engine.slow(1.0)
    healthy = speeds(engine.after(900.0))
    assert all(each is None or each >= LEARNED_FROM for each in healthy)
    assert healthy.count(1.0) >= 0.95 * len(healthy)


@pytest.mark.parametrize("rate_per_s", [0.3, 1.0])
def test_a_slow_engine_that_becomes_slower_is_told_as_much_slower(rate_per_s: float) -> None:
    engine = Watched(rate_per_s)
    list(engine.after(2700.0))
    for times in (1.5, 3.0, 1.5):
        engine.slow(times)
        said = speeds(engine.after(900.0))
        assert all(each is not None and 0.9 <= each * times <= 1.1 for each in said)


@pytest.mark.parametrize(("kind", "rate_per_s"), [("chat", 0.3), ("documents", 0.3)])
def test_prefills_that_stay_slow_are_told_and_never_learned(kind: str, rate_per_s: float) -> None:
    engine = Watched(rate_per_s, kind)
    list(engine.after(2700.0))
    engine.slow(2.0, prompts_only=True)
    said = names(engine.after(HOUR_S))
    assert sum("slow_steps" in each for each in said) >= 0.9 * len(said)
    engine.slow(1.0)
    assert all("slow_steps" not in each for each in names(engine.after(900.0)))


@pytest.mark.parametrize(
    ("drafts", "load", "times"),
    [(3, 1.0, 1.0), (3, 4.0, 1.0), (3, 4.0, 1.8), (1, 1.0, 1.0), (1, 4.0, 1.0)],
)
def test_lost_drafts_are_told_at_any_load(drafts: int, load: float, times: float) -> None:
    engine = Watched(0.5, "speculation", drafts)
    list(engine.after(2700.0))
    engine.rate_per_s *= load
    assert not set().union(*names(engine.after(1200.0)))
    engine.stop_drafts(times)
    said = names(engine.after(1200.0))
    assert sum("unexplained_latency" in each for each in said) >= 0.95 * len(said)


def test_an_unknown_speed_can_be_accepted() -> None:
    engine = Watched(0.3)
    list(engine.after(HOUR_S))
    engine.slow(2.0)
    engine.rate_per_s = 3.0
    list(engine.after(HOUR_S))
    (monitor,) = engine.stream.monitor.engines
    assert "speed" in {each.family for each in monitor.judge.accept(START_S + engine.t_s, "wanted")}
    assert None not in speeds(engine.after(900.0))


@pytest.mark.parametrize("load", [2.0, 5.0, 10.0])
def test_a_load_that_was_never_seen_is_not_slow(load: float) -> None:
    engine = Watched(0.3)
    list(engine.after(HOUR_S))
    engine.rate_per_s *= load
    assert all("slow_steps" not in each for each in names(engine.after(HOUR_S)))
    later = speeds(engine.after(900.0))
    assert later.count(1.0) >= 0.95 * len(later)


def test_long_requests_that_no_longer_come_beside_short_ones_cut_nothing_short() -> None:
    engine = Watched(1.0)
    engine.ask_both(short=0.02, short_share=0.55)
    assert not set().union(*names(engine.after(1800.0)))
    engine.ask(answers=0.02)
    engine.rate_per_s = 0.55
    assert "requests_failing" not in set().union(*names(engine.after(1800.0)))


def test_answers_that_are_cut_short_at_an_equal_load_are_a_fault_of_the_service() -> None:
    engine = Watched(1.0)
    assert not set().union(*names(engine.after(1200.0)))
    engine.ask(answers=0.01)
    verdicts = list(engine.after(HOUR_S))
    said = names(iter(verdicts))
    assert sum("requests_failing" in each for each in said) >= 0.95 * len(said)
    (cause,) = [each for each in verdicts[-1].causes if each.id == "requests_failing"]
    assert cause.severity == Severity.WARNING
    assert cause.summary.startswith("Answers have")
    (monitor,) = engine.stream.monitor.engines
    assert monitor.judge.accept(START_S + engine.t_s, "wanted")
    assert all("requests_failing" not in each for each in names(engine.after(900.0)))


@pytest.mark.parametrize(
    ("answers", "prompts", "rate_per_s"),
    [
        pytest.param(0.3, 1.0, 1.0, id="a third is a change of the workload"),
        pytest.param(0.01, 4.0, 1.0, id="other prompts: other traffic"),
        pytest.param(0.01, 1.0, 0.3, id="much less traffic"),
    ],
)
def test_short_answers_to_other_requests_are_no_fault(
    answers: float, prompts: float, rate_per_s: float
) -> None:
    engine = Watched(1.0)
    list(engine.after(1200.0))
    engine.ask(answers=answers, prompts=prompts)
    engine.rate_per_s = rate_per_s
    assert all("requests_failing" not in each for each in names(engine.after(1200.0)))
