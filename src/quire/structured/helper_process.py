"""The process that compiles grammars which nobody has looked at yet, and that may be killed.

Run as `python -m quire.structured.helper_process FD`. It loads a vocabulary once and compiles each
grammar in a child; see `utils.helpers.side`. It loads no torch.

First comes `HelperSetup`, then one `StructuredOutputsParams` at a time, each answered by one
`Answer`."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

import msgspec

from quire.errors import InvalidRequest
from quire.structured.compiler import Vocabulary
from quire.structured.gate import Answer, HelperSetup, Refusal, judge
from quire.structured.params import StructuredOutputsParams
from quire.utils.helpers.side import Lost, answer_each, become_helper
from quire.utils.helpers.words import receive


def serve(sock: socket.socket) -> None:
    """Answer until the other end closes."""
    first = receive(sock)
    if first is None:
        return
    begin = msgspec.msgpack.decode(first, type=HelperSetup)
    vocabulary: Vocabulary | None = None
    refusal: Refusal | None = None
    try:
        vocabulary = Vocabulary(begin.tokenizer, begin.vocab_size, begin.eos_token_ids)
    except InvalidRequest as error:
        refusal = Refusal(error.message, error.param)

    def work(word: bytes) -> Answer:
        if vocabulary is None:
            return Answer(refusal=refusal)
        params = msgspec.msgpack.decode(word, type=StructuredOutputsParams)
        return Answer.of(judge(vocabulary, params))

    def lost(found: Lost) -> Answer:
        said = f"structured_outputs: compiling it takes {found.why}."
        return Answer(refusal=Refusal(said, "structured_outputs", found.passes))

    answer_each(sock, begin.limits, work, lost)


def main(argv: list[str]) -> int:
    """Entry point."""
    become_helper("quire::Grammars")
    with socket.socket(fileno=int(argv[1])) as sock, suppress(OSError):
        serve(sock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
