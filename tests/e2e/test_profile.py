"""`LLM` runs in the caller's process, so profilers see the kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, Conflict

PARAMS = SamplingParams(temperature=0, max_tokens=2)
LONGER = SamplingParams(temperature=1, seed=3, max_tokens=40, logprobs=3, ignore_eos=True)


def test_start_and_stop_write_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM() as llm:
        monkeypatch.delenv("QUIRE_TORCH_PROFILER_DIR", raising=False)
        with pytest.raises(ConfigError, match="QUIRE_TORCH_PROFILER_DIR"):
            llm.start_profile()
        monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
        with pytest.raises(Conflict, match="start it first"):
            llm.stop_profile()
        llm.start_profile()
        with pytest.raises(Conflict, match="already running"):
            llm.start_profile()
        llm.generate("Hello", PARAMS, use_tqdm=False)
        llm.stop_profile()
    (trace,) = (tmp_path / "traces").glob("*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(e.get("name") == "quire::linear" for e in events)


def test_a_profiler_around_generate_sees_the_work() -> None:
    from torch.profiler import ProfilerActivity, profile

    with LLM() as llm, profile(activities=[ProfilerActivity.CPU]) as seen:
        llm.generate("Hello", PARAMS, use_tqdm=False)
    assert any(e.key == "quire::linear" for e in seen.key_averages())


def test_a_profiler_changes_no_bits() -> None:
    """While it records, layers are called one by one, so that their operations have names."""
    from torch.profiler import ProfilerActivity, profile

    def served(llm: LLM) -> list[object]:
        outputs = llm.generate(["Hello", "Once upon a time"], LONGER, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    with LLM() as llm:
        before = served(llm)
        with profile(activities=[ProfilerActivity.CPU]):
            during = served(llm)
        assert before == during == served(llm)
