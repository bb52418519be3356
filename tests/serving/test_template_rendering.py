"""Conversations are rendered where they can be killed, unless the template is cheap: with the same
text, one clear refusal for what exceeds a limit, and no pause for others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from patience import wait_for
from quire.errors import InvalidRequest, TooManyRequests
from quire.serving.prompts import render_turns
from quire.tokenizer.chat_template import ChatTemplate
from quire.tokenizer.template_helper import TemplateHelper
from quire.utils.helpers.words import HelperLimits

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "héllo 👋 \u2028"},
    {"role": "assistant", "content": "", "reasoning": "why", "tool_calls": [
        {"function": {"name": "f", "arguments": {"big": 2**70, "x": [1.5, None, "ü"]}}}]},
]  # fmt: skip
DEAR = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(2) }}"
SHOWS = "{{ bos_token }}{{ messages|tojson }}{{ tools|tojson }}{{ extra }}{{ documents }}"
LIMITS = HelperLimits(cpu_seconds=0.5, wall_seconds=20.0, memory=2**27)
MakeEngine = Callable[..., Any]


@pytest.fixture
async def make() -> AsyncIterator[MakeEngine]:
    made: list[TemplateHelper] = []

    def make_engine(source: str, limits: HelperLimits = LIMITS, max_wait: float = 60.0) -> Any:
        template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
        made.append(TemplateHelper(template, limits, max_wait))

        def render(messages: Any, **kwargs: Any) -> str:
            assert source == SHOWS, "only the cheap template may be rendered here"
            options = {name: kwargs.pop(name) for name in (
                "tools", "add_generation_prompt", "continue_final_message")}  # fmt: skip
            return template.render(messages, **options, variables=kwargs)

        tokenizer = SimpleNamespace(chat_template=template, apply_chat_template=render)
        return SimpleNamespace(tokenizer=tokenizer, templates=made[-1])

    yield make_engine
    for helper in made:
        helper.close()


def helpers() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "Templ" in child.name():
                found.append(child)
    return found


async def render(engine: Any, talk: list[dict[str, Any]] = TALK, **variables: Any) -> str:
    tools = [{"type": "function", "function": {"name": "f"}}]
    return await render_turns(engine, talk, tools, None, None, variables)


async def test_the_same_text_in_both_places(make: MakeEngine) -> None:
    here = await render(make(SHOWS), extra="é")
    assert not helpers()
    there = await render(make(SHOWS + DEAR), extra="é")
    assert len(helpers()) == 1
    assert here == there and "<s>" in here and str(2**70) in here


async def test_the_same_refusals_in_both_places(make: MakeEngine) -> None:
    for end in ("{{ raise_exception('no ' ~ messages[0].role) }}", "{{ a.b.c }}"):
        said = []
        for source in (end, end + DEAR):
            template = ChatTemplate({"default": source}, {})
            with pytest.raises(InvalidRequest) as found:
                template.render(TALK)
            said.append((found.value.message, found.value.param))
        with pytest.raises(InvalidRequest) as found:
            await render(make(end + DEAR))
        assert [(found.value.message, found.value.param)] * 2 == said


async def test_a_long_conversation_goes_to_the_helper(make: MakeEngine) -> None:
    talk = [{"role": "user", "content": "x" * 1000}] * 400
    text = await render(make(SHOWS), talk)
    assert len(helpers()) == 1 and text.count("x" * 1000) == 400


BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 40,
    "{{ 'a' * 10**10 }}",
    "{{ 10**(10**10) }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
]


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
async def test_bombs_are_refused_and_the_loop_goes_on(source: str, make: MakeEngine) -> None:
    engine = make(source)
    turns, done = 0, asyncio.Event()

    async def others() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0.001)

    beside = asyncio.create_task(others())
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="chat template"):
            await render(engine)
    done.set()
    await beside
    assert turns > 2
    wait_for(lambda: all(not p.children() for p in helpers()), "children to end")


async def test_a_busy_machine_is_no_fault_of_a_conversation(make: MakeEngine) -> None:
    engine = make(BOMBS[0], HelperLimits(cpu_seconds=60.0, wall_seconds=0.1))
    with pytest.raises(TooManyRequests, match="more than 0.1 seconds.*Send it again later"):
        await render(engine)


async def test_a_killed_helper_is_replaced(make: MakeEngine) -> None:
    engine = make(SHOWS + DEAR)
    first = await render(engine)
    for process in helpers():
        process.kill()
    assert await render(engine) == first


async def test_who_waits_too_long_is_refused(make: MakeEngine) -> None:
    with pytest.raises(TooManyRequests, match="Other conversations are being rendered"):
        await render(make(SHOWS + DEAR, max_wait=0.0))


async def test_nothing_stays(make: MakeEngine) -> None:
    engine = make(DEAR)
    await render(engine)
    known = helpers()
    engine.templates.close()
    wait_for(lambda: not any(p.is_running() for p in known), "helpers to end")
    assert os.getpid() not in {p.pid for p in known}
