"""What a server's metrics say about speculative decoding during a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from quire.errors import StartupError

if TYPE_CHECKING:
    from quire.bench.client import BenchClient

_LINE: Final = re.compile(r"^vllm:spec_decode_(\w+)_total(\{[^}]*\})? (\S+)$", re.MULTILINE)
_POSITION: Final = re.compile(r'position="(\d{1,9})"')
_TOTALS: Final = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(slots=True)
class SpeculationCounters:
    """Totals since the server's start, over all engines."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: dict[int, int] = field(default_factory=dict)

    def since(self, before: SpeculationCounters) -> dict[str, Any] | None:
        """The figures of what lies between; None if nothing was drafted."""
        drafts = self.num_drafts - before.num_drafts
        tokens = self.num_draft_tokens - before.num_draft_tokens
        accepted = self.num_accepted_tokens - before.num_accepted_tokens
        if drafts <= 0 or tokens <= 0:
            return None
        earlier = before.accepted_by_position
        by_position = sorted(self.accepted_by_position.items())
        return {
            "num_drafts": drafts,
            "draft_tokens": tokens,
            "accepted_tokens": accepted,
            "acceptance_rate": 100 * accepted / tokens,
            "acceptance_length": 1 + accepted / drafts,
            "per_position_acceptance_rates": [
                (count - earlier.get(place, 0)) / drafts for place, count in by_position
            ],
        }


async def read_speculation(client: BenchClient) -> SpeculationCounters | None:
    """The counters now; None if the server has none, or does not show its metrics."""
    try:
        status, body = await client.get("/metrics")
    except StartupError:
        return None
    return parse_speculation(body.decode("utf-8", "replace")) if status == 200 else None


def parse_speculation(text: str) -> SpeculationCounters | None:
    """Read them from metrics in Prometheus' text format; None if one of them is no number, because
    figures of the others would be wrong."""
    counters, found = SpeculationCounters(), False
    for name, labels, value in _LINE.findall(text):
        found = True
        try:
            count = int(float(value))
        except (ValueError, OverflowError):  # OverflowError: Inf
            return None
        if name == "num_accepted_tokens_per_pos":
            if place := _POSITION.search(labels):
                position = int(place.group(1))
                by_position = counters.accepted_by_position
                by_position[position] = by_position.get(position, 0) + count
        elif name in _TOTALS:
            setattr(counters, name, getattr(counters, name) + count)
    return counters if found else None
