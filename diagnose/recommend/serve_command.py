"""The whole `vllm serve` command after a change of flags. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.vllm_flags import CommandLine, is_hidden, printed_words, variable
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, ServeCommand, Value


def serve_command(
    launch: CommandLine, model: str, changes: Iterable[FlagChange] = ()
) -> ServeCommand | None:
    """The command after the changes of flags; None if no flag changes, or the model is unknown.

    `model` is for a launch that names none.
    """
    flags = [change for change in changes if change.flag.startswith("--")]
    model = launch.model or model
    if not flags or not model:
        return None
    after = _changed(launch.flags, flags)
    new = {flag for flag, value in after.items() if launch.flags.get(flag) != value}
    words = {flag: printed_words(flag, value, is_new=flag in new) for flag, value in after.items()}
    return ServeCommand(
        line=" ".join(["vllm serve", shlex.quote(model), *words.values()]),
        changed=tuple(words[flag] for flag in after if flag in new),
        removed=tuple(flag for flag in launch.flags if flag not in after),
        unknown=tuple(_unknown(launch, after, new)),
    )


def with_command(
    recommendation: Advice, stated: Stated, values: Mapping[str, float | None]
) -> Advice:
    """The recommendation with the whole command, if the present one is known.

    `values` are the signals now: a restart ends the requests, and empties the prefix cache.
    """
    model = "" if stated.model is None else stated.model.id
    line = stated.command_line
    command = line and serve_command(line, model, recommendation.changes)
    if not command:
        return recommendation
    hit_ratio, start_s = values.get("prefix_hit_ratio"), stated.reported.start_s
    running, waiting = values.get("running_avg"), values.get("waiting_avg")
    words = shlex.split(command.line)[2:] if stated.reported.in_pod else []
    command = replace(
        command,
        # Kubernetes expands a variable in parentheses only.
        container_args=tuple([re.sub(r"\$(\w+)", r"$(\1)", word) for word in words]),
        restart_at_least_s=None if start_s is None else round(start_s),
        lost_requests=None if running is None else round(running + (waiting or 0.0)),
        lost_prefix_hit_ratio=None if hit_ratio is None else round(hit_ratio, 2),
    )
    return replace(recommendation, command=command)


def arguments(changes: Iterable[FlagChange]) -> list[str]:
    """The arguments that set the changed flags, quoted for a shell; flags to drop are left out."""
    flags = [change for change in changes if change.flag.startswith("--")]
    return [printed_words(flag, value, is_new=True) for flag, value in _changed({}, flags).items()]


def _changed(flags: Mapping[str, str], changes: Iterable[FlagChange]) -> dict[str, str]:
    """The flags after the changes, in their order; new flags come last."""
    after = dict(flags)
    for change in changes:
        flag, value = change.flag, change.after
        whole, _, key = flag.partition(".")
        if key and whole in after:
            flag, value = whole, _with_key(after[whole], key, value)
        if value is None:
            after.pop(flag, None)
        elif isinstance(value, bool):
            on, off = flag, f"--no-{flag[2:]}"
            after.pop(off if value else on, None)
            after[on if value else off] = ""
        else:
            after[flag] = f"{value:g}" if isinstance(value, float) else str(value)
    return after


def _with_key(text: str, key: str, value: Value) -> str:
    """The JSON value of a flag with another value of this key; vLLM merges no two of them."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    return json.dumps({**document, key: value}) if isinstance(document, dict) else text


def _unknown(launch: CommandLine, after: Mapping[str, str], new: set[str]) -> Iterator[str]:
    if not launch.complete:
        yield "flags that are set elsewhere, such as in a --config file or a shell variable"
    for flag, value in after.items():
        if flag in new:
            continue
        if is_hidden(flag, value) and value:
            yield f"the value of {flag}, which may be a secret: set {variable(flag)} to it"
        elif value == f"${variable(flag)}":
            yield f"the value of {flag}: set {variable(flag)} to it"
        elif "$" in value:
            yield f"the value of {flag}, which a variable sets"
    for flag in launch.cut:
        yield f"further values of {flag}"
