"""Names that scripts import and quire cannot serve: each says so when it is used, not before.

So a script that imports more than it uses still runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from quire.errors import NotAvailable

_GRAMMAR: Final = "constrained decoding is not available yet"


def _refused(name: str, why: str) -> Callable[..., NoReturn]:
    """A callable called `name` that raises when called."""

    def use(*_: Any, **__: Any) -> NoReturn:
        raise NotAvailable(f"{name} is not available: {why}")

    use.__name__ = use.__qualname__ = name
    use.__doc__ = f"Not available: {why}."
    use.refused = why  # type: ignore[attr-defined]
    return use


StructuredOutputsParams = _refused("StructuredOutputsParams", _GRAMMAR)
GuidedDecodingParams = _refused("GuidedDecodingParams", _GRAMMAR)
EmbedsPrompt = _refused("EmbedsPrompt", "send text or token ids")
ExplicitEncoderDecoderPrompt = _refused(
    "ExplicitEncoderDecoderPrompt", "no family with an encoder and a decoder is served"
)
initialize_ray_cluster = _refused("initialize_ray_cluster", "the model runs in one process")
