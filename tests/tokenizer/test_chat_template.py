"""Chat templates: the environment of model authors, every shape of content, safe refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE
from quire.errors import InvalidRequest, ModelLoadError
from quire.tokenizer import ChatTemplate, Tokenizer, chat_template
from quire.tokenizer.chat_template import check_template_kwargs, read_chat_template

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA_LIKE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {{- '[' + message.role + ']' + (message.content | trim) + eos_token -}}
{%- endfor -%}"""
PARTS_OR_STRING = """\
{%- for m in messages -%}
  {%- if m.content is string -%}S:{{ m.content }}
  {%- else -%}{%- for part in m.content -%}P:{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endfor -%}"""
PARTS_ONLY = (
    "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}"
)

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **options: Any) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, **options)


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert render(CHATML, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(CHATML, USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_special_tokens_and_variables_reach_the_template() -> None:
    assert render(LLAMA_LIKE) == "<s>[user]hi</s>"
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
    assert render("{{ tools is none }}") == "True"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\ny", "x\ny"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        (
            "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("{{ {'a': '<é>&'} | tojson }}", '{"a": "<é>&"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ {'b': 1} | tojson(separators=(',', ':')) }}", '{"b":1}'),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abhic"),
        ("{{ missing }}|{{ missing.x is defined }}", "|False"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_the_environment_of_model_authors(source: str, text: str) -> None:
    if "missing.x" in source:
        with pytest.raises(InvalidRequest):
            render(source)
    else:
        assert render(source) == text


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year)}


CONTENTS = [
    (CHATML, "string", "hi", "hi"),
    (CHATML, "parts", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    (PARTS_OR_STRING, "string", "hi", "S:hi"),
    (PARTS_OR_STRING, "parts", [{"type": "text", "text": "a"}, "b"], "P:aP:b"),
    (PARTS_ONLY, "string", "hi", "<hi>"),
    (PARTS_ONLY, "parts", [{"type": "input_text", "text": "a"}], "<a>"),
    (PARTS_ONLY, "empty", [], ""),
]


@pytest.mark.parametrize(("source", "_kind", "content", "shown"), CONTENTS)
def test_content_reaches_the_template_in_its_shape(
    source: str, _kind: str, content: Any, shown: str
) -> None:
    text = render(source, [{"role": "user", "content": content}], add_generation_prompt=False)
    assert text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n") == shown


def test_content_may_be_missing_or_null() -> None:
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert render(source, [{"role": "assistant", "content": None}, {"role": "user"}]) == "[][]"


def test_tool_call_arguments_are_objects_for_the_template() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(source, [message]) == '{"x": "é"}'
    assert call["function"] == {"name": "f", "arguments": '{"x": "é"}'}  # the caller's is untouched


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", "[" * 100_000])
def test_tool_call_arguments_that_are_no_object(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match=r"messages\[0\].tool_calls\[0\]") as caught:
        render(CHATML, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "non-empty"),
        ("hi", "non-empty"),
        (None, "non-empty"),
        (["hi"], "object"),
        ([{"role": "user", "content": 5}], "content must be"),
        ([{"role": "user", "content": {"text": "x"}}], "content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text part"),
        ([{"role": "user", "content": [5]}], "text part"),
        ([{"role": "user", "content": [{"type": ["x"]}]}], "text part"),
        ([{"role": "user", "content": "x", "tool_calls": [5]}], "tool_calls"),
        ([{"role": "user", "content": "x", "tool_calls": 5}], "tool_calls"),
    ],
)
def test_messages_no_template_can_take(messages: Any, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as caught:
        render(CHATML, messages)
    assert caught.value.param == "messages"


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render(LLAMA_LIKE, [*USER, *USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ missing | tojson }}",
        "{% include 'x' %}",
    ],
)
def test_a_failing_template_is_the_requests_error_without_internals(source: str) -> None:
    with pytest.raises(InvalidRequest, match="could not render") as caught:
        render(source)
    message = caught.value.message
    assert not any(word in message for word in ("Traceback", "0x", "object at", ".py"))


