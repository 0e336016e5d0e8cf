"""What a fault did."""

from __future__ import annotations

from msgspec import Struct


class FaultOutcome(Struct, frozen=True):
    """What was done, what happened, and whether that is what is promised."""

    what: str
    happened: tuple[str, ...]
    kept: bool

    def __str__(self) -> str:
        """All of it in words."""
        lines = [f"{self.what}: {'as promised' if self.kept else 'NOT AS PROMISED'}"]
        return "\n".join([*lines, *(f"  {line}" for line in self.happened)])
