"""Large messages, cut into several that are each small enough to send.

The outputs of one step are spread over several messages. If one request's output is itself too
large, its prompt log-probabilities and its tokens travel in pieces, which the output processor
joins. What cannot be cut and is over the limit becomes an error of that one request. Knows no
sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quire.core.output import EngineCoreOutput, failed_output
from quire.core.stats import StepStats
from quire.engine.cores import wire
from quire.engine.messages import AddRequests, Outputs, ToCore


def encode_outputs(
    epoch: int, number: int, outputs: list[EngineCoreOutput], stats: StepStats | None
) -> tuple[list[bytes], list[str]]:
    """The frames that tell what a step produced: one, unless it would be a large one.

    Args:
        epoch: Of the core.
        number: Of the first message; the others count on from it.
        outputs, stats: What to tell. The statistics are in the last message: by then everybody
            has heard of all the tokens that they count.

    Returns:
        The frames, and the ids of requests whose output cannot be sent. An error is told in its
        place, so the core must end them.
    """
    try:
        frame = wire.encode(Outputs(epoch, number, outputs, stats))
    except wire.MessageTooLarge:
        pass
    else:
        if len(frame) <= wire.PART_BYTES:
            return [frame], []
    failed: list[str] = []
    packs = list(_pack(piece for output in outputs for piece in _pieces(output, failed)))
    last = len(packs) - 1
    frames = [
        wire.encode(Outputs(epoch, number + i, pack, stats if i == last else None))
        for i, pack in enumerate(packs)
    ]
    return frames, failed


def encode_to_core(message: ToCore) -> list[bytes]:
    """The frames that bring a message to a core. Many requests, as when a journal is replayed, are
    spread over several.

    Raises:
        MessageTooLarge: one request, or a call's arguments, are over the limit.
        TypeError, ValueError, OverflowError, RecursionError: msgpack cannot hold what is in it.
    """
    several = isinstance(message, AddRequests) and len(message.requests) > 1
    try:
        frame = wire.encode(message)
    except wire.MessageTooLarge:
        if not several:
            raise
    else:
        if len(frame) <= wire.PART_BYTES or not several:
            return [frame]
    assert isinstance(message, AddRequests), "no other message holds several of anything"
    half = len(message.requests) // 2
    first = AddRequests(message.epoch, message.requests[:half])
    second = AddRequests(message.epoch, message.requests[half:])
    return encode_to_core(first) + encode_to_core(second)


def _pack(pieces: Iterator[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
    """Neighbours share a message as long as it stays small; at least one message, maybe empty."""
    pack: list[EngineCoreOutput] = []
    size = 0
    for piece in pieces:
        more = wire.size_of(piece)
        if pack and size + more > wire.PART_BYTES // 2:
            yield pack
            pack, size = [], 0
        pack.append(piece)
        size += more
    yield pack


def _pieces(output: EngineCoreOutput, failed: list[str]) -> Iterator[EngineCoreOutput]:
    """One output, or several that together say the same, the last of them the end, if it is one."""
    size = wire.size_of(output)
    if size <= wire.PART_BYTES // 2:
        yield output
        return
    replace = msgspec.structs.replace
    last = ("finish_reason", "stop_reason", "error", "pooled", "scored")
    silent: dict[str, Any] = dict.fromkeys(last)
    start = 0
    for some in _runs(output.new_prompt_logprobs or []):
        yield replace(
            output,
            new_token_ids=[],
            new_logprobs=None,
            new_prompt_logprobs=some,
            prompt_logprobs_start=start,
            **silent,
        )
        start += len(some)
    rest = replace(output, new_prompt_logprobs=None)
    first = 0
    for some in list(_runs(output.new_logprobs or []))[:-1]:
        end = first + len(some)
        tokens = output.new_token_ids[first:end]
        yield replace(rest, new_token_ids=tokens, new_logprobs=some, **silent)
        first = end
    scores = output.new_logprobs and output.new_logprobs[first:]
    rest = replace(rest, new_token_ids=output.new_token_ids[first:], new_logprobs=scores)
    yield _bounded(rest, failed)


def _bounded(output: EngineCoreOutput, failed: list[str]) -> EngineCoreOutput:
    """What can be sent, or an error that says why it cannot."""
    size, limit = wire.size_of(output), wire.MAX_FRAME - wire.PART_BYTES
    if size <= limit:
        return output
    failed.append(output.request_id)
    return failed_output(
        output.request_id,
        f"the result takes {size} bytes, over the limit of {limit} bytes; ask for less",
    )


def _runs(values: list[Any]) -> Iterator[list[Any]]:
    """A list in runs of at most a quarter of a part each, or of one value that is larger."""
    run: list[Any] = []
    total = 0
    for value in values:
        more = wire.size_of(value)
        if run and total + more > wire.PART_BYTES // 4:
            yield run
            run, total = [], 0
        run.append(value)
        total += more
    if run:
        yield run
