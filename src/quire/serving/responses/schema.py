"""The request body of the Responses API, and tables of what is not supported.

A field is `None` when it is absent or null. Nothing here computes; what the fields mean is read in
`items.py` and `create.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from quire.serving.decode import Unsupported, refused
from quire.serving.tagged import ANY, REQUIRED, TEXT, FieldRule, Shape


class StreamDetails(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream of events."""

    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis; only false."""


class InputTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/responses/input_tokens`: what makes the prompt."""

    FREE_FORM: ClassVar[tuple[str, ...]] = (
        "input", "tools", "tool_choice", "reasoning", "text", "chat_template_kwargs",
    )  # fmt: skip

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """Body of `POST /v1/responses`."""

    FREE_FORM: ClassVar[tuple[str, ...]] = (
        *InputTokensRequest.FREE_FORM, "metadata", "repetition_detection", "vllm_xargs",
    )  # fmt: skip

    stream: bool | None = None
    stream_options: StreamDetails | None = None
    background: bool | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Labels a client may attach. None of them changes the reply.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    # vLLM's additions.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


_NO_TOOLS: Final = "the server runs no tools; offer your own as functions"
_TEXT_ONLY: Final = "this server takes and gives text only"

INPUT_UNSUPPORTED: Final[dict[str, Unsupported]] = {
    "truncation": refused("a conversation that does not fit is an error", "disabled"),
    "conversation": refused("use previous_response_id, or send the whole conversation"),
    "personality": refused("use instructions"),
}
RESPONSES_UNSUPPORTED: Final[dict[str, Unsupported]] = INPUT_UNSUPPORTED | {
    "service_tier": refused("there are no tiers", "auto", "default"),
    "max_tool_calls": refused("it limits tools that the server runs, and it runs none"),
    "prompt": refused("no prompts are stored; send instructions and input"),
    "prompt_cache_options": refused("every prompt's prefixes are cached by themselves"),
    "context_management": refused("the client decides what the conversation holds", []),
    "background_options": refused("what runs in the background runs at once"),
    "moderation": refused("nothing is moderated"),
    "access_programs": refused("there are no programs"),
    "image": refused(_TEXT_ONLY),
    "request_id": refused("the id of a response is the server's; send X-Request-Id"),
    "structured_outputs": refused("use text.format"),
    "previous_input_messages": refused("send the messages as input"),
    "enable_response_messages": refused("use input_items", False),
    "kv_transfer_params": refused("KV transfer between servers is not available"),
    "ec_transfer_params": refused("KV transfer between servers is not available"),
    "mm_payload": refused(_TEXT_ONLY),
    "return_mm_kwargs": refused(_TEXT_ONLY, False),
    "mm_processor_kwargs": refused(_TEXT_ONLY, {}),
    "media_io_kwargs": refused(_TEXT_ONLY, {}),
    "watermarking": refused("the output is not marked", False),
    "max_tokens": refused("on this endpoint it is called max_output_tokens"),
    "messages": refused("on this endpoint they are called input"),
    "response_format": refused("on this endpoint it is called text.format"),
    "n": refused("send several requests", 1),
}

# ---- items of the input --------------------------------------------------------------------------

