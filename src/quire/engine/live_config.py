"""The configuration as it holds now: what was given at the start, with the limits changed since.

Cores are started with `given`; `now` answers what holds. Knows no core and no messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config import EngineConfig, ModelShape
from quire.config.locate import located
from quire.core.admission import with_limits


class LiveConfig:
    """One configuration in two forms, which change together.

    Args:
        given: As the user gave it, for a core to resolve.
        now: The same, settled by `EngineConfig.resolve`.
    """

    def __init__(self, given: EngineConfig, now: EngineConfig) -> None:
        self.given = given
        """What a core is started with. Changed limits are in it: a core that takes the place of a
        dead one must not fall back to the limits of the start."""
        self.now = now
        """What holds."""

    @classmethod
    def begin(cls, config: EngineConfig) -> tuple[LiveConfig, ModelShape]:
        """Find the model, and settle what its shape settles.

        Raises:
            StartupError: the configuration or the model folder is bad.
        """
        given = located(config)
        shape = given.model.read_shape()
        return cls(given, given.resolve(shape)[0]), shape

    def change_limits(self, limits: Mapping[str, Any]) -> bool:
        """The core works with these limits from now on.

        Args:
            limits: All of `LIVE_LIMITS`, as the core reports them.

        Returns:
            Whether any of them is another than before.
        """
        self.given, _ = with_limits(self.given, limits)
        self.now, changed = with_limits(self.now, limits)
        return changed
