"""`import vllm` under `quire run`: what is there resolves, what is not says why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.compat.alias import Alias
from quire.compat.modules import ELSEWHERE, MODULES
from quire.registry import load


def under_alias(code: str) -> str:
    """What the code prints where `import vllm` is quire."""
    start = "from quire.compat.alias import Alias\nAlias('quire-demo').install()\n"
    result = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("module", MODULES)
def test_every_row_is_there(module):
    for name, target in MODULES[module].items():
        assert load(target) is not None, name
    parent = module.rpartition(".")[0]
    assert not parent or parent in MODULES, "a module needs its package"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("vllm.multimodal.image", "no module 'vllm.multimodal.image': prompts are text; of vllm"),
        ("vllm.entrypoints.openai.api_server", "start the server with `quire serve`"),
        ("vllm.v1.metrics.loggers", "LLM.get_metrics()"),
        ("vllm.sampling_parms", "did you mean 'vllm.sampling_params'?"),
    ],
)
def test_a_module_that_is_not_there_says_why_and_what_is(module, told):
    with pytest.raises(ModuleNotFoundError) as caught:
        Alias().find_spec(module)
    assert told in str(caught.value) and "vllm.lora.request" in str(caught.value)
    assert not set(ELSEWHERE) & set(MODULES)


def test_names_that_are_not_there_are_import_errors():
    code = (
        "try:\n    from vllm import SamplingParam\n"
        "except ImportError as error:\n    print(error)\n"
        "import vllm\n"
        "try:\n    vllm.SamplingParam\n"
        "except AttributeError as error:\n    print(error)\n"
        "import vllm.envs\n"
        "print(hasattr(vllm.envs, 'VLLM_NOTHING'), vllm.envs.VLLM_LOGGING_LEVEL)\n"
    )
    first, second, third = under_alias(code).splitlines()
    assert "cannot import name 'SamplingParam'" in first
    assert "did you mean 'SamplingParams'?; it offers AsyncEngineArgs" in second
    assert third == "False INFO"


def test_importing_names_loads_no_torch():
    code = (
        "import sys, vllm, vllm.utils, vllm.config, vllm.platforms, vllm.sampling_params\n"
        "from vllm import EngineArgs, SamplingParams, TokensPrompt, ModelRegistry\n"
        "from vllm.lora.request import LoRARequest\n"
        "from vllm.v1.engine.async_llm import AsyncLLM\n"
        "EngineArgs('m').create_engine_config()\n"
        "print('torch' in sys.modules, EngineArgs('facebook/opt-125m', tokenizer='t').model)\n"
    )
    assert under_alias(code) == "False quire-demo\n"


def test_helpers():
    code = (
        "import asyncio\n"
        "from vllm.utils import Counter, cdiv, round_up, is_list_of, merge_async_iterators\n"
        "from vllm.utils import get_open_port, random_uuid\n"
        "async def give(*values):\n    for v in values:\n        yield v\n"
        "async def main():\n"
        "    return sorted([x async for x in merge_async_iterators(give(1, 2), give(3))])\n"
        "c = Counter()\n"
        "print(next(c), next(c), cdiv(7, 3), round_up(7, 4), is_list_of([1, 'a'], int))\n"
        "print(len(random_uuid()), 1024 <= get_open_port() < 65536, asyncio.run(main()))\n"
    )
    assert under_alias(code) == "0 1 3 8 True\n32 True [(0, 1), (0, 2), (1, 3)]\n"


def test_a_family_cannot_be_replaced():
    code = (
        "from vllm import ModelRegistry\n"
        "try:\n    ModelRegistry.register_model('LlamaForCausalLM', 'a:b')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    told = "model architecture 'LlamaForCausalLM' is registered already\n"
    assert under_alias(code) == told
