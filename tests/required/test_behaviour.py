"""What guides to vLLM tell their readers to observe (rows B), with the model that ships."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.config.model import ModelConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.batch import BatchResult
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.stats import StepStats
from quire.observability.explain.diagnosis import diagnose
from quire.observability.explain.metric_alerts import metric_figures, parse_metrics
from quire.observability.explain.record_signals import read_signals
from quire.utils.timing import ManualClock
from record_rig import Rig
from watched import Watched

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


class Steps:
    """A scheduler whose every decision is seen; the worker always answers 7."""

    def __init__(
        self, blocks: int = 1000, budget: int = 2048, swap: int = 0, **limits: object
    ) -> None:
        config = SchedulerConfig(max_num_batched_tokens=budget, **limits)  # type: ignore[arg-type]
        self.kv = KVCacheManager(blocks, 16, True, 8192, num_swap_blocks=swap)
        self.scheduler = Scheduler(config, self.kv, max_model_len=8192, clock=ManualClock())
        self.swapped_in: list[str] = []

    @property
    def free(self) -> int:
        return self.kv.block_pool.get_num_free_blocks()

    def add(self, name: str, prompt: list[int], max_tokens: int = 50, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, prompt, params, priority=priority)
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """Tokens by request."""
        batch = self.scheduler.schedule()
        requests = self.scheduler.requests
        done = [i for i in batch.num_scheduled_tokens if _is_due(requests[i])]
        self.scheduler.update(batch, BatchResult({i: [7] for i in done}))
        self.scheduler.check_integrity()
        if batch.swap_in:
            self.swapped_in += [new.req_id for new in batch.scheduled_new_reqs]
        return batch.num_scheduled_tokens

    def order(self) -> list[str]:
        """Run to the end; names in the order of their ends."""
        ended: list[str] = []
        for _ in range(5000):
            before = list(self.scheduler.requests)
            if not before:
                return ended
            self.step()
            ended += [name for name in before if name not in self.scheduler.requests]
        raise AssertionError("requests never finished")


def _is_due(request: Request) -> bool:
    return request.num_computed_tokens == request.num_tokens


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(disable_log_stats=False) as made:
        yield made


def cached(llm: LLM, prompt: str) -> tuple[int, int]:
    """Tokens of a prompt, and how many of them were cached."""
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids is not None and output.num_cached_tokens is not None
    return len(output.prompt_token_ids), output.num_cached_tokens


def run(llm: LLM, prompts: list[str], tokens: int) -> list[StepStats]:
    """The steps of prompts that are given together."""
    engine, seen = llm.llm_engine, []
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"run{number}", prompt, params)
    while engine.has_unfinished_requests:
        outputs, stats = engine.core.step()
        engine.frontend.output.process(outputs, engine.clock.now())
        seen.append(stats)
    return seen


# ---- the prefix cache -------------------------------------------------------------------------


def test_b3_three_identical_prompts(llm: LLM) -> None:
    """Of three equal prompts, the second and third hit the prefix cache, even if the prompt is
    hardly longer than one block."""
    llm.reset_prefix_cache()
    prompt = "System: be concise. User: hi"
    together = llm.generate([prompt] * 3, GREEDY, use_tqdm=False)
    hits = [output.num_cached_tokens for output in together]
    assert hits[0] == 0 and hits[1] == hits[2] == 16
    llm.reset_prefix_cache()
    hits = [cached(llm, prompt)[1] for _ in range(3)]
    assert hits[0] == 0 and min(hits[1:]) >= 16
    short = "Hello there, who are you?"
    count, _ = cached(llm, short)
    assert count < 16 and cached(llm, short) == (count, count - 1), "less than a block hits, too"


def test_b4_a_hit_ends_before_the_last_token() -> None:
    """A prompt of N full blocks finds N - 1 of them whole, and all but the last token of the last
    one."""
    steps = Steps()
    steps.add("first", list(range(64)), 1)
    steps.step()
    again = steps.add("again", list(range(64)), 1)
    assert steps.step() == {"again": 1}
    assert again.num_cached_tokens == 63
    partial = steps.add("partial", list(range(70)), 1)
    assert steps.step() == {"partial": 6} and partial.num_cached_tokens == 64


def test_b5_hit_blocks_are_shared() -> None:
    """Blocks found in the cache cost no free block while a request holds them; those of a finished
    request leave the free queue."""
    steps = Steps()
    steps.add("first", list(range(64)))
    steps.step()
    free = steps.free
    second = steps.add("second", list(range(64)))
    steps.step()
    shared = steps.kv.get_block_ids("first")[0][:3]
    assert steps.kv.get_block_ids("second")[0][:3] == shared
    assert all(steps.kv.block_pool.blocks[b].ref_cnt == 2 for b in shared)
    assert free - steps.free == 1 + 1, "its own last block, and the first one's next"
    steps.order()
    free = steps.free
    steps.add("third", list(range(64)))
    steps.step()
    assert steps.free == free - 4 and second.num_cached_tokens == 48 + 15
    assert steps.kv.get_block_ids("third")[0][:3] == shared, "nothing was computed again"


def test_b6_everything_is_free_after_the_end() -> None:
    """All blocks of a finished request are free again, and can still be found."""
    steps = Steps(blocks=20)
    steps.add("first", list(range(64)), 20)
    steps.step()
    assert steps.free == 19 - 4
    steps.order()
    assert steps.free == 19
    again = steps.add("again", list(range(64)), 1)
    steps.step()
    assert again.num_cached_tokens == 63


def test_b15_ten_equal_prompts_with_and_without_the_cache() -> None:
    """Of ten equal prompts only the first is computed when the cache is on, so the first tokens of
    the others come after a step of one token instead of a whole prompt."""
    prompt = "The capital of France is Paris. " * 60
    for caching in (True, False):
        computed = []
        with LLM(enable_prefix_caching=caching) as llm:
            for _ in range(10):
                computed.append(run(llm, [prompt], 2)[0].num_prompt_tokens)
        assert computed[0] > 400
        assert computed[1:] == [1 if caching else computed[0]] * 9


# ---- the scheduler ----------------------------------------------------------------------------


def test_b7_chunked_prefill_example() -> None:
    """With a budget of 2048, prompts of 50 and 5000 tokens take the steps {50, 1998}, {1, 2047},
    {1, 955}; in the other order the long prompt uses up the steps."""
    short, long = [1] * 50, [2] * 5000
    steps = Steps()
    steps.add("short", short)
    steps.add("long", long)
    assert [steps.step() for _ in range(3)] == [
        {"short": 50, "long": 1998},
        {"short": 1, "long": 2047},
        {"short": 1, "long": 955},
    ]
    steps = Steps()
    steps.add("long", long)
    steps.add("short", short)
    assert [steps.step() for _ in range(3)] == [
        {"long": 2048},
        {"long": 2048},
        {"long": 904, "short": 50},
    ]
    steps = Steps(long_prefill_token_threshold=1000)
    steps.add("long", long)
    steps.add("short", short)
    assert steps.step() == {"long": 1000, "short": 50}, "a threshold lets others in"


def test_b8_without_chunks() -> None:
    """Without chunked prefill both prompts run in one step of 5050 tokens; a prompt that does not
    fit waits until it fits whole."""
    steps = Steps(budget=8192, enable_chunked_prefill=False)
    steps.add("short", [1] * 50)
    steps.add("long", [2] * 5000)
    assert steps.step() == {"short": 50, "long": 5000}
    steps = Steps(budget=8192, enable_chunked_prefill=False)
    for name in "ab":
        steps.add(name, [ord(name)] * 5000)
    assert steps.step() == {"a": 5000}
    assert steps.step() == {"a": 1, "b": 5000}


def test_b10_priority_alone_pushes_nobody_out() -> None:
    """An urgent request takes the place of a running one only with `--priority-preemption`."""
    for preempts in (False, True):
        steps = Steps(
            max_num_seqs=1, scheduling_policy="priority", priority_preemption=preempts
        )  # fmt: skip
        running = steps.add("running", [1] * 20, priority=5)
        steps.step()
        steps.add("urgent", [2] * 20, priority=0)
        steps.step()
        assert running.num_preemptions == int(preempts)
        assert steps.order() == (["urgent", "running"] if preempts else ["running", "urgent"])


def test_b11_less_preemption() -> None:
    """Requests that preempt one another do so rarely with a watermark, or when only whole prompts
    are admitted."""
    counts = {}
    for name, limits in {
        "bare": {"scheduler_reserve_full_isl": False},
        "whole prompts": {},
        "watermark": {"watermark": 0.4},
    }.items():
        steps = Steps(blocks=40, budget=64, **limits)
        requests = [steps.add(f"r{i}", [i] * 150, 60) for i in range(8)]
        steps.order()
        counts[name] = sum(request.num_preemptions for request in requests)
    assert counts["bare"] > counts["whole prompts"] > counts["watermark"]


def test_b12_who_goes_first() -> None:
    """`fcfs` serves running requests first; with `prefill_first` prompts go before decodes."""
    for policy, expected in (("fcfs", {"old": 1, "new": 63}), ("prefill_first", {"new": 64})):
        steps = Steps(budget=64, scheduling_policy=policy)
        steps.add("old", [1] * 20)
        steps.step()
        steps.add("new", [2] * 500)
        assert steps.step() == expected, policy


@pytest.mark.parametrize(
    "policy, expected", [("fcfs", "abc"), ("ljf", "cab"), ("sjf", "bac")], ids=str
)
def test_b13_policies(policy: str, expected: str) -> None:
    """Longest job first can be chosen as a policy, and so can shortest job first."""
    steps = Steps(max_num_seqs=1, scheduling_policy=policy)
    for name, length in (("a", 40), ("b", 20), ("c", 60)):
        steps.add(name, [ord(name)] * length, 2)
    assert "".join(steps.order()) == expected


def test_b14_joining_a_running_batch() -> None:
    """A request that arrives while others decode is in the very next step."""
    steps = Steps()
    for name in "ab":
        steps.add(name, [ord(name)] * 20)
    for _ in range(5):
        steps.step()
    steps.add("c", [3] * 20)
    assert steps.step() == {"a": 1, "b": 1, "c": 20}
    assert steps.step() == {"a": 1, "b": 1, "c": 1}


def test_b16_the_token_budget() -> None:
    """A smaller budget makes the longest gap between tokens shorter and the prompt's first token
    later."""
    gaps, firsts = {}, {}
    for budget in (1024, 4096, 16384):
        rig = Rig(budget=budget)
        chat = rig.add("chat", 20, 60)
        rig.step()
        rig.add("long", 8000, 2)
        rig.drain()
        gaps[budget] = max(rig.worked[chat][1:])
        ttft = rig.explain("long").ttft
        assert ttft is not None
        firsts[budget] = ttft
    assert gaps[1024] < gaps[4096] < gaps[16384]
    assert firsts[1024] > firsts[4096] > firsts[16384]


def test_b27_swap_in() -> None:
    """A request that was swapped out comes back with all it had computed."""
    steps = Steps(blocks=6, swap=20, preemption_mode="swap")
    steps.add("old", [1] * 31, 30)
    young = steps.add("young", [2] * 31, 30)
    while not young.num_preemptions:
        steps.step()
    assert steps.kv.swap is not None and steps.kv.swap.num_swapped == 1
    computed = steps.kv.swap.num_tokens_of("young")
    while "young" not in steps.swapped_in:
        tokens = steps.step()
    assert computed > 31 and tokens == {"young": young.num_tokens - 1 - computed}


# ---- memory and load --------------------------------------------------------------------------


def test_b18_c9_half_the_width_twice_the_blocks() -> None:
    """KV entries of half the width double the number of blocks, those of `--kv-cache-dtype fp8`
    too."""
    blocks = {}
    for dtype, kept in (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")):
        memory = 32 << 20
        with LLM(dtype=dtype, kv_cache_dtype=kept, kv_cache_memory_bytes=memory) as llm:
            blocks[dtype, kept] = llm.llm_engine.core.info.num_blocks
    assert abs(blocks["bfloat16", "auto"] - 2 * blocks["float32", "auto"]) <= 2
    assert abs(blocks["bfloat16", "fp8"] - 2 * blocks["bfloat16", "auto"]) <= 2


def test_b19_many_prompts_at_once(llm: LLM) -> None:
    """A hundred prompts together take a fraction of the steps, with more tokens in each and more KV
    in use. `quire bench engine` measures the tokens per second."""
    prompts = [f"Request {number}: tell me a story." for number in range(100)]
    together = run(llm, prompts, 8)
    alone = run(llm, prompts[:1], 8)
    assert len(together) <= len(alone) + 2, "each step computes a token for all"

    tokens = [sum(s.num_generation_tokens for s in steps) for steps in (alone, together)]
    assert tokens == [8, 800]
    usage = [max(s.kv_cache_usage for s in steps) for steps in (alone, together)]
    assert usage[1] > 50 * usage[0] > 0


def test_b20_concurrency_limit() -> None:
    """As many requests run as their lengths fit into the KV cache."""
    steps = Steps(blocks=101, budget=8192)
    for number in range(100):
        steps.add(f"r{number}", [number] * 60, 4)
    steps.step()
    assert len(steps.scheduler.running) == 100 * 16 // 64 == 25


def test_b17_enforce_eager(llm: LLM) -> None:
    """`--enforce-eager` is accepted; on a CPU nothing is compiled, so the bytes are the same."""
    prompt, params = "The capital of France is", SamplingParams(temperature=0, max_tokens=20)
    with LLM(enforce_eager=True) as eager:
        (ours,) = eager.generate(prompt, params, use_tqdm=False)
    (other,) = llm.generate(prompt, params, use_tqdm=False)
    assert ours.outputs[0].token_ids == other.outputs[0].token_ids


def test_b22_wrong_output_is_compared_with_transformers() -> None:
    """Wrong output can be bisected against another implementation: transformers gives the same
    tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt = "The capital of France is"
    with LLM(dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        (ours,) = llm.generate(prompt, params, use_tqdm=False)
        ids = torch.tensor([ours.prompt_token_ids])
    theirs = AutoModelForCausalLM.from_pretrained(ModelConfig().folder, dtype=torch.float32)
    with torch.inference_mode():
        for _ in range(16):
            token = theirs(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, token.view(1, 1)], 1)
    assert ids[0, -16:].tolist() == list(ours.outputs[0].token_ids)


