"""instructor: a typed answer by tools, by json_object, and by json_schema."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]


class Capital(BaseModel):
    """The capital of a country."""

    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode
    )
    try:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            response_model=Capital,
            max_retries=0,
            max_tokens=200,
            temperature=0,
        )
    except (IncompleteOutputException, InstructorRetryException):
        # json_object promises JSON, not the schema, which instructor only writes into the prompt;
        # the embedded model does not follow such a prompt.
        if mode is not instructor.Mode.JSON:
            raise
    else:
        assert isinstance(answer, Capital)
    print("ok", mode.name, flush=True)
