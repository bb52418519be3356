"""A worker without a model whose tokens follow from the KV it reads, so that a wrong block shows.

Each slot holds the hash of all tokens up to its position. A request that reads a slot with
anything else in it has found KV that was never computed for it: `stale` names it.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.batch import BatchResult, BlockIds, ScheduledBatch, TokenLogprobs
from quire.executor.base import ComputedBatch, ExecutorInfo, PendingBatch, Progress

Slot = tuple[int, int]


def next_token(context: Sequence[int]) -> int:
    """An ordinary token that depends on the last few and the length."""
    return 300 + (sum(context[-5:]) * 31 + len(context) * 7) % 40


class HonestWorker:
    """Executor of an engine core: computes, copies, swaps and forgets as a worker does.

    Args:
        num_blocks: Of the pool, the null block included.
        block_size: Tokens per block.
        windows: Of each group of layers, the positions a token sees.
        num_swap_blocks: Of the second tier.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        windows: tuple[int | None, ...] = (None,),
        num_swap_blocks: int = 0,
    ) -> None:
        self.info = ExecutorInfo(
            num_blocks, block_size, 2048, 2048, "cpu", "float32", 0, 0, windows, num_swap_blocks
        )
        self.stale: list[str] = []
        self.num_steps = 0
        self._slots: dict[Slot, int] = {}
        self._parked: dict[int, list[int | None]] = {}
        self._tables: dict[str, tuple[list[int], ...]] = {}
        self._known: dict[str, tuple[list[int], int, bool]] = {}
        # tokens, how many are computed, and whether log-probabilities are wanted

    @property
    def num_known(self) -> int:
        """Requests it has not been told to forget."""
        return len(self._known)

    def start(self, progress: Progress | None = None) -> ExecutorInfo:
        return self.info

    def reset(self) -> None:
        self._tables.clear()
        self._known.clear()

    def start_profile(self) -> None:
        raise AssertionError("not in these tests")

    stop_profile = start_profile

    def shutdown(self) -> None:
        self.reset()

    max_concurrent_batches = 1

    def submit(self, batch: ScheduledBatch) -> PendingBatch:
        return ComputedBatch(self.execute(batch))

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        self.num_steps += 1
        self._take_in(batch)
        self._move(batch)
        result = BatchResult({})
        for name, count in batch.num_scheduled_tokens.items():
            tokens, computed, scored = self._known[name]
            self._write(name, tokens, computed, computed + count)
            self._known[name] = (tokens, computed + count, scored)
        for name in batch.num_scheduled_tokens:
            tokens, computed, scored = self._known[name]
            if computed == len(tokens):
                self._read(name, tokens)
                token = next_token(tokens)
                tokens.append(token)
                result.sampled_token_ids[name] = [token]
                if scored:
                    entry = TokenLogprobs([token, 5], [-0.25 - token / 1024, -3.0], 1)
                    result.logprobs[name] = [entry]
        return result

    def _take_in(self, batch: ScheduledBatch) -> None:
        for name in (*batch.finished_req_ids, *batch.preempted_req_ids):
            self._tables.pop(name, None)
            self._known.pop(name, None)
        for new in batch.scheduled_new_reqs:
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            scored = new.sampling_params.logprobs is not None
            self._known[new.req_id] = (tokens, new.num_computed_tokens, scored)
            self._tables[new.req_id] = tuple(map(list, new.block_ids))
        cached = batch.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            assert self._known[name][1] == computed, f"{name}: wrong position"
            self._extend(name, blocks)

    def _extend(self, name: str, blocks: BlockIds) -> None:
        for table, ids in zip(self._tables[name], blocks, strict=bool(blocks)):
            table += ids

    def _move(self, batch: ScheduledBatch) -> None:
        size = self.info.block_size
        for source, parked in batch.swap_out:
            self._parked[parked] = [self._slots.get((source, i)) for i in range(size)]
        copied = {
            (target, i): self._slots[source, i]
            for source, target, count in batch.block_copies
            for i in range(count)
        }
        self._slots |= copied
        for parked, target in batch.swap_in:
            for i, value in enumerate(self._parked[parked]):
                if value is not None:
                    self._slots[target, i] = value

    def _hashes(self, tokens: list[int]) -> list[int]:
        hashes, last = [], 0
        for token in tokens:
            last = hash((last, token))
            hashes.append(last)
        return hashes

    def _write(self, name: str, tokens: list[int], start: int, end: int) -> None:
        size, hashes = self.info.block_size, self._hashes(tokens[:end])
        for table in self._tables[name]:
            for p in range(start, end):
                assert table[p // size], f"{name} writes into the null block"
                self._slots[table[p // size], p % size] = hashes[p]

    def _read(self, name: str, tokens: list[int]) -> None:
        size, hashes = self.info.block_size, self._hashes(tokens)
        for window, table in zip(self.info.kv_windows, self._tables[name], strict=True):
            first = max(0, len(tokens) - (window or len(tokens)))
            for p in range(first, len(tokens)):
                if self._slots.get((table[p // size], p % size)) != hashes[p]:
                    self.stale.append(f"{name} at position {p}, step {self.num_steps}")
