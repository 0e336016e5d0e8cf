"""The sweeps that are named for tensor-parallel degrees. I/O edge: it reads files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from glob import glob, has_magic
from pathlib import Path

from kneewatch.agent.settings import Settings
from kneewatch.collector.base import SettingsError
from kneewatch.diagnose.sizing.benchmark.by_tensor_parallel import Sweep
from kneewatch.diagnose.sizing.benchmark.points import Benchmark
from kneewatch.diagnose.sizing.inputs import SizingError

SETTING = "benchmark.by_tensor_parallel"
MOST_DEGREE = 1024
MOST_FILES = 256
"""Files of one degree: a sweep has a few dozen loads."""


def stated_sweeps(settings: Settings) -> tuple[Sweep, ...]:
    """The sweeps that the settings name, by rising degree; none where none is named.

    Raises:
        SettingsError: as `sweeps_of`, with the setting's origin.
    """
    named: Mapping[str, str] | None = settings[SETTING]
    if not named:
        return ()
    try:
        return sweeps_of(named.items())
    except SizingError as exc:
        raise SettingsError(f"{settings.origin(SETTING)}: {SETTING}: {exc}") from exc


def sweeps_of(named: Iterable[tuple[str, str]]) -> tuple[Sweep, ...]:
    """The sweep of each degree from its file, or from all that a pattern such as `tp4/*.json`
    finds, for most tools write one for each load; by rising degree.

    Raises:
        SizingError: what is no degree, or a file that cannot be used; the message names both.
    """
    found: dict[int, Sweep] = {}
    for text, path in named:
        degree = int(text) if text.isascii() and text.isdigit() else 0
        if not 1 <= degree <= MOST_DEGREE or degree in found:
            twice = "is there twice" if degree in found else "is no tensor-parallel degree"
            raise _refused(f"{text!r} {twice}; write 4 = FILE")
        try:
            found[degree] = _sweep(degree, path)
        except SizingError as exc:
            raise _refused(f"TP {degree}: {exc}") from exc
    return tuple(found[degree] for degree in sorted(found))


def _sweep(degree: int, path: str) -> Sweep:
    # Here: no command without a benchmark pays for what reads one.
    from kneewatch.agent.size_inputs import text_of
    from kneewatch.diagnose.sizing.benchmark.reading import merged, read_benchmark

    read: list[Benchmark] = []
    for file in _files(path):
        text = text_of(file, "benchmark")
        try:
            read.append(read_benchmark(text))
        except SizingError as exc:
            raise _refused(f"{file}: {exc}") from exc
    return Sweep(degree, merged(read), path)


def _files(path: str) -> list[str]:
    if not has_magic(path) or Path(path).exists():
        return [path]
    files = sorted(glob(path))  # noqa: PTH207 - a pattern may be absolute
    if not files or len(files) > MOST_FILES:
        raise _refused(f"{path}: {len(files)} files are there, 1 to {MOST_FILES} are read")
    return files


def _refused(message: str) -> SizingError:
    return SizingError(message, name="benchmark_by_tensor_parallel")
