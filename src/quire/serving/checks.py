"""Rules for the request fields that all APIs share, and the parameters a request is run with.

Checks whatever needs no model; the engine's input gate checks the rest (vocabulary, context
length). Knows no endpoint: it is given values, or any record with the named fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

from quire.bounds import read_field
from quire.errors import InvalidRequest
from quire.params import RequestOutputKind, SamplingParams
from quire.serving.decode import show
from quire.serving.limits import COMPLETIONS, LIST_IDS, check_lists

ID_LISTS: Final = ("allowed_token_ids", "stop_token_ids")
"""Sampling parameters that hold any number of token ids."""
MAX_LABEL: Final = 1024
"""Longest salt, user name and other label, in characters."""
MAX_REQUEST_ID: Final = 128
MAX_METADATA: Final = 16


class Truncatable(Protocol):
    """A request whose prompts may be truncated."""

    truncate_prompt_tokens: int | None
    truncation_side: str | None


def make_params(
    defaults: SamplingParams, given: Mapping[str, Any], *, stream: bool | None, prompts: int = 1
) -> SamplingParams:
    """The parameters for all prompts of a request, checked once.

    Args:
        defaults: The model's own parameters, for fields that the request leaves out.
        given: Sampling parameters by name; a value of `None` is a value.
        stream: Whether the reply is streamed.
        prompts: How many there are.

    Raises:
        InvalidRequest: a value is out of range, or together they ask for too much.
    """
    changes = dict(given)
    for name in ID_LISTS:
        if name in changes:
            LIST_IDS.check(len(changes[name]), name)
            changes[name] = list(dict.fromkeys(changes[name]))
    changes["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    params = defaults.replace(**changes)
    COMPLETIONS.check(prompts * params.n, "prompt" if prompts > 1 else "n")
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


def check_priority(priority: int, policy: str) -> None:
    """Refuse a priority that would have no effect.

    Raises:
        InvalidRequest: it is out of range, or the policy ignores priorities.
    """
    read_field("priority", priority)
    if priority and policy != "priority":
        raise InvalidRequest(
            f"priority must be 0 under the scheduling policy {policy} (the server was not started "
            f"with --scheduling-policy priority), got {priority}.",
            param="priority",
        )


def check_labels(request: Any) -> None:
    """Check salt, user, metadata and request id, as far as the request has these fields.

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
    _check_request_id(getattr(request, "request_id", None))


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
