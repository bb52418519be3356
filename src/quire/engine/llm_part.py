"""What the parts of `LLM` share: each part is a class with some of its methods. Reads prompts and
parameters that are given once or one by one. Knows neither sampling nor pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quire.bounds import show
from quire.engine.frontend.prompts import PromptType
from quire.errors import InvalidRequest
from quire.outputs import RequestOutput

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

P = TypeVar("P")


class LLMPart:
    """What each part may use of the whole."""

    llm_engine: LLMEngine

    def _submit_all(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[Any],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        """Run requests to their end, in the order given."""
        raise NotImplementedError


def as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[Any]:
    """One prompt or many: a list of integers is one prompt.

    Raises:
        InvalidRequest: it is neither.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(
            f"prompts must be a prompt or a list of prompts, got {show(prompts)}", param="prompts"
        )
    items = list(prompts)
    return [items] if items and all(isinstance(i, int) for i in items) else items


def one_for_each(name: str, kind: type[P], given: object, count: int) -> list[P]:
    """Parameters of `count` prompts, given once for all or one by one.

    Raises:
        InvalidRequest: they are something else, or not as many.
    """
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        raise InvalidRequest(
            f"{name} must be {kind.__name__} or a list of them, got {show(given)}", param=name
        )
    if len(given) != count:
        raise InvalidRequest(f"{name} has {len(given)} entries for {count} prompts", param=name)
    return list(given)
