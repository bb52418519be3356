"""A loaded model that gives the logits of every token of a text.

The model is loaded by the engine, with its kernels, types and cache, and computes what the engine
would: a row's bits depend on no other row, so that windows and chunks change nothing. Knows no
metric.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from quire.attention.kv_cache import allocate_kv_cache
from quire.config import EngineConfig
from quire.config.kv_dtypes import kept_layers
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.kernels.attention_metadata import AttentionMetadata
from quire.models.inspection import FormTotal, weight_forms
from quire.models.registry import kv_layers
from quire.tokenizer.tokenizer import Tokenizer

CHUNK: Final = 512
"""Tokens of one pass through the layers."""
ROWS: Final = 64
"""Rows of logits at a time: a vocabulary of 150,000 is 40 MB then."""
_BLOCK: Final = 16


class ModelPass:
    """The passes of a text model through given text: hidden states, then logits.

    Args:
        model: A `quire.models.base.CausalLM` with its weights.
        length: The longest window.
        dtype: Type of keys and values of layers that say none.
        layers: What each layer keeps of a token; `None`: as the model says.
    """

    def __init__(self, model: Any, length: int, dtype: str, layers: Any = None) -> None:
        self.model = model
        blocks = -(-length // _BLOCK)
        self._table = [list(range(blocks))]
        kept = kv_layers(model.shape) if layers is None else layers
        self._caches = allocate_kv_cache(kept, blocks, _BLOCK, dtype, str(model.device))

    def hidden(self, window: Sequence[int]) -> Tensor:
        """Token ids `[T]` to the states `[T, H]` that the head reads."""
        found = []
        for start in range(0, len(window), CHUNK):
            ids = torch.tensor(window[start : start + CHUNK], device=self.model.device)
            metadata = AttentionMetadata.build(
                [len(ids)], [start + len(ids)], self._table, _BLOCK, self.model.device
            )
            states = self.model.forward(ids, metadata.positions, self._caches, metadata)
            found.append(states.clone())  # its memory may be the next pass's
        return torch.cat(found)

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Of states `[T, H]`, float32 `[some rows, vocabulary]` at a time."""
        for some in hidden.split(ROWS):
            yield self.model.compute_logits(some)


class ScoredModel:
    """A model that an engine has loaded. A context manager: at its end the memory is free.

    Raises:
        StartupError: the configuration, the files or the memory do not allow it.
    """

    def __init__(self, config: EngineConfig, length: int) -> None:
        self._engine = LLMEngine(_for_windows(config, length))
        settled = self._engine.core.config
        if settled.model.runner != "generate":
            raise ConfigError(
                f"{config.model.model!r} is a model for {settled.model.runner}, and only models "
                "that generate text are scored"
            )
        self.model: Any = self._engine.core.executor.model
        """See `ModelPass`."""
        dtype = self._engine.core.info.dtype
        cache = settled.cache
        layers = kept_layers(
            kv_layers(self.model.shape), dtype, cache.kv_cache_dtype,
            cache.kv_cache_dtype_skip_layers,
        )  # fmt: skip
        self.passes = ModelPass(self.model, length, dtype, layers)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        found = self._engine.frontend.tokenizer
        assert isinstance(found, Tokenizer)
        return found

    @property
    def forms(self) -> dict[str, FormTotal]:
        """How its linear layers are kept."""
        return weight_forms(self.model)

    @property
    def weight_bytes(self) -> int:
        """Of all weights in memory."""
        return int(self._engine.core.info.weight_bytes)

    def __enter__(self) -> ScoredModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._engine.shutdown()


def _for_windows(config: EngineConfig, length: int) -> EngineConfig:
    """One request of that length: the engine's own cache is not used and stays small."""
    model = config.model
    if model.max_model_len is None:
        model = dataclasses.replace(model, max_model_len=length)
    elif length > model.max_model_len:
        raise ConfigError(f"--window {length} is more than --max-model-len {model.max_model_len}")
    scheduler = dataclasses.replace(config.scheduler, max_num_seqs=1)
    return dataclasses.replace(config, model=model, scheduler=scheduler)
