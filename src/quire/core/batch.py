"""What the scheduler and a worker say to each other: nothing else crosses between them.

New and resumed requests travel in full. Of requests that the worker knows only the differences
travel, because it keeps their state. Executors that compute nothing use the same messages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec

from quire.outputs import Pooled
from quire.params import PoolingParams, SamplingParams

BlockIds = tuple[list[int], ...]
"""One list of block ids per group of layers; mostly there is one group. `()`: nothing new."""


LayerSpan = tuple[float, float, float, float]
"""One layer in one step, in seconds: when it began on the monotonic clock, how long it took, and
how much of that attention and MLP."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities at one position. A prompt has as many of them as tokens, and every request
    waits while the garbage collector looks at objects: it may leave these out."""

    token_ids: list[int]
    """The sampled (or prompt) token first, then the most likely ones in order, then those that the
    request named."""
    logprobs: list[float]
    """Natural logarithms, parallel to `token_ids`."""
    rank: int
    """Rank of the first entry in the whole vocabulary, from 1."""


@dataclass(frozen=True, slots=True)
class ScheduledNewRequest:
    """A request the worker does not know, or one that comes back after a preemption."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Tokens generated before (preemption, replay after a crash); they stay output tokens."""
    sampling_params: SamplingParams
    """With `seed` always set."""
    block_ids: BlockIds
    """The request's whole block tables; 0, the null block, where a window has passed."""
    num_computed_tokens: int
    """Tokens whose KV is already in those blocks (prefix hit)."""
    pooling_params: PoolingParams | None = None
    """Set on requests of pooling models: nothing is sampled."""

    @property
    def request_id(self) -> str:
        """vLLM's other name of `req_id`."""
        return self.req_id


@dataclass(frozen=True, slots=True)
class ScheduledCachedRequests:
    """Differences of requests the worker already knows: parallel lists."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[BlockIds] = field(default_factory=list)
    """Blocks appended to each request's tables in this step."""
    num_computed_tokens: list[int] = field(default_factory=list)
    """Before this step."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The tokens of one step; in vLLM `SchedulerOutput`."""

    step: int
    scheduled_new_reqs: list[ScheduledNewRequest]
    """First-time and resumed requests."""
    scheduled_cached_reqs: ScheduledCachedRequests
    num_scheduled_tokens: dict[str, int]
    """By request id, in the order of the flat token batch."""
    total_num_scheduled_tokens: int
    preempted_req_ids: list[str]
    """Requests that lost their blocks in this step: the worker drops their state, and what batches
    in flight still compute for them is not used."""
    finished_req_ids: list[str]
    """Requests that ended since the last step: the worker drops their state."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(block, block of the second tier): to be copied before anything else of this step."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(block of the second tier, block): to be copied after `swap_out` and `block_copies`, before
    anything is computed."""
    block_copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(source, destination, tokens): KV of the first tokens of a block to be copied before
    anything of this step is written. All sources are read before any destination is written."""
    scheduled_spec_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Draft tokens to verify: they follow the request's known tokens, and are counted in
    `num_scheduled_tokens`."""
    num_prompt_tokens: int = 0
    """Of the scheduled tokens, those that belong to prompts."""
    num_prefills: int = 0
    """Requests that compute prompt tokens in this step."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache by requests admitted in this step, for statistics."""
    prefix_hits: int = 0
    prefix_lookups: list[tuple[int, int]] = field(default_factory=list)
    """The same by request: (tokens looked up, tokens found)."""

    @property
    def num_attended_tokens(self) -> int:
        """For each token of the step, at most how many tokens of its request it attends to, summed:
        scheduled tokens times context of each request."""
        rows, computed = self.num_scheduled_tokens, self.scheduled_cached_reqs.num_computed_tokens
        new = self.scheduled_new_reqs
        if not new and len(rows) == self.total_num_scheduled_tokens:
            return sum(computed) + len(rows)  # decodes, as mostly
        return sum(
            (count := rows[name]) * (before + count)
            for name, before in itertools.chain(
                ((request.req_id, request.num_computed_tokens) for request in new),
                zip(self.scheduled_cached_reqs.req_ids, computed, strict=True),
            )
        )


SchedulerOutput = ScheduledBatch


@dataclass(slots=True)
class BatchResult:
    """What a step produced; in vLLM `ModelRunnerOutput`."""

    sampled_token_ids: dict[str, list[int]]
    """New tokens by request; prompt chunks that did not reach the last token are absent. With
    drafts: those accepted, in order, and one more. Then those that a grammar forces."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Parallel to `sampled_token_ids`, for the requests that asked."""
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    """All prompt positions, once the prompt is complete, for the requests that asked."""
    scored: dict[str, Pooled] = field(default_factory=dict)
    """Log-probabilities of `prompt_logprob_token_ids`, once the prompt is complete."""
    failed: dict[str, str] = field(default_factory=dict)
    """Requests that failed alone in this step, with the reason."""
    num_forced: dict[str, int] = field(default_factory=dict)
    """How many of a request's last new tokens were not sampled: its grammar left nothing else."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Guesses at the tokens after the new ones, to be verified in the next step."""
    unwritten: list[int] = field(default_factory=list)
    """Blocks of the second tier that could not be written."""
    unread: list[int] = field(default_factory=list)
    """Blocks that could not be read back from the second tier."""
    swap_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    worker_start: float = 0.0
    """When the worker began, on the monotonic clock; with `worker_seconds` for detailed traces."""
    worker_seconds: float = 0.0
    layer_times: list[LayerSpan] = field(default_factory=list)
    """Of each layer, for detailed traces."""
    pooled: dict[str, Pooled] = field(default_factory=dict)
    """What pooling requests get, once their prompt is complete: that is their end."""


ModelRunnerOutput = BatchResult
