"""Loading needs hardly more memory than the packed weights and the KV cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE
from quire.config.model import EMBEDDED_FOLDER
from quire.kernels import compiled
from quire.weights.dummy import random_checkpoint

MIB = 2**20
SIZES = {
    # 72 M parameters: beside them the rest of the process is small
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "torch_dtype": "bfloat16",
}
MEASURE = """
import json, re, sys
import quire.worker.worker, quire.executor.inline
from quire import LLM, SamplingParams

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

before = peak()
llm = LLM(sys.argv[1], num_gpu_blocks_override=200)
loaded = peak()
llm.generate({"prompt_token_ids": [5] * 400}, SamplingParams(max_tokens=2), use_tqdm=False)
info = llm.llm_engine.core.executor._worker
print()
print(json.dumps([before, loaded, peak(), info.weight_bytes, info.plan.bytes]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are read from /proc")
@pytest.mark.skipif(compiled.lib is None, reason="the native kernels are not built")
@pytest.mark.parametrize("shards", [1, 3])
def test_peak_while_loading(tmp_path: Path, shards: int) -> None:
    random_checkpoint(tmp_path, SIZES, shards=shards)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / "quire-demo" / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "QUIRE_KERNELS": "native"},
    )
    assert done.returncode == 0, done.stderr
    before, loaded, served, weights, kv = json.loads(done.stdout.splitlines()[-1])
    assert weights > 128 * MIB, "small weights would show nothing"
    assert loaded - before <= 1.15 * weights + kv, (before, loaded, weights, kv)
    assert served - before <= 1.15 * weights + kv + 64 * MIB, "a step's activations are small"
