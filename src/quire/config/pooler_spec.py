"""How a model pools: what it makes of a prompt's hidden states. Facts only; reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from quire.checkpoint.sentence_transformers import DenseModule


@dataclass(frozen=True, slots=True)
class PoolerSpec:
    """How a model turns hidden states into what a request gets."""

    task: str
    """`embed` or `classify`."""
    backbone: str
    """Architecture without its head, such as `Bert` or `Qwen3`."""
    whole_prompts: bool
    """An encoder: a prompt is computed in one step, without KV cache."""
    pooling: str
    """`cls`, `mean`, `last`, `max` or `mean_sqrt_len`: which hidden states count."""
    use_activation: bool = True
    """Embeddings are scaled to length 1, `activation` is applied to classes, unless a request says
    otherwise."""
    activation: str = "softmax"
    """Classes: `softmax`, `sigmoid` or `none`."""
    size: int = 0
    """Numbers per embedding, or classes."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in order."""
    dense: tuple[DenseModule, ...] = ()
    """Linear layers between pooling and scaling, in order."""
    max_positions: int = 2**31
    """Longest prompt in tokens that positions allow."""
    max_seq_length: int | None = None
    """Longest prompt in tokens that the model was made for, if its files say."""
    dimensions: int | None = None
    """Embeddings are cut to this length unless a request says otherwise."""
    matryoshka: bool = False
    """Whether embeddings may be cut (https://arxiv.org/abs/2205.13147)."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The only lengths they may be cut to; empty: any."""

    @property
    def is_cross_encoder(self) -> bool:
        """Whether it scores a pair of texts with one number."""
        return self.task == "classify" and self.size == 1

    @property
    def keeps_prefixes(self) -> bool:
        """Whether cached prefixes can be used: only the last token's state is needed."""
        return not self.whole_prompts and self.pooling == "last"
