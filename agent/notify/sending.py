"""One try to hand a message over, and what its failure means. I/O edge."""

from __future__ import annotations

from kneewatch.collector.base import KneewatchError


class SendError(KneewatchError):
    """A message could not be handed over. `after_s` is how long the receiver asks to wait; None
    where it does not say. With `final` there is no use in trying again.

    The message is fit for a log: no secret is in it.
    """

    def __init__(self, message: str, *, final: bool = False, after_s: float | None = None) -> None:
        super().__init__(message)
        self.final, self.after_s = final, after_s
