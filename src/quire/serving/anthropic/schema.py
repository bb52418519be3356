"""The request bodies of the Messages API, and tables of what is not supported.

A field is `None` when it is absent or null. Nothing here computes; what the fields mean is read in
`dialogue.py` and `messages.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from quire.serving.decode import Unsupported, refused
from quire.serving.tagged import ANY, REQUIRED, TEXT, FieldRule, Shape


class MessageParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn."""

    role: str
    content: str | list[dict[str, Any]]


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`: what makes the prompt."""

    FREE_FORM: ClassVar[tuple[str, ...]] = (
        "messages", "system", "tools", "tool_choice", "thinking", "output_config",
        "cache_control", "chat_template_kwargs",
    )  # fmt: skip

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted here and on every block: prefixes are cached without being asked for."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's addition: further variables of the chat template."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    FREE_FORM: ClassVar[tuple[str, ...]] = (
        *CountTokensRequest.FREE_FORM, "metadata", "repetition_detection", "vllm_xargs",
    )  # fmt: skip

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    # vLLM's additions, and ours: as on OpenAI's routes.
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    seed: int | None = None
    priority: int | None = None
    repetition_detection: dict[str, Any] | None = None


_NO_TOOLS: Final = "the server runs no tools; offer your own"
_TEXT_ONLY: Final = "this server takes and gives text only"

COUNT_UNSUPPORTED: Final[dict[str, Unsupported]] = {
    "container": refused("the server runs no tools, so there are no containers"),
    "mcp_servers": refused(_NO_TOOLS, []),
    "context_management": refused("the client decides what the conversation holds"),
    "inference_geo": refused("the server runs where it runs"),
    "speed": refused("there is one speed", "standard"),
    "diagnostics": refused("ask /explain_prefix what the prefix cache holds"),
    "user_profile_id": refused("there are no profiles"),
    "workspace_id": refused("there are no workspaces"),
    "mm_payload": refused(_TEXT_ONLY),
}
MESSAGES_UNSUPPORTED: Final[dict[str, Unsupported]] = COUNT_UNSUPPORTED | {
    "service_tier": refused("there are no tiers", "auto", "standard_only"),
    "kv_transfer_params": refused("KV transfer between servers is not available"),
    "ec_transfer_params": refused("KV transfer between servers is not available"),
    "return_mm_kwargs": refused(_TEXT_ONLY, False),
    "watermarking": refused("the output is not marked", False),
}

_CACHED: Final = {"cache_control": FieldRule((dict,))}
_CALLER: Final = {"caller": FieldRule((dict,)), "toolset_name": TEXT}

TEXT_BLOCK: Final[Shape] = {"text": REQUIRED, "citations": ANY, **_CACHED}
TEXT_BLOCKS: Final[dict[str, Shape]] = {"text": TEXT_BLOCK}
"""Blocks of system prompts and of what tools return."""
USER_BLOCKS: Final[dict[str, Shape]] = {
    "text": TEXT_BLOCK,
    "tool_result": {
        "tool_use_id": REQUIRED,
        "content": FieldRule((str, list)),
        "is_error": FieldRule((bool,)),
        "toolset_name": TEXT,
        **_CACHED,
    },
}
ASSISTANT_BLOCKS: Final[dict[str, Shape]] = {
    "text": TEXT_BLOCK,
    "thinking": {"thinking": REQUIRED, "signature": TEXT},
    "tool_use": {
        "id": REQUIRED,
        "name": REQUIRED,
        "input": FieldRule((dict,), required=True),
        **_CALLER,
        **_CACHED,
    },
}
REFUSED_BLOCKS: Final[dict[str, str]] = {
    "image": _TEXT_ONLY,
    "document": f"{_TEXT_ONLY}; send the document's text as a text block",
    "search_result": "send the result's text as a text block",
    "container_upload": _NO_TOOLS,
    "redacted_thinking": "only the server that made it can read it",
    "server_tool_use": _NO_TOOLS,
    "web_search_tool_result": _NO_TOOLS,
    "web_fetch_tool_result": _NO_TOOLS,
    "code_execution_tool_result": _NO_TOOLS,
    "bash_code_execution_tool_result": _NO_TOOLS,
    "text_editor_code_execution_tool_result": _NO_TOOLS,
    "tool_search_tool_result": _NO_TOOLS,
    "tool_reference": _NO_TOOLS,
    "browser_state": _TEXT_ONLY,
}

TOOL: Final[Shape] = {
    "name": REQUIRED,
    "description": TEXT,
    "input_schema": FieldRule((dict,), required=True),
    "strict": FieldRule((bool,)),
    "input_examples": ANY,
    "eager_input_streaming": FieldRule((bool,)),
    "defer_loading": FieldRule((bool,), values=(False,)),
    "allowed_callers": FieldRule((list,), values=(["direct"],)),
    **_CACHED,
}
"""A tool of the client's own, whose type is `custom` or absent."""

_PARALLEL: Final = {"disable_parallel_tool_use": FieldRule((bool,))}
TOOL_CHOICES: Final[dict[str, Shape]] = {
    "auto": _PARALLEL,
    "any": _PARALLEL,
    "tool": {"name": REQUIRED, **_PARALLEL},
    "none": {},
}
_DISPLAY: Final = {"display": FieldRule(values=("summarized", "omitted"))}
THINKING: Final[dict[str, Shape]] = {
    "enabled": {"budget_tokens": FieldRule((int,), required=True), **_DISPLAY},
    "adaptive": _DISPLAY,
    "disabled": {},
}
REFUSED_THINKING: Final = {"between_tools": "the model thinks when it does"}
OUTPUT_CONFIG: Final[Shape] = {
    "effort": FieldRule(values=("low", "medium", "high", "xhigh", "max")),
    "format": FieldRule((dict,)),
}
FORMATS: Final[dict[str, Shape]] = {"json_schema": {"schema": FieldRule((dict,), required=True)}}
METADATA: Final[Shape] = {"user_id": TEXT}
CACHE_CONTROL: Final[Shape] = {
    "type": FieldRule(required=True, values=("ephemeral",)),
    "ttl": FieldRule(values=("5m", "1h")),
}
