"""Flags are the configuration sections: every field has one, and values survive the way."""

from __future__ import annotations

import dataclasses

import pytest

from quire.cli.parser import Parser
from quire.cli.serve import build_parser
from quire.config import EngineConfig, ServerConfig
from quire.config import cli as config_cli
from quire.config.cli import ALIASES, RENAMED, engine_config, flags, server_config
from quire.errors import ConfigError

ALL = [*flags(EngineConfig), *flags(ServerConfig)]
SAMPLES = {
    "bool": ([], None),
    "int": (["64"], 64),
    "int | None": (["64"], 64),
    "float": (["0.5"], 0.5),
    "float | None": (["0.5"], 0.5),
    "str": (["x"], "x"),
    "str | None": (["x"], "x"),
    "list[str]": (["a", "b"], ["a", "b"]),
    "dict[str, Any]": (['{"a": 1}'], {"a": 1}),
    "quantization_config": (['{"moe": "int8"}'], {"moe": "int8"}),
}
"""By annotation, or by field."""


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.delenv("QUIRE_ADMIN_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def parse(*arguments: str):
    return build_parser().parse(arguments)


def engine(*arguments: str) -> EngineConfig:
    return engine_config(parse(*arguments))


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        namespace = parse(*arguments)
        engine_config(namespace)
        server_config(namespace)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_flags_give_the_defaults_of_the_sections():
    assert engine() == EngineConfig()
    assert server_config(parse()) == ServerConfig()


@pytest.mark.parametrize("flag", ALL, ids=lambda flag: flag.field)
def test_every_field_has_a_working_flag_and_prose(flag):
    assert flag.help.endswith("."), f"{flag.field} has no prose"
    name = "--" + flag.field.replace("_", "-")
    given, value = SAMPLES.get(flag.field) or SAMPLES[flag.annotation]
    for spelling in flag.spellings:
        if flag.annotation == "bool":
            assert getattr(parse(spelling), flag.field) is True
            assert getattr(parse("--no-" + name[2:]), flag.field) is False
        else:
            assert getattr(parse(spelling, *given), flag.field) == value


def test_prose_is_the_text_under_the_field():
    seqs = next(flag for flag in ALL if flag.field == "max_num_seqs")
    assert seqs.help == "Largest number of requests running at once."
    assert seqs.help_with_default == "Largest number of requests running at once. Default: 128."


def test_fields_are_unique_across_sections():
    names = [flag.field for flag in ALL]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "value"),
    [("8k", 8000), ("8K", 8192), ("2048", 2048), ("1m", 10**6), ("2147483647", 2**31 - 1)],
)
def test_sizes(text, value):
    assert engine("--max-num-batched-tokens", text).scheduler.max_num_batched_tokens == value


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_automatic_model_length(text):
    assert engine("--max-model-len", text).model.max_model_len is None
    assert engine("--max-model-len", "4k").model.max_model_len == 4000


def test_other_spellings():
    assert engine("--device-memory-utilization=0.5").cache.gpu_memory_utilization == 0.5
    assert engine("--max_num_seqs", "3").scheduler.max_num_seqs == 3
    assert engine("--no-disable-log-stats").observability.disable_log_stats is False
    assert engine("--disable-log-requests").observability.enable_log_requests is False
    assert engine("--seed", "-7").model.seed == -7


def test_json_flags_and_their_dotted_form():
    given = engine(
        "--override-generation-config", '{"top_k": 5}',
        "--override-generation-config.temperature", "0.25",
        "--override_generation_config.stop=x",
    ).model.override_generation_config  # fmt: skip
    assert given == {"top_k": 5, "temperature": 0.25, "stop": "x"}
    assert "JSON object" in refused("--override-generation-config", "[1]")
    assert "JSON object" in refused("--override-generation-config", "{")


def test_model_by_place_or_by_name():
    assert engine("a/b").model.model == engine("--model", "a/b").model.model == "a/b"
    assert engine("a/b", "--model", "a/b").model.model == "a/b"
    assert "'a'" in refused("a", "--model", "b") and "'b'" in refused("a", "--model", "b")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["--max_num_seq=3"], "did you mean --max-num-seqs?"),
        (["--prot", "1"], "did you mean --port?"),
        (["--frobnicate"], "unknown flag --frobnicate"),
        (["--max-num"], "unknown flag"),  # no guessing by prefix
        (["model", "second"], "unexpected argument 'second'"),
        (["--port", "http"], "--port: expected"),
        (["--port", "70000"], "from 0 to 65535, got 70000"),
        (["--gpu-memory-utilization", "1.5"], "got 1.5"),
        (["--gpu-memory-utilization", "much"], "expected a number, got 'much'"),
        (["--dtype", "int3"], "got 'int3'"),
        (["--port"], "--port"),
        (["--host", "0.0.0.0"], "no key is set"),
        (["-tp", "2"], "--tensor-parallel-size 2 is not supported yet"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, told):
    assert told in refused(*arguments)


