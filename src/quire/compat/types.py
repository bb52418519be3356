"""Types that scripts for vLLM use in annotations."""

from __future__ import annotations

from quire.outputs import PositionLogprobs

SampleLogprobs = list[PositionLogprobs]
PromptLogprobs = list[PositionLogprobs | None]
