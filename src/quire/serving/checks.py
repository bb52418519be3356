"""Rules for the request fields that all APIs share, and the parameters a request is run with.

Checks whatever needs no model; the engine's input gate checks the rest (vocabulary, context
length). Knows no endpoint: it is given values, or any record with the named fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

from quire.bounds import read_field
from quire.config import ModelConfig
from quire.errors import InvalidRequest
from quire.params import NO_PROCESSORS, RequestOutputKind, SamplingParams, read_extra_args
from quire.serving.decode import show
from quire.serving.limits import LABEL, LIST_IDS, METADATA, REQUEST_ID, check_lists, completions

ID_LISTS: Final = ("allowed_token_ids", "stop_token_ids")
"""Sampling parameters that hold any number of token ids."""


class Truncatable(Protocol):
    """A request whose prompts may be truncated."""

    truncate_prompt_tokens: int | None
    truncation_side: str | None


def make_params(
    defaults: SamplingParams,
    given: Mapping[str, Any],
    *,
    stream: bool | None,
    prompts: int = 1,
    most: int = 1,
) -> SamplingParams:
    """The parameters for all prompts of a request, checked once.

    Args:
        defaults: The model's own parameters, for fields that the request leaves out.
        given: Sampling parameters by name; a value of `None` is a value.
        stream: Whether the reply is streamed.
        prompts: How many there are.
        most: Completions that it may ask for; more than 1 only in APIs that have `n`.

    Raises:
        InvalidRequest: a value is out of range, or together they ask for too much.
    """
    changes = dict(given)
    for name in ID_LISTS:
        ids = changes.get(name)
        if isinstance(ids, list):
            LIST_IDS.check(len(ids), name)
            if set(map(type, ids)) == {int}:  # anything else is refused with the other fields
                changes[name] = list(dict.fromkeys(ids))
    changes["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    params = defaults.replace(**changes)
    completions(most).check(prompts * params.n, "prompt" if prompts > 1 else "n")
    check_lists(params, prompts * params.n)
    return params


@contextmanager
def renamed(old: str, new: str) -> Iterator[None]:
    """Errors about a field, or about something in it, are told by the name that it has in the
    caller's API."""
    try:
        yield
    except InvalidRequest as error:
        if f"{error.param}.".partition(f"{old}.")[0]:  # it begins with another name
            raise
        told, param = error.message.replace(old, new, 1), str(error.param).replace(old, new, 1)
        raise InvalidRequest(told, param=param) from None


def read_xargs(given: dict[str, Any] | None, model: ModelConfig) -> dict[str, Any] | None:
    """`vllm_xargs`, which logits processors get as `extra_args`.

    Raises:
        InvalidRequest: it is too large, or nobody would read it.
    """
    found = read_extra_args("vllm_xargs", given)
    if found and not model.logits_processors:
        raise InvalidRequest(f"vllm_xargs {NO_PROCESSORS}, got {show(found)}.", param="vllm_xargs")
    return found


def check_labels(request: Any) -> None:
    """Check salt, user, metadata and request id, as far as the request has these fields.

    Raises:
        InvalidRequest: one is too long or empty.
    """
    for name in ("user", "safety_identifier", "prompt_cache_key", "session_id", "cache_salt"):
        value = getattr(request, name, None)
        if value is not None:
            LABEL.check(len(value), name)
    if request.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty.", param="cache_salt")
    metadata = getattr(request, "metadata", None)
    if metadata is not None:
        METADATA.check(len(metadata), "metadata")
    _check_request_id(getattr(request, "request_id", None))


def _check_request_id(given: str | None) -> None:
    if given is None:
        return
    visible = given.isascii() and given.isprintable() and " " not in given
    if not visible or not REQUEST_ID.least <= len(given) <= REQUEST_ID.most:
        rule = REQUEST_ID.rule.format(param="request_id", most=REQUEST_ID.most)
        raise InvalidRequest(f"{rule}, got {show(given)}.", param="request_id")


def truncate(ids: list[int], request: Truncatable, room: int) -> list[int]:
    """The prompt truncated to `truncate_prompt_tokens`, where -1 means `room`.

    Raises:
        InvalidRequest: the number is neither -1 nor positive.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return ids
    read_field("truncate_prompt_tokens", keep)
    keep = max(1, room) if keep == -1 else keep
    return ids[:keep] if request.truncation_side == "right" else ids[-keep:]
