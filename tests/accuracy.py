"""`make accuracy`: expected against given over the labelled recordings, without latency targets and
with targets at several levels.

Usage: python -m tests.accuracy [FOLDER]   a folder with captures and a labels.json; default: the
shipped ones
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

from msgspec import Struct

from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests import engine_speeds, kvtruth, ramps, routing_accuracy, slo_ramps, throughput
from tests.incidents import probes, rebuilt
from tests.incidents import table as incidents
from tests.peers import DOCTOR_CHECKS, doctor_checks, vllm_doctor
from tests.recordings import CAPTURES, FIRST_CAUSES, LAB, NO_TARGETS, Phase, diagnoses, phases
from tests.target_levels import LATENCY_CAUSES, UNREACHABLE, completed, is_missed, loose, middle

RIGHT_FROM = 0.8
"""A faulty phase counts as told right when the right cause comes first in four of five scrapes."""

STATED_LEVEL, STATED = "1 s and 60 ms", Targets(ttft_p99_s=1.0, itl_p99_s=0.06)
"""Targets as users state them, for all recordings alike."""

ROOT_CAUSES = frozenset(chain.from_iterable(FIRST_CAUSES.values())) - LATENCY_CAUSES
"""Causes that have evidence of their own: a missed target is none for them."""

Said = Mapping[Path, Sequence[Verdict]]
"""What was said of each recording."""


class PhaseVerdict(Struct, frozen=True):
    """What was said of one phase. `delay_s`: from its start to the first right word.

    `missed`: whether a judged scrape missed a target; `unfounded` are root causes that were said
    of a quiet phase with targets only.
    """

    phase: Phase
    judged: Sequence[Verdict]
    share: float
    delay_s: float | None
    worst: Severity
    missed: bool = False
    unfounded: frozenset[str] = frozenset()

    @property
    def right(self) -> bool:
        """Whether the phase was told right. In a quiet one in which a target is missed a warning
        about that is right."""
        if self.phase.first_causes:
            return bool(self.judged) and self.share >= RIGHT_FROM and self.stage_right
        calm = not self.unfounded if self.missed else self.worst < Severity.WARNING
        return calm and self.stage_right

    @property
    def stages(self) -> list[int]:
        """Stages given in the judged scrapes."""
        return sorted({d.stage.number for d in self.judged if d.stage.number is not None})

    @property
    def stage_right(self) -> bool:
        """Whether the stage was right, in four of five scrapes where there is a fault."""
        if self.phase.stages is None or not self.judged:
            return True
        low, high = self.phase.stages
        within = [d.stage.number is not None and low <= d.stage.number <= high for d in self.judged]
        return sum(within) >= (RIGHT_FROM if self.phase.first_causes else 1.0) * len(within)


def first_cause(diagnosis: Verdict) -> str:
    """The first cause's id, or a dash."""
    return diagnosis.causes[0].id if diagnosis.causes else "-"


def first_word(diagnosis: Verdict) -> str:
    """The first cause's id, without causes the worst finding's rule at warning or worse, or a
    dash."""
    if diagnosis.causes:
        return diagnosis.causes[0].id
    worst = max(diagnosis.findings, key=lambda finding: finding.severity, default=None)
    return worst.rule if worst and worst.severity >= Severity.WARNING else "-"


def verdict(
    phase: Phase,
    given_diagnoses: Sequence[Verdict],
    *,
    targets: Targets = NO_TARGETS,
    untargeted: Sequence[Verdict] = (),
) -> PhaseVerdict:
    """What was said of a phase; `untargeted` is what was said without the targets."""
    inside = [d for d in given_diagnoses if phase.from_s <= d.t_s <= phase.to_s]
    judged = [d for d in inside if d.t_s >= phase.judged_from_s]
    right = [d for d in judged if comes_first(d, phase.first_causes, targets)]
    hit = next((d.t_s for d in inside if comes_first(d, phase.first_causes, targets)), None)
    without = [d for d in untargeted if phase.judged_from_s <= d.t_s <= phase.to_s]
    unfounded = (causes_of(judged) - causes_of(without)) & ROOT_CAUSES
    return PhaseVerdict(
        phase,
        judged,
        len(right) / len(judged) if judged else 0.0,
        None if hit is None else hit - phase.from_s,
        max((d.severity for d in judged), default=Severity.OK),
        any(is_missed(d, targets) for d in judged),
        frozenset() if phase.first_causes else unfounded,
    )


