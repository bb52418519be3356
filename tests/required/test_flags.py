"""Flags that vLLM guides name (rows C), and variables of other software (D7, D9, D12, D13)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cli.serve import build_parser
from quire.config.cli import engine_config, server_config
from quire.errors import ConfigError
from watched import FOREIGN, Watched

COMMAND = """facebook/opt-125m --port 8000 --enforce-eager --no-disable-log-stats
    --max-num-batched-tokens 8k --max-num-seqs 256 --max-model-len auto
    --gpu-memory-utilization 0.9 --enable-chunked-prefill --enable-prefix-caching
    --scheduler-delay-factor 0.5 --swap-space 4 --scheduling-policy fcfs
    --otlp-traces-endpoint http://localhost:4317"""


def test_c1_c2_c3_c5_c6_c7_c8_c10_c11_c12_c13_c14_the_command_line() -> None:
    """All flags of the command lines in vLLM guides are accepted with their values; the defaults
    are vLLM's."""
    given = build_parser().parse(COMMAND.split())
    engine, server = engine_config(given), server_config(given)
    assert (engine.model.model, server.port) == ("facebook/opt-125m", 8000)
    assert engine.model.enforce_eager and not engine.observability.disable_log_stats
    assert engine.model.max_model_len is None
    assert engine.cache.gpu_memory_utilization == 0.9
    assert engine.cache.enable_prefix_caching and engine.cache.swap_space == 4
    scheduler = engine.scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (8000, 256)
    assert scheduler.enable_chunked_prefill and scheduler.scheduler_delay_factor == 0.5
    assert scheduler.scheduling_policy == "fcfs"
    plain = build_parser().parse(["model", "--gpu-memory-utilization", "0.5"])
    default = engine_config(plain)
    assert server_config(plain).port == 8000
    assert default.scheduler.max_num_batched_tokens == 2048
    assert default.scheduler.enable_chunked_prefill and default.cache.enable_prefix_caching


@pytest.mark.parametrize(
    "row, flag, remedy",
    [
        ("c17", '--speculative-config {"method":"ngram"}', "leave it out"),
        ("c18", "--tensor-parallel-size 2", "leave it out"),
        ("c18", "-tp 2", "leave it out"),
        ("c19", "--enable-lora", "merged"),
    ],
)
def test_c17_c18_c19_known_or_refused(row: str, flag: str, remedy: str) -> None:
    """The flags of speculation, tensor parallelism and LoRA are refused with a sentence on what to
    do instead, never ignored."""
    given = build_parser().parse(flag.split())
    with pytest.raises(ConfigError, match="not supported yet; ") as refused:
        engine_config(given)
    assert remedy in str(refused.value), row


def test_c16_quantization() -> None:
    """`--quantization` names what is done, or what the checkpoint is; else it is refused."""
    given = build_parser().parse(["-q", "int8"])
    assert engine_config(given).model.quantization == "int8"
    with pytest.raises(ConfigError, match="--quantization must be one of int8, int4"):
        LLM(quantization="awq")


def test_d7_compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`VLLM_TORCH_COMPILE_CACHE_DIR` is where torch keeps what it compiles in the engine's
    process."""
    folder = tmp_path / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("VLLM_TORCH_COMPILE_CACHE_DIR", str(folder))
    with LLM():
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        assert cache_dir() == str(folder) and folder.is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_TORCH_COMPILE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="QUIRE_TORCH_COMPILE_CACHE_DIR"):
        LLM()


def test_d9_attention_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`VLLM_ATTENTION_BACKEND` and `--attention-backend` choose the backend; one that this device
    does not have is refused, and the error lists those it has."""
    params = SamplingParams(temperature=0, max_tokens=8)
    tokens = []
    monkeypatch.setattr("quire.models.registry.logger.propagate", True)
    for name in (None, "FLASH_ATTN", "cpu_attn", "paged", "reference", "auto"):
        if name is not None:
            monkeypatch.setenv("VLLM_ATTENTION_BACKEND", name)
        with LLM(device="cpu") as llm:
            tokens.append(llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].token_ids)
    assert all(ids == tokens[0] for ids in tokens)
    told = [r.getMessage() for r in caplog.records if "attention backend" in r.getMessage()]
    assert "attention backend FLASH_ATTN: paged" in told
    known = "on cpu must be one of auto, CPU_ATTN, FLASH_ATTN, paged, got "
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    with pytest.raises(ConfigError, match=known + "'XFORMERS'"):
        LLM(device="cpu")
    with pytest.raises(ConfigError, match=known + "'FLASHINFER'"):
        LLM(device="cpu", attention_backend="FLASHINFER")
    with LLM(device="cpu", attention_backend="FLASH_ATTN"):
        pass  # the option wins over the variable


@pytest.mark.parametrize("row", ["NCCL", "CUDA"])
def test_d12_d13_variables_of_nccl_and_cuda(seen: Watched, row: str) -> None:
    """Variables that NCCL, CUDA and torch read reach the engine's process unchanged, and cause no
    complaint."""
    expected = {
        name: value for name, value in FOREIGN.items() if ("NCCL" in name) == (row == "NCCL")
    }
    assert len(expected) >= 3
    assert {name: seen.environment.get(name) for name in expected} == expected
    assert not re.search("|".join(expected), seen.log)