# ---- on call ----------------------------------------------------------------------------------


def test_b21_the_on_call_trio(seen: Watched) -> None:
    """One scrape gives time to first token, waiting requests and KV usage; explanation, trace and
    profiler then show the cause."""
    found = metric_figures({}, parse_metrics(seen.text), 1.0)
    assert found["ttft_metric_p95"] > 0
    assert (found["waiting"], found["kv_usage"]) == (0, 0), "the load is over"
    assert seen.value("vllm:num_requests_waiting", peak=True) >= 1
    assert re.search(r"Engine 000: Avg prompt throughput", seen.log), "first the stat line"
    assert set(seen.doors.values()) <= {200, 400} and len(seen.doors) == 4, seen.doors


def findings(rig: Rig) -> dict[str, str]:
    """What the doctor finds, and what it wants changed."""
    signals = read_signals(rig.records.snapshot(), rig.config, 1e9, rig.clock.now())
    return {finding.name: finding.remedy for finding in diagnose(signals)}


def test_b25_saturation() -> None:
    """A server that runs `--max-num-seqs` requests and has more than ten waiting is saturated."""
    rig = Rig(seqs=4)
    for number in range(40):
        rig.add(f"r{number}", 20, 30)
    rig.drain()
    found = findings(rig)
    assert list(found)[0] == "too_few_seats" and "--max-num-seqs" in found["too_few_seats"]
    rig = Rig(seqs=64)
    for number in range(40):
        rig.add(f"r{number}", 20, 30)
    rig.drain()
    assert "too_few_seats" not in findings(rig)


