"""Random mixes of requests against each alone, bit for bit: all policies, pools that are too small,
swapping, windows, aborts, limits that change meanwhile, every size of chunks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import wishes
from fuzz_kit import cases
from mixed import facts
from plain_text import FOLDER
from quire import LLM, RequestOutput, SamplingParams
from quire.config.kv_groups import blocks_per_request
from quire.config.scheduler import POLICIES
from quire.core.batch import ScheduledBatch
from quire.errors import InvalidRequest
from thinking_model import OPEN, make_thinking_model

CONTEXT = 256
CROWDS = (24, 24, 24, 24, 100)
MOST = 48
"""Tokens of the longest output."""
WINDOWED = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": wishes.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2047,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Options that load each model: the embedded one, one whose layers see 24 tokens, and one
    that reasons."""
    folder = tmp_path_factory.mktemp("windowed")
    (folder / "config.json").write_text(json.dumps(WINDOWED), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder / name)
    reasons = make_thinking_model(tmp_path_factory.mktemp("thinking") / "model")
    windowed = {"model": str(folder), "load_format": "dummy"}
    return {"demo": {}, "windowed": windowed, "thinking": {"model": str(reasons)}}


@pytest.fixture(scope="module")
def alone(models: dict[str, dict[str, Any]]) -> Iterator[Callable[..., RequestOutput]]:
    """What a request gives alone: nothing to share, nobody to meet, one chunk."""
    engines: dict[str, LLM] = {}

    def ask(model: str, prompt: list[int], wish: dict[str, Any]) -> RequestOutput:
        if model not in engines:
            engines[model] = LLM(
                **models[model], max_model_len=CONTEXT, enable_prefix_caching=False
            )
        params = SamplingParams(**wish)
        return engines[model].generate([prompt], params, use_tqdm=False)[0]

    yield ask
    for llm in engines.values():
        llm.shutdown()


def random_options(rng: random.Random, model: str, folder: Path) -> dict[str, Any]:
    """Of an engine: limits, policy, memory."""
    budget = rng.choice([8, 16, 33, 64, 100, 300, 2048])
    options: dict[str, Any] = {
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(budget, rng.choice([1, 3, 8, 20, 64])),
        "block_size": rng.choice([8, 8, 16, 32]),
        "enable_prefix_caching": rng.random() < 0.8,
        "scheduling_policy": rng.choice(list(POLICIES)),
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "long_prefill_token_threshold": rng.choice([0, 0, 5, 40]),
        "long_prefill_token_threshold_adaptive": rng.random() < 0.3,
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "scheduler_delay_factor": rng.choice([0.0, 0.0, 0.5]),
    }
    if options["scheduling_policy"] == "priority":
        options["priority_preemption"] = rng.random() < 0.7
    if rng.random() < 0.25:
        options["disable_hybrid_kv_cache_manager"] = True
    if rng.random() < 0.75:
        one_group = model == "demo" or "disable_hybrid_kv_cache_manager" in options
        windows = [None] if one_group else [None] + 5 * [WINDOWED["sliding_window"]]
        least = 1 + blocks_per_request(windows, CONTEXT, budget, options["block_size"])
        options["num_gpu_blocks_override"] = int(least * rng.choice([1.0, 1.0, 1.15, 1.5]))
    if rng.random() < 0.5:
        options["swap_space"] = rng.choice([0.0005, 0.02])
        options["preemption_mode"] = rng.choice(["auto", "swap", "recompute"])
        if rng.random() < 0.4:
            options["swap_dir"] = str(folder)
    return options


def random_prompt(rng: random.Random, known: list[list[int]]) -> list[int]:
    """Often one that was there, or its beginning with another end."""
    if known and rng.random() < 0.6:
        old = rng.choice(known)
        cut = rng.choice([len(old), len(old), rng.randint(1, len(old))])
        more = rng.choice([0, 0, 1, 7, 30])
        return (old[:cut] + [rng.randrange(wishes.VOCAB) for _ in range(more)])[:190]
    noise = [rng.randrange(wishes.VOCAB) for _ in range(rng.choice([0, 0, 60, 150]))]
    return wishes.prompt(rng, 40) + noise


def random_limits(rng: random.Random) -> dict[str, Any]:
    """A change of limits that is allowed."""
    budget = rng.choice([16, 40, 200, 3000])
    limits: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(budget, rng.choice([1, 4, 16, 80])),
    }
    if rng.random() < 0.5:
        limits["scheduling_policy"] = rng.choice(list(POLICIES))
    if rng.random() < 0.5:
        limits["long_prefill_token_threshold"] = rng.choice([0, 3, 50])
    return limits


