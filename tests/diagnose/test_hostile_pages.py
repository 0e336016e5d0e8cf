"""Pages with values and labels that no server has: each is judged or refused, none is a crash.

    python -m tests.diagnose.test_hostile_pages FIRST LAST

draws the engines of other seeds and prints each crash.
"""

from __future__ import annotations

import gzip
import random
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from tests.soak.growing import Growing

ENGINES = Path(__file__).parents[1] / "fixtures/engines"
RECORDED = ("healthy_light", "kv_pressure_cascade", "prefix_good")
SCRAPES = 14
GAPS_S = (2.0, 2.0, 2.0, 10.0, 0.01, 3600.0, -5.0, 60.0)

NUMBERS = ("NaN", "+Inf", "-Inf", "0", "-1", "1e308", "-1e308", "5e-324", "1e18", "3.5", "100")
TEXTS = ("", "0", "-1", "nan", "inf", "1e400", "9" * 5000, "None", "auto", "1_0", "a,b", ",", "é")

SAMPLE = re.compile(r"(?m)^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@cache
def pages_of(name: str) -> list[str]:
    """The pages of a recording, or that of another engine or router."""
    if name in RECORDED:
        growing = Growing(name)
        return [growing.page(3 * at).decode() for at in range(SCRAPES)]
    return [gzip.decompress((ENGINES / name).read_bytes()).decode()] * SCRAPES


def hostile(seed: int) -> list[tuple[float, str]]:
    """Times and pages of a server most of whose values are real."""
    rng = random.Random(seed)
    names = [*RECORDED, *sorted(file.name for file in ENGINES.glob("*.gz"))]
    pages, number_ratio = pages_of(rng.choice(names)), rng.choice((0.0, 0.01, 0.05, 0.3))
    mixed, label_ratio = rng.random() < 0.2, rng.choice((0.0, 0.02, 0.2))
    changed: dict[str, tuple[str | None, bool]] = {}

    def sample(match: re.Match[str]) -> str:
        name, labels, value = match[1], match[2] or "", match[3]
        if name + labels not in changed:
            number = rng.choice(NUMBERS) if rng.random() < number_ratio else None
            changed[name + labels] = number, rng.random() < label_ratio
        number, is_other = changed[name + labels]
        if is_other and labels and (name.endswith("_info") or rng.random() < 0.3):
            first = rng.randrange(labels.count("="))
            text, skipped = rng.choice(TEXTS), iter(range(first))
            labels = LABEL.sub(
                lambda label: (
                    label[0] if next(skipped, None) is not None else f'{label[1]}="{text}"'
                ),
                labels,
                first + 1,
            )
        return f"{name}{labels} {number or value}"

    t_s, scrapes = 1.7e9, list[tuple[float, str]]()
    for page in pages:
        beside = rng.choice(pages_of(rng.choice(names))) if mixed and rng.random() < 0.3 else ""
        t_s += rng.choice(GAPS_S)
        scrapes.append((t_s, SAMPLE.sub(sample, page) + "\n" + beside))
    return scrapes


def judge(seed: int) -> None:
    """Judge the pages of a seed.

    Raises:
        AssertionError: a number of a verdict is not finite.
    """
    stream = TargetStream("t", Profile(), Limits())
    for t_s, page in hostile(seed):
        for verdict in stream.take(t_s, page, "text/plain"):
            assert all(abs(value) < 1e300 for value in verdict.values.values() if value is not None)


@pytest.mark.parametrize("seed", [*range(8), 198, 217, 269, 353])
def test_hostile_values_and_labels_are_judged_or_refused(seed: int) -> None:
    judge(seed)


@pytest.mark.parametrize("text", TEXTS)
def test_a_capacity_that_is_no_number_is_unknown(text: str) -> None:
    stream, verdicts = TargetStream("t", Profile(), Limits()), []
    sizes = re.compile(r'(block_size|num_gpu_blocks|kv_cache_size_tokens)="[^"]*"')
    for at, page in enumerate(pages_of("kv_pressure_cascade")):
        written = sizes.sub(rf'\1="{text}"', page)
        verdicts = stream.take(1.7e9 + 6 * at, written, "text/plain")
    (verdict,) = verdicts
    number = int(text.replace("_", "")) if text in ("0", "1_0") else None
    assert verdict.values.get("kv_capacity_tokens") == number


if __name__ == "__main__":
    for at in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            judge(at)
        except Exception as error:  # noqa: BLE001 - all of them are printed
            print(at, type(error).__name__, error)
