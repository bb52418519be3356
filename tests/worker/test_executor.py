"""The whole way with a tiny random Llama: start, steps under any schedule, stop."""

import random
import subprocess
import sys

import pytest

from quire.config import EngineConfig, ModelShape
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.errors import ConfigError, ModelLoadError, NotEnoughMemory
from quire.executor.base import EXECUTORS, ExecutorInfo, make_executor
from quire.params import SamplingParams
from quire.weights.dummy import TINY, random_checkpoint

VOCAB = TINY["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("model"))


def resolved(folder, **options):
    shape = ModelShape.from_folder(folder)
    options = {"model": str(folder), "device": "cpu", "max_model_len": 96, **options}
    config, _ = EngineConfig.from_options(**options).resolve(shape)
    return config, shape


class Engine:
    def __init__(self, folder, **options):
        self.config, shape = resolved(folder, **options)
        self.executor = make_executor(self.config, shape)
        self.progress = []
        self.info = self.executor.start(lambda *step: self.progress.append(step))
        self.caching = self.config.cache.enable_prefix_caching

    def run(self, requests):
        """Results by id: token ids, log-probabilities, prompt log-probabilities."""
        info = self.info
        kv = KVCacheManager(
            info.num_blocks, info.block_size, self.caching, info.max_model_len, info.kv_windows
        )
        scheduler = Scheduler(self.config.scheduler, kv, max_model_len=info.max_model_len)
        for key, (prompt, params) in requests.items():
            scheduler.add_request(Request(key, prompt, params))
        results = {key: ([], [], []) for key in requests}
        self.preemptions = self.hits = 0
        while scheduler.has_requests:
            batch = scheduler.schedule()
            self.preemptions += len(batch.preempted_req_ids)
            self.hits += batch.prefix_hits
            for out in scheduler.update(batch, self.executor.submit(batch).result()):
                assert out.error is None
                tokens, logprobs, prompt_logprobs = results[out.request_id]
                tokens += out.new_token_ids
                logprobs += out.new_logprobs or []
                prompt_logprobs += out.new_prompt_logprobs or []
        return results


def make_requests(rng, count):
    shared = [rng.randrange(VOCAB) for _ in range(32)]
    requests = {}
    for i in range(count):
        prompt = shared[: rng.choice([0, 16, 32])]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        requests[f"r{i}"] = prompt, SamplingParams(
            seed=i, max_tokens=rng.randint(2, 24), temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.9]), logprobs=2, prompt_logprobs=rng.choice([None, 1]),
            presence_penalty=rng.choice([0.0, 1.0]), eos_token_ids=[2],
        )  # fmt: skip
    return requests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_schedule_gives_the_same_bytes(folder, dtype):
    requests = make_requests(random.Random(3), 8)
    plain = Engine(folder, dtype=dtype, enable_prefix_caching=False)
    alone = {}
    for key, request in requests.items():
        alone |= plain.run({key: request})
    assert len({tuple(tokens) for tokens, _, _ in alone.values()}) == 8
    crowded = Engine(
        folder, dtype=dtype, max_num_batched_tokens=19, max_num_seqs=6, num_gpu_blocks_override=11
    )
    assert crowded.run(requests) == alone
    assert crowded.preemptions > 0
    assert crowded.hits > 0


def test_start_tells_what_became_of_the_configuration(folder):
    engine = Engine(folder, max_num_seqs=2)
    info = engine.info
    assert (info.num_blocks, info.block_size, info.max_model_len) == (13, 16, 96)
    assert (info.vocab_size, info.device, info.dtype) == (VOCAB, "cpu", "float32")
    assert info.kv_cache_bytes == 13 * 16 * 2 * 2 * 2 * 16 * 4
    stored = (folder / "model.safetensors").stat().st_size
    # What is kept, not what was read: outputs are filled up to whole tiles of 64.
    assert 0.9 * stored < info.weight_bytes < 1.25 * stored
    assert ExecutorInfo.from_dict(info.to_dict()) == info
    phases = [phase for phase, _, _ in engine.progress]
    assert list(dict.fromkeys(phases)) == ["Loading weights", "Allocating KV cache"]
    for phase in set(phases):
        done, total = [step[1:] for step in engine.progress if step[0] == phase][-1]
        assert done == total > 0


def test_shutdown_and_reset(folder):
    engine = Engine(folder)
    requests = make_requests(random.Random(1), 2)
    before = engine.run(requests)
    engine.executor.reset()
    assert engine.run(requests) == before
    engine.executor.shutdown()
    engine.executor.shutdown()


def test_too_little_memory_is_told_before_the_weights_are_read(folder):
    config, shape = resolved(folder, num_gpu_blocks_override=3)
    heard = []
    with pytest.raises(NotEnoughMemory, match="longest length that fits is 32"):
        make_executor(config, shape).start(lambda *step: heard.append(step))
    assert heard == []


def test_missing_weights(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    config, shape = resolved(tmp_path)
    with pytest.raises(ModelLoadError, match="safetensors"):
        make_executor(config, shape).start()


def test_executors_are_a_table():
    with pytest.raises(ConfigError, match="unknown executor 'inlin'; did you mean 'inline'"):
        EXECUTORS.get("inlin")


def test_importing_the_base_loads_no_torch():
    code = "import sys, quire.executor.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