def comes_first(diagnosis: Verdict, wanted: Collection[str], targets: Targets) -> bool:
    """Whether one of the wanted causes comes first. A note may stand below a missed target."""
    missed = is_missed(diagnosis, targets)
    for cause in diagnosis.causes:
        if cause.id in wanted:
            return True
        if not missed or cause.id not in LATENCY_CAUSES:
            return False
        below = [other for other in diagnosis.causes if other.id in wanted]
        if not any(other.severity <= Severity.INFO for other in below):
            return False
    return False


def causes_of(diagnoses: Sequence[Verdict]) -> frozenset[str]:
    """Every cause that was said, by itself or within another."""
    causes = [cause for diagnosis in diagnoses for cause in diagnosis.causes]
    return frozenset(name for cause in causes for name in (cause.id, *cause.explains))


def given(verdict_of_phase: PhaseVerdict) -> str:
    """The first causes given, most frequent first, with their number of scrapes."""
    counts = Counter(first_word(d) for d in verdict_of_phase.judged)
    first = ", ".join(f"{cause} {count}" for cause, count in counts.most_common(3))
    unfounded = ", ".join(sorted(verdict_of_phase.unfounded))
    return f"{first}; unfounded: {unfounded}" if unfounded else first


def table(verdicts: Sequence[PhaseVerdict]) -> str:
    """A row per phase."""
    lines = [
        f"{'recording':31}{'phase':18}{'state':24}{'ok':4}{'share':>6}{'after':>7}  "
        f"{'stages':10}{'worst':9} first causes (scrapes)"
    ]
    for row in verdicts:
        phase = row.phase
        share = f"{row.share:.2f}" if phase.first_causes else ""
        after = f"{row.delay_s:.0f} s" if row.delay_s is not None else ""
        lines.append(
            f"{phase.capture.name.removesuffix('.jsonl.gz'):31}{phase.name:18}{phase.state:24}"
            f"{mark(row):4}{share:>6}{after:>7}  "
            f"{','.join(map(str, row.stages)):10}{row.worst.word:9} {given(row)}"
        )
    return "\n".join(lines)


def mark(verdict_of_phase: PhaseVerdict) -> str:
    """Whether a phase was told right, in a word; a dash where only wrong causes are looked for."""
    if not verdict_of_phase.right:
        return "NO"
    return "-" if verdict_of_phase.missed and not verdict_of_phase.phase.first_causes else "yes"


def summary(verdicts: Sequence[PhaseVerdict]) -> str:
    """How many phases were told right, in a line for faulty and one or two for quiet ones."""
    faulty = [v for v in verdicts if v.phase.first_causes]
    quiet = [v for v in verdicts if not v.phase.first_causes and v.judged]
    met = [v for v in quiet if not v.missed]
    missed = [v for v in quiet if v.missed]
    lines = [
        f"faulty phases told right: {sum(v.right for v in faulty)} of {len(faulty)}",
        f"quiet phases without a page: {sum(v.right for v in met)} of {len(met)}",
    ]
    if missed:
        right = sum(v.right for v in missed)
        lines.append(
            f"quiet phases that miss a target, without an unfounded cause: {right} of {len(missed)}"
        )
    return "\n".join(lines)


def by_cause(verdicts: Sequence[PhaseVerdict]) -> str:
    """Precision and recall of first causes at warning or worse, over judged scrapes."""
    concluded, right, wanted = Counter[str](), Counter[str](), Counter[str]()
    for row in verdicts:
        for diagnosis in row.judged:
            first = first_cause(diagnosis)
            expected = row.phase.first_causes
            label = first if first in expected else "/".join(sorted(expected))
            if expected:
                wanted[label] += 1
            if diagnosis.causes and (expected or diagnosis.causes[0].severity >= Severity.WARNING):
                concluded[first] += 1
                right[first] += first in expected
    lines = [f"{'first cause':40}{'precision':>10}{'recall':>8}{'scrapes':>9}"]
    for cause in sorted(set(concluded) | set(wanted)):
        precision = f"{right[cause] / concluded[cause]:.2f}" if concluded[cause] else "-"
        recall = f"{right[cause] / wanted[cause]:.2f}" if wanted[cause] else "-"
        lines.append(f"{cause:40}{precision:>10}{recall:>8}{wanted[cause]:>9}")
    return "\n".join(lines)


