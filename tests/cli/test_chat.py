"""`quire chat` and `quire complete`: conversations, over HTTP and with an engine of their own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.cli import main as cli
from quire.cli.chat import Chat
from quire.cli.engine_talker import EngineTalker
from quire.cli.talkers import Turn
from quire.cli.user_input import read_messages
from quire.config import EngineConfig
from quire.errors import EngineDead, InvalidRequest, StartupError
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import RequestOutputKind, SamplingParams


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("API_KEY", "LOGGING_LEVEL"):
        monkeypatch.delenv("VLLM_" + name, raising=False)
        monkeypatch.delenv("QUIRE_" + name, raising=False)
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "WARNING")


def run(capsys, monkeypatch, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# -------------------------------------------------------------------------- the conversation alone


class Echo:
    """Answers with what it was asked, in two pieces."""

    model, place = "echo", "nowhere"

    def __init__(self) -> None:
        self.seen: list[tuple[list, dict]] = []

    def reply(self, messages, options, turn):
        self.seen.append(([dict(m) for m in messages], dict(options)))
        text = messages[-1]["content"]
        if text == "refuse":
            raise InvalidRequest("no.")
        for piece in (f"<{text}", ">"):
            turn.add(piece, 1)
            yield piece

    def close(self) -> None:
        pass


def test_a_conversation_and_its_commands(capsys):
    echo = Echo()
    chat = Chat(echo, {"seed": 1}, "be brief", stats=False)
    lines = ["a", "", "/params temperature=0.5 max-tokens=9", "b", "/reset", "c"]
    lines += ["/system new", "d", "/system", "e", "/exit", "never"]
    assert chat.run(iter(lines)) == 0
    assert capsys.readouterr().out == "<a>\n<b>\n<c>\n<d>\n<e>\n"
    contents = [[m["content"] for m in messages] for messages, _ in echo.seen]
    assert contents == [
        ["be brief", "a"],
        ["be brief", "a", "<a>", "b"],
        ["be brief", "c"],
        ["new", "d"],
        ["e"],
    ]
    assert [m["role"] for m in echo.seen[1][0]] == ["system", "user", "assistant", "user"]
    assert echo.seen[0][1] == {"seed": 1}
    assert echo.seen[1][1] == {"seed": 1, "temperature": 0.5, "max_tokens": 9}


def test_commands_answer_on_stderr(capsys):
    chat = Chat(Echo(), {}, None, stats=False)
    chat.run(iter(["/stats", "/help", "/params", "/params topp=1", "/params top_p=x", "/rest"]))
    captured = capsys.readouterr()
    assert captured.out == ""
    for told in (
        "no reply yet",
        "/system TEXT",
        "the model's defaults",
        "did you mean 'top_p'?",
        "expected a number, got 'x'",
        "unknown command /rest; did you mean '/reset'?",
    ):
        assert told in captured.err


def test_a_refused_message_is_forgotten_and_the_chat_goes_on(capsys):
    echo = Echo()
    assert Chat(echo, {}, None, stats=True).run(iter(["refuse", "a"])) == 1
    captured = capsys.readouterr()
    assert captured.out == "<a>\n" and "quire: no." in captured.err
    assert [m["content"] for m in echo.seen[1][0]] == ["a"]
    assert "[2 tokens, " in captured.err and "TTFT" in captured.err


def contents(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.messages]


def test_taking_back_and_asking_again(capsys):
    echo = Echo()
    chat = Chat(echo, {}, "be brief", stats=False)
    assert chat.run(iter(["/undo", "/retry", "a", "b", "/retry", "/undo", "c"])) == 0
    captured = capsys.readouterr()
    assert captured.out == "<a>\n<b>\n<b>\n<c>\n"
    assert contents(chat) == ["be brief", "a", "<a>", "c", "<c>"]
    assert len(echo.seen) == 4 and [m["content"] for m in echo.seen[2][0]][-1] == "b"
    for told in ("nothing to take back", "no answer to ask for again", "taken back: b"):
        assert told in captured.err
    echo.reply = lambda *_: iter(Echo().reply([{"content": "refuse"}], {}, Turn()))
    assert chat.run(iter(["/retry"])) == 1
    assert contents(chat)[-2:] == ["c", "<c>"], "an answer is not lost to a failed attempt"


def test_sampling_options_are_checked_as_they_are_set(capsys):
    chat = Chat(Echo(), {"seed": 1}, None, stats=False)
    lines = ["/set temperature 0.5", "/set top-k=7", "/set stop a=b c", "/set seed default"]
    bad = ["/set temperature warm", "/set temperature -1", "/set top_k 1.5", "/set tempratur 1"]
    bad += ["/set max_tokens 0", "/set temperature nan", "/set temperature"]
    assert chat.run(iter([*lines, *bad, "/set", "hi"])) == 0
    *told, shown = capsys.readouterr().err.splitlines()
    assert shown == "temperature=0.5 top_k=7 stop=['a=b c']"
    assert len(told) == len(lines) + len(bad)
    assert "did you mean 'temperature'" in told[7] and "'1.5'" in told[6] and "-1" in told[5]
    assert chat._talker.seen[0][1] == {"temperature": 0.5, "top_k": 7, "stop": ["a=b c"]}


def test_a_conversation_is_saved_and_loaded(capsys, tmp_path):
    path = tmp_path / "with spaces.json"
    first = Chat(Echo(), {"temperature": 0.5, "stop": ["x", "y"]}, "brief", stats=False)
    first.run(iter(["a", f"/save {path}", "b", f"/save {path}"]))
    second = Chat(Echo(), {"seed": 3}, None, stats=False)
    second._talker.model = "another"
    second.run(iter(["lost", f"/load {path}", "c", "/reset", "d"]))
    messages, options = second._talker.seen[1]
    assert [m["content"] for m in messages] == ["brief", "a", "<a>", "b", "<b>", "c"]
    assert options == {"temperature": 0.5, "stop": ["x", "y"]}
    assert contents(second) == ["brief", "d", "<d>"]
    assert "saved 5 messages" in (err := capsys.readouterr().err)
    assert "loaded 5 messages, which were with echo" in err
    path.write_text(json.dumps([{"role": "user", "content": "hello"}]))
    second.run(iter([f"/load {path}", "/retry"]))
    assert contents(second) == ["hello", "<hello>"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7", "no saved conversation"),
        ("{}", "no list of messages"),
        ('[{"role": "user"}]', "message 1 needs"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "message 2"),
        ('{"messages": [], "options": {"temperature": "hot"}}', "temperature"),
        ('{"messages": [], "options": {"colour": 1}}', "unknown option 'colour'"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(capsys, tmp_path, content, told):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    chat = Chat(Echo(), {"seed": 1}, None, stats=False)
    assert chat.run(iter(["a", f"/load {path}"])) == 0
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
    assert contents(chat) == ["a", "<a>"] and chat._options == {"seed": 1}


def test_saving_spares_other_files(capsys, tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    chat = Chat(Echo(), {}, None, stats=False)
    chat.run(iter(["/save", f"/save {path}", f"/save {tmp_path / 'no' / 'folder'}", "/load"]))
    err = capsys.readouterr().err
    assert "which file? /save FILE" in err and "which file? /load FILE" in err
    assert "exists and is no saved conversation" in err and "cannot write" in err
    assert path.read_text() == "years of work" and len(list(tmp_path.iterdir())) == 1


def test_messages_of_several_lines():
    lines = iter(['"""a', "  b", "", 'c"""', "d", '"""e"""', '"""', "f", '"""', '"""g'])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    assert list(read_messages(read)) == ["a\n  b\n\nc", "d", "e", "f", "g"]


