"""How the weight of a linear layer is kept and multiplied with, apart from the layer itself.

`Linear` knows sizes and where it stands; its `LinearMethod` knows the checkpoint's tensors, what
they become in memory, and the product. Which method a layer gets is decided by the `WeightFormat`
of the model, by the layer's name: checkpoints leave some layers as they were. A new format is a
row of `WEIGHT_FORMATS`; layers, families and loader stay as they are.

`PlainMethod` is what checkpoints in float types need: weights are prepared once for the model's
kernels. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.dispatch import Ops
from quire.kernels.rows import largest_columns
from quire.layers.parameter import WITH_ANOTHER, KeptForm, Parameter, Parameters
from quire.registry import Registry


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """What a method knows of its layer."""

    name: str
    """The layer's name in the model. Layers that the model stacks have the name of the stack:
    `model.layers.0.self_attn.qkv_proj`."""
    ops: Ops
    dtype: torch.dtype
    """Type of the model's activations."""
    in_features: int
    """K."""
    parts: tuple[int, ...]
    """Rows of each layer that is stacked in this one; their sum is N."""
    bias: bool
    gated: bool = False
    """The two parts are gate and up, for `LinearMethod.gated`."""
    leaves: int = 1
    """Equal parts of K that are summed on their own and then added as a tree. A format that scales
    groups of K must not let a group cross from one leaf to the next."""

    @property
    def out_features(self) -> int:
        """N."""
        return sum(self.parts)

    @property
    def stacked(self) -> tuple[int, ...]:
        """`Parameter.parts` of a tensor with a row for each output."""
        return self.parts if len(self.parts) > 1 else ()


class LinearMethod:
    """The weight of one layer, from its checkpoint's tensors to its product.

    A row of a product depends on that row of `x` alone, bit for bit. What has a definition here
    is made of `apply`; a method that has something faster overrides it.
    """

    for_experts: ClassVar[bool] = False
    """Whether `prepared` is what `ops.prepare_linear` gives, which `ops.grouped_experts` needs."""

    def __init__(self, spec: LinearSpec) -> None:
        self.spec = spec

    def parameters(self) -> Parameters:
        """The tensors it waits for, by their names in a checkpoint (`weight`, `weight_scale`)."""
        raise NotImplementedError

    def apply(
        self, x: Tensor, out_dtype: torch.dtype | None = None, keep: str | None = None
    ) -> Tensor:
        """`x @ weight.T + bias` for `[T, K]`: `[T, N]`, summed in float32 and rounded once.

        The result has `out_dtype`, by default the type of `x`. It may live in memory of the name
        `keep` until the next call with that name.
        """
        raise NotImplementedError

    def gated(self, x: Tensor, activation: str, keep: str | None = None) -> Tensor:
        """`activation(gate) * up`, rounded once: `[T, N / 2]`."""
        del keep
        multiply = getattr(self.spec.ops, f"{activation}_and_mul")
        gated: Tensor = multiply(self.apply(x, torch.float32)).to(x.dtype)
        return gated

    def likeliest(self, x: Tensor) -> Tensor:
        """The column of the largest number of each row of the float32 result, the lowest one
        among equals: int64 `[T]`. -1 where some number of a row is not finite."""
        return largest_columns(self.apply(x, torch.float32))

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight for ids `[T]`: `[T, K]`. For an embedding that shares its memory."""
        raise NotImplementedError

    @property
    def form(self) -> str:
        """How the weight is kept, for people and to tell models apart: `bfloat16`, `int8`."""
        return str(self.spec.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Of the loaded weight, 0 if it is not loaded; by default as many as in the type of the
        activations."""
        return self.spec.out_features * self.spec.in_features * self.spec.dtype.itemsize

    @property
    def prepared(self) -> Any:
        """The loaded weight as `ops.prepare_linear` made it, for operations over several layers;
        `None` if it is kept otherwise: then the layers are computed one by one."""
        return None


