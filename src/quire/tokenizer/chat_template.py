"""Chat templates: turns conversations into prompt text with Jinja, as Hugging Face models expect.

The Jinja environment is the one that model authors write for: sandboxed and immutable,
`trim_blocks` and `lstrip_blocks`, `break`/`continue`, a `tojson` that escapes nothing for HTML,
`raise_exception`, `strftime_now`, and the `{% generation %}` mark. Jinja is imported with the first
template used.

Knows message dictionaries and text, but no tokens. The length of the output is limited, but a
template that computes forever is not stopped here: a server renders what `template_cost` does not
know to be cheap in a process that may be killed (`template_helper`).
"""

from __future__ import annotations

import enum
import functools
import json
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import InvalidRequest, ModelLoadError

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 8 * 2**20
"""Longest prompt text a template may produce."""
COMPILED_TEMPLATES = 16
"""Number of compiled templates that are kept, however many requests bring."""
TEXT_PART_TYPES = ("text", "input_text", "output_text", "refusal")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TYPE_TESTS = ("string", "iterable", "sequence", "mapping")
RESERVED_VARIABLES = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "self",
    )
)
"""Names that a client's keywords must not have, because they have fields and checks of their
own."""

Message = dict[str, Any]
T = TypeVar("T")


class ContentShape(enum.Enum):
    """What a template does with a message's content."""

    STRING = 0
    """Prints it."""
    PARTS = 1
    """Loops over its parts, without looking at its type."""
    EITHER = 2
    """Looks at its type first."""


class ChatTemplate:
    """The templates of one model, by name."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]) -> None:
        self.templates = dict(templates)
        """Sources by name; `default` and `tool_use` are known names."""
        self.special_tokens = dict(special_tokens)
        """Variables such as `bos_token`."""

    def source(self, tools: object = None, override: str | None = None) -> str:
        """The template to use: the override (a name or a source), or else the one that fits.

        Raises:
            InvalidRequest: the model has only templates of other names.
        """
        if override is not None:
            return self.templates.get(override, override)
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise InvalidRequest(
                f"this model has no default chat template, only: {names}. Name one of them as "
                "chat_template.",
                param="chat_template",
            )
        return self.templates[name]

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Prompt text of a conversation.

        Raises:
            InvalidRequest: the messages have a shape no template can take, the template refuses
                or fails on them, or the text is longer than `MAX_RENDERED_CHARS`.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other: the reply "
                "either goes on with the last message or starts a new one.",
                param="continue_final_message",
            )
        template, shape = _compile(self.source(tools, chat_template))
        messages = [_normalised(m, i, shape) for i, m in enumerate(_checked(messages))]
        mark = f"[{secrets.token_hex(16)}] " if continue_final_message else ""
        if mark:
            _append(messages[-1], mark, shape)
        context = {"documents": None, **self.special_tokens, **(variables or {})}
        context |= {"messages": messages, "tools": tools or None}
        text = _run(template, {**context, "add_generation_prompt": add_generation_prompt})
        return _cut_at(text, mark) if mark else text


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Template variables that a client sent, if none bypasses a field of the request.

    Raises:
        InvalidRequest: a reserved name is among them.
    """
    for name in kwargs:
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(
                f"chat_template_kwargs must not set {name!r}: the request has a field for it.",
                param="chat_template_kwargs",
            )
    return kwargs


def read_chat_template(option: str) -> str:
    """The template that an option gives: the name of a file, or the template itself.

    Raises:
        ModelLoadError: it looks like a file name, but there is no such file.
    """
    if "{" in option or "\n" in option:
        return option
    try:
        return Path(option).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"--chat-template: cannot read the file {option!r} ({error}), and it is no template "
            "itself, as it holds no {"
        ) from None


def _checked(messages: object) -> list[Message]:
    """The conversation, if it is a non-empty list of objects."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("messages must be a non-empty list.", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            kind = type(message).__name__
            raise InvalidRequest(f"messages[{i}] must be an object, got {kind}.", param="messages")
    return list(messages)


def _normalised(message: Message, index: int, shape: ContentShape) -> Message:
    """A copy in the form that the template is written for."""
    # Clients send null for what is not there; most templates were written for absence.
    message = _with_reasoning({k: v for k, v in message.items() if v is not None})
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        where = f"messages[{index}].content"
        parts = [_text_of(part, f"{where}[{j}]") for j, part in enumerate(content)]
        string = shape is ContentShape.STRING
        message["content"] = "\n".join(parts) if string else [_part(text) for text in parts]
    elif isinstance(content, str):
        message["content"] = [_part(content)] if shape is ContentShape.PARTS else content
    elif content is not None:
        raise InvalidRequest(
            f"messages[{index}].content must be a string, null or a list of parts, "
            f"got {type(content).__name__}.",
            param="messages",
        )
    calls = message.get("tool_calls")
    if calls:
        where = f"messages[{index}].tool_calls"
        if not isinstance(calls, (list, tuple)):
            raise InvalidRequest(f"{where} must be a list.", param="messages")
        parsed = [_with_parsed_arguments(call, f"{where}[{j}]") for j, call in enumerate(calls)]
        message["tool_calls"] = parsed
    return message


def _with_reasoning(message: Message) -> Message:
    """Give a message's reasoning both of its names: most templates read the first, GPT-OSS's the
    second."""
    given = (message[name] for name in REASONING_FIELDS if message.get(name) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text_of(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    known = isinstance(part, dict) and isinstance(kind, str) and kind in TEXT_PART_TYPES
    text = part.get(kind, part.get("text")) if known and isinstance(part, dict) else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{where} must be a text part, {{'type': 'text', 'text': ...}}: this model reads text "
            f"only, got type {str(kind)[:40]!r}.",
            param="messages",
        )
    return text


def _with_parsed_arguments(call: object, where: str) -> object:
    """Parse the arguments of tool calls: clients send them as JSON text, templates expect the
    object."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise InvalidRequest(
            f"{where} must be an object with a 'function' object.", param="messages"
        )
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequest(
            f"{where}.function.arguments must be the JSON text of an object.", param="messages"
        )
    return {**call, "function": {**call["function"], "arguments": parsed}}


