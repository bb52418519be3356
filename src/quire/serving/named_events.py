"""Server-sent events with names, for APIs whose streams hold events of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Emit = Callable[..., None]
"""Takes the name of an event and, by keyword, its fields."""


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """The frame of an event, whose data also holds the name, as `type`."""
    data = msgspec.json.encode({"type": name, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
