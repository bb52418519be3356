"""The step that is being put together. It knows requests and tokens, but no blocks."""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.batch import BlockIds, ScheduledBatch, ScheduledCachedRequests, ScheduledNewRequest
from quire.core.request import Request
from quire.logger import get_logger

logger = get_logger("quire.core.scheduler")


class StepPlan:
    """The tokens given out so far in this step, and the budget for the rest."""

    __slots__ = (
        "admitted",
        "block_copies",
        "budget",
        "chunk_limit",
        "cached_ids",
        "computed",
        "drafts",
        "new_blocks",
        "now",
        "num_prefills",
        "num_prompt_tokens",
        "preempted",
        "prefix_lookups",
        "scheduled",
        "total",
    )

    def __init__(self, budget: int, now: float, chunk_limit: int) -> None:
        self.now = now
        """Seconds on the clock when the step began."""
        self.total = budget
        """Tokens that the step may hold."""
        self.budget = budget
        """Tokens of it that are left."""
        self.chunk_limit = chunk_limit
        """Most tokens of one request in this step, besides the budget."""
        self.scheduled: dict[str, int] = {}
        """Tokens by request id, in the order of the batch."""
        self.admitted: list[ScheduledNewRequest] = []
        self.block_copies: list[tuple[int, int, int]] = []
        self.cached_ids: list[str] = []
        """The running requests that got tokens; `new_blocks` and `computed` are parallel to it."""
        self.new_blocks: list[BlockIds] = []
        """The blocks that each has got in this step."""
        self.computed: list[int] = []
        """The tokens of each that had been computed before."""
        self.drafts: dict[str, list[int]] = {}
        """Draft tokens to verify, by request id."""
        self.preempted: list[str] = []
        """Ids of the requests that lost their place in this step."""
        self.num_prompt_tokens = 0
        self.num_prefills = 0
        self.prefix_lookups: list[tuple[int, int]] = []
        """Of each request that was looked up in the prefix cache: its tokens, and those found."""

    def take(self, request: Request, num_tokens: int) -> None:
        """Spend budget on a request and advance it."""
        computed = request.num_computed_tokens
        if computed < request.num_prompt_tokens:
            self.num_prompt_tokens += min(num_tokens, request.num_prompt_tokens - computed)
            self.num_prefills += 1
        self.scheduled[request.request_id] = num_tokens
        self.budget -= num_tokens
        request.num_computed_tokens = computed + num_tokens

    def take_decodes(self, requests: Iterable[Request]) -> int:
        """Give requests the one token that a decode needs, up to the first that needs anything
        else (more or no tokens, a verification of drafts, blocks) or finds no budget.

        Returns:
            How many have got it.
        """
        # A step with thousands of decodes spends its time in this loop. So it does inline what
        # `take` does, calls nothing, and reads of a request only what stands first in it.
        count, budget = 0, self.budget
        scheduled, ids = self.scheduled, self.cached_ids
        for request in requests:
            before = request.num_computed_tokens
            after = before + 1
            if (
                after > request.num_quiet_tokens
                or len(request.all_token_ids) != after
                or request.spec_token_ids
                or count == budget
            ):
                break
            request.num_computed_tokens = after
            name = request.request_id
            scheduled[name] = 1
            ids.append(name)
            self.computed.append(before)
            count += 1
        self.new_blocks += [()] * count
        self.budget = budget - count
        return count

    def give_back(self, request: Request) -> bool:
        """Take back what a running request got in this step, because it loses its place.

        Returns:
            False if it had got nothing.
        """
        # Drafts are noted before room is found, and the request may be the one to give way.
        self.drafts.pop(request.request_id, None)
        num_tokens = self.scheduled.pop(request.request_id, None)
        if num_tokens is None:
            return False
        index = self.cached_ids.index(request.request_id)
        computed = self.computed[index]
        for parallel in (self.cached_ids, self.new_blocks, self.computed):
            del parallel[index]
        if computed < request.num_prompt_tokens:
            self.num_prompt_tokens -= min(num_tokens, request.num_prompt_tokens - computed)
            self.num_prefills -= 1
        self.budget += num_tokens
        request.num_computed_tokens = computed
        return True

    def freeze(
        self,
        step: int,
        finished_req_ids: list[str],
        moves: tuple[list[tuple[int, int]], list[tuple[int, int]]],
    ) -> ScheduledBatch:
        """The batch that the worker gets.

        Args:
            step: Its number.
            finished_req_ids: Requests that ended since the last step.
            moves: Copies (to, from) the second tier, as `SwapSpace.take_moves` gives them.
        """
        return ScheduledBatch(
            step=step,
            scheduled_new_reqs=self.admitted,
            scheduled_cached_reqs=ScheduledCachedRequests(
                req_ids=self.cached_ids,
                new_block_ids=self.new_blocks,
                num_computed_tokens=self.computed,
            ),
            num_scheduled_tokens=self.scheduled,
            total_num_scheduled_tokens=self.total - self.budget,
            preempted_req_ids=self.preempted,
            finished_req_ids=finished_req_ids,
            swap_out=moves[0],
            swap_in=moves[1],
            block_copies=self.block_copies,
            scheduled_spec_tokens=self.drafts,
            num_prefills=self.num_prefills,
            num_prompt_tokens=self.num_prompt_tokens,
            prefix_queries=sum([tokens for tokens, _ in self.prefix_lookups]),
            prefix_hits=sum([found for _, found in self.prefix_lookups]),
            prefix_lookups=self.prefix_lookups,
        )

    def log(self, num_running: int, num_waiting: int) -> None:
        """The step in two debug lines, with the names that people search logs for."""
        logger.debug(
            "[SCHED] step n_running=%d n_waiting=%d total_tokens=%d new=[%s] preempted=[%s]",
            num_running,
            num_waiting,
            self.total - self.budget,
            ", ".join(r.req_id for r in self.admitted),
            ", ".join(self.preempted),
        )
        tokens = ", ".join(f"{i}: {n}" for i, n in self.scheduled.items())
        logger.debug("[SCHED] num_scheduled_tokens = {%s}", tokens)
