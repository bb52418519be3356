"""`quire chat [MODEL]`: talk to a model in the terminal, here or at a running server.

The conversation and its commands live here; where replies come from is `quire.cli.talkers`.
On a terminal it prompts; with piped input each line is one turn and only replies reach stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from quire.cli import sampling
from quire.cli.parser import Parser
from quire.cli.talkers import ServerTalker, Talker, Turn
from quire.cli.target import add_target_flags, engine_target, quiet_logs, server_target
from quire.errors import ConfigError, RequestError

HELP: Final = """\
/system TEXT     set the system prompt and start over; without TEXT, remove it
/params K=V ...  change sampling (temperature=0.5 max_tokens=64); alone, show it
/stats           tokens, speed and time to first token of the last reply
/reset           forget the conversation, keep the system prompt
/help            this
/exit            leave (also Ctrl-D)"""


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
    parser.add_config_flag()
    sampling.add_sampling_flags(parser)
    add_target_flags(parser, positional=True)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Talk until the input ends; returns the exit code."""
    namespace = build_parser().parse(arguments)
    quiet_logs()
    talker = _talker(namespace)
    chat = Chat(talker, sampling.given(namespace), namespace.system_prompt, namespace.stats)
    with contextlib.closing(talker):
        if namespace.quick is not None:
            return chat.turn(namespace.quick)
        return chat.run(_lines(sys.stdin.isatty()))


def _talker(namespace: argparse.Namespace) -> Talker:
    server = server_target(namespace)
    if server is not None:
        return ServerTalker(server.url, server.api_key, server.model)
    from quire.cli.engine_talker import EngineTalker

    return EngineTalker(engine_target(namespace))


def _lines(terminal: bool) -> Iterator[str]:
    """What the user types, or the lines of a pipe."""
    if not terminal:
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` history and editing)
    print("Type a message; /help lists the commands, Ctrl-D leaves.", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


class Chat:
    """One conversation: its messages, its sampling options, its commands."""

    def __init__(
        self, talker: Talker, options: dict[str, Any], system: str | None, stats: bool
    ) -> None:
        self._talker = talker
        self._options = options
        self._show_stats = stats
        self._last: Turn | None = None
        self.messages: list[dict[str, Any]] = []
        self._start_over(system)

    def run(self, lines: Iterator[str]) -> int:
        """Answer each line; the exit code tells whether a turn failed."""
        code = 0
        for line in lines:
            if line.strip() in ("/exit", "/quit"):
                break
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                code |= self.turn(line)
        return code

    def turn(self, text: str) -> int:
        """Send one message and print the reply as it comes; 1 if the request was refused.

        Ctrl-C ends the reply, not the program; what was said so far stays in the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        turn = Turn()
        try:
            for piece in self._talker.reply(self.messages, self._options, turn):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print(" [stopped]", end="", file=sys.stderr)
        except RequestError as error:
            self.messages.pop()
            print(f"quire: {error.message}", file=sys.stderr)
            return 1
        print(flush=True)
        self.messages.append({"role": "assistant", "content": turn.text})
        self._last = turn
        if self._show_stats:
            print(turn.footer(), file=sys.stderr)
        return 0

    def _start_over(self, system: str | None) -> None:
        self._system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/system":
            self._start_over(rest or None)
            _say("system prompt set, conversation forgotten" if rest else "no system prompt")
        elif name == "/reset":
            self._start_over(self._system)
            _say("conversation forgotten")
        elif name == "/params":
            self._set_params(rest)
        elif name == "/stats":
            _say(self._last.footer() if self._last else "no reply yet")
        elif name == "/help":
            _say(HELP)
        else:
            from quire.registry import did_you_mean

            names = ("/system", "/params", "/stats", "/reset", "/help", "/exit")
            _say(f"unknown command {name}{did_you_mean(name, names)}")

    def _set_params(self, text: str) -> None:
        try:
            self._options.update(sampling.parse_assignment(word) for word in text.split())
        except ConfigError as error:
            _say(error.message)
            return
        shown = " ".join(f"{key}={value}" for key, value in self._options.items())
        _say(shown or "the model's defaults")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
