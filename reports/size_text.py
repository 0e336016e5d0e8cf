"""A sizing answer for reading: the arithmetic step by step, and where memory goes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.sizing.memory.beside_steps import gib
from kneewatch.diagnose.sizing.memory.budget import Memory
from kneewatch.diagnose.sizing.memory.setup import Setup
from kneewatch.diagnose.sizing.memory.steps import memory_steps
from kneewatch.diagnose.sizing.size import Size, steps
from kneewatch.diagnose.sizing.steps import Step, figure
from kneewatch.reports.words import WIDTH, duration, number, wrapped

BAR = 50


def size_text(answer: Size, *, width: int = WIDTH) -> list[str]:
    """The lines: verdict, picture, arithmetic, speed, fleet and cost, notes."""
    lines = [
        _verdict(answer),
        *wrapped(_setup(answer), width=width, more=2),
        "",
        *_picture(answer.memory, width=width),
        "",
    ]
    for step in (*memory_steps(answer.memory), *steps(answer)):
        lines += _step(step, width=width)
    for told in (*_fewest(answer), *_speed(answer)):
        lines += wrapped(told, width=width, more=2)
    for note in (*answer.missed, *answer.notes):
        lines += wrapped(f"note: {note}", width=width, more=6)
    return lines


def _verdict(answer: Size) -> str:
    found, question = answer.memory, answer.question
    asked = question.concurrency_per_engine
    held = found.concurrency
    per = " an engine" if question.engines > 1 else ""
    holds = (
        f"holds {figure(held.expected)} requests of {found.setup.context:,} tokens "
        f"({figure(held.low)} to {figure(held.high)}){per}"
    )
    if answer.fits:
        sure = found.concurrency.low >= asked
        return f"{'FITS' if sure else 'FITS, not for certain'}: {holds}"
    if not found.holds_one:
        return f"DOES NOT FIT: vLLM would not start; {holds}"
    return f"DOES NOT FIT: {holds}, {figure(asked)} are wanted"


def _setup(answer: Size) -> str:
    setup = answer.memory.setup
    gpu = setup.gpu.name if setup.gpu else "GPU not stated"
    version = ".".join(str(part) for part in setup.version)
    spread = setup.parallel
    engines = f", {spread.data} data-parallel engines" if spread.data > 1 else ""
    replicas = answer.question.replicas
    each = f"{replicas} replicas, each " if replicas > 1 else ""
    return (
        f"{setup.model.id} ({setup.scheme.id}, KV {setup.kv_cache_dtype}) on {each}"
        f"{spread.gpus} x {gpu} (TP {spread.tensor}, PP {spread.pipeline}{engines}), vLLM "
        f"{version}, utilization {figure(setup.utilization)}{_beside(setup)}"
    )


def _beside(setup: Setup) -> str:
    """What is loaded beside the model, in words."""
    words = ""
    if setup.adapters is not None:
        words += f", {setup.adapters.slots} adapter slots of rank {setup.adapters.rank}"
    if setup.draft is not None:
        words += f", {setup.draft.tokens} tokens drafted by {setup.draft.model.id}"
    return words


def _picture(found: Memory, *, width: int) -> list[str]:
    """One GPU's memory as a bar and its parts."""
    setup = found.setup
    if setup.gpu is None or found.overhead is None or found.weights_bytes is None:
        return [f"available KV on each GPU: {gib(found.available_bytes.expected)}"]
    whole_bytes = float(setup.gpu.memory_bytes)
    free = found.available_bytes.expected
    beside = found.adapter_bytes + found.draft_bytes
    parts = [
        ("#", "weights", found.weights_bytes - beside),
        *([("a", "adapters", found.adapter_bytes)] if found.adapter_bytes else []),
        *([("d", "draft", found.draft_bytes)] if found.draft_bytes else []),
        ("+", "overhead", found.overhead.expected_bytes),
        ("=", "KV cache", max(free, 0.0)),
        (".", "not vLLM's", (1 - setup.utilization) * whole_bytes),
    ]
    columns = min(BAR, width - 20)
    bar = "".join(
        mark * min(round(columns * size / whole_bytes), columns) for mark, _, size in parts
    )
    lines = [f"one GPU, {gib(whole_bytes)}: [{bar[:columns]:<{columns}}]"]
    lines += [
        f"  {mark} {name:<11}{gib(size):>12}{size / whole_bytes:>7.0%}"
        for mark, name, size in parts
    ]
    if free < 0:
        lines.append(f"  {gib(-free)} are missing")
    return lines


def _step(step: Step, *, width: int) -> list[str]:
    one = f"{step.title}: {step.formula} = {step.values} = {step.result}"
    source = f"[{step.source}]"
    if len(one) + len(source) < width:
        return [f"{one} {source}"]
    return [
        *wrapped(f"{step.title}: {step.formula}", width=width, more=4),
        *wrapped(f"  = {step.values}", width=width, more=4),
        *wrapped(f"  = {step.result} {source}", width=width, more=4),
    ]


def _fewest(answer: Size) -> list[str]:
    fewest = answer.fewest
    if fewest is None:
        return []
    if fewest.expected is None:
        return ["Fewest GPUs for one replica: 32 do not hold it"]
    spread = fewest.spread
    layout = "" if spread is None else f", TP {spread.tensor} x PP {spread.pipeline}"
    bounds = f"{fewest.low or 'more than 32'} to {fewest.high or 'more than 32'}"
    return [f"Fewest GPUs for one replica: {fewest.expected} ({bounds}){layout}"]


def _speed(answer: Size) -> list[str]:
    speed = answer.performance
    if speed is None:
        return []
    question = answer.question
    return [
        f"Predicted for one engine at {figure(question.concurrency_per_engine)} requests in "
        "flight, not measured: "
        f"TTFT {duration(speed.ttft_s)}, ITL {duration(speed.itl_s)}, "
        f"{number(speed.decode_tokens_per_s)} output tokens/s and "
        f"{number(speed.requests_per_s)} requests/s; bound by {speed.binding}"
    ]


def size_markdown(answer: Size) -> list[str]:
    """The same for a ticket or a page."""
    lines = [f"# {_verdict(answer)}", "", _setup(answer), ""]
    lines += _table(
        ("step", "formula", "values", "result", "source"),
        [
            (step.title, step.formula, step.values, step.result, step.source)
            for step in (*memory_steps(answer.memory), *steps(answer))
        ],
    )
    lines += ["", *_fewest(answer), *_speed(answer)]
    lines += [f"- {note}" for note in (*answer.missed, *answer.notes)]
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