class PreparedMethod(LinearMethod):
    """Multiplies with what the model's operations have prepared: whatever it was made of."""

    for_experts = True

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        self._ops = spec.ops
        self._prepared: Any = None

    def apply(
        self, x: Tensor, out_dtype: torch.dtype | None = None, keep: str | None = None
    ) -> Tensor:
        """See `LinearMethod.apply`."""
        return self._ops.linear(x, self._prepared, out_dtype, keep)

    def gated(self, x: Tensor, activation: str, keep: str | None = None) -> Tensor:
        """See `LinearMethod.gated`."""
        return self._ops.gated_linear(x, self._prepared, activation, keep)

    def likeliest(self, x: Tensor) -> Tensor:
        """See `LinearMethod.likeliest`."""
        return self._ops.likeliest(x, self._prepared)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `LinearMethod.rows`."""
        return self._ops.embedding_of(ids, self._prepared, dtype)

    @property
    def prepared(self) -> Any:
        """See `LinearMethod.prepared`."""
        assert self._prepared is not None, "the weight is not loaded yet"
        return self._prepared

    @property
    def nbytes(self) -> int:
        """See `LinearMethod.nbytes`."""
        return 0 if self._prepared is None else int(self._prepared.nbytes)

    @property
    def kept_form(self) -> KeptForm | None:
        """Of the parameter that the prepared weight is kept with; the others are kept with it."""
        if self._ops.keep_linear is None:
            return None
        return KeptForm(self._keep, self._restore)

    def _keep(self) -> Any:
        assert self._ops.keep_linear is not None
        return self._ops.keep_linear(self.prepared)

    def _restore(self, kept: Any) -> None:
        assert self._ops.restore_linear is not None, "whoever keeps it restores it"
        self._prepared = self._ops.restore_linear(kept)


class PlainMethod(PreparedMethod):
    """A weight `[N, K]` in a float type, prepared for the model's kernels."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        self._weight: tuple[list[Tensor], torch.dtype] | None = None
        self._bias: Tensor | None = None

    def parameters(self) -> Parameters:
        """`weight` and perhaps `bias`."""
        spec, kept = self.spec, self.kept_form
        shape, parts = (spec.out_features, spec.in_features), spec.stacked
        found = {
            "weight": Parameter(
                shape, self._load_weight, parts, load_parts=self._load_parts, kept=kept
            )
        }
        if spec.bias:
            kept = kept and WITH_ANOTHER
            found["bias"] = Parameter(shape[:1], self._load_bias, parts, kept=kept)
        return found

    def _load_weight(self, tensor: Tensor) -> None:
        self._load_parts([tensor], tensor.dtype)

    def _load_parts(self, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._weight = list(parts), dtype
        self._prepare()

    def _load_bias(self, tensor: Tensor) -> None:
        self._bias = tensor
        self._prepare()

    def _prepare(self) -> None:
        """Once weight and bias are there. The checkpoint's tensors are let go: they may be large
        or memory-mapped."""
        if self._weight is None or (self.spec.bias and self._bias is None):
            return
        self._prepared = self.made_of(*self._weight, self._bias)
        self._weight = self._bias = None

    def made_of(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> Any:
        """What is multiplied with, out of the checkpoint's tensors."""
        spec = self.spec
        return self._ops.prepare_linear(
            parts, bias, gated=spec.gated, dtype=dtype, leaves=spec.leaves
        )


class WeightFormat(Protocol):
    """How the linear layers of one checkpoint are kept."""

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """A new method for one layer.

        Raises:
            ModelLoadError: a layer like that cannot be kept so.
        """
        ...


class PlainFormat:
    """Float types everywhere."""

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """See `WeightFormat`."""
        return PlainMethod(spec)


PLAIN: Final = PlainFormat()

WEIGHT_FORMATS: Final[Registry[Callable[[Mapping[str, Any]], WeightFormat]]] = Registry(
    "weight format",
    {
        name: f"quire.quantization.{place}:make"
        for name, place in {
            "auto-round": "auto_round",
            "awq": "awq",
            "bitsandbytes": "bitsandbytes",
            "compressed-tensors": "compressed_tensors",
            "fbgemm_fp8": "fp8",
            "fp8": "fp8",
            "gguf": "gguf",
            "gptq": "gptq",
            "mlx": "mlx",
            "modelopt": "modelopt",
            "mxfp4": "mxfp4",
            "quark": "quark",
        }.items()
    },
    error=ModelLoadError,
    plugins="weight_format",
)
"""By `quant_method` of the `quantization_config` in `config.json`: makes the format of a checkpoint
from those entries, and raises `ModelLoadError` for what it does not read."""
