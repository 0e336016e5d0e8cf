"""What arguments and flags may be, beyond click's own kinds. Pure."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from kneewatch.agent.settings_sources import pair

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Span(click.ParamType[float]):
    """A duration: 30, 30s, 5m, 2h, 7d; seconds inside."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds."""
        text = str(value).strip()
        unit = next((u for u in UNITS_S if text.endswith(u)), "")
        try:
            seconds = float(text.removesuffix(unit)) * UNITS_S.get(unit, 1.0)
        except ValueError:
            self.fail(f"{value!r} is not a duration; write 30s, 5m or 2h", param, ctx)
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} must be longer than nothing", param, ctx)
        return seconds


class Pair(click.ParamType[tuple[str, str]]):
    """NAME=VALUE."""

    name = "name=value"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """The name and the value."""
        try:
            return pair(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


class Target(click.ParamType[str]):
    """A server's URL or a capture; the shell completes files."""

    name = "target"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """As it was typed."""
        del param, ctx
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files, by the shell itself."""
        del ctx, param
        return [CompletionItem(incomplete, type="file")]


SPAN, PAIR = Span(), Pair()
