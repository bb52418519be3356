"""Sizing of the KV cache, and the limits it starts from."""

import logging
import logging.handlers

import pytest

from quire.config import CacheConfig
from quire.config.shape import LayerKV
from quire.errors import NotEnoughMemory
from quire.utils.host import ControlGroups, available_cores, available_memory
from quire.worker.memory import (
    MemoryFacts,
    check_weights,
    log_plan,
    plan_kv_cache,
    plan_without_cache,
)

GIB = 2**30
PER_BLOCK = 2 * 4 * 2 * 16 * 2 * 16  # K and V, layers, heads, dim, bytes, tokens


def plan(
    free=8 * GIB, weights=GIB, limit=4 * GIB, seqs=4, length=1000, windows=(None,) * 4, chunk=64,
    **cache,
):  # fmt: skip
    facts = MemoryFacts("cpu", free, weights, limit)
    layers = [LayerKV(2, 16, 16, window) for window in windows]
    return plan_kv_cache(
        layers, CacheConfig(**cache), facts, bytes_per_element=2, max_num_seqs=seqs,
        max_model_len=length, max_chunk_tokens=chunk,
    )  # fmt: skip


def test_no_more_than_the_requests_can_fill():
    result = plan(seqs=4, length=1000)
    assert result.num_blocks == 4 * 63 + 1
    assert result.bytes == 253 * PER_BLOCK
    assert result.max_concurrency == 4.0
    assert result.tokens == 4 * 63 * 16


def test_no_more_than_the_default_limit():
    assert plan(seqs=10**6).num_blocks == 4 * GIB // PER_BLOCK
    spare = int(8 * GIB * 0.92) - GIB
    assert plan(seqs=10**6, limit=None).num_blocks == spare // PER_BLOCK


def test_no_more_than_memory_allows():
    result = plan(free=2 * GIB, seqs=10**6, gpu_memory_utilization=0.75)
    assert result.num_blocks == GIB // 2 // PER_BLOCK


def test_an_explicit_size_wins():
    bytes_ = 300 * PER_BLOCK + 5
    assert plan(free=GIB + bytes_, kv_cache_memory_bytes=bytes_).num_blocks == 300
    both = plan(kv_cache_memory_bytes=bytes_, num_gpu_blocks_override=77)
    assert both.num_blocks == 77
    with pytest.raises(
        NotEnoughMemory, match=f"--kv-cache-memory-bytes {bytes_} .*give at most 7,"
    ):
        plan(free=GIB + 7, kv_cache_memory_bytes=bytes_)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpu_blocks_override": 63}, ["--num-gpu-blocks-override to at least 64"]),
        ({"kv_cache_memory_bytes": 63 * PER_BLOCK}, [f"at least {64 * PER_BLOCK}"]),
        (
            {"free": GIB + 63 * PER_BLOCK, "gpu_memory_utilization": 1.0},
            ["--gpu-memory-utilization", "QUIRE_CPU_KVCACHE_SPACE"],
        ),
    ],
)
def test_one_request_must_fit(options, words):
    with pytest.raises(NotEnoughMemory) as error:
        plan(length=993, **options)  # 63 blocks and the null block
    for word in [
        "--max-model-len 993", "(64 blocks)", "(63 blocks)", "set --max-model-len 992", *words,
    ]:  # fmt: skip
        assert word in str(error.value)
    assert plan(length=992, **options).max_concurrency == 1.0


def test_no_memory_at_all():
    with pytest.raises(NotEnoughMemory, match="longest length that fits is 0 tokens"):
        plan(free=0)


GEMMA = (32, 32, 32, None)
"""One layer in four keeps all tokens: four groups of one layer."""


