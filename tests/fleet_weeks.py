"""A made-up fleet over days, with daily load and incidents at known times, in a real Prometheus.

    python -m tests.fleet_weeks REPLICAS [--days 7] [--every 120] [--port 9090] [--raw]

starts one, fills it, with what recording rules keep unless `--raw`, prints its address and the last
moment, and stays until it is ended. Counters and histograms are there for the whole time, so that a
week can be read back from them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from tests.collector.oracle import LOOPBACK, SAMPLE, Prometheus, running
from tests.fleet_replica import DAY_S, HOUR_S, INCIDENT_S, Floats, Planted, Replica, Row
from tests.fleet_sums import Sums
from tests.programs import require


class FleetWeek:
    """Replicas over some days, scraped every so many seconds; `sets` of an incident of each kind
    (one for every ten replicas), each of `incident_s`. `recorded`: with the sums that recording
    rules keep, from `sums_from_s` on. `tiered`: their targets have the label `tier`, else only DCGM
    tells their GPU. All are of a namespace."""

    def __init__(
        self,
        replicas: int,
        *,
        end_s: int,
        days: float,
        every_s: int,
        recorded: bool = False,
        sums_from_s: float = 0.0,
        tiered: bool = False,
        namespace: str = "prod",
        sets: int | None = None,
        incident_s: int = INCIDENT_S,
    ) -> None:
        self.replicas, self.end_s, self.every_s = replicas, end_s, every_s
        self.recorded, self.sums_from_s = recorded, sums_from_s
        self.tiered, self.namespace = tiered, namespace
        self.from_s = end_s - int(days * DAY_S)
        self.times = np.arange(self.from_s, end_s + 1, every_s, dtype=np.float64)
        each = max(1, replicas // 10)
        self.planted = tuple(self._plant(sets or each, each, days, incident_s))

    def _plant(self, sets: int, each: int, days: float, long_s: int) -> Iterator[Planted]:
        causes = ("kv_pressure", "target_down", "engine_restarted")
        span_s = days * DAY_S - 3 * HOUR_S - long_s
        for at in range(sets):
            for place, cause in enumerate(causes):
                share = (at * len(causes) + place + 1) / (sets * len(causes) + 4)
                start_s = (self.from_s + 2 * HOUR_S + share * span_s) // 60 * 60
                replica = (10 * at + at // each + 3 * place) % self.replicas
                yield Planted(cause, replica, start_s, start_s + long_s)

    def send(self, server: Prometheus) -> int:
        """Write it into a Prometheus, an engine at a time. Returns how many samples it has."""
        sums, samples = Sums(self.times), 0
        for at in range(self.replicas):
            engine = Replica(self, at)
            rows = list(engine.series())
            if self.recorded:
                sums.add(engine.labels, engine.there, rows)
            samples += _send(server, self.times, rows)
        for times, name, labels, values in sums.recorded_series():
            since = np.where(times >= self.sums_from_s, values, np.nan)
            samples += _send(server, times, [(name, labels, since)])
        return samples


SAMPLE_BYTES = 18
AT_ONCE = 240
"""Samples of a series in one request: Prometheus keeps room for so many as long as it runs
(tsdb/isolation.go, txRing)."""


def _send(server: Prometheus, times: Floats, rows: Sequence[Row]) -> int:
    """Write series into a Prometheus. Returns how many samples they have."""
    for at in range(0, len(times), AT_ONCE):
        part = slice(at, at + AT_ONCE)
        server.write(
            ({**labels, "__name__": name}, samples_of(times[part], values[part]))
            for name, labels, values in rows
        )
    return sum(int((~np.isnan(values)).sum()) for _, _, values in rows)


def samples_of(times: Floats, values: Floats) -> bytes:
    """Samples as remote write has them; NaN is none. Shapes: (samples,)."""
    kept = ~np.isnan(values)
    samples = np.empty((int(kept.sum()), SAMPLE_BYTES), dtype=np.uint8)
    samples[:, :3] = np.frombuffer(SAMPLE, dtype=np.uint8)
    samples[:, 3:11] = values[kept].astype("<f8").view(np.uint8).reshape(-1, 8)
    samples[:, 11] = 0x10
    millis = (1000 * times[kept]).astype(np.uint64)
    for byte in range(6):
        seven = (millis >> np.uint64(7 * byte)) & np.uint64(0x7F)
        samples[:, 12 + byte] = seven | np.uint64(0x80 if byte < 5 else 0)
    return samples.tobytes()


def _end(_number: int, _frame: object) -> None:
    sys.exit()


def main() -> None:
    """Fill a Prometheus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replicas", type=int)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--every", type=int, default=120)
    parser.add_argument("--port", type=int)
    parser.add_argument("--raw", action="store_true")
    given = parser.parse_args()
    end_s = int(time.time()) // HOUR_S * HOUR_S
    week = FleetWeek(
        given.replicas, end_s=end_s, days=given.days, every_s=given.every,
        recorded=not given.raw, tiered=True,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, _end)
    with running(require("prometheus"), port=given.port) as server:
        samples = week.send(server)
        print(f"http://{LOOPBACK}:{server.port} to={end_s} samples={samples}", flush=True)
        while True:
            time.sleep(DAY_S)


if __name__ == "__main__":
    main()
