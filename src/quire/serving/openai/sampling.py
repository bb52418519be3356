"""The fields that both of OpenAI's generation endpoints have, read into `SamplingParams`."""

from __future__ import annotations

from typing import Final

from quire.config import ModelConfig
from quire.errors import InvalidRequest
from quire.params import SamplingParams
from quire.serving.checks import check_labels, make_params, read_xargs
from quire.serving.decode import show
from quire.serving.openai.schema import GenerateRequest
from quire.serving.openai.structured import read_structured_outputs

COPIED: Final = (
    "n", "stop", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "logit_bias", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "logprob_token_ids",
    "stream_interval", "repetition_detection",
    "thinking_token_budget",
)  # fmt: skip
"""Fields that have the same name and meaning in `SamplingParams`."""


def build_params(
    request: GenerateRequest,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    model: ModelConfig,
    prompts: int = 1,
    most: int,
) -> SamplingParams:
    """The parameters for all prompts of this request, checked once.

    Args:
        request: The body.
        defaults: The model's parameters, for fields that the body leaves out.
        max_tokens, logprobs, prompt_logprobs: As the endpoint reads them.
        model: The options of the model.
        prompts: How many there are.
        most: Completions that the request may ask for.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given = {name: getattr(request, name) for name in COPIED}
    given = {name: value for name, value in given.items() if value is not None}
    if (constraint := read_structured_outputs(request)) is not None:
        given["structured_outputs"] = constraint
    if request.use_beam_search:
        prompts *= given.pop("n", 1)  # each of its steps asks for one token after each sequence
    given["extra_args"] = read_xargs(request.vllm_xargs, model)
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return make_params(defaults, given, stream=request.stream, prompts=prompts, most=most)


def check_common(request: GenerateRequest) -> None:
    """Check the fields that never reach the engine, or reach it unchanged.

    Raises:
        InvalidRequest: a rule is broken.
    """
    _check_stream(request)
    check_labels(request)
    if request.truncation_side not in (None, "left", "right"):
        side = show(request.truncation_side)
        raise InvalidRequest(
            f'truncation_side must be "left" or "right", got {side}.', param="truncation_side"
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
