"""A fleet as it was: its metrics system is asked for a past moment, one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

from kneewatch.agent.api.problems import Problem, clean
from kneewatch.collector.base import CollectError
from kneewatch.diagnose.fleet.diagnosing import FleetDiagnosis

ANSWER_S = 60.0
"""How long a request waits for its answer; the asking goes on behind it."""

KEPT_S = 60.0
"""How long an answer is kept for those who ask again."""

AGAIN_S = 5
NOTHING = "no_vllm"
"""CollectError's word for a metrics system without series of vLLM."""

SINCE = (
    "since is not told of a fleet, whose past its metrics system keeps: ask for one moment with "
    "at, or for a stretch with `kneewatch report --prometheus URL --since 2h --to TIME`"
)


@dataclass(slots=True)
class Asked:
    """A moment that is asked for, or was: `ended_s` is when its answer came."""

    at_s: float
    answer: Future[FleetDiagnosis]
    ended_s: float | None = None


class FleetPast:
    """Verdicts of past moments. The newest is kept for a while; another has to wait its turn."""

    def __init__(
        self,
        ask: Callable[[float], FleetDiagnosis],
        *,
        answer_s: float = ANSWER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._answer_s, self._monotonic = ask, answer_s, monotonic
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet-past")
        self._asked: Asked | None = None

    async def at(self, at_s: float) -> FleetDiagnosis:
        """The verdict of a moment, to the second. Called by one event loop.

        Raises:
            Problem: another moment is being asked for, nothing was seen then, or there is no
                answer, or none in time.
        """
        answer = self._answer(float(int(at_s)))
        try:
            return await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(answer)), self._answer_s
            )
        except TimeoutError as exc:
            raise Problem(
                HTTPStatus.GATEWAY_TIMEOUT,
                f"the metrics system has not told that moment within {self._answer_s:g} s; it is "
                f"waited for: ask again, with at={at_s:.0f}",
                {"Retry-After": str(AGAIN_S)},
            ) from exc
        except CollectError as exc:
            raise _untold(exc) from exc

    def _answer(self, at_s: float) -> Future[FleetDiagnosis]:
        asked = self._asked
        if asked is not None:
            if not asked.answer.done() and asked.at_s != at_s:
                raise Problem(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "another moment is being asked for: one at a time, for it is dear",
                    {"Retry-After": str(AGAIN_S)},
                )
            if asked.at_s == at_s and self._holds(asked):
                return asked.answer
        self._asked = asked = Asked(at_s, self._thread.submit(self._ask, at_s))
        asked.answer.add_done_callback(lambda _: self._ended(asked))
        return asked.answer

    def _holds(self, asked: Asked) -> bool:
        """Whether an answer is on its way, or is there, is no error, and is not old."""
        if not asked.answer.done():
            return True
        ended_s = self._monotonic() if asked.ended_s is None else asked.ended_s
        return asked.answer.exception() is None and self._monotonic() - ended_s < KEPT_S

    def _ended(self, asked: Asked) -> None:
        asked.ended_s = self._monotonic()


def _untold(error: CollectError) -> Problem:
    if error.kind == NOTHING:
        return Problem(HTTPStatus.NOT_FOUND, clean(f"nothing is known of that moment: {error}"))
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE, clean(f"the metrics system does not tell: {error}")
    )
