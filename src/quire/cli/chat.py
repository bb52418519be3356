"""`quire chat [MODEL]`: talk to a model in the terminal, here or at a running server.

This module has the commands inside a chat. Replies come from `quire.cli.talkers`;
`quire.cli.chat_history` holds what was said; `quire.cli.user_input` and `quire.cli.wrap` read and
show it. On a terminal it prompts. With piped input, each line is one turn, and only replies are
written to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from quire.cli import sampling_flags
from quire.cli.chat_history import Conversation, load, save
from quire.cli.chat_tools import read_file, run_command
from quire.cli.form_flags import add_form_flags, form_of
from quire.cli.parser import Parser
from quire.cli.talkers import ServerTalker, Talker, Turn
from quire.cli.target import add_target_flags, engine_target, quiet_logs, server_target
from quire.cli.user_input import piped, read_messages, typed
from quire.cli.wrap import terminal_width, writer
from quire.config.model import EMBEDDED_MODEL
from quire.errors import EngineDead, InvalidRequest, QuireError, told

_TOY: Final = (
    "This is the toy model that ships with quire: it knows capitals, small sums, greetings and "
    "short stories, and nothing else. A model of your own: quire chat org/name, or a folder."
)
_HINT: Final = (
    'Type a message, or several lines between """ and """; /help lists the commands, /bye leaves.'
)

MAX_ROUNDS: Final = 16
"""Calls may lead to further calls this often before the user is asked again."""
_ANSWERED, _FAILED, _STOPPED = range(3)
"""How an attempt to answer ends; `_STOPPED`: before the first word."""


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("chat", "Talk to a model. Inside, /help lists the commands.")
    parser.add_argument("-q", "--quick", metavar="TEXT", default=None, help="One turn, then exit.")
    parser.add_argument(
        "--system-prompt", metavar="TEXT", default=None, help="First message of the conversation."
    )
    parser.add_argument(
        "--stats", action="store_true", default=False, help="Print speed and TTFT after replies."
    )
    parser.add_argument(
        "--tools",
        metavar="FILE",
        default=None,
        help="Tools that the model may call: a JSON file with a tool in OpenAI's form, or a list. "
        "Calls are shown, and their results asked for.",
    )
    parser.add_argument(
        "--tool-command",
        metavar="CMD",
        default=None,
        help="Command that gives the result of a call: it gets the tool's name as its last "
        "argument and the call's arguments as JSON on its input.",
    )
    parser.add_config_flag()
    sampling_flags.add_sampling_flags(parser)
    add_form_flags(parser)
    add_target_flags(parser, positional=True)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Talk until the input ends; returns the exit code."""
    namespace = build_parser().parse(arguments)
    quiet_logs()
    tools = read_file(namespace.tools) if namespace.tools else None
    talker = _talker(namespace)
    chat = Chat(
        talker,
        sampling_flags.given(namespace),
        namespace.system_prompt,
        namespace.stats,
        tools,
        namespace.tool_command,
        form_of(namespace),
    )
    with contextlib.closing(talker):
        if namespace.quick is not None:
            return chat.turn(namespace.quick)
        if not sys.stdin.isatty():
            return chat.run(read_messages(piped))
        _greet(talker)
        return chat.run(read_messages(typed))


def _talker(namespace: argparse.Namespace) -> Talker:
    server = server_target(namespace)
    if server is not None:
        return ServerTalker(server.url, server.api_key, server.model)
    from quire.cli.engine_talker import EngineTalker

    return EngineTalker(engine_target(namespace))


def _greet(talker: Talker) -> None:
    toy = [_TOY] if talker.model == EMBEDDED_MODEL else []
    for text in (f"{talker.model} {talker.place}", *toy, _HINT):
        _say(textwrap.fill(text, min(100, terminal_width())))