def calibration(verdicts: Sequence[PhaseVerdict]) -> str:
    """How often first causes of a confidence were right, over scrapes of judged phases."""
    tens: dict[int, list[bool]] = {}
    for row in verdicts:
        for diagnosis in row.judged:
            if diagnosis.causes and diagnosis.causes[0].id != "engine_restarted":
                cause = diagnosis.causes[0]
                tens.setdefault(min(9, int(cause.confidence * 10)), []).append(
                    cause.id in row.phase.first_causes
                )
    return "\n".join(
        f"confidence {ten / 10:.1f} to {ten / 10 + 0.1:.1f}: right {sum(r)} of {len(r)} scrapes"
        for ten, r in sorted(tens.items())
    )


def cascade_times(by_capture: dict[Path, list[Verdict]]) -> str:
    """From the first counted preemption to stage 2, and from no request in flight to stage 0."""
    lines: list[str] = []
    for capture, of_capture in by_capture.items():
        rows = [d for d in of_capture if d.stage.number is not None]
        hit = [i for i, d in enumerate(rows) if (d.values.get("preemption_per_s") or 0) > 0]
        if not hit:
            continue
        staged = next(i for i, d in enumerate(rows) if i >= hit[0] and stage_of(d) >= 2)
        last = max(i for i, d in enumerate(rows) if stage_of(d) >= 2)
        calm = [d.t_s for d in rows[: last + 1] if d.values.get("waiting") and stage_of(d) >= 2]
        end_s = next((d.t_s for d in rows[last:] if stage_of(d) == 0), None)
        ended = f"{end_s - calm[-1]:.0f} s" if end_s is not None and calm else "-"
        lines.append(
            f"{capture.name}: stage 2 {staged - hit[0]} scrapes after the first preemption; "
            f"stage 0 {ended} after the last waiting request"
        )
    return "\n".join(lines)


def stage_of(diagnosis: Verdict) -> int:
    """The stage's number, -1 where nothing could be read."""
    return diagnosis.stage.number if diagnosis.stage.number is not None else -1


def beside_doctor(verdicts: Sequence[PhaseVerdict]) -> str:
    """What vllm-doctor says of the last page of each judged phase."""
    program = vllm_doctor()
    if program is None:
        return "vllm-doctor could not be installed: not compared"
    right = pages = false_pages = quiet = 0
    for row in verdicts:
        at = _last_page(row.phase)
        if at is None or not row.judged:
            continue
        fired = doctor_checks(program, row.phase.capture, at)
        wanted = {c for cause in row.phase.first_causes for c in DOCTOR_CHECKS.get(cause, ())}
        if row.phase.first_causes:
            pages, right = pages + 1, right + bool(wanted & set(fired))
        else:
            quiet, false_pages = quiet + 1, false_pages + bool(fired)
    return (
        "vllm-doctor 0.6.0 on the last page of each phase (scrape mode): a fitting check among all "
        f"that fired in {right} of {pages} faulty phases; something at warning or worse in "
        f"{false_pages} of {quiet} quiet ones"
    )


def _last_page(phase: Phase) -> int | None:
    pages = [entry for entry in CaptureReader(phase.capture) if entry.body is not None]
    inside = [i for i, e in enumerate(pages) if phase.judged_from_s <= e.t_s <= phase.to_s]
    return inside[-1] if inside else None


def judge(folder: Path) -> tuple[list[PhaseVerdict], dict[Path, list[Verdict]]]:
    """Verdicts on all phases of a folder of recordings, and all that was said."""
    by_capture: dict[Path, list[Verdict]] = {}
    verdicts: list[PhaseVerdict] = []
    for phase in phases(folder):
        if phase.capture not in by_capture:
            by_capture[phase.capture] = diagnoses(phase.capture)
        verdicts.append(verdict(phase, by_capture[phase.capture]))
    return verdicts, by_capture


