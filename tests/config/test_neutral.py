"""vLLM's options: a value that asks for nothing starts at every door, any other gets a sentence."""

from __future__ import annotations

import json
import types

import pytest

import drop_in
from quire.config import EngineConfig, ServerConfig, neutral
from quire.config.cli import engine_config, flags, server_config, taken_line
from quire.errors import ConfigError

FLAGS = {drop_in.long_name(row): row for row in drop_in.SURFACE["flags"]}
FIELDS = {flag.field for root in (EngineConfig, ServerConfig) for flag in flags(root)}
ROWS = {**neutral.engine_rows(), **neutral.server_rows()}


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.delenv("QUIRE_ADMIN_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.fixture(scope="module")
def counted():
    """By title."""
    return {row.title: row for row in drop_in.flag_counts()}


@pytest.mark.parametrize(
    ("title", "least"),
    [
        ("flags at their own default, command line", 193),
        ("flags at their own default, `--config` file", 193),
        ("options at their own default, `LLM(...)`", 231),
        ("spellings of flags, known or refused by name", 428),
    ],
)
def test_no_default_of_vllm_stops_a_start(counted, title, least):
    row = counted[title]
    assert row.missing == [] and len(row.names) >= least


def test_a_row_is_no_field_and_says_what_else_to_do():
    assert not set(ROWS) & FIELDS, "these exist now: delete their rows"
    assert set(neutral.ALSO) <= set(ROWS)
    assert set(neutral.SHORT.values()) <= set(ROWS) | FIELDS
    known = set(drop_in.parser().known)
    for row in ROWS.values():
        if row.remedy.startswith("nearest: "):
            named = row.remedy.removeprefix("nearest: ").split(";")[0]
            assert {flag.split()[0] for flag in named.split(", ")} <= known, row


def start(*arguments: str):
    namespace = drop_in.parser().parse(arguments)
    return engine_config(namespace), server_config(namespace), taken_line(namespace)


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        start(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def other_value(row: neutral.Row) -> str:
    """A value, as text, that asks for something."""
    if row.kind is neutral.SWITCH:
        return str(row.default is not True)
    return {neutral.JSON: '{"x": 1}', neutral.LIST: "something"}.get(row.kind, "77")


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_other_values_are_one_sentence_at_every_door(row, tmp_path):
    value = other_value(row)
    if row.kind is neutral.SWITCH:
        asked = value == "True"
        if row.asks_nothing(asked):
            return  # either position changes nothing
        given, plain = [row.flag if asked else "--no-" + row.flag[2:]], asked
    else:
        given = [f"{row.flag}={value}"]
        plain = json.loads(value) if row.kind is neutral.JSON else value
        plain = [value] if row.kind is neutral.LIST else plain
    sentence = refused(*given)
    assert sentence.startswith(row.flag) and sentence.endswith(row.remedy)
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({row.name: plain}), "utf-8")
    assert row.flag in refused("--config", str(path))
    with pytest.raises(ConfigError, match="servers" if row.server else "not supported yet"):
        EngineConfig.from_options(**{row.name: plain})


@pytest.mark.parametrize(
    "arguments",
    [
        "-O0 -O 2 -O=2",
        "-tp 1 -pp=1 -dp 1 --no-trust-remote-code --kv_cache_dtype=auto",
        "--trust-remote-code --disable-custom-all-reduce --quantization None",
        "--compilation-config {} --compilation-config.mode 0 -cc.cudagraph_mode NONE",
        '--allowed-origins [] --allowed-methods ["*"] --ignore-patterns original/**/*',
        "--cpu-offload-gb 0.0 --mm-processor-cache-gb=4.0 --max-model-len None --tokenizer None",
        "--no-headless --api-server-count 1 --dtype half --uds None --max-num-seqs None",
    ],
)
def test_neutral_values_in_many_spellings(arguments):
    engine, server, _ = start(*arguments.split())
    engine = EngineConfig.from_dict(
        {**engine.to_dict(), "model": EngineConfig().to_dict()["model"]}
    )
    assert (engine, server) == (EngineConfig(), ServerConfig())


def test_one_line_names_what_does_nothing():
    line = start("-tp", "1", "--trust-remote-code", "--middleware", "[]")[2]
    assert line.endswith("here: --middleware, --tensor-parallel-size, --trust-remote-code")
    assert start("--port", "1")[2] is None
    many = start(
        *(
            f"{row.flag}={row.default}"
            for row in ROWS.values()
            if row.kind is neutral.INT and row.default == 1
        )
    )[2]
    assert many.count("--") == 10 and " more" in many


def test_what_a_program_passes_on_is_not_worth_a_line():
    given = {"tensor_parallel_size": 1, "trust_remote_code": False, "quantization": None}
    assert neutral.taken(neutral.beyond_defaults(given)) is None
    line = neutral.taken(neutral.beyond_defaults({**given, "trust_remote_code": True}))
    assert line.endswith("here: --trust-remote-code")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-tp", "2"], "--tensor-parallel-size 2 is not supported yet; leave it out"),
        (["-tp", "two"], "--tensor-parallel-size two is not supported yet"),
        (["-cc.mode", "3"], "--compilation-config {'mode': 3} is not supported yet"),
        (["--compilation-config.pass_config.enable_fusion=true"], "{'enable_fusion': True}"),
        (["--structured-outputs-config.backend", "xgrammar"], "llguidance"),
        (["--structured-outputs-config.reasoning_parser", "qwen3"], "use --reasoning-parser"),
        (["--structured-outputs-config.mood=1"], "unknown key 'mood'; known are backend"),
        (["--structured-outputs-config", '{"enable_in_reasoning": 1}'], "true or false, got 1"),
        (["--middleware", '["m"]'], "--middleware ['m'] is not supported yet;"),
        (["--enable-lora"], "--enable-lora is not supported yet; give a model folder"),
        (["--lora-modules", "a=b", "c=d"], "--lora-modules ['a=b', 'c=d'] is not"),
    ],
)
def test_what_is_asked_for_is_named(arguments, told):
    assert told in refused(*arguments)


def test_options_of_scripts():
    torch = types.SimpleNamespace(
        float16=type("dtype", (), {"__str__": lambda _: "torch.float16"})()
    )
    given = EngineConfig.from_options(
        tensor_parallel_size=1, trust_remote_code=True, block_size=None, max_num_seqs=None,
        dtype=torch.float16, compilation_config={}, disable_log_stats=None, shutdown_timeout=0,
    )  # fmt: skip
    assert given == EngineConfig.from_options(dtype="float16")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 4 is not supported yet"):
        EngineConfig.from_options(tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="port is an option of servers"):
        EngineConfig.from_options(port=9000)
    # A switch is no number.
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        EngineConfig.from_options(tensor_parallel_size=True)


def test_help_of_such_a_flag(capsys):
    with pytest.raises(SystemExit):
        drop_in.parser().parse(["--help=tensor-parallel-size"])
    assert "the model runs in one process" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        drop_in.parser().parse(["--help"])
    assert "--tensor-parallel-size" not in capsys.readouterr().out


def test_an_unknown_option_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig.from_options(max_num_seq=4)


def test_they_are_no_flags_of_another_server():
    from quire.cli.chat import build_parser
    from quire.cli.target import server_target

    given = build_parser().parse(["--url", "http://127.0.0.1:1", "-tp", "1"])
    with pytest.raises(ConfigError, match="--tensor-parallel-size is for an engine started here"):
        server_target(given)
    assert build_parser().parse(["-q", "Hello", "-tp", "1"]).quick == "Hello"
