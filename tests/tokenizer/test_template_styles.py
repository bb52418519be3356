"""Chat templates of many styles give the text that transformers' `apply_chat_template` gives."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from quire.errors import InvalidRequest
from quire.tokenizer.chat_template import ChatTemplate

TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}

STYLES = {
    # A default system prompt, roles as they come.
    "default system": """
{%- if messages[0].role != 'system' %}
    {{- '<|start|>system\\nBe helpful.<|stop|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|start|>' + m.role + '\\n' + m.content | trim + '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
""",
    # The system prompt goes into the first user turn; turns must alternate.
    "system merging": """
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set system = messages[0]['content'] + '\\n\\n' %}{% set turns = messages[1:] %}
{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{% for m in turns %}
  {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Roles must alternate user/assistant/...') }}
  {% endif %}
  {% if m['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = m['role'] %}{% endif %}
<turn>{{ role }}
{{ (system if loop.first else '') + m['content'] | trim }}</turn>
{% endfor %}
{% if add_generation_prompt %}
<turn>model
{% endif %}
""",
    # Tools as JSON in the system prompt, calls as tags, results grouped.
    "hermes tools": """
{%- if tools %}
<system>{% if messages[0].role == 'system' %}{{ messages[0].content ~ '\\n' }}{% endif %}
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</system>
{%- endif %}
{%- for m in messages if not (m.role == 'system' and tools) %}
{%- if m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<user>{% endif %}
<result>{{ m.content }}</result>
{%- if loop.last or loop.nextitem.role != 'tool' %}</user>{% endif %}
{%- else %}
<{{ m.role }}>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</call>
{%- endfor %}</{{ m.role }}>
{%- endif %}
{%- endfor %}
""",
    # Reasoning only of the turns after the last question; a switch from the request.
    "reasoning": """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set text = m.content or '' %}
    {%- if m.role == 'assistant' and '</think>' in text %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '[' + m.role + ']' }}
    {%- if m.reasoning_content is string and loop.index0 > ns.last %}
        {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
    {%- endif %}
    {{- text + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
""",
    # Loop controls, reversed and sliced loops, cycles.
    "loop controls": """
{% for m in messages | reverse %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{{ loop.cycle('odd', 'even') }}:{{ loop.revindex }}/{{ loop.length }} {{ m.content | upper }}
{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}
""",
    # Documents for retrieval, with a title or without.
    "documents": """
{%- if documents %}{{ '<results>\\n' }}
{%- for d in documents %}Document: {{ loop.index0 }}
{{ 'title: ' ~ d.title ~ '\\n' if d.title is defined }}{{ d.text }}
{% endfor %}</results>
{%- elif documents is none %}(no documents)
{%- endif %}
{%- for m in messages %}
{{ m.role }}={{ m.content }}
{%- endfor %}
""",
    # The date, indented JSON of sorted keys, text in other scripts.
    "date and json": """
{{- 'Today is ' + strftime_now('%d %b %Y') }}
{% if tools is not none %}
{{ tools | tojson(indent=2) }}
{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}
{% endif %}
{% for m in messages %}{{ loop.index }} {{ m | tojson }}
{% endfor %}
""",
    # Marks of what the assistant wrote.
    "generation": """
{% for m in messages %}
{% if m.role == 'assistant' %}{{ 'A: ' }}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}

{% else %}{{ m.role[0] | upper }}: {{ m.content }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}A: {% endif %}
""",
    # Macros with defaults, includes of arithmetic, dict(), tests on types.
    "macros": """
{%- macro shown(m, mark='*') -%}
  {{ mark * (1 + m.content | length % 3) }}{{ m.content if m.content is string else m.content | length }}
{%- endmacro %}
{%- set names = dict(user='U', assistant='A', system='S', tool='T') %}
{%- for m in messages %}
{{ names[m.role] }}{{ shown(m) }}{{ shown(m, mark='-') }}
{%- endfor %}
{{- bos_token if bos_token is defined else '' }}{{ pad_token if pad_token is defined else 'no pad' }}
""",
    # A template that only takes lists of parts.
    "parts": """
{%- for m in messages %}{{ m.role }}:
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% else %}<{{ p.type }}>{% endif %}{% endfor %}
{%- endif %};
{%- endfor %}
""",
}  # fmt: skip
# ruff: noqa: E501 - templates are shown as their authors write them

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter in <Köln> & 'überall'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
USER = {"role": "user", "content": "  What's up?\n"}
ASSISTANT = {"role": "assistant", "content": "<think>hm</think>\n\nFine."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    ],
}
RESULT = {"role": "tool", "content": "rain"}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "\nLet me see.\n"}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER],
    "two users": [USER, USER],
    "tool": [USER, CALL, RESULT, RESULT, {"role": "assistant", "content": "It rains."}],
    "thought": [USER, THOUGHT, USER, THOUGHT],
    "alias": [USER, {"role": "assistant", "content": "No.", "reasoning": "Hm."}],
    "unicode": [{"role": "user", "content": "你好 <b>&amp;</b> 🙂\t'\""}],
}
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]
DOCUMENTS = [{"title": "One", "text": "first"}, {"text": "second"}]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"documents": DOCUMENTS},
    {"enable_thinking": False},
    {"enable_thinking": True, "bos_token": "<other>"},
]


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), **TOKENS)


def theirs(tokenizer: Any, style: str, messages: Any, **options: Any) -> str | None:
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=STYLES[style], tokenize=False, **options
        )
    except Exception:
        return None


def ours(style: str, messages: Any, prompt: bool, continued: bool, **options: Any) -> str | None:
    template = ChatTemplate({"default": STYLES[style]}, TOKENS)
    tools = options.pop("tools", None)
    try:
        return template.render(
            messages, tools=tools, add_generation_prompt=prompt,
            continue_final_message=continued, variables=options,
        )  # fmt: skip
    except InvalidRequest:
        return None


@pytest.mark.parametrize("style", STYLES)
def test_text_is_what_transformers_renders(reference: Any, style: str) -> None:
    today = datetime.now().date()
    rendered = refused = 0
    for (_, messages), options, prompt in itertools.product(
        CONVERSATIONS.items(), VARIABLES, (False, True)
    ):
        expected = theirs(reference, style, messages, add_generation_prompt=prompt, **options)
        got = ours(style, messages, prompt, False, **options)
        if datetime.now().date() == today:
            assert got == expected, (messages, options)
        rendered, refused = rendered + (got is not None), refused + (got is None)
    assert rendered >= 10, f"a style that renders nothing tests nothing ({refused} refused)"


def test_parts_are_what_transformers_renders(reference: Any) -> None:
    expected = theirs(reference, "parts", PARTS)
    assert ours("parts", PARTS, False, False) == expected == "user:[a][b];"


@pytest.mark.parametrize("style", ["default system", "system merging", "reasoning", "generation"])
def test_continued_messages_are_what_transformers_renders(reference: Any, style: str) -> None:
    for text in ("So far", "So far ", "a\n"):
        messages = [USER, {"role": "assistant", "content": text}]
        expected = theirs(reference, style, messages, continue_final_message=True)
        assert expected is not None
        assert ours(style, messages, False, True) == expected


def test_refusals_are_shared(reference: Any) -> None:
    messages = CONVERSATIONS["two users"]
    assert theirs(reference, "system merging", messages) is None
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        ChatTemplate({"default": STYLES["system merging"]}, TOKENS).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ dict.mro() }}",
        "{{ dict.__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}{{ ns.x }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__.__builtins__ }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    try:
        text = ChatTemplate({"default": source}, TOKENS).render([USER])
    except InvalidRequest:
        return
    assert text == "", "what is unsafe is undefined"
