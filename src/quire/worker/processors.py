"""The logits processors of an engine (`--logits-processors`): found once, then made for each
request that needs them.

Knows no scheduler; what processors do to logits is `quire.sampling.custom`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from quire.config import EngineConfig, ModelShape
from quire.errors import ConfigError
from quire.logger import get_logger
from quire.params import SamplingParams
from quire.registry import Registry, load
from quire.sampling.custom import RequestProcessors, check_params
from quire.sampling.logits_processor import LogitsProcessor

logger = get_logger(__name__)

PROCESSORS: Final[Registry[type[LogitsProcessor]]] = Registry(
    "logits processor", subclass_of="quire.sampling.logits_processor:LogitsProcessor"
)
_VLLM_NAMES: Final = "quire.compat.alias:install_once"
"""Makes `import vllm` find quire's names, as classes written for vLLM need it."""


class ProcessorStore:
    """The classes of an engine.

    Args:
        config: Resolved; `logits_processors` names them.
        shape: The model's sizes.
        device: Where logits are.

    Raises:
        ConfigError: one cannot be imported or made, or is no logits processor.
    """

    def __init__(self, config: EngineConfig, shape: ModelShape, device: torch.device) -> None:
        names = config.model.logits_processors
        self._view = config_view(config, shape)
        self._device = device
        if names and "vllm" not in sys.modules:
            install: Any = load(_VLLM_NAMES)
            install()
        self._classes = [self._find(name) for name in names]
        if names:
            logger.info("logits processors: %s", ", ".join(names))

    def check(self, params: SamplingParams) -> None:
        """Ask all processors whether they take a request.

        Raises:
            ProcessorRefused: one does not.
            ProcessorFailed: one raises something else than `ValueError`.
        """
        check_params(self._classes, params.clone())

    def begin(self, params: SamplingParams, prompt: Sequence[int]) -> RequestProcessors | None:
        """The processors of a request; `None` if none of them applies to it.

        Args:
            params: Its parameters.
            prompt: Its token ids.

        Raises:
            ProcessorFailed: one raises.
        """
        if not self._classes:
            return None
        own = params.clone()  # processors may write into it
        found = RequestProcessors(self._classes, self._make, own, prompt)
        return found if found.early or found.late else None

    def _make(self, kind: type[LogitsProcessor]) -> LogitsProcessor:
        return kind(self._view, self._device, False)

    def _find(self, name: str) -> type[LogitsProcessor]:
        """Import a class, and make an instance to see that it can be made."""
        given_as = f"--logits-processors {name}"
        kind = PROCESSORS.at(name, given_as)
        if inspect.isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise ConfigError(f"{given_as} does not define {missing}")
        made: LogitsProcessor = _tried(given_as, "__init__", lambda: self._make(kind))
        answer = _tried(given_as, "is_argmax_invariant", made.is_argmax_invariant)
        if not isinstance(answer, bool):
            what = type(answer).__name__
            raise ConfigError(f"{given_as} is_argmax_invariant must return a bool, not {what}")
        return kind


def _tried(given_as: str, part: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        logger.debug("%s", given_as, exc_info=True)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{given_as} {part} fails: {what}") from None


class _Section(SimpleNamespace):
    """A part of vLLM's configuration; what it lacks is told by name."""

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(vars(self)))
        raise AttributeError(f"quire's vllm_config has no {name!r} here; it offers {known}")


def config_view(config: EngineConfig, shape: ModelShape) -> Any:
    """What processors get as `vllm_config`: the parts of vLLM's that processors read."""
    model = config.model
    return _Section(
        model_config=_Section(
            model=model.model,
            tokenizer=model.tokenizer or model.model,
            served_model_name=model.names[0],
            max_model_len=model.max_model_len,
            dtype=model.dtype,
            seed=model.seed,
            logits_processors=list(model.logits_processors),
            get_vocab_size=lambda: shape.vocab_size,
            get_hidden_size=lambda: shape.hidden_size,
            is_multimodal_model=False,
        ),
        # A processor has one request, whatever the engine has.
        scheduler_config=_Section(
            max_num_seqs=1, max_num_batched_tokens=config.scheduler.max_num_batched_tokens
        ),
        speculative_config=None,
        lora_config=None,
        reasoning_config=None,
    )