def _append(message: Message, mark: str, shape: ContentShape) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1] = _part(content[-1]["text"] + mark)
    else:
        parts = shape is ContentShape.PARTS
        message["content"] = [_part(mark)] if parts else (content or "") + mark


def _cut_at(text: str, mark: str) -> str:
    """The text up to the mark. If the template trims contents, trailing space is removed as
    well."""
    position = text.rfind(mark.strip())
    if position < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the last message's content.",
            param="messages",
        )
    kept = text[:position]
    return kept if text.startswith(mark, position) else kept.rstrip()


def _run(template: jinja2.Template, context: dict[str, Any]) -> str:
    try:
        return _joined(template.generate(context))
    except InvalidRequest:
        raise
    except _Refusal as error:
        raise InvalidRequest(
            f"the chat template refused these messages: {str(error)[:300]}", param="messages"
        ) from None
    except Exception as error:  # a template is a program: it can raise anything
        raise InvalidRequest(
            "the chat template could not render these messages: check roles, their order and "
            f"the fields it needs ({type(error).__name__}).",
            param="messages",
        ) from error


def _joined(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length > MAX_RENDERED_CHARS:
            raise InvalidRequest(
                f"the rendered conversation is longer than {MAX_RENDERED_CHARS} characters.",
                param="messages",
            )
    return "".join(kept)


class _Refusal(Exception):
    """A template called `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format)


def _template_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)`, without access to the attributes of the class."""
    return dict(*args, **kwargs)


def _template_namespace(**attributes: Any) -> object:
    """`namespace(...)`, without names that begin with an underscore, which lead out of the
    sandbox."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    for name in attributes:
        if name.startswith("_"):
            raise SecurityError(f"a namespace must not have {name!r}")
    return Namespace(attributes)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Marks the assistant's own words for training; for serving it is transparent."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _template_dict
    environment.globals["namespace"] = _template_namespace
    return environment


def template_tree(source: str) -> jinja2.nodes.Template:
    """The syntax tree of a template.

    Raises:
        InvalidRequest: it has none.
    """
    return _parsed(source, lambda environment: environment.parse(source))


def compile_template(source: str) -> None:
    """Have a template compiled for the next time that it is rendered.

    Raises:
        InvalidRequest: it cannot be compiled.
    """
    _compile(source)


@functools.lru_cache(maxsize=COMPILED_TEMPLATES)
def _compile(source: str) -> tuple[jinja2.Template, ContentShape]:
    """The compiled template, and the form of content it is written for."""
    return _parsed(
        source,
        lambda environment: (
            environment.from_string(source),
            _content_shape(environment.parse(source)),
        ),
    )


def _parsed(source: str, read: Callable[[ImmutableSandboxedEnvironment], T]) -> T:
    from jinja2 import TemplateSyntaxError

    try:
        return read(_environment())
    except TemplateSyntaxError as error:
        raise InvalidRequest(
            f"the chat template has a syntax error in line {error.lineno}: {error.message}. "
            "Correct the model's template, or give another with --chat-template.",
            param="chat_template",
        ) from None
    except Exception as error:  # nesting too deep for the compiler, and the like
        raise InvalidRequest(
            f"the chat template cannot be compiled ({type(error).__name__}).",
            param="chat_template",
        ) from error


def _content_shape(tree: jinja2.nodes.Template) -> ContentShape:
    """The form of content a template expects: it depends on whether a `for` loops over
    `message.content`, and whether a test looks at its type."""
    from jinja2 import nodes

    aliases: set[str] = set()

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter) and node.node is not None:
            return is_content(node.node)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in aliases

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            aliases.add(assign.target.name)
    if not any(is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return ContentShape.STRING
    asks = any(test.name in TYPE_TESTS for test in tree.find_all(nodes.Test))
    return ContentShape.EITHER if asks else ContentShape.PARTS
