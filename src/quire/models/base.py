"""What a runner may expect of a model: hidden states, and logits if it generates text.

Knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.config.shape import ModelShape
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cache_tensors import KVCache
from quire.kernels.decoder import NextLogits, NextTokens, Pick
from quire.kernels.dispatch import Ops
from quire.kernels.request_rows import LastTokens


class PagedDecoder(Protocol):
    """A decoder over a flat token batch: requests one after another, no padding.

    A token's hidden state depends only on the tokens of its own request up to itself, bit for bit.
    Results are inference tensors: change them in place only under
    `torch.inference_mode()`.
    """

    shape: ModelShape
    dtype: torch.dtype
    """Type of activations and KV cache."""
    device: torch.device
    ops: Ops
    """The operations that it computes with; sampling from its logits uses them, too."""
    num_parameters: int
    """Weights in the checkpoint that are used (a tied head counts once)."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Ids and positions `[T]` int64 to hidden states after the final norm.

        These are `[T, H]`, or `[W, H]` if `metadata.wanted` names W of the tokens.

        Writes this step's keys and values into `kv_caches`, one pair per layer.
        """
        ...


class CausalLM(PagedDecoder, Protocol):
    """A decoder with a language-model head.

    A token's logits depend on its hidden state alone, bit for bit.
    """

    def compute_logits(self, hidden: Tensor, keep: str | None = None) -> Tensor:
        """Hidden states `[R, H]` to float32 logits `[R, vocab_size]`.

        With `keep` they may live in memory of this name until the next call with it: logits of a
        large batch are tens of megabytes, and fresh ones cost a page fault per 4 KiB.
        """
        ...

    def compute_likeliest(self, hidden: Tensor) -> Tensor:
        """The token of each row's largest logit, the lowest id among equals: int64 `[R]`.

        -1 where some logit of the row is not finite. The logits need never be in memory.
        """
        ...

    def tokens_after(
        self, last: LastTokens, kv_caches: Sequence[KVCache], picks: list[Pick] | None
    ) -> NextTokens | None:
        """`forward` and `compute_likeliest` for one token of each of some requests, in one call;
        with picks, `compute_logits` and `pick_tokens` instead of the likeliest.

        Args:
            last: These tokens.
            kv_caches: As `forward` takes them; this token's keys and values are written.
            picks: Of each; `None`: the likeliest of all.

        Returns:
            `None`: it has no such thing, or not now. Then nothing was written.

        Raises:
            IndexError: a request has no token or block there.
        """
        ...

    def logits_after(self, last: LastTokens, kv_caches: Sequence[KVCache]) -> NextLogits | None:
        """`tokens_after` without the pick, in the memory that `compute_logits` calls "logits"."""
        ...