def test_ctrl_c_clears_and_twice_in_a_row_leaves(capsys):
    script = iter(
        [KeyboardInterrupt, "a", '"""b', KeyboardInterrupt, "c", *[KeyboardInterrupt] * 2]
    )

    def read(prompt):
        step = next(script)
        if isinstance(step, str):
            return step
        raise step

    assert list(read_messages(read)) == ["a", "c"]
    assert capsys.readouterr().err.count("Ctrl-C again or Ctrl-D leaves") == 3


def test_footer():
    turn = Turn(started=10.0)
    assert turn.footer() == "[no tokens]"
    turn.num_tokens, turn.first, turn.last = 11, 10.25, 12.25
    assert turn.footer() == "[11 tokens, 5.0 tokens/s, TTFT 0.250 s]"


# ----------------------------------------------------------------------------------- over a server


class Handler(BaseHTTPRequestHandler):
    """A server with one model that repeats the prompt's words."""

    protocol_version = "HTTP/1.1"
    mode = "ok"
    seen: list = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, {"data": [{"id": "the-model"}] if self.mode != "empty" else []})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body, self.headers.get("Authorization")))
        if self.mode.isdecimal():
            message = {"error": {"message": f"refused with {self.mode}"}}
            return self.answer(int(self.mode), message)
        chat = "messages" in body
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        events = [
            {"choices": [{"delta": {"content": w}} if chat else {"text": w}]} for w in text.split()
        ]
        events.append({"choices": [], "usage": {"completion_tokens": 42}})
        if self.mode == "error":
            events = [events[0], {"error": {"message": "it went wrong"}}]
        lines = [b"data: " + json.dumps(e).encode() + b"\n\n" for e in events]
        if self.mode == "ok":
            lines.append(b"data: [DONE]\n\n")
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for line in [b": a comment\n\n", *lines]:
            self.wfile.write(line)
        self.close_connection = True

    def answer(self, status, data):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Handler, "mode", "ok")
    monkeypatch.setattr(Handler, "seen", [])
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_chat_over_http(capsys, monkeypatch, server, suffix):
    code, out, err = run(
        capsys, monkeypatch, "chat", "--url", server + suffix, "--api-key", "k", "--stats",
        "--system-prompt", "short", "--max-tokens", "5", "--stop", "x", "y", "--seed", "3",
        stdin="good day\n/stats\n",
    )  # fmt: skip
    assert (code, out) == (0, "goodday\n") and err.count("[42 tokens") == 2
    path, body, key = Handler.seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body["model"] == "the-model" and body["stream"] is True
    assert (body["max_tokens"], body["stop"], body["seed"]) == (5, ["x", "y"], 3)
    assert [m["content"] for m in body["messages"]] == ["short", "good day"]
    assert "temperature" not in body


