"""Latency targets such as `ttft_p99=500ms,tpot_p99=50ms`, and how a run compares with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.bench.result import LATENCIES
from quire.errors import ConfigError

_TARGET = re.compile(r"([a-z0-9]+)_(mean|p\d{1,2}(?:\.\d+)?)=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """One figure that must not be exceeded."""

    metric: str
    """A row of `LATENCIES`."""
    statistic: str
    """`mean`, or a percentile as results name it: `p99`, `p99.9`."""
    milliseconds: float

    @property
    def key(self) -> str:
        """Where the figure stands in a result."""
        return f"{self.statistic}_{self.metric}_ms"

    def __str__(self) -> str:
        return f"{self.metric}_{self.statistic}={self.milliseconds:g}ms"


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """What a setting must meet."""

    targets: tuple[LatencyTarget, ...]

    @classmethod
    def parse(cls, text: str) -> LatencyTargets:
        """Read `ttft_p99=500ms,tpot_p99=50ms`.

        Raises:
            ConfigError: a part is no target.
        """
        found = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            match = _TARGET.fullmatch(part)
            if match is None or match[1] not in LATENCIES or float(match[3]) == 0:
                raise ConfigError(
                    f"--slo: {part!r} is no target; write them like ttft_p99=500ms,tpot_mean=0.05s "
                    f"(of {', '.join(LATENCIES)})"
                )
            statistic = match[2] if match[2] == "mean" else f"p{float(match[2][1:]):g}"
            milliseconds = float(match[3]) * (1e3 if match[4] == "s" else 1)
            found.append(LatencyTarget(match[1], statistic, milliseconds))
        if not found:
            raise ConfigError("--slo wants targets, such as ttft_p99=500ms,tpot_p99=50ms")
        return cls(tuple(found))

    @property
    def percentiles(self) -> list[float]:
        """Those that a result must have."""
        named = {float(t.statistic[1:]) for t in self.targets if t.statistic != "mean"}
        return sorted(named | {99.0})

    def excess(self, result: Mapping[str, Any]) -> float:
        """The largest share of a target that a run used: at most 1 if all are met."""
        if result["failed"] or not result["completed"]:
            return math.inf
        return max(float(result[t.key]) / t.milliseconds for t in self.targets)

    def figures(self, result: Mapping[str, Any]) -> dict[str, float]:
        """What a run had where there are targets, in milliseconds."""
        return {f"{t.metric}_{t.statistic}": round(result[t.key], 2) for t in self.targets}
