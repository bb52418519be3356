"""An executor that scripts the tokens: no torch, no weights."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.batch import BatchResult, ScheduledBatch
from quire.executor.base import ComputedBatch, ExecutorInfo, PendingBatch, Progress


class FakeExecutor:
    """Gives request after request the tokens of `script(prompt, num_outputs)`.

    It keeps the state a worker keeps, so it also notices when the scheduler forgets to announce
    a request or tells a wrong position.
    """

    def __init__(
        self,
        script: Callable[[list[int], int], int],
        num_blocks: int = 100,
        block_size: int = 16,
        vocab_size: int = 2048,
        max_model_len: int = 2048,
    ) -> None:
        self.script = script
        self.info = ExecutorInfo(
            num_blocks, block_size, max_model_len, vocab_size, "cpu", "float32", 0, 0
        )
        self.known: dict[str, tuple[list[int], list[int], int]] = {}
        self.fail: dict[str, str] = {}
        self.batches: list[ScheduledBatch] = []
        self.stopped = False

    def start(self, progress: Progress | None = None) -> ExecutorInfo:
        if progress is not None:
            progress("loading weights", 1, 1)
        return self.info

    max_concurrent_batches = 1

    def submit(self, batch: ScheduledBatch) -> PendingBatch:
        return ComputedBatch(self.execute(batch))

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        self.batches.append(batch)
        for request_id in (*batch.finished_req_ids, *batch.preempted_req_ids):
            self.known.pop(request_id, None)
        for new in batch.scheduled_new_reqs:
            self.known[new.req_id] = (
                new.prompt_token_ids,
                list(new.output_token_ids),
                new.num_computed_tokens,
            )
        cached = batch.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            assert self.known[request_id][2] == computed, f"{request_id}: wrong position"
        sampled = {}
        for request_id, count in batch.num_scheduled_tokens.items():
            prompt, outputs, computed = self.known[request_id]
            computed += count
            if computed == len(prompt) + len(outputs) and request_id not in self.fail:
                token = self.token_of(request_id, prompt, len(outputs))
                outputs.append(token)
                sampled[request_id] = [token]
            self.known[request_id] = (prompt, outputs, computed)
        failed = {i: why for i, why in self.fail.items() if i in batch.num_scheduled_tokens}
        return BatchResult(sampled, failed=failed)

    def token_of(self, request_id: str, prompt: list[int], num_outputs: int) -> int:
        """The next token of a request."""
        return self.script(prompt, num_outputs)

    def start_profile(self) -> None:
        raise AssertionError("not in these tests")

    stop_profile = reset = start_profile

    def shutdown(self) -> None:
        self.stopped = True