def test_quick_turn_and_key_of_the_environment(capsys, monkeypatch, server):
    monkeypatch.setenv("QUIRE_API_KEY", "env-key")
    arguments = ("chat", "other-model", "--url", server, "-q", "hello you")
    assert run(capsys, monkeypatch, *arguments, stdin="not read\n")[:2] == (0, "helloyou\n")
    assert Handler.seen[0][2] == "Bearer env-key" and Handler.seen[0][1]["model"] == "other-model"


def test_complete_over_http(capsys, monkeypatch, server):
    code, out, err = run(capsys, monkeypatch, "complete", "one two", "--url", server)
    assert (code, out, err) == (0, "onetwo\n", "")
    path, body, _ = Handler.seen[0]
    assert path == "/v1/completions" and body["prompt"] == "one two"
    assert (body["max_tokens"], body["temperature"]) == (16, 0.0)


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_forms_and_what_else_a_request_may_say(capsys, monkeypatch, server, tmp_path, command):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    asked = {
        ("--json-schema", str(schema)): {"json": '{"type": "integer"}'},
        ("--json-object",): {"json_object": True},
        ("--choice", "a b", "c"): {"choice": ["a b", "c"]},
        ("--grammar", str(schema)): {"grammar": '{"type": "integer"}'},
        ("--structural-tag", str(schema)): {"structural_tag": '{"type": "integer"}'},
    }
    for flags, form in asked.items():
        Handler.seen.clear()
        code, _, err = run(capsys, monkeypatch, command, "-q", "one", "--url", server, *flags)
        assert code == 0, err
        assert Handler.seen[-1][1]["structured_outputs"] == form
    repeats = ("--repetition-detection", '{"max_pattern_size": 3, "min_count": 4}')
    more = (*repeats, "--thinking-token-budget", "7", "--min-tokens", "2")
    assert run(capsys, monkeypatch, command, "-q", "one", "--url", server, *more)[0] == 0
    body = Handler.seen[-1][1]
    assert body["repetition_detection"] == {"max_pattern_size": 3, "min_count": 4}
    assert (body["thinking_token_budget"], body["min_tokens"]) == (7, 2)
    assert "structured_outputs" not in body
    code, _, err = run(capsys, monkeypatch, command, "-q", "a", "--repetition-detection", "[1]")
    assert code != 0 and "--repetition-detection" in err and "[1]" in err


