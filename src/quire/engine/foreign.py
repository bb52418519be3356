"""Keywords and members of vLLM's engines that quire's lack: each is refused by name, with advice.

A keyword that asks for nothing (`lora_request=None`) is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.errors import InvalidRequest

_TEXT_ONLY: Final = "prompts are text"
_MERGED: Final = "give a model folder with the adapter merged into it"
_WEIGHTS: Final = "weights stay as they were loaded until the process ends"

REQUEST_OPTIONS: Final = {
    "arrival_time": "a request arrives when it is given to the engine",
    "chat_template": "pairs are put together by the tokenizer's own rule",
    "chat_template_content_format": "the template says which form it takes",
    "data_parallel_rank": "start one engine per replica",
    "delay_iterations": "start the profile when it is to begin",
    "kv_hints": "which blocks are kept depends on memory alone",
    "lora_request": _MERGED,
    "max_iterations": "stop the profile when it is to end",
    "mm_processor_kwargs": _TEXT_ONLY,
    "profile_prefix": "traces are named by their process",
    "prompt_text": "give a prompt as {'prompt_token_ids': …, 'prompt': …}",
    "reasoning_ended": "the server splits reasoning from the text, the engine does not",
    "reasoning_parser_kwargs": "the server splits reasoning from the text, the engine does not",
    "session_id": "requests find their prefix in the cache by its tokens",
    "tokenization_kwargs": "give token ids for another tokenisation",
}
"""Keywords of vLLM's `generate`, `chat` and `add_request`, and what to say if one is used."""
_NEUTRAL: Final = {"chat_template_content_format": ("auto",)}


def check_request_options(**given: Any) -> None:
    """Accept keywords that ask for nothing: `None`, something empty, a list of `None`.

    Raises:
        InvalidRequest: one asks for something.
    """
    for name, value in given.items():
        asks = any(entry is not None for entry in value) if isinstance(value, list) else value
        if asks and value not in _NEUTRAL.get(name, ()):
            raise InvalidRequest(
                f"{name} is not supported yet: {REQUEST_OPTIONS[name]}.", param=name
            )


def truncation(tokenization_kwargs: Mapping[str, Any] | None, given: int | None) -> int | None:
    """`truncate_prompt_tokens` of a pooling verb, which may stand in `tokenization_kwargs`, too.

    Raises:
        InvalidRequest: another tokenisation is asked for.
    """
    rest = dict(tokenization_kwargs or {})
    asked = rest.pop("truncate_prompt_tokens", None)
    check_request_options(tokenization_kwargs=rest)
    return given if asked is None else asked


_LORA: Final = dict.fromkeys(("add_lora", "remove_lora", "pin_lora"), _MERGED)
_BOTH_ENGINES: Final = {
    **_LORA,
    "collective_rpc": "the model runs in one process, and takes no calls of others",
    "get_weight_version": _WEIGHTS,
    "release_kv_cache_memory": "the KV cache stays until shutdown()",
    "sleep": "weights and KV cache stay in memory until shutdown()",
    "wake_up": "there is no sleep() to wake up from",
}
_WEIGHT_UPDATES: Final = dict.fromkeys(
    (
        "finish_weight_update", "init_weight_transfer_engine", "shutdown_weight_transfer_engine",
        "start_draft_weight_update", "start_weight_update", "update_weight_version",
        "update_weights",
    ),
    _WEIGHTS,
)  # fmt: skip
ABSENT_OF_LLM: Final = {
    **{name: why for name, why in _BOTH_ENGINES.items() if name not in _LORA},
    **_WEIGHT_UPDATES,
    "apply_model": "the model is not handed out",
    "enqueue": "give generate() all prompts at once",
    "enqueue_chat": "give chat() all conversations at once",
    "wait_for_completion": "generate() and chat() return what they made",
}
ABSENT_OF_LLM_ENGINE: Final = {
    **_BOTH_ENGINES,
    "apply_model": "the model is not handed out",
    "from_vllm_config": "use from_engine_args",
    "has_unfinished_requests_dp": "the model runs in one process",
    "set_weight_version": _WEIGHTS,
}
ABSENT_OF_ASYNC_LLM: Final = {
    **_BOTH_ENGINES,
    **_WEIGHT_UPDATES,
    "add_request": "use generate() or encode()",
    "checkpoint_prepare": "an engine cannot be frozen and thawed",
    "checkpoint_restore": "an engine cannot be frozen and thawed",
    "compute_weight_checksums": "`quire verify` checks a model's files",
    "get_num_queued_tokens": "GET /load and the metrics tell what waits",
    "get_status": "check_health() tells whether it runs",
    "get_kv_event_sources": "KV blocks stay in their process",
    "handle_fault": "the model runs in one process",
    "notify_kv_transfer_request_rejected": "KV blocks stay in their process",
    "pause_generation": "abort the requests, or lower the limits with set_limits()",
    "resume_generation": "generation cannot be paused",
    "scale_elastic_ep": "the model runs in one process",
}