def test_tables_do_not_contradict_the_fields():
    known = set(build_parser().known)
    assert set(ALIASES) <= {flag.field for flag in ALL}
    assert set(RENAMED.values()) <= known and not set(RENAMED) & known


def test_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    assert server_config(parse("--host", "0.0.0.0")).api_key == ["from-env"]
    assert server_config(parse("--api-key", "a", "--api-key", "b")).api_key == ["a", "b"]


# ------------------------------------------------------------------------------------------ files


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


def test_file_lies_between_command_line_and_defaults(file):
    path = file(
        "model: some/model\nmax-num-seqs: 7\nmax_num_batched_tokens: 1k\nmax-model-len: auto\n"
        "enable_prefix_caching: false\nserved-model-name: [a, b]\napi-key: k\nseed:\n"
        "override-generation-config: {top_k: 3}\nport: 9000\n"
    )
    namespace = parse("--config", path, "--port", "9001", "--max-num-seqs", "8")
    config, server = engine_config(namespace), server_config(namespace)
    assert config.model.model == "some/model" and config.model.served_model_name == ["a", "b"]
    assert config.scheduler.max_num_seqs == 8
    assert config.scheduler.max_num_batched_tokens == 1000
    assert config.cache.enable_prefix_caching is False
    assert config.model.override_generation_config == {"top_k": 3}
    assert config.model.seed == 0 and config.model.max_model_len is None
    assert server.port == 9001 and server.api_key == ["k"]
    assert engine("other", "--config", path).model.model == "other"


def test_an_error_names_its_flag_once():
    told = refused("--quantization-config", '{"linear": "int9"}')
    assert told.count("--quantization-config") == 1 and "got 'int9'" in told


def test_files_may_have_other_spellings(file):
    path = file("sse-keep-alive-interval: 3\ndevice_memory_utilization: 0.5\n")
    namespace = parse("--config", path)
    assert server_config(namespace).stream_keep_alive == 3
    assert engine_config(namespace).cache.gpu_memory_utilization == 0.5
    spelled = parse("--sse-keep-alive-interval", "0")
    assert server_config(spelled).stream_keep_alive == 0


def test_sections_may_be_nested(file):
    path = file("model:\n  model: m\n  dtype: float32\ncache: {block_size: 32}\n")
    config = engine("--config", path)
    assert (config.model.model, config.model.dtype, config.cache.block_size) == ("m", "float32", 32)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_num_seq: 3", "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("enable-prefix-caching: maybe", "expected true or false, got 'maybe'"),
        ("max-num-seqs: [1]", "expected one value, got [1]"),
        ("max-num-seqs: true", "expected one value, got True"),
        ("port: http", "port: expected"),
        ("a: [1", "line 1"),
        ("- port", "must be a mapping"),
        ("help: true", "unknown key 'help'"),
        ("config: other.yaml", "unknown key 'config'"),
        (
            "stream-keep-alive: 1\nsse-keep-alive-interval: 2",
            "stream_keep_alive is given twice, also as sse_keep_alive_interval",
        ),
        ("override_generation_config: 3", "JSON object"),
    ],
)
def test_bad_files_are_one_sentence(file, text, told):
    message = refused("--config", file(text))
    assert told in message and "--config" in message


def test_missing_and_empty_files(file):
    assert "cannot read '/no/such.yaml'" in refused("--config", "/no/such.yaml")
    assert engine("--config", file("")) == EngineConfig()


# ------------------------------------------------------------------------------------------- help


def shown(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_tells_every_flag(capsys):
    text = shown(capsys, "--help")
    for flag in ALL:
        assert f"--{flag.field.replace('_', '-')}" in text
    assert shown(capsys, "--help=all") == text


def test_help_topics(capsys):
    groups = shown(capsys, "--help=listgroup")
    assert "Scheduler" in groups and "Server" in groups
    scheduler = shown(capsys, "--help=scheduler")
    assert "--max-num-seqs" in scheduler and "--port" not in scheduler
    one = shown(capsys, "--help=max_num_seqs")
    assert "Largest number of requests running at once." in one and "--port" not in one
    assert "did you mean 'Scheduler'?" in refused("--help=shceduler")


@dataclasses.dataclass(frozen=True)
class Odd:
    """A section with a field of a type that flags cannot read."""

    thing: complex = 1j


def test_a_new_annotation_without_a_row_is_noticed(monkeypatch):
    monkeypatch.setattr(config_cli, "sections", lambda root: {"odd": Odd})
    config_cli.flags.cache_clear()
    try:
        with pytest.raises(KeyError):
            config_cli._add(Parser("x", "x"), EngineConfig)
    finally:
        config_cli.flags.cache_clear()
