"""Every field that vLLM's clients know is taken at the value that asks for nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

BOTH: dict[str, Any] = {
    "n": 1, "stop": [], "stream": False, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "min_p": 0.0, "top_p": 1.0, "top_k": 0,
    "min_tokens": 0, "stop_token_ids": [], "include_stop_str_in_output": False,
    "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "echo": False, "priority": 0, "return_token_ids": False, "return_tokens_as_token_ids": False,
    "use_beam_search": False, "bad_words": [], "logit_bias": {}, "best_of": 1, "store": False,
    "stream_interval": 1, "return_prompt_text": False, "return_token_offsets": False,
    "return_mm_kwargs": False, "routed_experts_prompt_start": 0, "watermarking": False,
    "logprob_token_ids": [], "vllm_xargs": {}, "response_format": {"type": "text"},
    "early_stopping": False, "metadata": {}, "user": "", "prompt_cache_key": "", "seed": -1,
    "temperature": 1.0, "prompt_logprobs": 0,
}  # fmt: skip
CHAT: dict[str, Any] = {
    "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none",
    "parallel_tool_calls": True, "include_reasoning": True, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "chat_template_kwargs": {},
    "documents": [], "mm_processor_kwargs": {}, "media_io_kwargs": {},
}  # fmt: skip
TEXT: dict[str, Any] = {"suffix": "", "add_special_tokens": True, "max_tokens": 16}
NULLS = (
    "stream_options", "seed", "temperature", "max_tokens", "allowed_token_ids", "request_id",
    "cache_salt", "session_id", "mm_payload", "kv_transfer_params", "ec_transfer_params",
    "structured_outputs", "repetition_detection", "thinking_token_budget", "truncation_side",
    "truncate_prompt_tokens", "prompt_logprobs", "model", "user",
)  # fmt: skip
CHAT_NULLS = ("reasoning_effort", "chat_template", "tools", "documents", "max_completion_tokens")
TEXT_NULLS = ("prompt_embeds", "suffix", "best_of", "logprobs")
ROWS = [
    *(("/v1/chat/completions", {name: value}) for name, value in (BOTH | CHAT).items()),
    *(("/v1/completions", {name: value}) for name, value in (BOTH | TEXT).items()),
    *(("/v1/chat/completions", {name: None}) for name in (*BOTH, *CHAT, *NULLS, *CHAT_NULLS)),
    *(("/v1/completions", {name: None}) for name in (*BOTH, *TEXT, *NULLS, *TEXT_NULLS)),
]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}


@pytest.mark.parametrize(("path", "field"), ROWS, ids=lambda value: str(value)[:60])
async def test_a_neutral_field(client: httpx.AsyncClient, path: str, field: dict[str, Any]) -> None:
    reply = await client.post(path, json=GOOD[path] | field)
    assert reply.status_code == 200, reply.text


async def test_all_of_them_at_once(client: httpx.AsyncClient) -> None:
    for path, own in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        reply = await client.post(path, json=GOOD[path] | BOTH | own)
        assert reply.status_code == 200, reply.text