def test_a_template_with_a_syntax_error() -> None:
    with pytest.raises(InvalidRequest, match="syntax error in line 2"):
        render("ok\n{% if %}")


def test_output_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    source = (
        "{% for i in range(10000) %}{% for j in range(10000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="longer than 1000"):
        render(source)
    assert len(render("{% for i in range(100) %}xxxxxxxxxx{% endfor %}")) == 1000


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (CHATML, "The answer ", "<|im_start|>assistant\nThe answer "),
        (CHATML, "", "<|im_start|>assistant\n"),
        (CHATML, None, "<|im_start|>assistant\n"),
        ("{{ messages[-1].content | trim }}!", "The answer ", "The answer"),
        (PARTS_ONLY, [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}], "<a><b "),
        (PARTS_ONLY, [], "<"),
    ],
)
def test_continuing_the_final_message(source: str, content: Any, text: str) -> None:
    messages = [{"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(source, messages, **options) == text
    assert messages == [{"role": "assistant", "content": content}]


def test_continuing_needs_a_template_that_shows_the_message() -> None:
    with pytest.raises(InvalidRequest, match="does not show"):
        render("x", continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        render(CHATML, continue_final_message=True, add_generation_prompt=True)


def test_named_templates() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t", "rag": "r"}, {})
    assert template.render(USER) == "d"
    assert template.render(USER, tools=[{"type": "function"}]) == "t"
    assert template.render(USER, chat_template="rag") == "r"
    assert template.render(USER, chat_template="{{ 'own' }}") == "own"
    with pytest.raises(InvalidRequest, match="only: rag"):
        ChatTemplate({"rag": "r"}, {}).render(USER)


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "self"])
def test_client_variables_cannot_go_around_fields(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        check_template_kwargs({"ok": 1, name: "x"})
    assert check_template_kwargs({"enable_thinking": True}) == {"enable_thinking": True}


def test_templates_of_a_folder(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    path = folder / "tokenizer_config.json"

    path.write_text(json.dumps(config | {"chat_template": "from config {{ bos_token }}"}))
    assert Tokenizer.from_folder(folder).apply_chat_template(USER) == "from config <|bos|>"

    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, 5]
    path.write_text(json.dumps(config | {"chat_template": named}))
    assert Tokenizer.from_folder(folder).apply_chat_template(USER, tools=[{}]) == "t"

    (folder / "chat_template.jinja").write_text("from file {{ x }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template(USER, x=1) == "from file 1"
    assert tokenizer.apply_chat_template(USER, chat_template="rag") == "rag"

    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        Tokenizer.from_folder(folder)


def test_the_option_takes_the_place_of_the_models_templates(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("the model's")
    (tmp_path / "own.jinja").write_text("own {{ eos_token }}")
    tokenizer = Tokenizer.from_folder(folder, chat_template=str(tmp_path / "own.jinja"))
    assert tokenizer.apply_chat_template(USER) == "own <|end|>"
    assert Tokenizer.from_folder(folder, "{{ 1 }}").apply_chat_template(USER, tools=[{}]) == "1"
    with pytest.raises(ModelLoadError, match=r"no\.jinja"):
        Tokenizer.from_folder(folder, chat_template="no.jinja")


def test_without_a_template(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        byte_level.apply_chat_template(USER)
    assert byte_level.apply_chat_template(USER, chat_template="{{ eos_token }}") == "<|end|>"


def test_reading_the_option(tmp_path: Path) -> None:
    assert read_chat_template("{{ x }}") == "{{ x }}"
    (tmp_path / "t.jinja").write_text("file")
    assert read_chat_template(str(tmp_path / "t.jinja")) == "file"
    with pytest.raises(ModelLoadError, match="no-such-file"):
        read_chat_template("no-such-file")


def test_heavy_imports_wait_until_needed() -> None:
    code = (
        "import sys, quire.tokenizer; "
        "assert not {'jinja2', 'tokenizers', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