class Chat:
    """One conversation: its messages, its sampling options, its commands."""

    def __init__(
        self,
        talker: Talker,
        options: dict[str, Any],
        system: str | None,
        stats: bool,
        tools: list[dict[str, Any]] | None = None,
        tool_command: str | None = None,
        form: dict[str, Any] | None = None,
    ) -> None:
        self._talker = talker
        self._options = options
        self._show_stats = stats
        self._always = (form or {}) | ({"tools": tools} if tools else {})
        """Options that no command changes."""
        self._tool_command = tool_command
        self._inputs: Iterator[str] = iter(())
        """What the user says next: also the results of calls."""
        self._last: Turn | None = None
        self._talk = Conversation()
        self._talk.start_over(system)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        return self._talk.messages

    def run(self, messages: Iterator[str]) -> int:
        """Answer each message; the exit code says whether a turn failed."""
        code = 0
        self._inputs = messages
        for text in messages:
            if text.strip() in _LEAVE:
                break
            try:
                code |= self._take(text)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self._talk.take_question()
                _say("[stopped]")
        return code

    def _take(self, text: str) -> int:
        if not text.strip():
            return 0
        if not text.startswith("/"):
            return self.turn(text)
        return self._command(text)

    def turn(self, text: str) -> int:
        """Send one message and print the reply as it comes; 1 if it was refused.

        Ctrl-C ends the reply, not the program; the part so far stays in the conversation.
        """
        self._talk.say("user", text)
        end = self._answer_with_tools()
        if end != _ANSWERED:
            self._talk.take_question()
        return int(end == _FAILED)

    def _answer_with_tools(self) -> int:
        """Have the conversation answered; while the answer calls tools, ask for their results and
        go on. Without results, the calls are the answer."""
        start, rounds = len(self.messages), 0
        end = self._answer()
        while end == _ANSWERED and self._last is not None and self._last.calls:
            rounds += 1
            results = [self._result(call) for call in self._last.calls]
            if None in results or rounds > MAX_ROUNDS:
                break
            for call, result in zip(self._last.calls, results, strict=True):
                self.messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                )
            end = self._answer()
        if end != _ANSWERED:
            del self.messages[start:]
        return end

    def _result(self, call: dict[str, Any]) -> str | None:
        """The result of a call, after the call was shown; `None` if nobody gives one."""
        function = call["function"]
        print(f"{function['name']}({function['arguments']})", flush=True)
        if self._tool_command is not None:
            result = run_command(self._tool_command, call)
            _say(f"[{result if len(result) <= 200 else result[:197] + '...'}]")
            return result
        if sys.stdin.isatty():
            _say(f"[result of {function['name']}?]")
        return next(self._inputs, None)

    def _answer(self) -> int:
        """Have the conversation answered. If that fails, the conversation stays unchanged."""
        turn, out = Turn(), writer()
        try:
            self._stream(turn, out.feed)
        except EngineDead:
            raise
        except QuireError as error:
            if turn.text:
                out.end()
            _say(f"quire: {told(error)}")
            return _FAILED
        out.end()
        if turn.stopped:
            _say("[stopped]" if turn.text else "[stopped before the first word: nothing was said]")
        if turn.stopped and not turn.text:
            return _STOPPED
        self._talk.say("assistant", turn.text)
        if turn.calls:
            self.messages[-1]["tool_calls"] = turn.calls
        self._last = turn
        if self._show_stats:
            _say(turn.footer())
        return _ANSWERED

    def _stream(self, turn: Turn, show: Callable[[str], None]) -> None:
        """Show the reply, or the part of it that came before Ctrl-C."""
        try:
            with contextlib.closing(
                self._talker.reply(self.messages, {**self._options, **self._always}, turn)
            ) as pieces:
                for piece in pieces:
                    show(piece)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            turn.stopped = True

    # ------------------------------------------------------------------------------- the commands

    def _command(self, line: str) -> int:
        name, _, rest = line.strip().partition(" ")
        name = _OTHER_NAMES.get(name, name)
        if name not in COMMANDS:
            from quire.spelling import did_you_mean

            _say(f"unknown command {name}{did_you_mean(name, (*COMMANDS, '/bye'))}; see /help")
            return 0
        try:
            return COMMANDS[name][0](self, rest.strip()) or 0
        except QuireError as error:
            _say(error.message)
            return 0

    def _system(self, text: str) -> None:
        self._talk.start_over(text or None)
        _say("system prompt set, conversation forgotten" if text else "no system prompt")

    def _reset(self, _: str) -> None:
        self._talk.start_over(self._talk.system)
        _say("conversation forgotten")

    def _set(self, text: str) -> None:
        first = text.partition(" ")[0]
        name, _, value = text.partition("=" if "=" in first else " ")
        if value.strip() == "default":
            self._options.pop(name.replace("-", "_").lower(), None)
        elif name:
            key, parsed = sampling_flags.parse_value(name, value.strip())
            self._options[key] = parsed
        self._show_options()

    def _params(self, text: str) -> None:
        self._options.update(
            sampling_flags.parse_value(*(word.partition("=")[::2])) for word in text.split()
        )
        self._show_options()

    def _show_options(self) -> None:
        shown = " ".join(f"{key}={value}" for key, value in self._options.items())
        _say(shown or "the model's defaults")

    def _retry(self, _: str) -> int:
        reply = self._talk.take_reply()
        if not self.messages or self.messages[-1]["role"] not in ("user", "tool"):
            raise InvalidRequest("there is no answer to ask for again")
        end = self._answer_with_tools()
        if end != _ANSWERED and reply is not None:
            self.messages.append(reply)
        return int(end == _FAILED)

    def _undo(self, _: str) -> None:
        self._talk.take_reply()
        question = self._talk.take_question()
        if question is None:
            raise InvalidRequest("there is nothing to take back")
        first = " ".join(question.split())
        _say(f"taken back: {first if len(first) <= 60 else first[:57] + '...'}")

    def _save(self, path: str) -> None:
        count = save(_file(path, "/save"), self._talk, self._options, self._talker.model)
        _say(f"saved {count} messages in {path}")

    def _load(self, path: str) -> None:
        talk, options, model = load(_file(path, "/load"))
        known = dict(sampling_flags.checked(name, value) for name, value in options.items())
        self._talk, self._options = talk, known
        other = f", which were with {model}" if model not in ("", self._talker.model) else ""
        _say(f"loaded {len(talk.messages)} messages{other}")

    def _stats(self, _: str) -> None:
        _say(self._last.footer() if self._last else "no reply yet")

    def _help(self, _: str) -> None:
        _say(HELP)


