"""What an engine-core process would send."""

from __future__ import annotations


class KeptFrames:
    """Keeps frames instead of sending them: a `Sender` of tests that have no front end."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def put(self, frame: bytes) -> None:
        """Keep it."""
        self.frames.append(frame)
