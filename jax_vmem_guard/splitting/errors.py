"""What a proof says when it does not go through."""

from __future__ import annotations


class Refused(Exception):
    """A split that could not be proved right. `reason` says what stood in the way, in words fit for a log line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
