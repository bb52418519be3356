"""Renders chat templates in processes that may be killed.

A template is a program. What it does to a conversation that a client sent can take any time and
memory, unless it is known to be cheap (`template_cost`). The rest is rendered by the same code in a
helper process, under limits that the kernel enforces, so it gives the same text.

Knows no HTTP and no event loop but that of the caller who waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from quire.errors import InvalidRequest
from quire.tokenizer.chat_template import ChatTemplate
from quire.utils.helpers.pool import MAX_WAIT, HelperPool
from quire.utils.helpers.words import HelperLimits

MAX_WORK: Final = 300_000
"""What a cheap template may do with a conversation in the server's own process, in passes of its
innermost part: at most a second or so, and mostly a few milliseconds."""
LIMITS: Final = HelperLimits(cpu_seconds=2.5, memory=2**29)
"""50,000 turns, as many as a body of 4 MiB has, take a tenth of that, and a third or more on a slow
core that others share. The shorter a bomb lasts, the sooner others follow."""
_FAILED: Final = "the chat template: these messages could not be rendered."


class RenderSetup(msgspec.Struct):
    """The first word to a helper."""

    limits: HelperLimits
    special_tokens: dict[str, str]


class RenderTask(msgspec.Struct):
    """The arguments of `ChatTemplate.render`."""

    source: str
    options: bytes
    """JSON, in which numbers of any size fit."""


class Rendered(msgspec.Struct):
    """What came of it: one of the first two."""

    text: str | None = None
    refusal: str | None = None
    param: str | None = None
    passes: bool = False
    """Whether it is refused because of the machine at that time."""


class TemplateHelper:
    """Renders the templates of one model. Processes and threads start with the first conversation.

    Args:
        template: The model's templates.
        limits: For one conversation.
        max_wait: Seconds for which a conversation may wait for its turn.
    """

    def __init__(
        self,
        template: ChatTemplate,
        limits: HelperLimits = LIMITS,
        max_wait: float = MAX_WAIT,
    ) -> None:
        self._template = template
        self._pool = HelperPool(
            "quire.tokenizer.template_process",
            lambda: RenderSetup(limits, template.special_tokens),
            "template-helper",
            "Other conversations are being rendered",
            max_wait,
        )

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """As `ChatTemplate.render`.

        Raises:
            InvalidRequest: see there; or rendering exceeds a limit.
            TooManyRequests: others are being rendered, and its turn did not come in time; or the
                machine was too busy or short of memory for it.
        """
        source = self._template.source(tools)
        options = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": dict(variables),
        }
        asked = self._pool.ask(lambda: RenderTask(source, msgspec.json.encode(options)))
        try:
            answer = await asyncio.wrap_future(asked)
        finally:
            asked.cancel()
        if answer is None:
            raise self._pool.passing(_FAILED)
        found = msgspec.msgpack.decode(answer, type=Rendered)
        if found.text is None:
            said = found.refusal or _FAILED
            if found.passes:
                raise self._pool.passing(said)
            raise InvalidRequest(said, param=found.param)
        return found.text

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
