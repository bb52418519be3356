"""The request bodies of the OpenAI API: typed records, and tables of fields that are not supported.

A field is `None` when it is absent or null. Nothing here computes; rules between fields are in
`sampling.py`, `chat.py` and `completions.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from quire.serving.conversation import ChatMessage
from quire.serving.decode import Unsupported, refused


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    """A last chunk without choices carries the token counts."""
    continuous_usage_stats: bool | None = None
    """Every chunk carries the token counts so far."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis; only false."""


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generation endpoints take."""

    FREE_FORM: ClassVar[tuple[str, ...]] = (
        "response_format",
        "metadata",
        "structured_outputs",
        "guided_json",
        "repetition_detection",
        "vllm_xargs",
    )

    model: str | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    response_format: dict[str, Any] | None = None
    # Labels a client may attach. By OpenAI's definition none of them changes the reply.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    # vLLM's additions.
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    """This and the next five are vLLM's older names of what `structured_outputs` says."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Log-probabilities of these tokens at each position of the output; asks for `logprobs`."""
    vllm_xargs: dict[str, Any] | None = None
    """For the logits processors that the server was started with."""
    stream_interval: int | None = None
    """Tokens per chunk of a stream, but for the first and the last."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; -1: no limit."""
    repetition_detection: dict[str, Any] | None = None
    """Ends an output that repeats itself: `max_pattern_size`, `min_pattern_size`, `min_count`."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many prompt tokens; -1: as many as leave room for the output."""
    truncation_side: str | None = None
    """`left` (the default) drops the beginning, `right` the end."""
    add_special_tokens: bool | None = None
    echo: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    """Search for the likeliest outputs instead of sampling; `n` is the width."""
    length_penalty: float | None = None
    """How beam search ranks outputs of different lengths."""


class ChatRequest(GenerateRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    FREE_FORM: ClassVar[tuple[str, ...]] = (
        *GenerateRequest.FREE_FORM,
        "messages",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "documents",
    )

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """If false, calls after the first are left out of the reply."""
    reasoning_effort: str | None = None
    """How much to reason, for templates that can be told."""
    include_reasoning: bool | None = None
    """If false, reasoning is left out of the reply."""
    documents: list[dict[str, Any]] | None = None
    """For templates that quote sources: title and text of each, by the field names they use."""


_ONE_CONVERSATION: Final = frozenset(
    ("messages", "n", "stream", "stream_options", "stream_interval", "use_beam_search")
    + ("length_penalty", "prompt_logprobs", "tools", "tool_choice", "parallel_tool_calls")
)

BatchChatRequest: Final = msgspec.defstruct(
    "BatchChatRequest",
    [
        ("messages", list[list[ChatMessage]]),
        *(
            (field.name, field.type, field.default)
            for field in msgspec.structs.fields(ChatRequest)
            if field.name not in _ONE_CONVERSATION
        ),
    ],
    namespace={
        "__doc__": "Body of `POST /v1/chat/completions/batch`: a `ChatRequest` for each list of "
        "messages, without what it has one of.",
        "FREE_FORM": tuple(n for n in ChatRequest.FREE_FORM if not n.startswith("tool")),
    },
    module=__name__,
    forbid_unknown_fields=True,
    kw_only=True,
)


class CompletionRequest(GenerateRequest, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: either `prompt`, or `messages` with the fields after it."""

    FREE_FORM: ClassVar[tuple[str, ...]] = ("messages", "tools", "chat_template_kwargs")

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


_TEXT_ONLY: Final = "this server takes and gives text only"

_BOTH: Final[dict[str, Unsupported]] = {
    "service_tier": refused("there are no tiers", "auto", "default"),
    "kv_transfer_params": refused("KV transfer between servers is not available"),
    "ec_transfer_params": refused("KV transfer between servers is not available"),
    "watermarking": refused("the output is not marked", False),
    "early_stopping": refused("a beam search ends when no better output can come", False),
    "mm_payload": refused(_TEXT_ONLY),
    "return_mm_kwargs": refused(_TEXT_ONLY, False),
    "routed_experts_prompt_start": refused("the experts that tokens took are not told", 0),
    "return_prompt_text": refused("use echo", False),
    "return_token_offsets": refused("use return_token_ids", False),
    "mm_processor_kwargs": refused(_TEXT_ONLY, {}),
    "media_io_kwargs": refused(_TEXT_ONLY, {}),
}

CHAT_UNSUPPORTED: Final[dict[str, Unsupported]] = _BOTH | {
    "audio": refused(_TEXT_ONLY),
    "modalities": refused(_TEXT_ONLY, ["text"]),
    "prediction": refused("predicted outputs are not available"),
    "verbosity": refused("no model here takes it", "medium"),
    "web_search_options": refused("the server does not reach out to the web"),
    "functions": refused("use tools"),
    "enable_thinking": refused("send it in chat_template_kwargs"),
    "function_call": refused("use tool_choice"),
    "chat_template": refused("a template is code; the operator sets it with --chat-template"),
    "best_of": refused("use n", 1),
    "suffix": refused("it belongs to /v1/completions, and no model here can infill"),
}

_WHOLE: Final = "replies of a batch are whole; stream a conversation with /v1/chat/completions"
_NO_TOOLS: Final = "a batch calls no tools; send the conversation to /v1/chat/completions"

BATCH_CHAT_UNSUPPORTED: Final[dict[str, Unsupported]] = CHAT_UNSUPPORTED | {
    "n": refused("each conversation has one choice", 1),
    "stream": refused(_WHOLE, False),
    "stream_options": refused(_WHOLE),
    "stream_interval": refused(_WHOLE),
    "use_beam_search": refused("send the conversation to /v1/chat/completions", False),
    "length_penalty": refused("a batch searches no beams", 1, 1.0),
    "prompt_logprobs": refused("send the conversation to /v1/chat/completions"),
    "tools": refused(_NO_TOOLS, []),
    "tool_choice": refused(_NO_TOOLS, "none"),
    "parallel_tool_calls": refused(_NO_TOOLS, True, False),
}

COMPLETION_UNSUPPORTED: Final[dict[str, Unsupported]] = _BOTH | {
    "suffix": refused("no model here can infill", ""),
    "prompt_embeds": refused("send text or token ids"),
    "max_completion_tokens": refused("on this endpoint it is called max_tokens"),
    "messages": refused("send them to /v1/chat/completions"),
}

TOKENIZE_UNSUPPORTED: Final[dict[str, Unsupported]] = {
    "chat_template": CHAT_UNSUPPORTED["chat_template"],
    "mm_processor_kwargs": refused(_TEXT_ONLY, {}),
}
