"""The process that renders chat templates which are not known to be cheap, and that may be killed.

Run as `python -m quire.tokenizer.template_process FD`. It renders each conversation in a child; see
`utils.helpers.side`. A template that has been rendered once is compiled here, too, so that the next
child need not.

First comes `RenderSetup`, then one `RenderTask` at a time, each answered by one `Rendered`."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import suppress

import msgspec

from quire.errors import InvalidRequest
from quire.tokenizer.chat_template import ChatTemplate, compile_template
from quire.tokenizer.template_helper import Rendered, RenderSetup, RenderTask
from quire.utils.helpers.side import Lost, answer_each, become_helper
from quire.utils.helpers.words import receive


def serve(sock: socket.socket) -> None:
    """Answer until the other end closes."""
    first = receive(sock)
    if first is None:
        return
    begin = msgspec.msgpack.decode(first, type=RenderSetup)

    def work(word: bytes) -> Rendered:
        task = msgspec.msgpack.decode(word, type=RenderTask)
        template = ChatTemplate({"default": task.source}, begin.special_tokens)
        try:
            return Rendered(template.render(**json.loads(task.options), chat_template="default"))
        except InvalidRequest as error:
            return Rendered(refusal=error.message, param=error.param)

    def done(word: bytes) -> None:
        with suppress(InvalidRequest):
            compile_template(msgspec.msgpack.decode(word, type=RenderTask).source)

    def lost(found: Lost) -> Rendered:
        said = f"the chat template: rendering these messages takes {found.why}."
        return Rendered(refusal=said, param="messages", passes=found.passes)

    answer_each(sock, begin.limits, work, lost, done)


def main(argv: list[str]) -> int:
    """Entry point."""
    become_helper("quire::Templates")
    with socket.socket(fileno=int(argv[1])) as sock, suppress(OSError):
        serve(sock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
