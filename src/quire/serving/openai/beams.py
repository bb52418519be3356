"""Beam search in OpenAI's bodies: `use_beam_search` and `length_penalty`, as vLLM spells them, and
which other fields cannot go with it.

What chooses tokens in another way is refused by name. Fields of sampling (`temperature`, `top_p`,
`top_k`, `min_p`, `seed`) are accepted and have no effect, because nothing is sampled.
"""

from __future__ import annotations

from typing import Any, Final

from quire.bounds import read_field
from quire.engine.frontend.beams import check_width
from quire.engine.frontend.checked import filled
from quire.errors import InvalidRequest
from quire.params import SamplingParams
from quire.serving.beam_search import Beams
from quire.serving.decode import show
from quire.serving.openai.schema import GenerateRequest

_RAW: Final = "candidates are ranked by the model's own log-probabilities"
_NOT_WITH_BEAMS: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    # field: why not, and the values that ask for nothing
    "stream": ("which output is best is known only at the end", (False,)),
    "stream_interval": ("which output is best is known only at the end", (1,)),
    "presence_penalty": (_RAW, (0,)),
    "frequency_penalty": (_RAW, (0,)),
    "repetition_penalty": (_RAW, (1,)),
    "logit_bias": (_RAW, ({},)),
    "bad_words": (_RAW, ([],)),
    "allowed_token_ids": (_RAW, ()),
    "vllm_xargs": (_RAW, ({},)),
    "min_tokens": ("sequences end where the model ends them", (0,)),
    "thinking_token_budget": ("sequences end where the model ends them", (-1,)),
    "repetition_detection": ("sequences end where the model ends them", ()),
    "prompt_logprobs": ("ask for them in a request of its own", ()),
    "logprob_token_ids": ("use logprobs, which gives the likeliest tokens", ([],)),
}
_NO_GRAMMAR: Final = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip


def read_beams(request: GenerateRequest, max_logprobs: int) -> Beams | None:
    """The search that a body asks for; `None`: it does not.

    Raises:
        InvalidRequest: the width or the penalty is out of range, or a field does not go with it.
    """
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    if not request.use_beam_search:
        if penalty != 1.0:
            raise InvalidRequest(
                f"length_penalty needs use_beam_search to be true, got {show(penalty)}.",
                param="length_penalty",
            )
        return None
    for name, (why, neutral) in _NOT_WITH_BEAMS.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise _refusal(name, why)
    form = request.response_format
    for name in _NO_GRAMMAR:
        if getattr(request, name) is not None:
            raise _refusal(name, "beams have no grammars")
    if form is not None and form.get("type") != "text":
        raise _refusal("response_format", "beams have no grammars")
    width = check_width(1 if request.n is None else request.n, max_logprobs, "n")
    return Beams(width, read_field("length_penalty", penalty))


def check_parsing(params: SamplingParams, beams: Beams | None) -> None:
    """Refuse tool calls that need a grammar.

    Raises:
        InvalidRequest: `tool_choice` forces a call.
    """
    if beams is not None and params.structured_outputs is not None:
        raise _refusal("tool_choice", "only calls that the model makes by itself are possible")


def refuse_render(request: GenerateRequest) -> None:
    """Refuse to say in one request of tokens what takes many.

    Raises:
        InvalidRequest: beam search is asked for.
    """
    if request.use_beam_search:
        raise InvalidRequest(
            "use_beam_search cannot be rendered: a search is many requests, each made of the "
            "answers to those before.",
            param="use_beam_search",
        )


def turn_params(params: SamplingParams, beams: Beams | None) -> SamplingParams:
    """Parameters whose `n` is the number of choices in the reply. In themselves, greedy parameters
    have one."""
    return params if beams is None else filled(params, n=beams.width)


def _refusal(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported with use_beam_search: {why}.", param=name)