class Mix:
    """One engine with requests that come and go."""

    def __init__(self, rng: random.Random, llm: LLM, reasons: bool = False) -> None:
        self.rng, self.engine, self.reasons = rng, llm.llm_engine, reasons
        self.count = rng.choice(CROWDS)
        executor = self.engine.core.executor
        executor.submit = self._watch(executor.submit)  # type: ignore[method-assign]
        self.asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()
        self.preemptions = 0

    def _watch(self, submit: Callable[[ScheduledBatch], Any]) -> Callable[[ScheduledBatch], Any]:
        """Every step: a block is filled once before the model runs."""

        def watched(batch: ScheduledBatch) -> Any:
            filled = [block for _, block in batch.swap_in] + [c[1] for c in batch.block_copies]
            assert len(filled) == len(set(filled)), "a block is filled twice in one step"
            return submit(batch)

        return watched

    def run(self) -> None:
        """Until all requests have ended."""
        rng = self.rng
        pace = rng.choice([0.2, 1.0, 5.0, 30.0])
        while len(self.asked) < self.count or self.engine.has_unfinished_requests:
            arrivals = int(pace) or int(rng.random() < pace)
            for _ in range(min(arrivals, self.count - len(self.asked))):
                self.add()
            if rng.random() < 0.05:
                self.disturb()
            for output in self.engine.step():
                self.last[output.request_id] = output
            if rng.random() < 0.05:
                self.engine.core.scheduler.check_integrity()

    def add(self) -> None:
        """One more request."""
        rng = self.rng
        prompt = random_prompt(rng, [prompt for prompt, _ in self.asked.values()])
        wish = wishes.params(rng, MOST)
        if rng.random() < 0.5:
            wish["ignore_eos"] = True
        if self.reasons and rng.random() < 0.7:
            wish["thinking_token_budget"] = rng.choice([0, 1, 5, 20])
            prompt = [*prompt, OPEN] if rng.random() < 0.7 else prompt
            if rng.random() < 0.5:
                wish["logprobs"] = None  # then what is forced comes at once
        wish.setdefault("logprobs", 1)  # bits that move show first in these
        if rng.random() < 0.2:
            del wish["seed"]
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = prompt, wish
        self.engine.add_request(
            request_id,
            {"prompt_token_ids": prompt},
            SamplingParams(**wish),
            priority=rng.choice([-1, 0, 0, 5]),
            cache_salt=rng.choice([None, None, None, "salt"]),
            client=rng.choice(["", "a", "b"]),
        )

    def disturb(self) -> None:
        """Something that must change no byte of those who stay."""
        rng, core = self.rng, self.engine.core
        kind = rng.randrange(5)
        if kind == 0:
            core.call("set_limits", random_limits(rng))
        elif kind == 1:
            some = [i for i in core.scheduler.requests if rng.random() < 0.3]
            core.call("set_limits", {"priorities": {i: rng.randint(-3, 3) for i in some}})
        elif kind == 2:
            core.call("reset_prefix_cache", {})
        elif kind == 3:
            core.call("explain_prefix", {"prompt_token_ids": wishes.prompt(rng)})
        elif self.asked:
            gone = rng.choice(list(self.asked))
            self.engine.abort_request([gone])
            if gone not in self.last or not self.last[gone].finished:
                self.aborted.add(gone)


def check_beginning(got: RequestOutput, whole: RequestOutput) -> None:
    """What an aborted request had got is how it would have begun."""
    for one, full in zip(got.outputs, whole.outputs, strict=True):
        size = len(one.token_ids)
        assert one.token_ids == full.token_ids[:size]
        assert (one.logprobs or [])[:size] == (full.logprobs or [])[:size]
        assert full.text.startswith(one.text)


@cases(10)
def test_together_as_alone(
    rng: random.Random,
    models: dict[str, dict[str, Any]],
    alone: Callable[..., RequestOutput],
    tmp_path: Path,
) -> None:
    model = rng.choice(["demo", "demo", "windowed", "thinking"])
    options = random_options(rng, model, tmp_path)
    with LLM(**models[model], **options) as llm:
        mix = Mix(rng, llm, model == "thinking")
        mix.run()
        scheduler = llm.llm_engine.core.scheduler
        scheduler.check_integrity()
        llm.llm_engine.frontend.output.check_integrity()
        assert scheduler.kv.usage == 0.0
    for request_id, (prompt, wish) in mix.asked.items():
        got = mix.last.get(request_id)
        where = f"{request_id} of a {model} under {options}: {wish}"
        if got is None:
            assert request_id in mix.aborted, where
            continue
        whole = alone(model, prompt, wish | {"seed": got.seed})
        if request_id in mix.aborted:
            check_beginning(got, whole)
        else:
            assert facts(got) == facts(whole), where
            assert (got.error, got.seed) == (whole.error, whole.seed), where


def threads_work(rng: random.Random) -> list[tuple[list[list[int]], list[dict[str, Any]]]]:
    """What one thread asks, call after call."""
    calls = []
    for _ in range(rng.randint(1, 4)):
        prompts = [random_prompt(rng, []) for _ in range(rng.randint(1, 3))]
        calls.append((prompts, [wishes.params(rng, 30) for _ in prompts]))
        if rng.random() < 0.2:
            prompts[rng.randrange(len(prompts))] = [wishes.VOCAB]  # refused: not the others' fault
    return calls


@cases(3)
def test_threads_that_share_one_llm_get_what_each_gets_alone(
    rng: random.Random, alone: Callable[..., RequestOutput], tmp_path: Path
) -> None:
    works = [threads_work(rng) for _ in range(rng.randint(2, 6))]
    options = random_options(rng, "demo", tmp_path)
    with LLM(**options) as llm, ThreadPoolExecutor(len(works)) as pool:

        def ask(prompts: list[list[int]], wanted: list[dict[str, Any]]) -> list[Any]:
            try:
                params = [SamplingParams(**wish) for wish in wanted]
                return [facts(o) for o in llm.generate(prompts, params, use_tqdm=False)]
            except InvalidRequest:
                return []

        got = list(pool.map(lambda work: [ask(*call) for call in work], works, timeout=300))
        scheduler = llm.llm_engine.core.scheduler
        scheduler.check_integrity()
        assert not scheduler.requests and scheduler.kv.usage == 0.0
    for work, answers in zip(works, got, strict=True):
        for (prompts, wanted), answer in zip(work, answers, strict=True):
            pairs = zip(prompts, wanted, strict=True)
            if [wishes.VOCAB] in prompts:
                assert answer == []
            else:
                assert answer == [facts(alone("demo", *pair)) for pair in pairs], options