def test_windows_make_room_for_more_requests():
    result = plan(seqs=4, length=1000, windows=GEMMA)
    windowed = -(-(31 + 64) // 16) + 1  # what a step of 64 tokens and the window before them need
    assert result.windows == (None, 32, 32, 32)
    assert result.blocks_per_request == 63 + 3 * windowed
    assert result.num_blocks == 4 * result.blocks_per_request + 1
    assert result.bytes == result.num_blocks * PER_BLOCK // 4
    assert result.max_concurrency == 4.0
    assert result.tokens == 4 * 1000
    kept = plan(seqs=4, length=1000, windows=GEMMA, disable_hybrid_kv_cache_manager=True)
    assert kept.windows == (None,)
    assert kept.bytes == 253 * PER_BLOCK
    assert result.bytes < 0.4 * kept.bytes


def test_a_chunk_longer_than_the_context_makes_windows_keep_all():
    assert plan(length=1000, windows=GEMMA, chunk=8192).blocks_per_request == 4 * 63


def test_the_longest_length_that_fits_counts_windows():
    needed = plan(length=1000, windows=GEMMA).blocks_per_request + 1
    with pytest.raises(NotEnoughMemory) as error:
        plan(length=1000, windows=GEMMA, num_gpu_blocks_override=needed - 10)
    longest = int(str(error.value).split("fits is ")[1].split()[0])
    plan(length=longest, windows=GEMMA, num_gpu_blocks_override=needed - 10)
    with pytest.raises(NotEnoughMemory):
        plan(length=longest + 1, windows=GEMMA, num_gpu_blocks_override=needed - 10)


def test_weights_that_do_not_fit_are_refused_before_reading():
    facts = MemoryFacts("cpu", 2 * GIB, 2 * GIB, None)
    with pytest.raises(NotEnoughMemory, match=r"2\.0 GiB.*1\.8 GiB.*utilization 0\.92"):
        check_weights(facts, CacheConfig())
    check_weights(facts, CacheConfig(gpu_memory_utilization=1.0))


@pytest.mark.parametrize(("device", "words"), [("cpu", ("CPU", "swap")), ("cuda", ("GPU", "CPU"))])
def test_the_log_lines(device, words):
    handler = logging.handlers.BufferingHandler(10)
    logger = logging.getLogger("quire.worker.memory")
    logger.addHandler(handler)
    package = logging.getLogger("quire")
    before = package.level
    package.setLevel(logging.INFO)  # the attribute alone leaves what loggers remember of it
    try:
        log_plan(plan(seqs=25, length=1008), device, 1008)
    finally:
        package.setLevel(before)
        logger.removeHandler(handler)
    assert [record.getMessage() for record in handler.buffer] == [
        f"{words[0]} KV cache size: 25,200 tokens",
        f"# {words[0]} blocks: 1576, # {words[1]} blocks: 0",
        "Maximum concurrency for 1,008 tokens per request: 25.00x",
    ]


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_DOT_", ".")).write_text(text)


class TestControlGroups:
    def groups(self, tmp_path, membership):
        (tmp_path / "self").write_text(membership)
        return ControlGroups(tmp_path / "fs", tmp_path / "self")

    def test_version_2_takes_the_tightest_of_all_levels(self, tmp_path):
        groups = self.groups(tmp_path, "0::/a/b\n")
        root = tmp_path / "fs"
        group(
            root / "a",
            memory_DOT_max="1000\n",
            memory_DOT_current="900\n",
            memory_DOT_stat="anon 1\ninactive_file 50\n",
            cpu_DOT_max="150000 100000\n",
        )
        group(
            root / "a/b",
            memory_DOT_max="max\n",
            memory_DOT_current="10\n",
            cpu_DOT_max="max 100000\n",
        )
        assert groups.memory_left() == 150
        assert groups.cpu_quota() == 1.5
        assert available_memory(groups) == 150
        assert 1 <= available_cores(groups) <= 2

    def test_version_1(self, tmp_path):
        groups = self.groups(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n")
        root = tmp_path / "fs"
        group(
            root / "memory/x",
            memory_DOT_limit_in_bytes="500",
            memory_DOT_usage_in_bytes="450",
            memory_DOT_stat="total_inactive_file 7\n",
        )
        group(root / "cpu/x", cpu_DOT_cfs_quota_us="50000", cpu_DOT_cfs_period_us="100000")
        assert groups.memory_left() == 57
        assert groups.cpu_quota() == 0.5
        assert available_cores(groups) == 1

    def test_no_limits(self, tmp_path):
        groups = self.groups(tmp_path, "0::/\n")
        group(tmp_path / "fs", cpu_DOT_cfs_quota_us="-1", cpu_DOT_cfs_period_us="100000")
        assert groups.memory_left() is None
        assert groups.cpu_quota() is None
        missing = ControlGroups(tmp_path / "none", tmp_path / "none")
        assert missing.memory_left() is None
        assert missing.cpu_quota() is None

    def test_this_machine(self):
        assert available_memory() > 0
        assert available_cores() >= 1


def test_books_without_a_cache_stay_small():
    wide = plan_without_cache(
        16, max_num_batched_tokens=2**31 - 1, max_num_seqs=4, max_model_len=160
    )
    assert wide.num_blocks == 4 * 10 + 4 + 10 + 1, "as many as may run, whole"
    widest = plan_without_cache(
        16, max_num_batched_tokens=2**31 - 1, max_num_seqs=2**20, max_model_len=160
    )
    assert widest.num_blocks == 2**20 + 10 + 1