_Run = Callable[[Chat, str], int | None]
COMMANDS: Final[dict[str, tuple[_Run, str, str]]] = {
    "/set": (Chat._set, "NAME VALUE", "change sampling (/set temperature 0.5); alone, show it"),
    "/system": (Chat._system, "TEXT", "set the system prompt and start over; without TEXT, none"),
    "/retry": (Chat._retry, "", "ask for another answer to the last message"),
    "/undo": (Chat._undo, "", "take back the last message and its answer"),
    "/reset": (Chat._reset, "", "forget the conversation, keep the system prompt"),
    "/save": (Chat._save, "FILE", "write the conversation to a file"),
    "/load": (Chat._load, "FILE", "go on with a saved conversation"),
    "/stats": (Chat._stats, "", "tokens, speed and time to first token of the last reply"),
    "/params": (Chat._params, "K=V ...", "like /set, for several"),
    "/help": (Chat._help, "", "this"),
}
"""By name: the function (its exit code counts for piped input), the argument, and the help."""
_OTHER_NAMES: Final = {"/?": "/help", "/clear": "/reset"}
_LEAVE: Final = ("/bye", "/exit", "/quit")
HELP: Final = "\n".join(
    [
        *(f"{f'{name} {takes}':<17}{about}" for name, (_, takes, about) in COMMANDS.items()),
        f"{'/bye':<17}leave (also Ctrl-D, or Ctrl-C twice)",
        '"""              begins and ends a message of several lines',
        "Ctrl-C           stops an answer and keeps the conversation",
    ]
)


def _file(path: str, command: str) -> str:
    if not path:
        raise InvalidRequest(f"which file? {command} FILE")
    return path


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