@pytest.mark.parametrize(
    ("mode", "code", "told"),
    [
        ("400", 1, "answers 400: refused with 400"),
        ("401", 1, "answers 401: refused with 401"),
        ("503", 1, "answers 503: refused with 503"),
        ("error", 1, "it went wrong"),
        ("cut", 1, "broke off before its end"),
        ("empty", 1, "lists no model"),
    ],
)
def test_what_a_server_can_do_wrong(capsys, monkeypatch, server, mode, code, told):
    monkeypatch.setattr(Handler, "mode", mode)
    for command in (["chat", "-q", "hi"], ["complete", "hi"]):
        got, _, err = run(capsys, monkeypatch, *command, "--url", server)
        last = err.splitlines()[-1]
        assert got == code and last.startswith("quire: ") and told in last
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["chat", "--url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["chat", "--url", "ftp://x"], "--url must look like"),
        (["chat", "--url", "http://h:port"], "invalid port"),
        (["chat", "--url", "http://h", "--block-size", "16"], "--block-size is for an engine"),
        (["chat", "--api-key", "k"], "--api-key is for a running server"),
        (["chat", "/no/such"], "there is no model folder '/no/such'"),
        (["complete", "a", "-q", "b"], "two prompts"),
        (["complete", "a", "--model", "/no/such"], "there is no model folder '/no/such'"),
    ],
)
def test_wrong_usage(capsys, monkeypatch, arguments, told):
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code in (1, 2) and out == "" and told in err and err.count("\n") == 1


# ---------------------------------------------------------------------- with an engine of our own


class FakeEngine:
    """What `AsyncLLM` promises to a talker."""

    def __init__(self, config) -> None:
        self.config = config
        self.default_params = SamplingParams(top_p=0.5)
        self.info = {"place": "the CPU"}
        self.tokenizer = self
        self.chat_template = None
        self.special_tokens = {}
        self.submitted: list = []
        self.closed: list[str] = []
        self.down = False

    @classmethod
    async def start(cls, config):
        engine = cls(config)
        cls.last = engine
        return engine

    async def wait_ready(self):
        if self.config.model.dtype == "float16":
            raise StartupError("cannot")

    def apply_chat_template(self, messages, tools=None):
        return "|".join(m["content"] for m in messages)

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return list(text.encode())

    async def submit(self, prompt, params, request_id):
        text = bytes(prompt["prompt_token_ids"]).decode()
        self.submitted.append((text, params, request_id))
        if text.endswith("refuse"):
            raise InvalidRequest("no.")
        return Stream(self, request_id)

    async def shutdown(self):
        self.down = True


