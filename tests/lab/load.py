"""Load of streamed completions in a closed or open loop, and what its clients saw. I/O edge."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from tests.lab.model import SPECIAL, VOCABULARY
from tests.lab.server import HOST, MODEL

READ_TIMEOUT_S = 120.0
PAUSE_AFTER_FAILURE_S = 0.2
LONGER_RATIO = 0.05


class Shape(Struct, frozen=True, kw_only=True):
    """A request: `shared_tokens` of the prompt are the same in all, the others random.

    `words` limits prompt and output to so few words; `pause_s` is waited after each request.
    `hangs_up_after_s`: the client closes the connection when the answer is not complete by then.
    `every_s`: an open loop: the client sends a request at random every so many seconds on average,
    whether the ones before are answered or not.
    """

    prompt_tokens: int = 100
    output_tokens: int = 300
    shared_tokens: int = 0
    words: int = VOCABULARY - len(SPECIAL)
    pause_s: float = 0.0
    hangs_up_after_s: float | None = None
    every_s: float | None = None


PLAIN = Shape()


class Arrival(Struct, frozen=True):
    """A piece of a stream: when it came, how long it was waited for, the tokens it held."""

    at_s: float
    wait_s: float
    tokens: int


class Seen(Struct, frozen=True):
    """Of the first tokens and the later tokens that came in a span of time: means, and the
    longest wait between tokens."""

    streams: int
    ttft_mean_s: float | None
    itl_mean_s: float | None
    itl_longest_s: float | None


POLL_S = 0.1


class Load:
    """Workers with one request in flight each; none starts a request after `lasts_s` seconds."""

    def __init__(self, port: int, *, lasts_s: float, shape: Shape = PLAIN) -> None:
        self._port = port
        self._shape = shape
        self._end_s = time.monotonic() + lasts_s
        self._workers = 0
        self._threads: dict[int, threading.Thread] = {}
        # Appending to a list is atomic, and no list is read while it matters that it is complete.
        self._first: list[Arrival] = []
        self._later: list[Arrival] = []
        self.failures: list[str] = []

    def resize(self, workers: int, *, over_s: float = 0.0) -> None:
        """Have so many workers; one too many ends with its present request.

        New ones start spread over that time: started at once they would go on in step.
        """
        self._workers = workers
        for number in range(workers):
            if number not in self._threads or not self._threads[number].is_alive():
                delay_s = over_s * number / workers
                thread = threading.Thread(target=self._work, args=(number, delay_s), daemon=True)
                self._threads[number] = thread
                thread.start()

    def wait_drained(self, silent_s: float) -> bool:
        """Whether the workers that are too many have ended; False after so long without a token.

        How long the last requests take depends on the machine, and on what else runs there.
        """
        tokens, last_s = -1, time.monotonic()
        while sum(thread.is_alive() for thread in self._threads.values()) > self._workers:
            if tokens != (tokens := len(self._first) + len(self._later)):
                last_s = time.monotonic()
            elif time.monotonic() - last_s > silent_s:
                return False
            time.sleep(POLL_S)
        return True

    def seen(self, *others: Load, from_s: float, to_s: float) -> Seen:
        """What the clients saw, also those of other loads, between two moments (unix seconds)."""
        loads = (self, *others)
        first = [a for load in loads for a in list(load._first) if from_s <= a.at_s <= to_s]
        later = [a for load in loads for a in list(load._later) if from_s <= a.at_s <= to_s]
        return Seen(len(first), mean_wait_s(first), mean_wait_s(later), longest_wait_s(later))

    def _work(self, number: int, delay_s: float) -> None:
        shape = self._shape
        prompts = random.Random(f"{number} of {shape}")
        common = random.Random(str(shape))
        shared = [word(common, shape.words) for _ in range(shape.shared_tokens)]
        time.sleep(delay_s)
        while number < self._workers and time.monotonic() < self._end_s:
            own = shape.prompt_tokens - shape.shared_tokens
            prompt = [*shared, *(word(prompts, shape.words) for _ in range(own))]
            if shape.every_s is None:
                self._try(prompt)
            else:
                threading.Thread(target=self._try, args=(prompt,), daemon=True).start()
                time.sleep(prompts.expovariate(1 / shape.every_s))

    def _try(self, prompt: Sequence[int]) -> None:
        try:
            self._complete(prompt)
            time.sleep(self._shape.pause_s)
        except (OSError, http.client.HTTPException, ValueError) as exc:
            self.failures.append(f"{type(exc).__name__}: {exc}")
            time.sleep(PAUSE_AFTER_FAILURE_S)

    def _complete(self, prompt: Sequence[int]) -> None:
        patience_s = self._shape.hangs_up_after_s
        connection = http.client.HTTPConnection(
            HOST, self._port, timeout=patience_s or READ_TIMEOUT_S
        )
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": self._shape.output_tokens,
            **self._limits(),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        sent_s = time.time()
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ValueError(f"HTTP {response.status}: {response.read(200)!r}")
            self._follow(sent_s, generated(response))
        except TimeoutError:
            if patience_s is None:
                raise
        finally:
            connection.close()

    def _limits(self) -> dict[str, object]:
        """Words that the output is limited to; nothing where it may be any."""
        words = self._shape.words
        if words == VOCABULARY - len(SPECIAL):
            return {}
        return {"allowed_token_ids": [*range(len(SPECIAL), len(SPECIAL) + words)]}

    def _follow(self, sent_s: float, counts: Iterable[int]) -> None:
        patience_s, last_s, tokens_received = self._shape.hangs_up_after_s, sent_s, 0
        for tokens in counts:
            now_s, new = time.time(), tokens - tokens_received
            if patience_s is not None and now_s - sent_s > patience_s:
                raise TimeoutError
            if not new:
                continue
            if tokens_received:
                self._later.append(Arrival(now_s, now_s - last_s, new))
            else:
                self._first.append(Arrival(now_s, now_s - sent_s, 1))
                if new > 1:  # tokens that came along with the first: no wait between them
                    self._later.append(Arrival(now_s, 0.0, new - 1))
            last_s, tokens_received = now_s, tokens
        wanted = self._shape.output_tokens
        if tokens_received != wanted:
            raise ValueError(f"the stream ended after {tokens_received} of {wanted} tokens")


def word(source: random.Random, words: int) -> int:
    """A random token of so many."""
    return source.randrange(len(SPECIAL), len(SPECIAL) + words)


def generated(lines: Iterable[bytes]) -> Iterator[int]:
    """The tokens generated so far, from each event of a stream of completions."""
    for line in lines:
        if line.startswith(b"data: {"):
            yield int(json.loads(line[6:])["usage"]["completion_tokens"])


def mean_wait_s(arrivals: Sequence[Arrival]) -> float | None:
    """Waited seconds per token; None without a token."""
    tokens = sum(arrival.tokens for arrival in arrivals)
    return sum(arrival.wait_s for arrival in arrivals) / tokens if tokens else None


def longest_wait_s(arrivals: Sequence[Arrival]) -> float | None:
    """The wait that no more than a twentieth of the time is spent in longer ones; None: no wait.

    A single wait may be the machine's.
    """
    left_s = LONGER_RATIO * sum(arrival.wait_s for arrival in arrivals)
    for wait_s in sorted((arrival.wait_s for arrival in arrivals), reverse=True):
        left_s -= wait_s
        if left_s < 0:
            return wait_s
    return None
