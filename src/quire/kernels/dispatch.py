"""Which implementation of the operations runs: chosen once, at start.

`ops.linear(...)` and its siblings call the chosen implementation; the first use chooses by
`QUIRE_KERNELS` if nobody called `select` before. An implementation is a module with a table
`OPS` of operation name to function and, optionally, `unavailable() -> str | None`, the reason
why this machine cannot run it. An operation that it lacks is the reference's. Knows no operation
itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from quire import envs
from quire.errors import ConfigError
from quire.kernels.decoder import DecoderParts, DecoderRun
from quire.logger import get_logger
from quire.registry import did_you_mean

logger = get_logger(__name__)

IMPLEMENTATIONS: Final = {
    "native": "quire.kernels.native",
    "reference": "quire.kernels.reference",
}
"""Name to module, fastest first: `auto` takes the first one that this machine can run."""


class Ops:
    """The chosen operations, as attributes. Shapes and meaning: `quire.kernels.reference`."""

    name: str
    """Name of the implementation."""
    add_leaves: Callable[[Tensor, Any, Tensor, Tensor, Tensor], None]
    clamped_swiglu: Callable[[Tensor, float, float], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]
    embedding_of: Callable[[Tensor, Any, torch.dtype], Tensor]
    encoder_attention: Callable[..., Tensor]
    exp: Callable[[Tensor], Tensor]
    finite_rows: Callable[[Tensor], Tensor]
    fuse_decoder: Callable[[DecoderParts], DecoderRun | None]
    gated_linear: Callable[..., Tensor]
    gelu: Callable[[Tensor], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh: Callable[[Tensor], Tensor]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    grouped_experts: Callable[..., Tensor]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    likeliest: Callable[[Tensor, Any], Tensor]
    linear: Callable[..., Tensor]
    linear_add: Callable[..., Tensor]
    log: Callable[[Tensor], Tensor]
    log_softmax: Callable[[Tensor], Tensor]
    paged_attention: Callable[..., Tensor]
    pick_tokens: Callable[..., Tensor] | None
    """All of the sampler's picking in one call, or `None`: `quire.sampling.sampler.PICKING`."""
    prepare_linear: Callable[..., Any]
    relu: Callable[[Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_add: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rms_norm_wide: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    route_experts: Callable[..., tuple[Tensor, Tensor]]
    rotary_partial: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    silu: Callable[[Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    tanh: Callable[[Tensor], Tensor]
    top_logprobs: Callable[..., tuple[list[list[int]], list[list[float]], list[int]]] | None
    """As `quire.sampling.logprobs.top_logprobs`, or `None`."""
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

    def __getattr__(self, attribute: str) -> Any:
        """Reached only while nothing is chosen (or for a name that no operation has)."""
        if attribute not in Ops.__annotations__ or "name" in self.__dict__:
            raise AttributeError(f"there is no operation {attribute!r}")
        select()
        return self.__dict__[attribute]


ops: Final = Ops()


def select(name: str | None = None) -> str:
    """Choose the implementation; `None` and `"auto"` mean as `QUIRE_KERNELS` says.

    Weights prepared before belong to the implementation of that time: choose, then load.

    Returns:
        The name of the implementation.

    Raises:
        ConfigError: there is no such implementation, or this machine cannot run it.
    """
    wanted = name or envs.KERNELS
    candidates = list(IMPLEMENTATIONS) if wanted == "auto" else [wanted]
    reasons = []
    for candidate in candidates:
        table, reason = _load(candidate)
        if reason is None:
            for why in reasons:
                logger.warning(why)
            ops.__dict__.update(table, name=candidate)
            return candidate
        reasons.append(f"{candidate} kernels not used: {reason}")
    raise ConfigError(f"no kernels can run here ({'; '.join(reasons)})")


def _load(name: str) -> tuple[dict[str, Any], str | None]:
    if name not in IMPLEMENTATIONS:
        known = ", ".join(["auto", *IMPLEMENTATIONS])
        hint = did_you_mean(name, IMPLEMENTATIONS)
        raise ConfigError(f"kernels must be one of {known}, got {name!r}{hint}")
    module = importlib.import_module(IMPLEMENTATIONS[name])
    reason = getattr(module, "unavailable", lambda: None)()
    # What an implementation does not have of its own, the definition does.
    table = {**importlib.import_module(IMPLEMENTATIONS["reference"]).OPS, **module.OPS}
    assert set(table) >= set(Ops.__annotations__) - {"name"}, "the reference lacks operations"
    return table, reason