class Stream:
    def __init__(self, engine, request_id) -> None:
        self.engine, self.request_id, self.left = engine, request_id, ["ab", "c"]

    async def __anext__(self):
        await asyncio.sleep(0)
        if "die" in self.engine.submitted[-1][0]:
            raise EngineDead("it died")
        piece = self.left.pop(0)
        output = CompletionOutput(0, piece, list(piece.encode()))
        return RequestOutput(self.request_id, None, [], [output], finished=not self.left)

    async def aclose(self):
        self.engine.closed.append(self.request_id)


@pytest.fixture
def engine(monkeypatch):
    fake = types.ModuleType("quire.engine.async_llm")
    fake.AsyncLLM = FakeEngine
    monkeypatch.setitem(sys.modules, "quire.engine.async_llm", fake)


def test_chat_with_an_engine(capsys, monkeypatch, engine):
    arguments = ("chat", "--max-num-seqs", "3", "--temperature", "0.25", "--stats")
    code, out, err = run(capsys, monkeypatch, *arguments, stdin="x\nrefuse\ny\n")
    fake = FakeEngine.last
    assert (code, out) == (1, "abc\nabc\n") and "quire: no." in err and "[3 tokens" in err
    assert fake.config.scheduler.max_num_seqs == 3 and fake.down
    assert fake.config.observability.disable_log_stats
    prompts = [prompt for prompt, _, _ in fake.submitted]
    assert prompts == ["x", "x|abc|refuse", "x|abc|y"]
    params = fake.submitted[0][1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.25, 0.5, None)
    assert params.output_kind is RequestOutputKind.DELTA
    assert len(fake.closed) == 2 and len(set(fake.closed)) == 2


def test_a_dead_engine_ends_the_chat(capsys, monkeypatch, engine):
    code, _, err = run(capsys, monkeypatch, "chat", "-q", "die")
    assert code == 1 and "quire: it died\n" in err and FakeEngine.last.down


def test_an_engine_that_cannot_start(capsys, monkeypatch, engine):
    before = threading.active_count()
    code, _, err = run(capsys, monkeypatch, "chat", "--dtype", "float16", "-q", "x")
    assert (code, err) == (1, "quire: cannot\n") and threading.active_count() == before


def test_stopping_a_reply_closes_its_stream(engine):
    with contextlib.closing(EngineTalker(EngineConfig())) as talker:
        turn = Turn()
        pieces = talker.reply([{"role": "user", "content": "x"}], {}, turn)
        assert next(pieces) == "ab" and FakeEngine.last.closed == []
        pieces.close()
        assert FakeEngine.last.closed == ["chat-0"] and turn.text == "ab"


def test_logs_stay_out_of_the_way_unless_asked_for(capsys, monkeypatch, engine):
    import os

    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "")
    run(capsys, monkeypatch, "chat", "-q", "x")
    assert os.environ["QUIRE_LOGGING_LEVEL"] == "WARNING"  # the engine core inherits it


def test_complete_with_an_engine(capsys, monkeypatch):
    import quire

    class FakeLLM:
        def __init__(self, **options):
            FakeLLM.options = options

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def get_default_sampling_params(self):
            return SamplingParams(top_k=7)

        def generate(self, prompts, params, use_tqdm):
            FakeLLM.call = (prompts, params)
            output = CompletionOutput(0, " Paris", [1])
            return [RequestOutput("0", prompts[0], [], [output], finished=True)]

    monkeypatch.setattr(quire, "LLM", FakeLLM, raising=False)
    arguments = ("complete", "--seed", "4", "--max-num-seqs", "2", "--stop", "a")
    code, out, err = run(capsys, monkeypatch, *arguments, stdin="The capital\n")
    assert (code, out, err) == (0, " Paris\n", "")
    assert FakeLLM.options["max_num_seqs"] == 2
    prompts, params = FakeLLM.call
    assert prompts == ["The capital"] and params.greedy and params.max_tokens == 16
    assert (params.seed, params.stop, params.top_k) == (4, ["a"], 0)
