"""Requests as the engine gets them, in the form that `POST /inference/v1/generate` takes: what the
render routes give. Knows no API.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quire.params import SamplingParams
from quire.serving.server_state import ServedModel
from quire.serving.submission import Submission

FILLED_IN: Final = frozenset(
    ("output_kind", "grammar", "shown_special_ids", "eos_token_ids", "bad_words_token_ids")
    + ("thinking", "thinking_marks")
)
"""Parameters that the server fills in by itself."""


def rendered(submission: Submission, served: ServedModel, stream: bool) -> list[dict[str, Any]]:
    """A request for each prompt. Without a seed each gets its own, whatever the first one gets."""
    assert isinstance(submission.params, SamplingParams), "a request for text"
    given = msgspec.to_builtins(submission.params)
    params = {name: value for name, value in given.items() if name not in FILLED_IN}
    return [
        {
            "request_id": request_id,
            "model": served.name,
            "token_ids": ids,
            "sampling_params": {**params, "max_tokens": submission.params.max_tokens},
            "stream": stream,
            "priority": submission.priority,
            "cache_salt": submission.cache_salt,
        }
        for request_id, ids in zip(submission.request_ids, submission.prompts, strict=True)
    ]
