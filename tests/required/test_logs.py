"""Log lines that vLLM guides name (rows H), variables that switch them (rows D), flags (C)."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE
from quire.observability.metrics.log_line import Interval, render
from watched import PROMPT, Watched

LINE = re.compile(
    r"INFO .*Engine 000: Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: "
    r"[\d.]+ tokens/s, Running: \d+ reqs, Waiting: \d+ reqs,( Preemptions: \d+,)? "
    r"KV cache usage: [\d.]+%, Prefix cache hit rate: [\d.]+%.*, Swapped: 0 reqs, Pending: \d+ reqs"
)


def in_a_process(code: str, tmp_path: Path, **env: str) -> str:
    """What a script prints and logs."""
    import os

    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env={**os.environ, "TMPDIR": str(tmp_path), **env},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_c4_no_disable_log_stats(seen: Watched) -> None:
    """`--no-disable-log-stats` is taken, and statistics are on."""
    assert LINE.search(seen.log)


def test_d1_logging_level(seen: Watched) -> None:
    """`VLLM_LOGGING_LEVEL=DEBUG` shows debug lines of both processes."""
    assert re.search(r"\(EngineCore pid=\d+\) DEBUG", seen.log)
    assert re.search(r"\(APIServer pid=\d+\) DEBUG", seen.log)


def test_d2_basic_config(tmp_path: Path) -> None:
    """`logging.basicConfig(level=DEBUG)` before the import makes our logger print debug lines, and
    no line twice."""
    code = (
        "import logging; logging.basicConfig(level=logging.DEBUG)\n"
        "from quire.logger import get_logger\n"
        "get_logger('quire.x').debug('seen once')"
    )
    assert in_a_process(code, tmp_path).count("seen once") == 1


def test_d3_log_stats_interval(seen: Watched) -> None:
    """`VLLM_LOG_STATS_INTERVAL=1` gives a stat line every second instead of every ten."""
    times = re.findall(r"(\d\d:\d\d:\d\d) \[log_line\.py:\d+\] Engine 000", seen.log)
    assert len(times) >= 3 and len(set(times)) >= 3


def test_d4_log_batchsize_interval(seen: Watched) -> None:
    """`VLLM_LOG_BATCHSIZE_INTERVAL=1` lists (tokens, count, median ms), most frequent first."""
    lists = re.findall(r"\(batchsize, count, median_time\(ms\)\): (\[.*\])", seen.log)
    rows = re.findall(r"\((\d+), (\d+), ([\d.]+)\)", lists[-1])
    counts = [int(count) for _, count, _ in rows]
    assert counts == sorted(counts, reverse=True) and counts[-1] > 1
    assert "4" in [size for size, _, _ in rows], "four requests decode together"


def test_d5_trace_function(tmp_path: Path) -> None:
    """`VLLM_TRACE_FUNCTION=1` writes calls and returns into a file that only its owner can read."""
    code = (
        "from quire.utils.function_trace import trace_functions, stop_tracing\n"
        "from quire.utils.math import human_bytes\n"
        "import threading\n"
        "print(trace_functions('test')); human_bytes(1)\n"
        "t = threading.Thread(target=human_bytes, args=(1,)); t.start(); t.join()\n"
        "stop_tracing(); human_bytes(2)"
    )
    folder = Path(in_a_process(code, tmp_path).strip())
    assert folder.parent.parent.parent == tmp_path and folder.name == "quire-instance-test"
    files = sorted(folder.glob("*TRACE_FUNCTION_for_process_*_thread_*_at_*.log"))
    assert len(files) == 2 and all(f.stat().st_mode & 0o077 == 0 for f in files)
    for file in files:
        text = file.read_text()
        assert text.count("Call to human_bytes") == text.count("Return from human_bytes") == 1


def test_d5_trace_function_of_an_engine(tmp_path: Path) -> None:
    """The variable reaches the engine."""
    code = "from quire import LLM\ntry: LLM('nowhere')\nexcept Exception: pass"
    out = in_a_process(code, tmp_path, VLLM_TRACE_FUNCTION="1")
    assert "QUIRE_TRACE_FUNCTION: calls go to" in out
    assert list(tmp_path.glob("*/quire/quire-instance-*/*.log"))


def test_d6_log_model_inspection(seen: Watched) -> None:
    """`VLLM_LOG_MODEL_INSPECTION=true` prints the tree of the model."""
    assert re.search(r"LlamaForCausalLM: [\d,]+ parameters in \w+", seen.log)
    assert re.search(r"qkv_proj \(Linear\)", seen.log)


def test_d8_use_v1(seen: Watched) -> None:
    """`VLLM_USE_V1=1` is read; 0 is refused (tests/config/test_envs.py)."""
    assert "VLLM_USE_V1 is set, but" not in seen.log


def test_h1_stat_line(seen: Watched) -> None:
    """The stat line has vLLM's fields in vLLM's order, with work in them."""
    lines = LINE.findall(seen.log)
    assert lines
    rates = re.findall(r"generation throughput: ([\d.]+) tokens", seen.log)
    assert max(map(float, rates)) > 0


def test_h2_the_second_tier_has_its_own_words(seen: Watched) -> None:
    """On a CPU the main pool is not called `CPU KV cache usage`; on a GPU it is the GPU's."""
    assert "CPU KV cache usage" not in seen.log
    assert ", GPU KV cache usage: 0.0%" in render(Interval("cuda"))


