"""Imports at the top that are never used, and the usual way to free an engine."""

import contextlib
import gc

import torch
import vllm
import vllm.envs as envs
from vllm import LLM, ModelRegistry, SamplingParams, __version__
from vllm.config import CompilationConfig, KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

logger = init_logger(__name__)
assert KVTransferConfig and StructuredOutputsParams and BeamSearchParams
assert vllm.__version__ == __version__ and vllm.__version_tuple__ >= (0, 6, 0)
assert "Qwen2ForCausalLM" in ModelRegistry.get_supported_archs()
ModelRegistry.register_model("MineForCausalLM", "quire.models.families.llama:LlamaForCausalLM")
assert "MineForCausalLM" in ModelRegistry.get_supported_archs()
assert envs.VLLM_LOGGING_LEVEL and current_platform.is_cpu() in (True, False)

adapter = LoRARequest("style", 1, "path/to/adapter")
llm = LLM(
    "facebook/opt-125m", dtype=torch.float32, compilation_config=CompilationConfig(mode=0),
    hf_overrides={"architectures": ["MineForCausalLM"]}, quantization=None, kv_cache_dtype="auto",
    limit_mm_per_prompt={},
)  # fmt: skip
params = SamplingParams(temperature=0, max_tokens=2)
try:
    llm.generate("Hello", params, lora_request=adapter)
except ValueError as error:
    logger.info("as expected: %s", error)
else:
    raise AssertionError("an adapter was ignored")
for refused in (llm.sleep, llm.wake_up, llm.apply_model):
    try:
        refused(level=1)
    except NotImplementedError as error:
        assert "is not available: " in str(error)
    else:
        raise AssertionError("refused in silence")
assert llm.generate("Hello", params, use_tqdm=False, lora_request=[None])[0].outputs[0].token_ids
destroy_model_parallel()
destroy_distributed_environment()
del llm
gc.collect()
with contextlib.suppress(Exception):
    torch.cuda.empty_cache()
cleanup_dist_env_and_memory()
