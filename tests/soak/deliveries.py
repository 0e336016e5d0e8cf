"""Alerts through a receiver that fails in every way, and a daemon that is killed: none is lost.

    python -m tests.soak.deliveries [2000 [50]]

Alerts are posted to real daemons, each killed (SIGKILL) at a random moment; a post that is not
answered with 200 is posted again, as Alertmanager does. The receiver answers 200, 401, 429 or 503
(with a Retry-After of up to 31 years), hangs, or closes the connection before or after it has read
the message. Each alert must arrive; a message that arrives twice has the same `id`, so a receiver
that keeps ids sees it once.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path

from msgspec import Struct

from tests.agent.daemon.running import Daemon
from tests.agent.notify.posts import alert, post
from tests.agent.notify.web import Posted, Reply, Taker
from tests.agent.notify.webhooks import webhook
from tests.waiting import until

ALIVE_S = (0.0, 1.5)
POSTS_MAX = 8
"""Most posts to one daemon."""

INSTANCE = "127.0.0.1:9"
FAILURES = (
    Reply(status=401),
    Reply(status=429, headers={"Retry-After": "1"}),
    Reply(status=429, headers={"Retry-After": "999999999"}),
    Reply(status=503),
    Reply(status=503, headers={"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}),
    Reply(hang=True),
    Reply(status=0),
)
DELIVERED_WITHIN_S = 240.0


class Failing(Taker):
    """A receiver that answers as the dice say, until `is_well`. Its `arrived` are the messages
    that it has read, by id, those that it refused left out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.is_well = False
        self.arrived: Counter[str] = Counter()
        self.ids_of: defaultdict[str, set[str]] = defaultdict(set)
        self.refused = 0
        self._rng = random.Random(seed)

    def take(self, posted: Posted) -> Reply:
        """The answer to one message."""
        reply = Reply() if self.is_well or self._rng.random() < 0.6 else self._rng.choice(FAILURES)
        if reply.status != 200:
            self.refused += 1
            return reply
        message = posted.body["id"]
        self.arrived[message] += 1
        for event in posted.body["events"]:
            self.ids_of[event["labels"]["number"]].add(message)
        # Read, but the answer is lost.
        return reply if self.is_well or self._rng.random() < 0.9 else Reply(status=0)


class Deliveries(Struct, frozen=True):
    """What became of alerts: `alerts` accepted, those that never arrived, those in messages of
    different ids, and messages that arrived again with the same id."""

    alerts: int
    lost: int
    in_two_messages: int
    again: int
    refused: int
    kills: int

    @property
    def kept(self) -> bool:
        """Whether each alert arrived, and once for a receiver that keeps ids."""
        return self.alerts > 0 and not self.lost and not self.in_two_messages


def accepts(daemon: Daemon, numbers: range) -> bool:
    """Post alerts. Returns whether the daemon has answered that it has them."""
    alerts = [alert(instance=INSTANCE, number=str(number)) for number in numbers]
    request = urllib.request.Request(
        f"{daemon.url}/api/v1/alerts",
        json.dumps(post(*alerts)).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def deliver(folder: Path, *, alerts: int, kills: int, seed: int = 1) -> Deliveries:
    """Post alerts to daemons that are killed, and then to one that is not."""
    rng, taker, step = random.Random(seed), Failing(seed), max(1, alerts // (kills * POSTS_MAX))
    config = folder / "kneewatch.toml"
    config.write_text(
        webhook(taker, "own = false\nalerts = true").replace("timeout_s = 300", "timeout_s = 2")
    )
    queue = [range(at, min(at + step, alerts)) for at in range(0, alerts, step)]
    try:
        for life in range(kills + 1):
            taker.is_well = life == kills
            with Daemon(folder, f"http://{INSTANCE}", "--config", config) as daemon:
                began_s, count = time.monotonic(), POSTS_MAX if life < kills else len(queue)
                while queue and count and accepts(daemon, queue[0]):
                    count -= 1
                    del queue[0]
                if life < kills:
                    if rng.random() < 0.7:
                        assert daemon.url
                        time.sleep(rng.uniform(*ALIVE_S))
                    daemon.process.send_signal(signal.SIGKILL)
                    daemon.process.wait()
                else:
                    until(lambda: len(taker.ids_of) == alerts, DELIVERED_WITHIN_S)
                    assert not queue, f"not accepted within {time.monotonic() - began_s:.0f} s"
                    daemon.end()
                assert "Traceback" not in daemon.log, daemon.log
    finally:
        taker.close()
    return Deliveries(
        alerts,
        alerts - len(taker.ids_of),
        sum(len(ids) > 1 for ids in taker.ids_of.values()),
        sum(count - 1 for count in taker.arrived.values()),
        taker.refused,
        kills,
    )


def main() -> None:
    """Deliver, print the figures."""
    alerts, kills = (*map(int, sys.argv[1:3]), *(2000, 50)[len(sys.argv) - 1 :])
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = deliver(Path(folder), alerts=alerts, kills=kills)
    print(
        f"alerts: {outcome.alerts} over {outcome.kills} kills in {time.monotonic() - began_s:.0f} s"
    )
    print(f"messages refused, reset or left without an answer: {outcome.refused}")
    print(f"alerts lost: {outcome.lost}; in messages of different ids: {outcome.in_two_messages}")
    print(f"messages that arrived again with the same id: {outcome.again}")
    if not outcome.kept:
        sys.exit("alerts lost or repeated")


if __name__ == "__main__":
    main()