def test_h3_swapped_and_pending(seen: Watched) -> None:
    """The words of older vLLM guides are at the end of the line."""
    assert re.search(r"Swapped: 0 reqs, Pending: \d+ reqs$", seen.log, re.M)


def test_h4_preemptions_show(seen: Watched) -> None:
    """The preemptions of all intervals add up to the counter."""
    shown = re.findall(r"Engine 000: .*Preemptions: (\d+)", seen.log)
    assert sum(map(int, shown)) == seen.value("vllm:num_preemptions_total") > 0


def test_h5_every_step(seen: Watched) -> None:
    """`--enable-logging-iteration-details` gives a line per step; idle intervals are at DEBUG."""
    steps = re.findall(
        r"Iteration\(\d+\): \d+ context requests, \d+ context tokens, \d+ generation requests, "
        r"\d+ generation tokens, iteration elapsed time: [\d.]+ ms, KV cache usage",
        seen.log,
    )
    assert len(steps) == seen.value("vllm:engine_steps_total")
    assert re.search(r"DEBUG .*Engine 000: Avg prompt throughput: 0\.0", seen.log)


def test_h6_h7_scheduler_lines(seen: Watched) -> None:
    """At DEBUG each step lists the requests that run, are new or were preempted, with their
    tokens."""
    assert re.search(
        r"\[SCHED\] step n_running=\d+ n_waiting=\d+ total_tokens=\d+ new=\[.*\] preempted=\[.*\]",
        seen.log,
    )
    assert re.search(r"\[SCHED\] num_scheduled_tokens = \{.*\d+\}", seen.log)
    assert re.search(r"preempted=\[[^\]]+\]", seen.log), "the preemptions are there by name"


def test_h8_kv_lines(seen: Watched) -> None:
    """At DEBUG each allocation gives its tokens, the length of the block table and the number of
    free blocks."""
    line = r"\[KV\] req=\S+ new_tokens=\d+ block_table_len=\d+ free_blocks=\d+"
    assert re.search(line, seen.log)


def test_h9_cache_hit_lines(seen: Watched) -> None:
    """At DEBUG each block found in the prefix cache is named."""
    assert re.search(r"\[CACHE HIT\] hash=[0-9a-f]+ block_id=\d+", seen.log)


def test_h10_b18_start_up_lines(seen: Watched) -> None:
    """The lines at start give the size of the KV cache in tokens, and how many requests of the
    longest length it holds."""
    assert re.search(r"KV cache size: \d[\d,]* tokens", seen.log)
    assert "# CPU blocks: 24, # swap blocks: 0" in seen.log
    assert re.search(r"Maximum concurrency for 256 tokens per request: [\d.]+x", seen.log)


def test_h12_standard_logging(seen: Watched) -> None:
    """Lines come from standard logging and name process, level, time, file and line."""
    assert isinstance(logging.getLogger("quire"), logging.Logger)
    head = r"^\(APIServer pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] "
    assert re.search(head, seen.log, re.M)


def test_request_lines(seen: Watched) -> None:
    """`--enable-log-requests`: arrival with parameters, and the abort; the prompt at DEBUG only."""
    assert re.search(r"INFO .*Received request \S+: params: SamplingParams\(", seen.log)
    assert re.search(r"INFO .*Aborted request\(s\) \S+\.", seen.log)
    lines = [line for line in seen.log.splitlines() if PROMPT in line]
    assert len(lines) >= 7 and all(" DEBUG " in line for line in lines)


@pytest.mark.parametrize("row", ["b1", "b2", "b9"])
def test_b1_b2_b9_what_one_sees(seen: Watched, row: str) -> None:
    """Decode steps compute a token per running request; a block per 16 tokens; a full cache
    preempts, and usage falls."""
    if row == "b1":
        decode = re.findall(
            r"Iteration\(\d+\): 0 context requests, 0 context tokens, (\d+) generation requests, "
            r"(\d+) generation tokens",
            seen.log,
        )
        # a request that is aborted while its step runs is given no token, and one that was
        # preempted computes again what it had generated
        assert sum(r == t for r, t in decode) >= 0.9 * len(decode) > 0
        again = sum(int(tokens) > int(requests) for requests, tokens in decode)
        assert again <= seen.value("vllm:num_preemptions_total")
    elif row == "b2":
        lengths: dict[str, list[int]] = {}
        for name, length in re.findall(r"\[KV\] req=(\S+) .*block_table_len=(\d+)", seen.log):
            lengths.setdefault(name, []).append(int(length))
        grows = [
            b - a for table in lengths.values() for a, b in zip(table, table[1:], strict=False)
        ]
        assert grows and all(grow in (0, 1) for grow in grows if grow >= 0)
    else:
        assert seen.value("vllm:kv_cache_usage_perc", peak=True) > 0.8
        assert seen.value("vllm:num_preemptions_total") >= 1
        assert seen.value("vllm:kv_cache_usage_perc") == 0
