"""Random lives of requests against a naive model; integrity is checked after every rule.

The model computes each request's output as a pure function of its tokens, so whatever the
scheduler does (chunks, preemption, prefix hits, drafts, failures, a crash) the outputs must come
out the same. From the records of each step alone its batch must be restored.
"""

from __future__ import annotations

import os
import random
from itertools import chain

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.config.kv_groups import blocks_per_request
from quire.config.scheduler import POLICIES, SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.facts import Follower
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request, RequestStatus
from quire.core.scheduler import Scheduler
from quire.params import SamplingParams
from quire.utils.timing import ManualClock

POLICY = st.sampled_from(list(POLICIES))
MAX_MODEL_LEN = 48
EOS = 9


def next_token(tokens: list[int]) -> int:
    """The model: what follows is a function of everything before."""
    return (sum(tokens) * 31 + len(tokens)) % 10


def reference(prompt: list[int], max_tokens: int) -> list[int]:
    """What one request alone gives."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < MAX_MODEL_LEN:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, fails and resets at random; a toy KV store notices stale blocks."""

    @initialize(
        spare_blocks=st.integers(0, 14),
        block_size=st.sampled_from([8, 16]),
        budget=st.integers(4, 64),
        seqs=st.integers(1, 4),
        caching=st.booleans(),
        lookahead=st.sampled_from([0, 0, 1, 3]),
        windows=st.sampled_from([(None,), (None,), (10,), (None, 5), (None, 20, 20), (17, 1)]),
        seed=st.integers(0, 99),
        num_swap_blocks=st.sampled_from([0, 2, 10]),
        options=st.fixed_dictionaries(
            {
                "scheduling_policy": POLICY,
                "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
                "long_prefill_token_threshold_adaptive": st.booleans(),
                "priority_preemption": st.booleans(),
                "scheduler_aging_seconds": st.sampled_from([None, 0.0, 5.0]),
                "preemption_mode": st.sampled_from(["auto", "swap", "recompute"]),
                "scheduler_delay_factor": st.sampled_from([0.0, 0.0, 2.0]),
                "scheduler_reserve_full_isl": st.booleans(),
                "watermark": st.sampled_from([0.0, 0.0, 0.3]),
            }
        ),
    )
    def start(  # type: ignore[no-untyped-def]
        self,
        spare_blocks,
        block_size,
        budget,
        seqs,
        caching,
        lookahead,
        windows,
        seed,
        num_swap_blocks,
        options,
    ):
        self.block_size = block_size
        self.clock = ManualClock()
        self.windows = windows
        chunk = budget + lookahead
        needed = blocks_per_request(windows, MAX_MODEL_LEN, chunk, block_size)
        self.cache = (needed + 1 + spare_blocks, block_size, caching, MAX_MODEL_LEN, windows, chunk)
        self.num_swap_blocks = num_swap_blocks
        self.lookahead = lookahead
        self.random = random.Random(seed)
        self._make_scheduler(
            SchedulerConfig(
                max_num_batched_tokens=budget, max_num_seqs=min(seqs, budget), **options
            )
        )
        self.arrivals: dict[str, tuple[list[int], SamplingParams, dict[str, object]]] = {}
        self.expected: dict[str, list[int]] = {}
        self.seen: dict[str, list[int]] = {}
        self.done: dict[str, str] = {}
        self.count = 0

    def _make_scheduler(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(
            config,
            KVCacheManager(*self.cache, num_swap_blocks=self.num_swap_blocks),
            max_model_len=MAX_MODEL_LEN,
            clock=self.clock,
            num_lookahead_tokens=self.lookahead,
        )
        self.store: dict[tuple[int, int], int] = {}
        self.parked: dict[int, list[int | None]] = {}
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.follower = Follower()
        self.names: dict[int, str] = {}

    @rule(
        length=st.integers(1, 40),
        alphabet=st.integers(1, 2),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, "s"]),
        client=st.sampled_from(["", "x", "y"]),
    )
    def add(self, length, alphabet, max_tokens, priority, salt, client):  # type: ignore[no-untyped-def]
        self.count += 1
        name = f"r{self.count}"
        prompt = [(i * alphabet) % 7 for i in range(length)]
        params = SamplingParams(max_tokens=max_tokens, eos_token_ids=[EOS])
        self.expected[name] = reference(prompt, max_tokens)
        self.seen[name] = []
        more = {
            "arrival_time": self.count,
            "priority": priority,
            "cache_salt": salt,
            "client": client,
        }
        self.arrivals[name] = (prompt, params, more)
        self.scheduler.add_request(Request(name, prompt, params, **more))

    def _compute(self, batch):  # type: ignore[no-untyped-def]
        """A worker: writes token values into blocks, then reads whole contexts back."""
        for new in batch.scheduled_new_reqs:
            self.tables[new.req_id] = tuple(map(list, new.block_ids))
        written = [dst for _, dst in batch.swap_out]
        assert len(written) == len(set(written)), "a block of the tier is written twice in a step"
        for src, dst in batch.swap_out:
            self.parked[dst] = [self.store.get((src, i)) for i in range(self.block_size)]
        copied = [
            ((dst, i), self.store[(src, i)])
            for src, dst, count in batch.block_copies
            for i in range(count)
        ]
        self.store.update(copied)
        for src, dst in batch.swap_in:
            for i, value in enumerate(self.parked[src]):
                self.store[(dst, i)] = value
        cached = batch.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, ids in zip(self.tables[name], blocks, strict=bool(blocks)):
                table += ids
        for name, count in batch.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            tokens = request.all_token_ids + batch.scheduled_spec_tokens.get(name, [])
            end = request.num_computed_tokens
            for slots in self._slots(name, end - count, end):
                self.store.update(zip(slots, tokens[end - count : end], strict=True))
        sampled = {}
        for name in batch.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            if request.num_computed_tokens < request.num_tokens:
                continue
            context, end = request.all_token_ids, request.num_tokens
            for window, slots in zip(self.windows, self._slots(name, 0, end), strict=True):
                first = max(0, end - (window or end))
                seen = [self.store.get(slot, -1) for slot in slots[first:]]
                assert seen == context[first:], f"{name} reads stale KV in window {window}"
            sampled[name] = [next_token(context)]
            for draft in batch.scheduled_spec_tokens.get(name, []):
                if draft != sampled[name][-1]:
                    break
                sampled[name].append(next_token(context + sampled[name]))
        return sampled

    def _guess(self, sampled):  # type: ignore[no-untyped-def]
        """Drafts, some of them right."""
        drafts = {}
        for name, tokens in sampled.items():
            context = self.scheduler.requests[name].all_token_ids + tokens
            drafts[name] = []
            for _ in range(self.random.randint(0, self.lookahead)):
                right = self.random.random() < 0.7
                drafts[name].append(next_token(context + drafts[name]) if right else 8)
        return drafts

    def _slots(self, name: str, start: int, end: int) -> list[list[tuple[int, int]]]:
        """Block and offset of some positions, in each group."""
        size = self.block_size
        return [
            [(table[p // size], p % size) for p in range(start, end)] for table in self.tables[name]
        ]

    def _check_windows(self, batch, computed):  # type: ignore[no-untyped-def]
        """Exactly the blocks are held that a token of the step or a later one sees."""
        held = {name: self.scheduler.kv.get_block_ids(name) for name in batch.num_scheduled_tokens}
        for name, tables in held.items():
            if name not in computed:
                continue
            for window, table in zip(self.windows, tables, strict=True):
                seen = max(0, computed[name] - window + 1) if window else 0
                unseen = seen // self.block_size
                assert [block == 0 for block in table] == [
                    index < unseen for index in range(len(table))
                ], f"{name} holds {table} with {computed[name]} tokens computed, window {window}"

    def _apply(self, batch, result):  # type: ignore[no-untyped-def]
        result.draft_token_ids = self._guess(result.sampled_token_ids)
        outputs = self.scheduler.update(batch, result)
        stats = self.scheduler.make_stats(batch, result, outputs)
        self.names.update(stats.names)
        followed = self.follower.follow(stats.facts)
        restored = {self.names[number]: count for number, count in followed.items()}
        assert restored == batch.num_scheduled_tokens, "the records tell of another batch"
        for output in outputs:
            self.seen[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.done[output.request_id] = str(output.finish_reason)

    @rule(times=st.integers(1, 4))
    def step(self, times):  # type: ignore[no-untyped-def]
        for _ in range(times):
            had_requests = bool(self.scheduler.requests)
            computed = {r.request_id: r.num_computed_tokens for r in self.scheduler.running}
            batch = self.scheduler.schedule()
            self._check_windows(batch, computed)
            limit = self.scheduler.config.max_num_batched_tokens
            assert batch.total_num_scheduled_tokens <= limit
            # By priority, the only one served so far can be the one that has to give way.
            progress = batch.num_scheduled_tokens or batch.preempted_req_ids
            assert progress or not had_requests, "a step without progress"
            admitted = {new.req_id for new in batch.scheduled_new_reqs}
            assert not admitted & set(batch.preempted_req_ids), "admitted and evicted in one step"
            self.clock.advance(1.0)
            self._apply(batch, BatchResult(self._compute(batch)))

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def step_with_a_failure(self, data):  # type: ignore[no-untyped-def]
        batch = self.scheduler.schedule()
        if not batch.num_scheduled_tokens:
            return  # see step()
        culprit = data.draw(st.sampled_from(sorted(batch.num_scheduled_tokens)))
        sampled = self._compute(batch)
        sampled.pop(culprit, None)
        # whatever the culprit wrote cannot be trusted
        request = self.scheduler.requests[culprit]
        first = request.num_cached_tokens
        held = set(chain(*self.scheduler.kv.get_block_ids(culprit))) - {0}
        for slots in self._slots(culprit, first, request.num_computed_tokens):
            self.store.update({slot: -7 for slot in slots if slot[0] in held})
        self._apply(batch, BatchResult(sampled, failed={culprit: "injected"}))

    @precondition(lambda self: self.scheduler.running and self.num_swap_blocks)
    @rule(write=st.booleans())
    def step_with_a_broken_swap_space(self, write):  # type: ignore[no-untyped-def]
        batch = self.scheduler.schedule()
        result = BatchResult(self._compute(batch))
        if write:
            result.unwritten = [dst for _, dst in batch.swap_out]
        lost = set(result.unwritten) or {src for src, _ in batch.swap_in[:1]}
        result.unread = [dst for src, dst in batch.swap_in if src in lost]
        for parked in lost:
            self.parked[parked] = [-5] * self.block_size
        for block in result.unread:
            self.store.update({(block, i): -5 for i in range(self.block_size)})
        for name in result.sampled_token_ids:
            # What has left a request's window is another's by now, and the request does not see it.
            held = self.scheduler.kv.get_block_ids(name)
            if not set(chain(*held)).isdisjoint(result.unread):
                result.sampled_token_ids[name] = [8]
        self._apply(batch, result)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):  # type: ignore[no-untyped-def]
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.done[name] = "abort"

    @rule(
        budget=st.integers(4, 64),
        seqs=st.integers(1, 4),
        policy=POLICY,
        threshold=st.sampled_from([0, 3]),
    )
    def set_limits(self, budget, seqs, policy, threshold):  # type: ignore[no-untyped-def]
        before = {r.request_id for r in self.scheduler.waiting}
        self.scheduler.set_limits(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            scheduling_policy=policy,
            long_prefill_token_threshold=threshold,
        )
        assert {r.request_id for r in self.scheduler.waiting} == before

    @rule()
    def crash(self) -> None:
        """The core dies; a new one gets what was journalled."""
        unfinished = [name for name in self.arrivals if name in self.scheduler.requests]
        self._make_scheduler(self.scheduler.config)
        for name in unfinished:
            prompt, params, more = self.arrivals[name]
            outputs = list(self.seen[name])
            self.scheduler.add_request(
                Request(name, prompt, params, output_token_ids=outputs, **more)
            )

    @rule()
    def reset_prefix_cache(self) -> None:
        held = self.scheduler.kv.usage > 0
        assert self.scheduler.kv.reset_prefix_cache() is not held

    @rule()
    def memory_runs_short(self) -> None:
        """What nobody holds is forgotten; whoever runs does not notice."""
        pool, scheduler = self.scheduler.kv.block_pool, self.scheduler
        scheduler.begin()
        pool.drop_free_content()
        scheduler.commit()
        assert not [b for b in pool.blocks if b.ref_cnt == 0 and b.parent is not None]

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            for name, tokens in self.seen.items():
                assert tokens == self.expected[name][: len(tokens)], f"{name} got other tokens"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_requests:
                break
            self.step(1)
        assert not self.scheduler.requests, "requests never finished"
        for name, expected in self.expected.items():
            if self.done[name] in ("stop", "length"):
                assert self.seen[name] == expected
        self.scheduler.check_integrity()
        assert self.scheduler.kv.usage == 0.0


nightly = os.environ.get("QUIRE_TEST_NIGHTLY") == "1"
SchedulerMachine.TestCase.settings = settings(
    max_examples=2000 if nightly else 150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerMachine = SchedulerMachine.TestCase
