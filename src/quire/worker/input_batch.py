"""State of the requests a worker knows, kept between steps in one row per request.

Tokens and blocks are arrays, so a step's flat inputs take a handful of vector operations, whatever
the number of requests. Counts are plain numbers: a step reads a few of each, and arrays of few
numbers are dear where the model's weights have driven everything else out of the caches. Knows no
model and no scheduler; row numbers have no meaning outside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.core.batch import BlockIds, ScheduledNewRequest, TokenLogprobs
from quire.kernels.request_rows import LastTokens, RequestRows
from quire.outputs import Pooled
from quire.params import SamplingParams
from quire.sampling import RequestSampling
from quire.structured.state import GrammarState
from quire.utils.math import cdiv
from quire.worker.block_table import BlockTable, grown
from quire.worker.grammars import GrammarStore
from quire.worker.processors import ProcessorStore

ROOM: Final = 2**30
"""Number of tokens that all rows together have room for at the start: 4 GiB of address space."""

PromptLogprobs = list[TokenLogprobs | None]
_NOTHING: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ScoredIds:
    """Tokens to score at positions of a prompt, and their log-probabilities so far."""

    start: int
    """The position that the first row follows."""
    ids: np.ndarray
    """int64 `[rows, candidates]`; -1 where there is none."""
    logprobs: np.ndarray
    """float32, as `ids`; -inf where nothing is known."""

    @classmethod
    def of(cls, params: SamplingParams) -> ScoredIds:
        """What a request asks for, with nothing known."""
        rows = params.prompt_logprob_token_ids or []
        ids = np.full((len(rows), max(map(len, rows), default=0)), -1, dtype=np.int64)
        for own, row in zip(ids, rows, strict=True):
            own[: len(row)] = row
        return cls(params.first_scored or 0, ids, np.full(ids.shape, -np.inf, dtype=np.float32))

    def result(self) -> Pooled:
        """The log-probabilities as they are sent."""
        return Pooled(self.logprobs.shape, self.logprobs.astype("<f4", copy=False).tobytes())


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Flat inputs of one step: R requests, T tokens."""

    req_ids: Sequence[str]
    rows: list[int]
    """Of each request."""
    input_ids: np.ndarray
    """int64 `[T]`."""
    positions: np.ndarray
    """int64 `[T]`."""
    token_request: np.ndarray
    """int64 `[T]`, index into the R requests."""
    query_start_loc: np.ndarray
    """int32 `[R + 1]`."""
    seq_lens: np.ndarray
    """int32 `[R]`, context after the step."""
    block_tables: list[np.ndarray]
    """int32 `[R, blocks]` of each group of layers."""
    slot_mappings: list[np.ndarray]
    """int64 `[T]` of each group of layers."""
    samples: list[int]
    """Of each request: positions at which it samples. 0: the step ends before the last
    known token. 1: it ends there. More: drafts follow, and a token is sampled after each."""
    wanted: np.ndarray
    """int64 `[W]`: the tokens whose states are used, the last ones of each request: those that are
    sampled after, and the last one of a chunk that nothing is sampled after."""
    wanted_start_loc: np.ndarray
    """int32 `[R + 1]`: as `query_start_loc`, of `wanted`."""
    chunks: np.ndarray
    """int64 `[C]`: indexes of the requests after which nothing is sampled."""
    sampled: np.ndarray | None
    """int64 `[S]`: places in `wanted` that are sampled after; `None`: all."""


@dataclass(frozen=True, slots=True)
class _OneOfEach:
    """What the inputs of R requests of one token have that depends on R alone. Nobody writes to
    it."""

    requests: np.ndarray
    """int64 `[R]`: 0, 1, ..."""
    starts: np.ndarray
    """int32 `[R + 1]`: the same."""
    samples: list[int]


@functools.lru_cache(maxsize=256)
def _one_of_each(count: int) -> _OneOfEach:
    requests = np.arange(count, dtype=np.int64)
    return _OneOfEach(requests, np.arange(count + 1, dtype=np.int32), [1] * count)


