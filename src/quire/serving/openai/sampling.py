"""Request fields to `SamplingParams`, with the model's defaults under them.

Checks what needs no model; the engine's input gate checks the rest (vocabulary, context length).
"""

from __future__ import annotations

from typing import Any, Final

from quire.bounds import read_field
from quire.errors import InvalidRequest
from quire.params import RequestOutputKind, SamplingParams
from quire.serving.decode import show
from quire.serving.engine_protocol import EngineClient
from quire.serving.limits import COMPLETIONS, LIST_IDS, check_lists
from quire.serving.openai.schema import GenerateRequest

COPIED: Final = (
    "n", "stop", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "logit_bias", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids", "bad_words",
)  # fmt: skip
"""Fields that have the same name and meaning in `SamplingParams`."""
ID_LISTS: Final = ("allowed_token_ids", "stop_token_ids")
"""Those among them that hold any number of token ids."""

MAX_LABEL: Final = 1024
"""Longest salt, user name and other label, in characters."""
MAX_REQUEST_ID: Final = 128
MAX_METADATA: Final = 16


def build_params(
    request: GenerateRequest,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    prompts: int = 1,
) -> SamplingParams:
    """The parameters in force for all prompts of this request, checked once.

    Args:
        request: The body.
        defaults: What holds where it says nothing.
        max_tokens, logprobs, prompt_logprobs: As the endpoint reads them.
        prompts: How many there are.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given = {name: getattr(request, name) for name in COPIED}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in ID_LISTS:
        if name in changes:
            LIST_IDS.check(len(changes[name]), name)
            changes[name] = list(dict.fromkeys(changes[name]))
    streaming = bool(request.stream)
    changes |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "output_kind": RequestOutputKind.DELTA if streaming else RequestOutputKind.FINAL_ONLY,
    }
    params = defaults.replace(**changes)
    COMPLETIONS.check(prompts * params.n, "prompt" if prompts > 1 else "n")
    check_lists(params, prompts * params.n)
    return params


def check_common(request: GenerateRequest, engine: EngineClient) -> None:
    """Rules of the fields that never reach the engine, or reach it as they are.

    Raises:
        InvalidRequest: one is broken.
    """
    _check_stream(request)
    check_labels(request)
    if request.response_format is not None and request.response_format != {"type": "text"}:
        raise InvalidRequest(
            'response_format must be {"type": "text"}: constrained decoding is not available '
            f"yet, got {show(request.response_format)}.",
            param="response_format",
        )
    check_priority(request.priority or 0, engine.config.scheduler.scheduling_policy)
    if request.truncation_side not in (None, "left", "right"):
        side = show(request.truncation_side)
        raise InvalidRequest(
            f'truncation_side must be "left" or "right", got {side}.', param="truncation_side"
        )


def check_priority(priority: int, policy: str) -> None:
    """Refuse a priority that does not count.

    Raises:
        InvalidRequest: it is out of range, or the policy does not look at it.
    """
    read_field("priority", priority)
    if priority and policy != "priority":
        raise InvalidRequest(
            f"priority must be 0 under the scheduling policy {policy} (the server was not started "
            f"with --scheduling-policy priority), got {priority}.",
            param="priority",
        )


def _check_stream(request: GenerateRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported: chunks are not padded.",
            param="stream_options.include_obfuscation",
        )


def check_labels(request: Any) -> None:
    """Rules of salt, user, metadata and request id, as far as the request has such fields.

    Raises:
        InvalidRequest: one is too long or empty.
    """
    for name in ("user", "safety_identifier", "prompt_cache_key", "cache_salt"):
        value = getattr(request, name, None)
        if value is not None and len(value) > MAX_LABEL:
            raise InvalidRequest(
                f"{name} may have at most {MAX_LABEL} characters, got {len(value)}.", param=name
            )
    if request.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty.", param="cache_salt")
    metadata = getattr(request, "metadata", None)
    if metadata is not None and len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata may have at most {MAX_METADATA} entries, got {len(metadata)}.",
            param="metadata",
        )
    _check_request_id(request.request_id)


def _check_request_id(given: str | None) -> None:
    if given is None:
        return
    visible = given.isascii() and given.isprintable() and " " not in given
    if not visible or not 1 <= len(given) <= MAX_REQUEST_ID:
        raise InvalidRequest(
            f"request_id must be 1 to {MAX_REQUEST_ID} visible ASCII characters without spaces, "
            f"got {show(given)}.",
            param="request_id",
        )


def truncate(ids: list[int], request: GenerateRequest, room: int) -> list[int]:
    """The prompt cut to `truncate_prompt_tokens`; `room` is what -1 stands for.

    Raises:
        InvalidRequest: the number is neither -1 nor positive.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return ids
    read_field("truncate_prompt_tokens", keep)
    keep = max(1, room) if keep == -1 else keep
    return ids[:keep] if request.truncation_side == "right" else ids[-keep:]