def test_b26_what_latencies_mean() -> None:
    """High TTFT with normal TPOT means queueing; spikes of TPOT mean long prompts in the same
    steps, for which to lower `--max-num-batched-tokens`."""

    def load(budget: int) -> Rig:
        rig = Rig(budget=budget)
        for number in range(8):
            rig.add(f"chat{number}", 20, 300)
        for number in range(6):
            for _ in range(40):
                rig.step()
            rig.add(f"long{number}", 2000, 2)
        rig.drain()
        return rig

    spikes = findings(load(2048))
    assert "--max-num-batched-tokens" in spikes["long_prefills_stall_decodes"]
    assert "long_prefills_stall_decodes" not in findings(load(64))


def test_b24_j5_processes_have_names(seen: Watched) -> None:
    """The engine's process can be found by its name, for py-spy, gdb and top."""
    assert any("quire::EngineCore" in title for title in seen.titles), seen.titles
    assert any("serve" in title for title in seen.titles)


def test_j8_prefill_is_cheap_per_token(llm: LLM) -> None:
    """A prompt token costs a fraction of a decoded one, because the weights are read once for many
    of them. Measured in processor time of this process, the least of a few steps, so other
    processes do not count.
    """
    llm.reset_prefix_cache()
    prompts = [f"Once upon a time there was a king {number}. " * 40 for number in range(3)]
    steps = [step for prompt in prompts for step in timed(llm, prompt, 8)]
    prefill = [seconds / tokens for tokens, seconds in steps if tokens > 200]
    decode = [seconds for tokens, seconds in steps if tokens == 1]
    assert (len(prefill), len(decode)) == (3, 21)
    assert min(prefill) < min(decode) / 3


def timed(llm: LLM, prompt: str, count: int) -> list[tuple[int, float]]:
    """Tokens and processor seconds of a prompt's step, and of the decodes after it."""
    engine, found = llm.llm_engine, []
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    engine.add_request("timed", prompt, params)
    while engine.has_unfinished_requests:
        start = time.process_time()
        outputs, stats = engine.core.step()
        found.append((stats.num_scheduled_tokens, time.process_time() - start))
        engine.frontend.output.process(outputs, engine.clock.now())
    return found