class InputBatch:
    """The known requests.

    Args:
        max_num_seqs: Number of requests to make room for, unless their tokens would exceed `ROOM`.
            More requests fit at the price of a copy; this happens when a request that the scheduler
            has already dropped stays for one more step.
        max_model_len: Longest prompt plus output.
        block_size: Tokens per KV block.
        vocab_size: Size of the logits' rows.
        windows: Of each group of layers, the positions a token sees; `None`: all before it.
        grammars: Says where requests stand in their grammars; `None`: they have none.
        processors: Makes the logits processors of requests; `None`: they have none.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        windows: Sequence[int | None] = (None,),
        grammars: GrammarStore | None = None,
        processors: ProcessorStore | None = None,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.row_of: dict[str, int] = {}
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}
        """Entries so far of requests that asked and have not got theirs."""
        self.scored: dict[str, ScoredIds] = {}
        """The same of requests that named the tokens."""
        self.grammar_states: dict[str, GrammarState] = {}
        """Of the requests that have a grammar."""
        self.budgeted: set[str] = set()
        """The requests that have a budget of reasoning."""
        self._grammars = grammars
        self._processors = processors
        # Untouched pages of these arrays cost nothing: the system hands them out on first use. But
        # it refuses arrays that it could never fill.
        rows = max(1, min(max_num_seqs, ROOM // (max_model_len + 1)))
        self.token_ids = np.zeros((rows, max_model_len + 1), dtype=np.int32)
        self.num_prompt = [0] * rows
        self.num_tokens = [0] * rows
        self.num_computed = [0] * rows
        self.sampling: list[RequestSampling | None] = [None] * rows
        width = cdiv(max_model_len, block_size)
        self.block_tables = [BlockTable(rows, width, block_size, w) for w in windows]
        self._free = list(range(rows))[::-1]
        self._request_rows: RequestRows | None = None

    def __len__(self) -> int:
        return len(self.row_of)

    # ---- requests in and out -----------------------------------------------------------------

    def add(self, new: ScheduledNewRequest) -> None:
        """Add a request; it replaces one with the same id."""
        self.remove(new.req_id)
        prompt, output = new.prompt_token_ids, new.output_token_ids
        grammar = None if self._grammars is None else self._grammars.state(new.sampling_params)
        processors = None
        if self._processors is not None:
            processors = self._processors.begin(new.sampling_params, prompt)
        sampling = RequestSampling.from_params(
            new.sampling_params, prompt, self.vocab_size, grammar, processors
        )
        if grammar is not None:
            self.grammar_states[new.req_id] = grammar
        if sampling.thinking is not None:
            self.budgeted.add(new.req_id)
        row = self._take_row()
        self.row_of[new.req_id] = row
        num_tokens = len(prompt) + len(output)
        self.token_ids[row, : len(prompt)] = prompt
        self.token_ids[row, len(prompt) : num_tokens] = output
        self.num_prompt[row], self.num_tokens[row] = len(prompt), num_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.sampling[row] = sampling
        for table, block_ids in zip(self.block_tables, new.block_ids, strict=True):
            table.replace(row, block_ids)
        if new.sampling_params.prompt_logprobs is not None and not output:
            # Nothing precedes the first token; positions read from the prefix cache (only on
            # explicit wish) have no logits.
            self.prompt_logprobs[new.req_id] = [None] * (1 + new.num_computed_tokens)
        if new.sampling_params.prompt_logprob_token_ids is not None and not output:
            scored = self.scored[new.req_id] = ScoredIds.of(new.sampling_params)
            assert new.num_computed_tokens <= scored.start, "a state that is needed is in the cache"

    def advance(self, req_id: str, num_computed: int, new_block_ids: BlockIds) -> None:
        """A known request continues: set its position, and add its new blocks."""
        row = self.row_of[req_id]
        self.num_computed[row] = num_computed
        if new_block_ids:
            for table, block_ids in zip(self.block_tables, new_block_ids, strict=True):
                table.append(row, block_ids)

    def remove(self, req_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self.prompt_logprobs.pop(req_id, None)
        self.scored.pop(req_id, None)
        self.grammar_states.pop(req_id, None)
        self.budgeted.discard(req_id)
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self.sampling[row] = None
            for table in self.block_tables:
                table.replace(row, ())
            self._free.append(row)

    def put_drafts(self, req_id: str, drafts: Sequence[int]) -> None:
        """Write draft tokens after a request's known ones. They do not become its tokens: the next
        append overwrites them."""
        row = self.row_of[req_id]
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(drafts)] = drafts

    def append_tokens(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Add sampled tokens to a request's output."""
        row = self.row_of[req_id]
        for token_id in token_ids:
            self.token_ids[row, self.num_tokens[row]] = token_id
            self.num_tokens[row] += 1

    def clear(self) -> None:
        """Forget all requests, even one that was added only halfway."""
        self.row_of.clear()
        self.prompt_logprobs.clear()
        self.scored.clear()
        self.grammar_states.clear()
        self.budgeted.clear()
        self.sampling = [None] * len(self.sampling)
        for table in self.block_tables:
            table.clear(len(self.sampling))
        self._free = list(range(len(self.sampling)))[::-1]
        self._request_rows = None

    def _take_row(self) -> int:
        if not self._free:
            self._grow(max(1, 2 * len(self.sampling)))
        return self._free.pop()

    def _grow(self, num_rows: int) -> None:
        old = len(self.sampling)
        self.token_ids = grown(self.token_ids, num_rows)
        for counts in (self.num_prompt, self.num_tokens, self.num_computed):
            counts += [0] * (num_rows - old)
        for table in self.block_tables:
            table.grow(num_rows)
        self.sampling += [None] * (num_rows - old)
        self._free += range(num_rows - 1, old - 1, -1)
        self._request_rows = None

    # ---- one step ----------------------------------------------------------------------------

    def select(self, req_ids: Sequence[str], num_scheduled: Sequence[int]) -> StepInputs:
        """Flat inputs of the next tokens of some requests.

        Args:
            req_ids: At least one, in the order of the flat batch.
            num_scheduled: Tokens of each; those beyond the known ones are drafts.
        """
        rows, positions = self._places(req_ids)
        if self._are_last(rows, positions, num_scheduled):
            return self._inputs_of_last(req_ids, rows, positions)
        return self._next_tokens(req_ids, rows, positions, num_scheduled)

    def last_tokens(
        self, req_ids: Sequence[str], num_scheduled: Sequence[int]
    ) -> LastTokens | None:
        """The last known tokens of some requests, if just these are scheduled; else `None`. (After
        the last token of a prompt there is nothing of it to score.) As `request_rows`, with one
        group of layers."""
        rows, positions = self._places(req_ids)
        if not self._are_last(rows, positions, num_scheduled):
            return None
        return LastTokens(self.request_rows(), rows, positions)

    def request_rows(self) -> RequestRows:
        """Where the requests are in memory, if there is one group of layers; another object after
        that has changed."""
        if self._request_rows is None:
            (table,) = self.block_tables
            self._request_rows = RequestRows(
                self.token_ids, table.ids, self.block_size, table.window
            )
        return self._request_rows

    def _places(self, req_ids: Sequence[str]) -> tuple[list[int], list[int]]:
        """The row of each request, and its first position that is not computed."""
        rows = [self.row_of[i] for i in req_ids]
        return rows, [self.num_computed[row] for row in rows]

    def _are_last(
        self, rows: list[int], positions: list[int], num_scheduled: Sequence[int]
    ) -> bool:
        """Whether one token of each is scheduled, and it is the last known one."""
        return sum(num_scheduled) == len(rows) and all(
            self.num_tokens[row] == position + 1
            for row, position in zip(rows, positions, strict=True)
        )

    def _inputs_of_last(
        self, req_ids: Sequence[str], rows: list[int], computed: list[int]
    ) -> StepInputs:
        """One token of each request, after which all sample, as in most steps.

        Worth a case of its own, and single numbers are looked up one by one: the first operation of
        a kind on arrays takes 20 to 40 us in caches that hold weights.
        """
        token_at = self.token_ids.item
        known = [token_at(*place) for place in zip(rows, computed, strict=True)]
        like, places = _one_of_each(len(rows)), np.array(rows, dtype=np.int64)
        positions = np.array(computed, dtype=np.int64)
        lengths = [position + 1 for position in computed]
        return StepInputs(
            req_ids=req_ids,
            rows=rows,
            input_ids=np.array(known, dtype=np.int64),
            positions=positions,
            token_request=like.requests,
            query_start_loc=like.starts,
            seq_lens=np.array(lengths, dtype=np.int32),
            block_tables=[t.lines(places, positions, max(lengths)) for t in self.block_tables],
            slot_mappings=[t.slots(rows, computed) for t in self.block_tables],
            samples=like.samples,
            wanted=like.requests,
            wanted_start_loc=like.starts,
            chunks=_NOTHING,
            sampled=None,
        )

    def _next_tokens(
        self,
        req_ids: Sequence[str],
        known_rows: list[int],
        first: list[int],
        num_scheduled: Sequence[int],
    ) -> StepInputs:
        """Any number of tokens of each request, from its first one on that is not computed."""
        count, rows = len(known_rows), np.array(known_rows, dtype=np.int64)
        computed = np.array(first, dtype=np.int64)
        lengths = np.array(num_scheduled, dtype=np.int64)
        starts = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        token_request = np.repeat(np.arange(count), lengths)
        token_rows = rows[token_request]
        positions = np.arange(starts[-1]) + (computed - starts[:-1])[token_request]
        seq_lens = computed + lengths
        longest = max(seq_lens.tolist())
        known = np.array([self.num_tokens[row] for row in known_rows], dtype=np.int64)
        samples = np.maximum(seq_lens - known + 1, 0)
        used = np.maximum(samples, 1)
        wanted_starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(used, out=wanted_starts[1:])
        # The k-th wanted token of a request stands k before the end of its wanted ones.
        wanted = np.arange(wanted_starts[-1]) + np.repeat(starts[1:] - wanted_starts[1:], used)
        chunks = (samples == 0).nonzero()[0]
        return StepInputs(
            req_ids=req_ids,
            rows=known_rows,
            input_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            token_request=token_request,
            query_start_loc=starts.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=[t.lines(rows, computed, longest) for t in self.block_tables],
            slot_mappings=[t.slot_mapping(token_rows, positions) for t in self.block_tables],
            samples=samples.tolist(),
            wanted=wanted,
            wanted_start_loc=wanted_starts,
            chunks=chunks,
            sampled=np.repeat(samples > 0, used).nonzero()[0] if len(chunks) else None,
        )

    def outputs(self, rows: Sequence[int], num_drafts: Sequence[int] = ()) -> list[np.ndarray]:
        """Output token ids so far of some rows, each followed by the given number of its drafts, as
        views."""
        return [
            self.token_ids[row, self.num_prompt[row] : self.num_tokens[row] + ahead]
            for row, ahead in zip(rows, num_drafts or [0] * len(rows), strict=True)
        ]

    def sampling_of(self, row: int) -> RequestSampling:
        """The sampling parameters of a row's request."""
        sampling = self.sampling[row]
        assert sampling is not None, f"row {row} has no request"
        return sampling

    def num_known(self, req_id: str, num_scheduled: int) -> int:
        """How many of a request's next tokens are not drafts."""
        row = self.row_of[req_id]
        return min(num_scheduled, self.num_tokens[row] - self.num_computed[row])

    def drafts_after(self, rows: Sequence[int], num_drafts: Sequence[int]) -> list[int]:
        """The draft after the first `num_drafts` drafts of each row; undefined if there is none."""
        last = self.token_ids.shape[1] - 1
        columns = [
            min(self.num_tokens[row] + ahead, last)
            for row, ahead in zip(rows, num_drafts, strict=True)
        ]
        drafts: list[int] = self.token_ids[rows, columns].tolist()
        return drafts

    def output_of(self, req_id: str) -> np.ndarray:
        """Output token ids so far of a request, int32, as a view."""
        row = self.row_of[req_id]
        return self.token_ids[row, self.num_prompt[row] : self.num_tokens[row]]

    def room_of(self, req_id: str) -> int:
        """Tokens that a request may still get by the context."""
        return self.token_ids.shape[1] - 1 - self.num_tokens[self.row_of[req_id]]

    def tokens_of(self, req_id: str) -> np.ndarray:
        """Prompt and output so far of a request, int32, as a view that cannot be written to."""
        row = self.row_of[req_id]
        view = self.token_ids[row, : self.num_tokens[row]]
        view.flags.writeable = False
        return view
