"""Which templates are known to be cheap, and how much they may do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quire
from quire.tokenizer.template_cost import rendering_work, template_degree

DEMO = Path(quire.__file__).parent / "assets" / "quire-demo" / "tokenizer_config.json"
LOOP = "{% for m in messages %}"
END = "{% endfor %}"


@pytest.mark.parametrize("source, degree", [
    ("{{ bos_token }}", 0),
    (LOOP + "{{ m.role ~ m.content }}" + END, 1),
    (LOOP + "{% for p in m.content %}{% for k, v in p|items %}{{ k }}" + END * 3, 1),
    (LOOP + "{% for t in tools %}{{ t|tojson(indent=4) }}" + END * 2, 2),
    (LOOP + "{% for p in m.a %}{% for q in m.b %}{{ q }}" + END * 3, 2),
    (LOOP + "{% set c = m.content %}{% for p in c %}{{ p }}" + END * 2, 1),
    ("{% set ms = messages[1:] if messages else messages %}{% for m in ms %}" + END, 1),
    ("{% set ns = namespace(x='') %}" + LOOP + "{% set ns.x = ns.x ~ m.content %}" + END, 1),
    (LOOP + "{% set c = m.content.split('</think>')[-1].lstrip('\\n') %}{{ c }}" + END, 1),
    (LOOP + "{% if loop.index0 % 2 == 0 %}{{ m.role }}{% endif %}" + END, 1),
    ("{% macro f(x) %}{% for y in x %}{{ y }}{% endfor %}{% endmacro %}"
     + LOOP + "{{ f(m.content) }}{{ f(tools) }}" + END, 2),
    ("{% for i in range(messages|length - 1, -1, -1) %}{{ messages[i].role }}" + END, 1),
    ("{% for i in range(10) %}x" + END, 1),
    ("{{ messages|map(attribute='role')|list }}{% for x in ['a', 'b'] %}" + END, 1),
])  # fmt: skip
def test_cheap_templates(source: str, degree: int) -> None:
    assert template_degree(source) == degree


BOMBS = [
    "{% for i in range(10**9) %}" + END,
    "{% for i in range(99999) %}{% for j in range(99999) %}" + END * 2,
    "{% set n = 99999 %}{% for i in range(n) %}" + END,
    "{% for i in range(messages|length * 99999) %}" + END,
    "{% set ns = namespace(x='ab') %}" + LOOP + "{% set ns.x = ns.x ~ ns.x %}" + END,
    "{% set x = 'ab' %}" + "{% set x = x + x %}" * 60,
    "{% set x = ['ab'] %}" + "{% set x = [x, x] %}" * 60,
    "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "{% set x = 'ab' %}" + "{% set x %}{% for i in range(9) %}{{ x }}" + END + "{% endset %}" * 1,
    "{% set x = '\"' %}" + "{% set x = x|tojson %}" * 60,
    "{% set x = 'a' %}" + "{% set x = x|replace('a', 'aa') %}" * 60,
    "{% set x = 'a' %}" + "{% set x = x|list|string %}" * 60,
    "{% set x = 'a' %}" + "{% set x = x.split('a') ~ '' %}" * 60,
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set x = 'a' %}" + "{% set x = f(x) %}" * 60,
    "{% set x = 'a' %}{% macro f() %}{{ x }}{{ x }}{% endmacro %}" + "{% set x = f() %}" * 60,
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "".join(f"{{% macro f{i}() %}}" + f"{{{{ f{i + 1}() }}}}" * 2 + "{% endmacro %}"
            for i in range(60)) + "{% macro f60() %}x{% endmacro %}{{ f0() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}" + END,
    "{{ 'a' * 10**10 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ messages[0].content % 1 }}",
    "{{ messages[0].content|center(999999999) }}",
    "{{ messages[0].content.zfill(999999999) }}",
    "{{ messages[0].content.replace('', messages[0].content) }}",
    "{{ 10**10**10 }}",
    "{{ messages|map('center', 99999999)|list }}",
    "{{ strftime_now('%999999999d' ~ tools) }}",
    "{{ lipsum(n=100000) }}",
    "{{ 'x'|indent(999999999) }}",
    LOOP + "{% set x = messages ~ '' %}{% for c in x ~ x %}" + END * 2,
    "x" * 70_000,
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_what_is_not_known_to_be_cheap(source: str) -> None:
    assert template_degree(source) is None


def test_the_embedded_model_s_template_is_cheap() -> None:
    assert template_degree(json.loads(DEMO.read_text("utf-8"))["chat_template"]) is not None


def test_work_grows_with_what_is_given() -> None:
    given = [{"role": "user", "content": "x" * 100}] * 10
    once, twice = (rendering_work(degree, given, 10**9) for degree in (1, 2))
    assert 1000 < once < 1300 and twice > 20 * once
    assert rendering_work(1, given * 1000, 5000) > 5000
