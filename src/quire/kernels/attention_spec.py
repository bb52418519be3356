"""What one layer's attention does besides softmax(q k) v. Fixed when the model is built."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """Constants of a layer's attention, the same for every step.

    A score is `scale * q.k`, capped, biased, masked; then softmax over the seen positions (and
    the sink), then the weighted sum of values.
    """

    scale: float
    """Factor of `q.k`."""
    window: int | None = None
    """Positions a token sees at most, itself included; `None`: all before it."""
    softcap: float = 0.0
    """If above 0, a score s becomes softcap * tanh(s / softcap) (Gemma 2)."""
    alibi_slopes: Tensor | None = None
    """Float32 `[H]`: slope * (key position - query position) is added (Press et al. 2022)."""
    sinks: Tensor | None = None
    """Float32 `[H]`: one more score per head that takes weight but has no value (GPT-OSS)."""
    latent_dim: int | None = None
    """Values are the first `latent_dim` numbers of the keys and are not stored (DeepSeek's MLA)."""
    kv_scales: tuple[float, float] = (1.0, 1.0)
    """What keys and what values were divided by before they were kept as 8-bit floats."""
