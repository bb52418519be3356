"""Bombs of grammars, patterns and chat templates, and the helper processes that they are for.

Templates are the operator's. So the server of this drill has one that renders as the embedded
model's does, and explodes where a message says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

import quire
from mixed_load import CHAT, COMPLETIONS, Ask
from surroundings import Around

TEMPLATES = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubles": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 40,
    "recurses": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
}
FORMS: tuple[Callable[[int], dict[str, Any]], ...] = (
    lambda i: {"regex": f"(x+x+)+y{i}"},
    lambda i: {"regex": f"(?:a?){{5000}}a{{5000}}{i}"},
    lambda i: {"regex": rf"(\w{{1,500}}\s){{1,500}}{i}"},
    lambda i: {"regex": "(" * 5000 + f"a{i}" + ")" * 5000},
    lambda i: {"grammar": f'start: a\na: a a a a | b\nb: "{i}" | ""'},
    lambda i: {"grammar": "root ::= " + "(" * 90 + f'"{i}"' + "){1,9999}" * 90},
    lambda i: {"grammar": f'root ::= "{i}" root r0 | "x"\nr60 ::= "y"?\n'
               + "\n".join(f"r{k} ::= r{k + 1} r{k + 1}" for k in range(60))},
    lambda i: {"choice": [f"choice {i} {k}" for k in range(9000)]},
    lambda i: {"json": {"$ref": "#/$defs/a0", "title": str(i), "$defs": {"a30": {}} | {
        f"a{k}": {"anyOf": [{"$ref": f"#/$defs/a{k + 1}"}] * 10} for k in range(30)}}},
)  # fmt: skip


def bomb_asks(count: int) -> list[Ask]:
    """Bombs of all kinds, no two of them equal."""
    asks = []
    common: dict[str, Any] = {"model": "quire-demo", "max_tokens": 8, "temperature": 0}
    for i in range(count):
        if i % 5 == 4:
            name = list(TEMPLATES)[i // 5 % len(TEMPLATES)]
            text = f"explode: {name} {i}"
            body = common | {"messages": [{"role": "user", "content": text}]}
            asks.append(Ask(f"template {name}", CHAT, body))
        else:
            form = FORMS[i % len(FORMS)](i)
            body = common | {"prompt": f"Bomb {i}:", "structured_outputs": form}
            asks.append(Ask(f"grammar {i % len(FORMS)}", COMPLETIONS, body))
    return asks


@contextlib.contextmanager
def bomb_template(folder: Path) -> Iterator[Around]:
    """A server with the template that can explode."""
    assets = Path(quire.__file__).parent / "assets" / "quire-demo" / "tokenizer_config.json"
    usual = json.loads(assets.read_text("utf-8"))["chat_template"]
    text = "{%- set asked = messages[0].content -%}"
    for name, bomb in TEMPLATES.items():
        text += f"{{%- if asked.startswith('explode: {name}') -%}}{bomb}{{%- endif -%}}"
    path = folder / "template.jinja"
    path.write_text(text + usual, "utf-8")
    yield Around(args=("--chat-template", str(path)))


def _helpers(server: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(server).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith(("quire::Gramm", "quire::Templ")):
                    found.append(child)
    return found


async def kill_helpers(server: int, count: int) -> int:
    """Kill helpers while they work; how many."""
    killed, end = 0, time.monotonic() + 20
    while killed < count and time.monotonic() < end:
        for helper in _helpers(server):
            with contextlib.suppress(psutil.NoSuchProcess):
                if helper.children():
                    helper.kill()
                    killed += 1
                    break
        await asyncio.sleep(0.05)
    return killed


async def helpers_rest(server: int) -> bool:
    """Whether no helper works a moment after."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any(helper.children() for helper in _helpers(server)):
                return True
        await asyncio.sleep(0.05)
    return False
