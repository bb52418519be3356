"""`EngineArgs` and the parser of scripts: every option by name, judged by the one table."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

import drop_in
from quire.compat.arguments import FlexibleArgumentParser
from quire.compat.async_llm import AsyncLLM
from quire.compat.engine_args import AsyncEngineArgs, EngineArgs
from quire.config import EngineConfig
from quire.errors import ConfigError, NotAvailable


def parsed(*arguments: str, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    return EngineArgs.add_cli_args(parser or FlexibleArgumentParser()).parse_args(arguments)


def test_defaults_are_no_options():
    args = EngineArgs()
    assert args.create_engine_config() == EngineConfig()
    assert EngineConfig.from_options(**dataclasses.asdict(args)) == EngineConfig()
    assert args.tensor_parallel_size == 1 and args.gpu_memory_utilization == 0.92


def test_every_option_of_vllm_is_a_field():
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    # Given to `quire serve`; LLM takes its default.
    assert set(drop_in.SURFACE["engine_args"]) - fields == {"reasoning_parser", "shutdown_timeout"}
    with pytest.raises(TypeError, match="max_num_seq'"):
        EngineArgs(max_num_seq=3)


@pytest.mark.parametrize("parser", [FlexibleArgumentParser, argparse.ArgumentParser])
def test_from_a_command_line(parser):
    namespace = parsed("--model", "m", "-tp", "1", "--max-num-seqs", "8", parser=parser())
    args = EngineArgs.from_cli_args(namespace)
    assert (args.model, args.max_num_seqs) == ("m", 8)
    assert args.create_engine_config() == EngineConfig.from_options(model="m", max_num_seqs=8)
    again = EngineConfig.from_options(**vars(namespace))
    assert again == args.create_engine_config()


def test_other_spellings_and_a_file(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("max_num_seqs: 4\nenable-prefix-caching: false\nserved_model_name: [a, b]\n")
    namespace = parsed(
        "--config", str(file), "--max_num_seqs=5", "--compilation_config.mode", "0",
        "--hf_overrides.rope.theta", "3", "--hf_overrides.rope.type=x",
    )  # fmt: skip
    assert namespace.max_num_seqs == 5 and namespace.enable_prefix_caching is False
    assert namespace.served_model_name == ["a", "b"]
    assert namespace.compilation_config == {"mode": 0}
    assert namespace.hf_overrides == {"rope": {"theta": 3, "type": "x"}}
    own = FlexibleArgumentParser()
    own.add_argument("--max_tokens", type=int)
    own.add_argument("--top-p", type=float)
    assert own.parse_args(["--max_tokens", "3", "--top_p", "1"]).max_tokens == 3


@pytest.mark.parametrize(
    "arguments", [["--config", "/no/such.yaml"], ["--config"], ["--hf-overrides.x"]]
)
def test_a_bad_command_line_ends_with_a_sentence(capsys, arguments):
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert "error: --" in capsys.readouterr().err


def test_what_is_asked_for_is_refused_when_an_engine_is_made():
    args = EngineArgs(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 is not supported yet"):
        args.create_engine_config()
    with pytest.raises(ConfigError, match="--enable-lora is not supported yet"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(enable_lora=True))
    with pytest.raises(NotAvailable, match="stat_loggers are not available"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(), stat_loggers=[print])
    json.dumps(dataclasses.asdict(EngineArgs()))


async def test_the_asynchronous_engine_starts_with_its_first_request_and_ends():
    from quire import SamplingParams
    from quire.errors import EngineDead, InvalidRequest

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=128))
    assert engine.is_running and engine.get_num_unfinished_requests() == 0
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="lora_request is not supported yet"):
        async for _ in engine.generate("Hello", params, "0", lora_request=object()):
            pass
    outputs = []
    async for output in engine.generate("Hello", params, "1"):
        outputs.append(output)
        await engine.abort(["1"])
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await engine.wait_for_requests_to_drain(10)
    assert await engine.reset_prefix_cache() and not await engine.is_sleeping()
    assert await engine.get_supported_tasks() == ("generate",)
    with pytest.raises(NotAvailable, match="AsyncLLM.sleep is not available"):
        await engine.sleep()
    engine.shutdown()
    engine.shutdown()
    assert engine.is_stopped
    with pytest.raises(EngineDead):
        async for _ in engine.generate("Hello", params, "2"):
            pass
    await engine._closing
