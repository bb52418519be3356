"""The logits processors of one request: others' code, which may raise or return anything.

What a processor holds follows from the request and its output alone. If a request was computed
elsewhere before (it was preempted, or its engine core died), or its last tokens were drafts that
did not hold, processors are made anew and are told all tokens again, one by one. They are told of
each token separately even if a step brought several, so that nothing depends on how tokens were
grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from quire.errors import InvalidRequest, ProcessorFailed, ProcessorRefused
from quire.logger import get_logger
from quire.params import SamplingParams
from quire.sampling.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from quire.utils.signals import pass_on_signals

logger = get_logger(__name__)

Maker = Callable[[type[LogitsProcessor]], LogitsProcessor]
_NOTHING: Final = np.zeros(0, np.int32)


class RequestProcessors:
    """The processors of one request, in the order in which they were given.

    Args:
        classes: Those that may apply to it.
        make: Makes an instance.
        params: Of the request.
        prompt: Its token ids.

    Raises:
        ProcessorFailed: one raises while it is made.
    """

    def __init__(
        self,
        classes: Sequence[type[LogitsProcessor]],
        make: Maker,
        params: SamplingParams,
        prompt: Sequence[int],
    ) -> None:
        self._make, self._params, self._prompt = make, params, list(prompt)
        self._classes = [kind for kind in classes if _applies(kind, params)]
        self._seen = _NOTHING
        self._output: list[int] = []
        # the list that processors keep
        self._early: list[LogitsProcessor] = []
        self._late: list[LogitsProcessor] = []
        self._begin()

    @property
    def early(self) -> bool:
        """Whether some apply before penalties."""
        return bool(self._early)

    @property
    def late(self) -> bool:
        """Whether some apply after temperature and min-p."""
        return bool(self._late)

    def apply(self, logits: Tensor, output: np.ndarray, *, late: bool) -> Tensor:
        """Run the processors of one kind.

        Args:
            logits: Float32 `[vocab]`; left as it is, so that no processor holds on to what others
                use.
            output: int32 `[n]`, output token ids so far.
            late: Those after temperature and min-p, or those before penalties.

        Returns:
            Float32 `[vocab]`, without NaN and positive infinity.

        Raises:
            ProcessorFailed: one raised, or what it returned is no row of logits.
        """
        self._follow(output)
        row = logits.unsqueeze(0)
        for processor in self._late if late else self._early:
            name = type(processor).__name__
            with _contained(name, "apply"):
                given = row.clone()
                row = _checked(name, processor.apply(given), given)
        return row[0]

    def _begin(self) -> None:
        """Make all processors, and tell them of the request before its first token."""
        self._seen, self._output, self._early, self._late = _NOTHING, [], [], []
        added = (0, self._params, self._prompt, self._output)
        for kind in self._classes:
            name = kind.__name__
            with _contained(name, "__init__"):
                processor = self._make(kind)
            with _contained(name, "update_state"):
                processor.update_state(BatchUpdate(1, (), (added,), ()))
            if isinstance(processor, AdapterLogitsProcessor) and not processor.req_info:
                continue
            with _contained(name, "is_argmax_invariant"):
                invariant = processor.is_argmax_invariant()
            if not invariant:
                self._early.append(processor)
            elif not self._params.greedy:
                self._late.append(processor)

    def _follow(self, output: np.ndarray) -> None:
        """Bring the processors to the end of an output."""
        known = len(self._seen)
        if len(output) < known or not np.array_equal(output[:known], self._seen):
            self._begin()
            known = 0
        if len(output) == known:
            return
        for token in output[known:].tolist():
            self._output.append(token)
            for processor in (*self._early, *self._late):
                with _contained(type(processor).__name__, "update_state"):
                    processor.update_state(None)
        self._seen = output.copy()


def check_params(classes: Sequence[type[LogitsProcessor]], params: SamplingParams) -> None:
    """Ask all processors whether they take a request.

    Raises:
        ProcessorRefused: one does not.
        ProcessorFailed: one raises something else than `ValueError`.
    """
    for kind in classes:
        with _contained(kind.__name__, "validate_params"):
            try:
                kind.validate_params(params)
            except InvalidRequest as error:
                raise ProcessorRefused.by(kind.__name__, error.message) from None
            except ValueError as error:
                logger.warning("logits processor %s refuses a request: %s", kind.__name__, error)
                raise ProcessorRefused.by(kind.__name__) from None


def _applies(kind: type[LogitsProcessor], params: SamplingParams) -> bool:
    with _contained(kind.__name__, "applies_to"):
        return bool(kind.applies_to(params))


def _checked(name: str, found: object, given: Tensor) -> Tensor:
    """What a processor returned, if it is a row of logits."""
    if not isinstance(found, Tensor):
        raise ProcessorFailed.of(name, f"apply returned {type(found).__name__}, not a tensor")
    if found.shape != given.shape:
        shape, wanted = tuple(found.shape), tuple(given.shape)
        raise ProcessorFailed.of(name, f"apply returned a tensor of shape {shape}, not {wanted}")
    if not found.is_floating_point():
        raise ProcessorFailed.of(name, f"apply returned {found.dtype}, not floating-point numbers")
    found = found.to(device=given.device, dtype=torch.float32)
    if not bool((found < torch.inf).all()):
        raise ProcessorFailed.of(name, "apply returned NaN or positive infinity")
    return found


@contextmanager
def _contained(name: str, method: str) -> Iterator[None]:
    """Make a `ProcessorFailed` of what others' code raises; the exception is for the log."""
    try:
        yield
    except (ProcessorFailed, ProcessorRefused):
        raise
    except Exception as error:
        pass_on_signals(error)
        logger.error("logits processor %s raised in %s", name, method, exc_info=error)
        raise ProcessorFailed.of(name, f"{method} raised") from None
