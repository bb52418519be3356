"""What each kind of server is asked, and how its reply is read: one row per `--backend`.

A backend makes the body of a request and tells what an event of the reply means. Knows the APIs'
JSON, but no sockets and no clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from quire.errors import ConfigError
from quire.spelling import did_you_mean
from quire.workload.request import WorkloadRequest

_NO_AUDIO = "quire measures text only"
_MULTIMODAL = "it embeds images, and quire measures text only: use openai-embeddings"
_INFINITY = "it is the API of the Infinity server: use openai-embeddings, which Infinity serves too"
REFUSED: Final = {
    "openai-audio": _NO_AUDIO,
    "openai-embeddings-chat": _MULTIMODAL,
    "openai-embeddings-clip": _MULTIMODAL,
    "openai-embeddings-vlm2vec": _MULTIMODAL,
    "infinity-embeddings": _INFINITY,
    "infinity-embeddings-clip": _INFINITY,
}
"""Backends of `vllm bench serve` that quire lacks, and why."""


MOST_TOKENS: Final = 2**53
"""Counts above are no counts: a result in JSON could not hold them."""
MAX_TOKENS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names of the output's limit in the bodies of requests."""


class UnreadableReplyError(ValueError):
    """A reply is not what the API promises; the message says where."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests of a run have in common."""

    model: str
    ignore_eos: bool = False
    logprobs: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that were given."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields of every request's body; they take precedence."""