_MARKS: Final = {"id": TEXT, "status": TEXT}
_LIST: Final = FieldRule((list,))
ITEMS: Final[dict[str, Shape]] = {
    "message": {
        "role": REQUIRED,
        "content": FieldRule((str, list), required=True),
        "phase": TEXT,
        **_MARKS,
    },
    "function_call": {"call_id": REQUIRED, "name": REQUIRED, "arguments": REQUIRED, **_MARKS},
    "function_call_output": {
        "call_id": REQUIRED,
        "output": FieldRule((str, list), required=True),
        "name": TEXT,
        **_MARKS,
    },
    "reasoning": {"summary": _LIST, "content": _LIST, "encrypted_content": TEXT, **_MARKS},
    "item_reference": {"id": REQUIRED},
}
_OF_TOOLS: Final = (
    "file_search_call", "web_search_call", "computer_call", "computer_call_output",
    "image_generation_call", "code_interpreter_call", "local_shell_call",
    "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
    "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "custom_tool_call", "custom_tool_call_output", "tool_search_call",
    "tool_search_output", "additional_tools", "program", "program_output",
)  # fmt: skip
REFUSED_ITEMS: Final[dict[str, str]] = dict.fromkeys(_OF_TOOLS, _NO_TOOLS) | {
    "compaction": "only the server that made it can read it",
    "compaction_trigger": "the client decides what the conversation holds",
}
INPUT_PARTS: Final[dict[str, Shape]] = {
    "input_text": {"text": REQUIRED, "prompt_cache_breakpoint": ANY}
}
OUTPUT_PARTS: Final[dict[str, Shape]] = {
    "output_text": {"text": REQUIRED, "annotations": ANY, "logprobs": ANY},
    "input_text": INPUT_PARTS["input_text"],
    "refusal": {"refusal": REQUIRED},
}
THOUGHT_PARTS: Final[dict[str, Shape]] = {
    "reasoning_text": {"text": REQUIRED},
    "summary_text": {"text": REQUIRED},
}
REFUSED_PARTS: Final = dict.fromkeys(
    ("input_image", "input_file", "input_audio", "input_video"), _TEXT_ONLY
)

# ---- tools and formats ---------------------------------------------------------------------------

TOOLS: Final[dict[str, Shape]] = {
    "function": {
        "name": REQUIRED,
        "description": TEXT,
        "parameters": FieldRule((dict,)),
        "strict": FieldRule((bool,)),
        "output_schema": ANY,
        "async": FieldRule((bool,), values=(False,)),
        "defer_loading": FieldRule((bool,), values=(False,)),
        "allowed_callers": FieldRule((list,), values=(["direct"],)),
    }
}
REFUSED_TOOLS: Final[dict[str, str]] = dict.fromkeys(
    (
        "web_search", "web_search_2025_08_26", "web_search_preview",
        "web_search_preview_2025_03_11", "file_search", "computer", "computer_use_preview",
        "code_interpreter", "image_generation", "local_shell", "shell", "mcp", "custom",
        "apply_patch", "namespace", "tool_search", "programmatic_tool_calling",
    ),
    _NO_TOOLS,
)  # fmt: skip
TOOL_CHOICES: Final[dict[str, Shape]] = {
    "function": {"name": REQUIRED},
    "allowed_tools": {
        "mode": FieldRule(required=True, values=("auto", "required")),
        "tools": FieldRule((list,), required=True),
    },
}
REASONING: Final[Shape] = {
    "effort": TEXT,
    "summary": FieldRule(values=("auto",)),
    "generate_summary": FieldRule(values=("auto",)),
}
TEXT_CONFIG: Final[Shape] = {
    "format": FieldRule((dict,)),
    "verbosity": FieldRule(values=("medium",)),
}
FORMATS: Final[dict[str, Shape]] = {
    "text": {},
    "json_object": {},
    "json_schema": {
        "name": REQUIRED,
        "schema": FieldRule((dict,), required=True),
        "description": TEXT,
        "strict": FieldRule((bool,)),
    },
}
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDED: Final[dict[str, str]] = {
    LOGPROBS: "",
    "reasoning.encrypted_content": "",
    "message.input_image.image_url": _TEXT_ONLY,
    **dict.fromkeys(
        (
            "file_search_call.results", "web_search_call.results",
            "web_search_call.action.sources", "computer_call_output.output.image_url",
            "code_interpreter_call.outputs",
        ),
        _NO_TOOLS,
    ),
}  # fmt: skip
"""Values of `include`, and why some are refused. Reasoning is never encrypted: items of it have
their text as `content`, with which they can be sent back."""
