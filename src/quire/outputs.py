"""What callers get back: `RequestOutput` with its `CompletionOutput`s, or the output of a pooling
model.

Names and fields are vLLM's. Nothing here knows how the values are computed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    import numpy as np


class FinishReason(enum.IntEnum):
    """Why a completion ended. `str()` is the word used in APIs and metric labels."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(slots=True)
class Logprob:
    """Log-probability of one candidate token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Candidates of one position by token id; the sampled (or prompt) token comes first."""


class Pooled(msgspec.Struct, array_like=True, frozen=True):
    """The numbers that a pooling model computed for one prompt."""

    shape: tuple[int, ...]
    """`[size]`, or `[tokens, size]`."""
    data: bytes
    """float32, little-endian, row by row."""

    def array(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The numbers as a float32 array (read-only)."""
        import numpy as np

        return np.frombuffer(self.data, dtype="<f4").reshape(self.shape)

    def tolist(self) -> list[Any]:
        """The numbers as (nested) lists."""
        numbers: list[Any] = self.array().tolist()
        return numbers


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    """0 to `n` - 1."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the sampled tokens, if `logprobs` was requested."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; `None` while running."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; `None` for end of sequence."""
    lora_request: object | None = None
    # Of vLLM, for what quire does not do: always empty.
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    def finished(self) -> bool:
        """True once `finish_reason` is set."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Timings of one request, in seconds on the monotonic clock."""

    arrival_time: float
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def first_token_latency(self) -> float:
        """Time to first token, in seconds: from arrival to the first output in the caller's
        process."""
        return self.first_token_ts - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """State of one request as its caller sees it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    """Entry 0 is `None`: nothing precedes the first token. From `LLM` a list; from `AsyncLLM` a
    sequence that makes each entry when it is looked at."""
    metrics: RequestMetrics | None = None
    lora_request: object | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    seed: int | None = None
    """The seed used: the request's own or the one it was given. Repeating the request with it gives
    the same tokens."""
    error: str | None = None
    """Set when `finish_reason` is `error`: what happened to this request."""
    pooled: Pooled | None = None
    """The result of a pooling request; it has no `outputs`."""
    scored: Pooled | None = None
    """The numbers of `prompt_token_id_logprobs`."""
    # Of vLLM, for what quire does not do: always empty.
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None

    @property
    def prompt_token_id_logprobs(self) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """Log-probabilities of `prompt_logprob_token_ids`: float32
        `[prompt tokens - 1 - prompt_logprob_start, candidates of the longest row]`, -inf where a
        row is padded; `None` if they were not asked for."""
        return None if self.scored is None else self.scored.array()


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that beam search found."""

    tokens: list[int]
    """Prompt and output, with the end of sequence if that ended it."""
    logprobs: list[PositionLogprobs]
    """For each output token the candidates it was chosen from; the chosen one comes first."""
    lora_request: object | None = None
    cum_logprob: float = 0.0
    """Sum over the output tokens."""
    text: str | None = None
    """Of all tokens."""
    finish_reason: str | None = None
    """`stop` or `length`."""
    stop_reason: int | str | None = None
    orig_prompt: object | None = None
    """The prompt as it was given."""


@dataclass(slots=True)
class BeamSearchOutput:
    """What beam search found for one prompt."""

    sequences: list[BeamSearchSequence]
    """Best first; as many as the width, unless the vocabulary has too few."""


@dataclass(slots=True)
class PoolingOutput:
    """The output of a pooling model, unprocessed."""

    data: Any
    """float32 array: `[size]`, or `[tokens, size]` for the task `token_embed`."""


@dataclass(slots=True)
class EmbeddingOutput:
    """One embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of its elements."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Probabilities of the classes, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts match."""

    score: float


P = TypeVar("P")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[P]):
    """One finished prompt of a pooling model. Each subclass holds the output that its name says."""

    request_id: str
    outputs: P
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Any:
        """The same request with its numbers in this class's own form."""
        return replace(output)

    @classmethod
    def of(cls, output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
        """From the engine's output."""
        assert output.pooled is not None, f"{output.request_id} was not pooled"
        return PoolingRequestOutput(
            output.request_id,
            PoolingOutput(output.pooled.array()),
            output.prompt_token_ids,
            output.num_cached_tokens,
        )


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """With an `EmbeddingOutput`."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """The embedding of a pooled prompt."""
        return cls(*_but(output, EmbeddingOutput(output.outputs.data.tolist())))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """With a `ClassificationOutput`."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """The classes of a pooled prompt."""
        return cls(*_but(output, ClassificationOutput(output.outputs.data.tolist())))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """With a `ScoringOutput`."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """The score of a pooled pair."""
        return cls(*_but(output, ScoringOutput(float(output.outputs.data[0]))))


def _but(output: PoolingRequestOutput[PoolingOutput], outputs: P) -> tuple[Any, ...]:
    """The fields of a pooled request, with other outputs."""
    return (
        output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens,
        output.finished,
    )  # fmt: skip


def cosine(one: Any, two: Any) -> float:
    """Cosine of two float32 arrays, summed in float64 in a fixed order; 0 if one is zero."""
    a, b = one.astype("f8").tolist(), two.astype("f8").tolist()
    norm = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0