@dataclass(slots=True)
class ReplyPart:
    """What one event of a reply says."""

    is_output: bool = False
    """Whether it carries output, be it empty: it counts for TTFT and ITL."""
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    is_end: bool = False
    """Whether the reply is whole with it."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Backend:
    """A row."""

    path: str
    """Default of `--endpoint`."""
    body: Callable[[WorkloadRequest, Asking], dict[str, Any]]
    read: Callable[[Any], ReplyPart]
    """Raises UnreadableReplyError."""
    streams: bool = True
    """Whether the reply comes as events. One that comes whole has no TTFT."""


def backend_named(name: str) -> Backend:
    """The row of a `--backend`.

    Raises:
        ConfigError: there is none, or quire lacks it.
    """
    if name in REFUSED:
        raise ConfigError(f"--backend {name}: {REFUSED[name]}")
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ConfigError(
            f"--backend must be one of {known}, got {name!r}{did_you_mean(name, BACKENDS)}"
        )
    return BACKENDS[name]


def _common(request: WorkloadRequest, asking: Asking) -> dict[str, Any]:
    body = {"model": asking.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= asking.sampling
    if asking.ignore_eos:
        body["ignore_eos"] = True
    if request.priority:
        body["priority"] = request.priority
    return body


def _completions(request: WorkloadRequest, asking: Asking) -> dict[str, Any]:
    body = _common(request, asking) | {"prompt": request.prompt, "max_tokens": request.output_len}
    if asking.logprobs is not None:
        body["logprobs"] = asking.logprobs
    return body | request.extra | asking.extra_body


def _chat(request: WorkloadRequest, asking: Asking) -> dict[str, Any]:
    messages = request.messages or [{"role": "user", "content": request.prompt}]
    body = _common(request, asking)
    body |= {"messages": messages, "max_completion_tokens": request.output_len}
    if asking.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": asking.logprobs}
    return body | request.extra | asking.extra_body


def _responses(request: WorkloadRequest, asking: Asking) -> dict[str, Any]:
    body = _common(request, asking)
    del body["stream_options"]  # this API always tells
    body |= {"input": request.messages or request.prompt, "max_output_tokens": request.output_len}
    if asking.logprobs is not None:
        body |= {"top_logprobs": asking.logprobs, "include": ["message.output_text.logprobs"]}
    return body | request.extra | asking.extra_body


def _embeddings(request: WorkloadRequest, asking: Asking) -> dict[str, Any]:
    return {"model": asking.model, "input": request.prompt} | request.extra | asking.extra_body


def _rerank(request: WorkloadRequest, asking: Asking) -> dict[str, Any]:
    texts = request.prompt
    if len(texts) < 2 or not isinstance(texts[0], str) or isinstance(texts, str):
        raise ConfigError("--backend vllm-rerank needs queries and documents: random-rerank")
    body = {"model": asking.model, "query": texts[0], "documents": texts[1:]}
    return body | request.extra | asking.extra_body


def _read_choices(event: Any) -> ReplyPart:
    event = _object(event, "an event")
    part = ReplyPart(error=_error(event))
    if (usage := event.get("usage")) is not None:
        usage = _object(usage, "usage")
        part.prompt_tokens = _count(usage, "prompt_tokens")
        part.output_tokens = _count(usage, "completion_tokens")
    for choice in _list(event, "choices"):
        choice = _object(choice, "a choice")
        part.is_output = True
        said = choice if choice.get("delta") is None else _object(choice["delta"], "delta")
        part.text += _text(said, "text") or _text(said, "content")
        part.is_end = part.is_end or choice.get("finish_reason") is not None
    return part


def _read_responses(event: Any) -> ReplyPart:
    event = _object(event, "an event")
    kind, whole = _text(event, "type"), event.get("response")
    whole = {} if whole is None else _object(whole, "response")
    part = ReplyPart(error=_error(event) or _error(whole))
    if kind.endswith(".delta"):
        # Reasoning and tool calls are output as well, though no text of the answer.
        part.is_output = True
        part.text = _text(event, "delta") if kind == "response.output_text.delta" else ""
    if kind in ("response.completed", "response.incomplete"):
        if (usage := whole.get("usage")) is not None:
            usage = _object(usage, "usage")
            part.prompt_tokens = _count(usage, "input_tokens")
            part.output_tokens = _count(usage, "output_tokens")
        part.is_end = True
    return part


def _read_whole(event: Any) -> ReplyPart:
    event = _object(event, "the reply")
    part = ReplyPart(is_end=True, error=_error(event))
    if (usage := event.get("usage")) is not None:
        usage = _object(usage, "usage")
        part.prompt_tokens = _count(usage, "prompt_tokens") or _count(usage, "total_tokens")
    return part


def error_of(body: Any) -> str:
    """What a reply that is one JSON value says of an error; empty: nothing."""
    return _error(body) if isinstance(body, dict) else ""


def _error(event: dict[str, Any]) -> str:
    error = event.get("error")
    if not error:
        return ""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableReplyError(f"{name} must be an object, got {_shown(value)}")
    return value


def _list(parent: dict[str, Any], name: str) -> list[Any]:
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnreadableReplyError(f"{name} must be a list, got {_shown(value)}")
    return value


def _text(parent: dict[str, Any], name: str) -> str:
    value = parent.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnreadableReplyError(f"{name} must be a text, got {_shown(value)}")
    return value


def _count(parent: dict[str, Any], name: str) -> int | None:
    value = parent.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TOKENS:
        raise UnreadableReplyError(f"{name} must be a count of tokens, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value from a server, short and on one line."""
    return f"{json.dumps(value):.40}"


_COMPLETIONS = Backend("/v1/completions", _completions, _read_choices)
BACKENDS: Final = {
    "openai": _COMPLETIONS,
    "vllm": _COMPLETIONS,
    "openai-chat": Backend("/v1/chat/completions", _chat, _read_choices),
    "openai-responses": Backend("/v1/responses", _responses, _read_responses),
    "openai-embeddings": Backend("/v1/embeddings", _embeddings, _read_whole, streams=False),
    "vllm-pooling": Backend("/pooling", _embeddings, _read_whole, streams=False),
    "vllm-rerank": Backend("/v1/rerank", _rerank, _read_whole, streams=False),
}
"""Backends by name."""
