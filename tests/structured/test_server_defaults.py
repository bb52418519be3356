"""`--structured-outputs-config`: what an operator says of the forms of all requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from drop_in import parser
from quire import LLM, EngineConfig, SamplingParams
from quire.compat.settings import section
from quire.config.cli import engine_config
from quire.engine.frontend.sampling_checks import SamplingChecks
from quire.errors import ConfigError
from quire.params import StructuredOutputsParams
from quire.structured.compiler import Vocabulary
from routes_server import RoutesServer
from test_thinking_budget import options
from thinking_model import ASK, CLOSE, OPEN, make_thinking_model
from vocabularies import END, demo

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
    "required": ["a"],
}
LIKES_SPACES = {"temperature": 1.5, "max_tokens": 300, "seed": 5}


def texts(defaults: dict[str, Any]) -> list[str]:
    with LLM(max_model_len=1024, structured_outputs_config=defaults) as llm:
        params = SamplingParams(
            **LIKES_SPACES, structured_outputs=StructuredOutputsParams(json=SCHEMA)
        )
        outputs = llm.generate(["Some JSON:"] * 12, params, use_tqdm=False)
        found = [o.outputs[0] for o in outputs]
        return [one.text for one in found if one.finish_reason == "stop"]


def test_what_a_request_may_say_may_be_the_default() -> None:
    free = texts({})
    assert any(" " in text or "\n" in text for text in free)
    tight = texts({"disable_any_whitespace": True, "disable_additional_properties": True})
    assert len(tight) == 12
    for text in tight:
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
        assert set(json.loads(text)) == {"a"}


@pytest.mark.parametrize("closed", [False, True])
def test_objects_may_be_closed_by_default(closed: bool) -> None:
    vocabulary = demo()
    checks = SamplingChecks(
        2048, None, 1024, 20, [END], _Gate(vocabulary),
        forms={"disable_additional_properties": closed},
    )  # fmt: skip
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    grammar = checks.check(params).params.grammar
    matcher = vocabulary.compile(grammar)
    tokens = vocabulary.tokens.tokenize_str('{"a": [1], "b": 2}')
    assert all(matcher.consume_token(token) for token in tokens) is not closed


class _Gate:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self.settle = vocabulary.settle


def test_forms_may_hold_within_the_reasoning(tmp_path: Any) -> None:
    model = str(make_thinking_model(tmp_path / "model"))
    defaults = {"backend": "guidance", "enable_in_reasoning": True, "disable_fallback": True}
    ask = {
        **ASK, "chat_template_kwargs": {}, "structured_outputs": {"json": SCHEMA},
        "temperature": 1, "max_tokens": 100, "logit_bias": {str(OPEN): 100, str(CLOSE): -100},
        "return_token_ids": True, "thinking_token_budget": 9,
    }  # fmt: skip
    for more, reasons in (({}, True), ({"structured_outputs_config": defaults}, False)):
        with asyncio.Runner() as runner:
            server = RoutesServer(runner, options(model) | more)
            try:
                (choice,) = server.ask("/v1/chat/completions", ask)["choices"]
                assert (OPEN in choice["token_ids"]) is reasons
            finally:
                server.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"backend": "outlines"}, "llguidance"),
        ({"disable_any_whitespace": "yes"}, "true or false, got 'yes'"),
        ({"reasoning_parser": "qwen3"}, "use --reasoning-parser"),
        ({"reasoning_parser_plugin": "a.py"}, "no code"),
        ({"whitespace": 1}, "unknown key 'whitespace'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match="--structured-outputs-config") as caught:
        EngineConfig.from_options(structured_outputs_config=given)
    assert told in caught.value.message


DOORS = {
    "JSON": ["--structured-outputs-config", '{"disable_any_whitespace": true, "backend": "auto"}'],
    "keys": ["--structured-outputs-config.disable_any_whitespace", "true",
             "--structured-outputs-config.backend=auto"],
    "vLLM's spelling": ["--structured_outputs_config.disable-any-whitespace=true",
                        "--structured-outputs-config.backend", "auto"],
}  # fmt: skip
FILES = {
    "mapping": "structured-outputs-config:\n  disable_any_whitespace: true\n  backend: auto\n",
    "text": f"structured_outputs_config: '{DOORS['JSON'][1]}'",
    "keys": "structured-outputs-config.disable_any_whitespace: true\n"
            "structured-outputs-config.backend: auto\n",
    "section": "model:\n  structured_outputs_config: {disable_any_whitespace: true, backend: auto}",
}  # fmt: skip


def test_every_front_door(tmp_path: Path) -> None:
    said = {"disable_any_whitespace": True, "backend": "auto"}
    path = tmp_path / "config.yaml"

    def read(*arguments: str) -> dict[str, Any]:
        return engine_config(parser().parse(arguments)).model.structured_outputs_config

    for name, arguments in DOORS.items():
        assert read(*arguments) == said, name
    for name, text in FILES.items():
        path.write_text(text)
        assert read("--config", str(path)) == said, name
    assert read("--config", str(path), "--structured-outputs-config", "{}") == {}
    for given in (said, section(**said, enable_in_reasoning=None)):
        config = EngineConfig.from_options(structured_outputs_config=given)
        assert config.model.structured_outputs_config == said
    for wrong in ("nonsense", "[1]", "null", "5"):
        with pytest.raises(ConfigError, match="--structured-outputs-config: expected a JSON obj"):
            read("--structured-outputs-config", wrong)
    path.write_text("structured-outputs-config.backend: outlines")
    with pytest.raises(ConfigError, match="llguidance follows all grammars"):
        read("--config", str(path))


def test_vllms_defaults_say_nothing() -> None:
    given = {
        "backend": "auto", "disable_any_whitespace": False, "reasoning_parser": "",
        "disable_additional_properties": False, "reasoning_parser_plugin": "",
        "enable_in_reasoning": False,
    }  # fmt: skip
    EngineConfig.from_options(structured_outputs_config=given)
    EngineConfig.from_options(structured_outputs_config=None)
