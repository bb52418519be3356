"""Implementations of the operations, and the table of each that models compute with.

An `Ops` has every operation of one implementation as an attribute. A model is built with one and
keeps it: what is chosen later, for another device or by another caller, does not touch it. An
implementation is a row of `IMPLEMENTATIONS`; an operation that it lacks is the reference's.

Callers that have no model use `ops`, the process's default: the first use chooses by
`QUIRE_KERNELS`, `select` chooses anew. Knows no operation itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from quire import envs
from quire.errors import ConfigError
from quire.kernels.decoder import DecoderParts, DecoderRun
from quire.logger import get_logger
from quire.registry import Registry
from quire.spelling import did_you_mean

logger = get_logger(__name__)


def _always() -> None:
    """Nothing keeps plain torch from running."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """What a row of `IMPLEMENTATIONS` names."""

    ops: Mapping[str, Callable[..., Any] | None]
    """Operation to function; what is left out is the reference's."""
    device: str | None = None
    """Name of the device whose memory it reads (a row of `config.model.DEVICES`); `None`: any that
    torch has."""
    unavailable: Callable[[], str | None] = _always
    """Why this machine cannot run it, or `None`. Asked each time it is chosen."""
    build: Callable[[], str] = str
    """Which build of it this is, where another one may give other bits."""
    combined: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Operations made of others: they take the table that they belong to as keyword `ops`."""


IMPLEMENTATIONS: Final[Registry[Implementation]] = Registry(
    "kernels",
    {
        "native": "quire.kernels.native:IMPLEMENTATION",
        "reference": "quire.kernels.reference:IMPLEMENTATION",
    },
    instance_of="quire.kernels.dispatch:Implementation",
    plugins="kernels",
)
"""Fastest first: `auto` takes the first one that this machine can run."""


class Ops:
    """The operations of one implementation, as attributes.

    Shapes and meaning: `quire.kernels.reference`.
    """

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
    keep_linear: Callable[[Any], dict[str, Any]] | None
    """What `prepare_linear` made, as tensors and plain values, for another process; `None` if it
    is not worth keeping."""
    keep_allowed: Callable[[Tensor, Any, Any], Tensor]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    likeliest: Callable[[Tensor, Any], Tensor]
    linear: Callable[..., Tensor]
    linear_add: Callable[..., Tensor]
    log: Callable[[Tensor], Tensor]
    log_softmax: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    pick_tokens: Callable[..., Tensor] | None
    """All of the sampler's picking in one call, with masks if there are some, or `None`:
    `quire.sampling.sampler.PICKING`."""
    prepare_coded: Callable[..., Any]
    prepare_linear: Callable[..., Any]
    relu: Callable[[Tensor], Tensor]
    restore_linear: Callable[[Mapping[str, Any]], Any] | None
    """The inverse of `keep_linear`. Copies nothing."""
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
    write_kv: Callable[..., None]


OPERATIONS: Final = frozenset(Ops.__annotations__) - {"name"}
"""Names of all operations."""


class _Default(Ops):
    """The operations of the implementation chosen last; the first use chooses one."""

    def __getattr__(self, attribute: str) -> Any:
        """Reached only while nothing is chosen (or for a name that no operation has)."""
        if attribute not in Ops.__annotations__ or "name" in self.__dict__:
            raise AttributeError(f"there is no operation {attribute!r}")
        select()
        return self.__dict__[attribute]


ops: Final = _Default()
_tables: Final[dict[str, Ops]] = {}
"""One per implementation, so that profilers find all that are in use."""


def select(name: str | None = None) -> str:
    """Choose the process's default; `None` and `"auto"` mean as `QUIRE_KERNELS` says.

    Models that were built before keep the operations they were built with.

    Returns:
        The name of the implementation.

    Raises:
        ConfigError: there is no such implementation, or this machine cannot run it.
    """
    # The same dictionary, not a copy: whoever wraps or replaces an operation of the default
    # does so for the models that compute with it.
    ops.__dict__ = choose(name).__dict__
    return ops.name


def default_ops() -> Ops:
    """The operations of a model whose caller does not choose: those of the process's default.

    Raises:
        ConfigError: `QUIRE_KERNELS` names kernels that this machine cannot run.
    """
    return _tables[ops.name]


def choose(name: str | None = None, device: str = "cpu") -> Ops:
    """The operations for models on a device.

    Kernels that are made for the device come before those that run anywhere.

    Args:
        name: An implementation; `None` and `"auto"` mean as `QUIRE_KERNELS` says.
        device: Its name.

    Raises:
        ConfigError: there is no such implementation, it is for other devices, or this machine
            cannot run it.
    """
    wanted = name or envs.KERNELS
    candidates = _made_for(device) if wanted == "auto" else [wanted]
    reasons = []
    for candidate in candidates:
        row = _row(candidate)
        if row.device not in (None, device):
            raise ConfigError(
                f"QUIRE_KERNELS={candidate} computes on the {_spoken(row.device)} only, and the "
                f"device is {device}: leave the variable out, or use --device {row.device}",
                param="QUIRE_KERNELS",
            )
        reason = row.unavailable()
        if reason is None:
            for why in reasons:
                logger.warning(why)
            return _table(candidate, row)
        reasons.append(f"{candidate} kernels not used: {reason}")
    raise ConfigError(f"no kernels can run here ({'; '.join(reasons)})")


def build_of(ops: Ops) -> str:
    """Tells apart what may give other bits, for people too: `native avx2 0a1b2c3d, torch 2.13.0`.

    Operations that an implementation lacks are torch's.
    """
    return f"{ops.name} {_row(ops.name).build()}".rstrip() + f", torch {torch.__version__}"


def title_of(ops: Ops) -> str:
    """Which kernels these are, in short: `native avx2`."""
    return " ".join([ops.name, *_row(ops.name).build().split()[:1]])


def tables() -> list[Ops]:
    """Of all implementations that were ever chosen in this process."""
    return list(_tables.values())


def _made_for(device: str) -> list[str]:
    rows = {name: IMPLEMENTATIONS.get(name).device for name in IMPLEMENTATIONS}
    return [n for n, d in rows.items() if d == device] + [n for n, d in rows.items() if d is None]


def _spoken(device: str | None) -> str:
    return "CPU" if device == "cpu" else str(device)


def _row(name: str) -> Implementation:
    if name not in IMPLEMENTATIONS:
        known = ", ".join(["auto", *IMPLEMENTATIONS])
        hint = did_you_mean(name, IMPLEMENTATIONS)
        raise ConfigError(f"kernels must be one of {known}, got {name!r}{hint}")
    return IMPLEMENTATIONS.get(name)


def _table(name: str, row: Implementation) -> Ops:
    found = _tables.get(name)
    if found is None:
        # What an implementation does not have of its own, the definition does.
        plain = IMPLEMENTATIONS.get("reference")
        found = Ops()
        found.__dict__.update(plain.ops, **row.ops, name=name)
        for operation, function in {**plain.combined, **row.combined}.items():
            if operation not in row.ops:
                found.__dict__[operation] = functools.partial(function, ops=found)
        assert set(found.__dict__) >= OPERATIONS, "the reference lacks operations"
        _tables[name] = found
    return found
