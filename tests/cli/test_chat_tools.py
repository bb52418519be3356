"""`quire chat --tools`: calls are shown, results typed in or given by a command."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main as cli
from quire.cli.chat import Chat
from quire.cli.chat_history import load, save
from quire.cli.chat_tools import read_file, run_command
from quire.cli.engine_talker import EngineTalker
from quire.cli.talkers import Turn
from quire.config import EngineConfig
from quire.errors import InvalidRequest
from thinking_model import CLOSE, make_thinking_model

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Caller:
    """Calls a tool for each question, and says what its result was."""

    model, place = "caller", "nowhere"

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []

    def reply(self, messages: Any, options: Any, turn: Any) -> Any:
        assert options["tools"] == [TOOL]
        self.seen.append([dict(message) for message in messages])
        if messages[-1]["role"] == "tool":
            text = f"It is {messages[-1]['content']}."
            turn.add(text, 1)
            yield text
        else:
            turn.calls = [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                }
            ]

    def close(self) -> None:
        pass


def test_results_are_what_is_said_next(capsys: Any, tmp_path: Path) -> None:
    caller = Caller()
    chat = Chat(caller, {}, None, False, [TOOL])
    assert chat.run(iter(["weather?", "sunny", "/undo", "again?", "rainy"])) == 0
    out = capsys.readouterr().out.split("\n")
    assert [line for line in out if line] == [
        'get_weather({"city": "Rome"})', "It is sunny.",
        'get_weather({"city": "Rome"})', "It is rainy.",
    ]  # fmt: skip
    assert [message["role"] for message in chat.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert chat.messages[0]["content"] == "again?" and chat.messages[2]["tool_call_id"] == "c"
    path = str(tmp_path / "talk.json")
    save(path, chat._talk, {}, "m")
    assert load(path)[0].messages == chat.messages, "calls and results are kept"


def test_without_a_result_the_call_is_the_answer(capsys: Any) -> None:
    caller = Caller()
    chat = Chat(caller, {}, None, False, [TOOL])
    assert chat.turn("weather?") == 0
    assert "get_weather" in capsys.readouterr().out
    assert len(caller.seen) == 1


def test_a_command_gives_results(capsys: Any) -> None:
    script = "import sys, json; print(sys.argv[1], json.load(sys.stdin)['city'])"
    command = f'{sys.executable} -c "{script}"'
    chat = Chat(Caller(), {}, None, False, [TOOL], command)
    assert chat.turn("weather?") == 0
    assert "It is get_weather Rome." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "says"), [("false", "exit code 1"), ("/no/such/command", "error"), ("'", "error")]
)
def test_a_command_that_fails_is_a_result(command: str, says: str) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    assert says in run_command(command, call)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not JSON"), ("[]", "must hold a tool"), ("[1]", "must hold a tool"),
     ('{"type": "x"}', "tools\\[0\\] must be"), (None, "cannot read")],
)  # fmt: skip
def test_files_that_hold_no_tools(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "tools.json"
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(InvalidRequest, match=says):
        read_file(str(path))


def test_the_embedded_model_calls_and_answers(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOL), "utf-8")
    lines = 'What is the weather in Paris?\n{"weather": "sunny", "temperature": 21}\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "WARNING")
    assert cli.main(["chat", "--tools", str(path), "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert 'get_weather({"city": "Paris"})' in out
    assert "sunny" in out and "21" in out


def test_a_form_holds_after_the_reasoning(tmp_path: Path) -> None:
    """Without tools, too; the reasoning is not the answer."""
    model = make_thinking_model(tmp_path / "model")
    path = model / "tokenizer_config.json"
    opens = "{%- if enable_thinking is defined and enable_thinking -%}"
    text = path.read_text("utf-8")
    assert opens in text
    path.write_text(text.replace(opens, "{%- if true -%}"), "utf-8")
    talker, turn = EngineTalker(EngineConfig.from_options(model=str(model))), Turn()
    try:
        options = {
            "structured_outputs": {"regex": "[0-9]{4}!"}, "temperature": 1, "seed": 3,
            "thinking_token_budget": 30, "logit_bias": {CLOSE: -100},
        }  # fmt: skip
        said = "".join(talker.reply([{"role": "user", "content": "Is it good?"}], options, turn))
    finally:
        talker.close()
    assert re.fullmatch("[0-9]{4}!", said), said
    assert turn.num_tokens > 30, "it has reasoned"
