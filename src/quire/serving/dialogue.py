"""One conversation, one reply: from a conversation in a template's terms to what is submitted, for
APIs that take one conversation and give one choice.

Knows no endpoint and no format of bodies; `generation.py` runs what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.params import SamplingParams
from quire.serving.exchange import Exchange
from quire.serving.field_names import AS_THE_ENGINE, FieldNames
from quire.serving.forced_calls import call_names
from quire.serving.prompts import encode, render_turns
from quire.serving.server_state import ServedModel
from quire.serving.submission import Submission
from quire.serving.tools import NO_TOOLS, ToolUse
from quire.serving.turn_reader import TurnReader


@dataclass(slots=True)
class Dialogue:
    """A conversation as chat templates take it."""

    turns: list[dict[str, Any]]
    """As `prompts.render_turns` describes them."""
    tools: ToolUse = NO_TOOLS
    continues: bool = False
    """The reply continues the last turn, which is the assistant's."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    form: FieldNames = AS_THE_ENGINE
    """What the caller calls the form that the output must have, and the conversation."""


@dataclass(frozen=True, slots=True)
class DialoguePrompt:
    """A rendered conversation."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class RequestLabels:
    """What a caller may say about a request that does not change its output."""

    request_id: str
    user: str | None = None
    priority: int = 0
    cache_salt: str | None = None


async def render(served: ServedModel, dialogue: Dialogue) -> DialoguePrompt:
    """The prompt of a conversation.

    Raises:
        InvalidRequest: the template refuses or shows no tools, or the prompt is far too long.
    """
    engine, tools = served.engine, dialogue.tools.for_template()
    served.parsers.check_tools(dialogue.tools)
    text = await render_turns(
        engine, dialogue.turns, tools, None, dialogue.continues, dialogue.variables
    )
    with dialogue.form.told():
        return DialoguePrompt(text, await encode(engine, text, False))


async def prepare(
    exchange: Exchange,
    served: ServedModel,
    dialogue: Dialogue,
    params: SamplingParams,
    labels: RequestLabels,
    *,
    reasoning: bool = True,
) -> tuple[Submission, TurnReader]:
    """What to submit for a conversation, and how to read what comes of it: with the model's
    reasoning, unless that is to be left out.

    Raises:
        InvalidRequest: as `render` raises it.
    """
    prompt = await render(served, dialogue)
    parsing, params = served.parsers.parsing(
        prompt.text,
        dialogue.tools,
        params,
        served.engine.tokenizer,
        reasoning=reasoning,
        may_reason=not dialogue.continues and served.parsers.may_reason(dialogue.variables),
    )
    form = dialogue.form
    names = call_names(dialogue.tools).beside(form.others) if dialogue.tools.constrains else form
    submission = Submission(
        [labels.request_id],
        [prompt.ids],
        params,
        labels.priority,
        labels.cache_salt,
        exchange.client(labels.user),
        exchange.trace_headers(),
        exchange.deadline,
        names,
    )
    tokens = params.num_logprobs is not None
    return submission, TurnReader(params, tokens=tokens, parsing=parsing)