def level_targets(verdicts: Sequence[PhaseVerdict], said: Said) -> dict[str, dict[Path, Targets]]:
    """Targets by level and recording; `verdicts` and `said` are those without targets."""
    healthy: dict[Path, list[Verdict]] = {capture: [] for capture in said}
    for row in verdicts:
        if not row.phase.first_causes:
            healthy[row.phase.capture] += row.judged
    loosest = {capture: loose(rows) for capture, rows in healthy.items()}
    others = list(loosest.values())
    fixed = {STATED_LEVEL: STATED, **UNREACHABLE}
    return {
        "loose": {capture: completed(own, others) for capture, own in loosest.items()},
        "median": {capture: middle(rows) for capture, rows in said.items()},
        **{level: dict.fromkeys(said, targets) for level, targets in fixed.items()},
    }


def with_targets(verdicts: Sequence[PhaseVerdict], said: Said) -> dict[str, list[PhaseVerdict]]:
    """Verdicts by level on the phases that have scrapes to judge."""
    by_level: dict[str, list[PhaseVerdict]] = {}
    for level, targets in level_targets(verdicts, said).items():
        targeted = {capture: diagnoses(capture, targets=own) for capture, own in targets.items()}
        by_level[level] = [
            verdict(
                row.phase, targeted[capture], targets=targets[capture], untargeted=said[capture]
            )
            for row, capture in ((row, row.phase.capture) for row in verdicts if row.judged)
        ]
    return by_level


def wrong(by_level: Mapping[str, Sequence[PhaseVerdict]]) -> str:
    """A row for each phase that was not told right at a level."""
    lines = [f"{'level':18}{'recording':31}{'phase':18}{'expected':44}said (scrapes)"]
    for level, verdicts in by_level.items():
        for row in verdicts:
            if row.right:
                continue
            phase = row.phase
            name = phase.capture.name.removesuffix(".jsonl.gz")
            expected = "/".join(sorted(phase.first_causes)) or "nothing at warning"
            if row.missed and not phase.first_causes:
                expected = "no unfounded cause, stage 0 or 1"
            lines.append(f"{level:18}{name:31}{phase.name:18}{expected:44}{given(row)}")
    return "\n".join(lines)


def main() -> None:
    """Print the tables. Climbing loads and routed pools are simulated in a second process."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else CAPTURES
    with get_context("spawn").Pool(1) as pool:
        kv_ramps = pool.apply_async(ramps.report)
        ttft_ramps = pool.apply_async(slo_ramps.report)
        routing = pool.apply_async(routing_accuracy.report)
        verdicts, by_capture = judge(folder)
        print(f"{table(verdicts)}\n\n{summary(verdicts)}")
        by_level = with_targets(verdicts, by_capture)
        for level, rows in by_level.items():
            print(f"\ntargets: {level}\n{table(rows)}\n\n{summary(rows)}")
        print(f"\nwrong with targets:\n{wrong(by_level)}\n")
        print(by_cause(verdicts), "\n")
        print(calibration(verdicts), "\n")
        print(cascade_times(by_capture), "\n")
        print(incidents.report(), "\n")
        print(rebuilt.report(), "\n")
        print(probes.report(), "\n")
        print(engine_speeds.report(), "\n")
        lab_verdicts, lab_by_capture = judge(LAB)
        print(f"incidents made on a real vLLM:\n{table(lab_verdicts)}\n\n{summary(lab_verdicts)}\n")
        by_level = with_targets(lab_verdicts, lab_by_capture)
        for level, rows in by_level.items():
            print(f"{level}: {'; '.join(summary(rows).splitlines())}")
        print(f"\nwrong with targets:\n{wrong(by_level)}\n")
        print(beside_doctor(verdicts), "\n")
        print(kvtruth.report(), "\n")
        print(throughput.report(), "\n")
        print(throughput.beside_aiconfigurator(), "\n")
        print(kv_ramps.get(), "\n")
        print(ttft_ramps.get(), "\n")
        print(routing.get(), "\n")
    print(slo_ramps.of_recordings())


if __name__ == "__main__":
    main()
