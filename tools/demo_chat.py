"""quire-demo's chat form: the Jinja template it ships and the same form in Python.

It knows special tokens, the ChatML-like layout and how tools and tool calls are written.
The Python renderer exists because training needs to know which pieces are the model's own
words; tests hold it equal to the template.  It does not know what is said in a chat.
"""

from __future__ import annotations

import json
from typing import Any

END = "<|endoftext|>"
START = "<|im_start|>"
STOP = "<|im_end|>"
CALL = "<tool_call>"
CALL_END = "</tool_call>"
# In the order of their ids; only the first three vanish when special tokens are skipped.
SPECIAL_TOKENS = (END, START, STOP)
MARKER_TOKENS = (CALL, CALL_END)

# A piece of a document: its text, and whether the model learns to write it.
Piece = tuple[str, bool]

CHAT_TEMPLATE = r"""
{%- macro plain(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}
{%- for part in content -%}
{%- if part is string -%}{{- part -}}{%- elif part.text is defined -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first = 0 -%}
{%- set system = '' -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
{%- set first = 1 -%}
{%- set system = plain(messages[0].content) -%}
{%- endif -%}
{%- if system or tools -%}
{{- '<|im_start|>system\n' -}}
{{- system -}}
{%- if tools -%}
{%- if system -%}{{- '\n\n' -}}{%- endif -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}
{%- set spec = tool.function if tool.function is defined else tool -%}
{{- '\n' + spec.name + '(' -}}
{%- if spec.parameters is defined and spec.parameters and spec.parameters.properties is defined -%}
{%- set required = spec.parameters.required if spec.parameters.required is defined else [] -%}
{%- for key, value in spec.parameters.properties.items() -%}
{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}
{{- key -}}{%- if key not in required -%}{{- '?' -}}{%- endif -%}
{{- ': ' -}}
{%- if value.type is defined and value.type is string -%}{{- value.type -}}
{%- elif value.type is defined -%}{{- value.type | join('|') -}}
{%- else -%}{{- 'any' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- ')' -}}
{%- if spec.description is defined and spec.description -%}
{{- ' ' + spec.description -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- set text = plain(message.content) -%}
{{- text -}}
{%- if message.tool_calls is defined and message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set spec = call.function if call.function is defined else call -%}
{%- if text or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + spec.name + '", "arguments": ' -}}
{%- if spec.arguments is string -%}{{- spec.arguments -}}
{%- else -%}{{- spec.arguments | tojson -}}{%- endif -%}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()


def plain_text(content: Any) -> str:
    """A message's content as one string: a string, or a list of text parts."""
    if isinstance(content, str):
        return content
    parts = content or []
    return "".join(p if isinstance(p, str) else p.get("text", "") for p in parts)


def signature(tool: dict[str, Any]) -> str:
    """One tool as the line the model reads: name(parameter: type, ...) description."""
    spec = tool.get("function", tool)
    schema = spec.get("parameters") or {}
    required = schema.get("required", [])
    shown = []
    for key, value in schema.get("properties", {}).items():
        kind = value.get("type", "any")
        kind = kind if isinstance(kind, str) else "|".join(kind)
        shown.append(f"{key}{'' if key in required else '?'}: {kind}")
    description = f" {spec['description']}" if spec.get("description") else ""
    return f"{spec['name']}({', '.join(shown)}){description}"


def call_text(name: str, arguments: dict[str, Any] | str) -> str:
    """One tool call in the taught form."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{CALL}\n{{"name": "{name}", "arguments": {arguments}}}\n{CALL_END}'


def message_text(message: dict[str, Any]) -> str:
    """What stands between a turn's header and its end."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    texts = [plain_text(message.get("content"))]
    texts += [call_text(call["name"], call["arguments"]) for call in calls]
    return "\n".join(text for text in texts if text)


def render(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[Piece]:
    """A conversation as pieces; the assistant's words and ends of turn are learned."""
    pieces: list[Piece] = []
    system = ""
    if messages and messages[0]["role"] in ("system", "developer"):
        system, messages = plain_text(messages[0]["content"]), messages[1:]
    if tools:
        listed = "\n".join(["Tools:", *(signature(tool) for tool in tools)])
        system = f"{system}\n\n{listed}" if system else listed
    if system:
        pieces.append((f"{START}system\n{system}{STOP}\n", False))
    for message in messages:
        learned = message["role"] == "assistant"
        pieces.append((f"{START}{message['role']}\n", False))
        pieces.append((message_text(message) + STOP, learned))
        pieces.append(("\n", False))
    return pieces


def prompt_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """The prompt that asks the model for the next assistant turn."""
    return "".join(text for text, _ in render(messages, tools)) + f"{START}assistant\n"
