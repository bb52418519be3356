"""What records hold, and what a file's records say of its streams.

Knows the engine's outputs, and no HTTP: what the server has to say of a stream is bytes to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from quire.core.output import EngineCoreOutput
from quire.engine.frontend.disk.cipher import file_cipher
from quire.engine.frontend.disk.records import BadHeader, Damage, Header, Kind, Record, scan
from quire.errors import StartupError
from quire.logger import get_logger
from quire.params import SamplingParams

logger = get_logger(__name__)


class StoredPrompt(msgspec.Struct, array_like=True):
    """One prompt of a stream, as it was accepted."""

    index: int
    token_ids: list[int]
    seed: int
    params: bytes
    """Digest of its sampling parameters with everything filled in."""


class Opened(msgspec.Struct, array_like=True):
    """Payload of `Kind.OPEN`."""

    stream_id: str
    opening: bytes
    """What the server needs to render the reply again."""
    prompt: StoredPrompt


class StoredOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What a step brought for one completion of a stream."""

    prompt: int
    index: int
    token_ids: list[int]
    rest: EngineCoreOutput | None = None
    """The whole output, where it holds more than tokens."""

    @classmethod
    def of(cls, prompt: int, index: int, output: EngineCoreOutput) -> StoredOutput:
        """An output, with its tokens in one place and without times, which are of this process."""
        tokens = output.new_token_ids
        plain = EngineCoreOutput(output.request_id, tokens)
        if output == plain:
            return cls(prompt, index, tokens)
        rest = msgspec.structs.replace(
            output, request_id="", new_token_ids=[], queued_ts=0.0, scheduled_ts=0.0
        )
        return cls(prompt, index, tokens, rest)

    def output(self, request_id: str) -> EngineCoreOutput:
        """As the engine said it."""
        if self.rest is None:
            return EngineCoreOutput(request_id, self.token_ids)
        return msgspec.structs.replace(
            self.rest, request_id=request_id, new_token_ids=self.token_ids
        )


Step = list[StoredOutput]
"""What one step brought for one stream."""


@dataclass(slots=True)
class StoredStream:
    """A stream of a file."""

    stream_id: str
    opening: bytes
    prompts: dict[int, StoredPrompt]
    """By index. All but the first may be missing: they follow from the request."""
    steps: list[Step] = field(default_factory=list)
    """In order, from the first on. The last ones may be missing: they follow from the rest."""
    ended_at: float | None = None
    """Seconds since 1970, if its reply is complete."""
    num_records: int = 1
    is_released: bool = False
    """Whether its process has left it to the next one, though it still lives."""

    def steps_of(self, prompt: int) -> list[Step]:
        """What the steps brought for one prompt."""
        found = ([one for one in step if one.prompt == prompt] for step in self.steps)
        return [step for step in found if step]

    def num_tokens(self) -> int:
        """Tokens generated so far, over all completions."""
        return sum(len(one.token_ids) for step in self.steps for one in step)


@dataclass(frozen=True, slots=True)
class Resumption:
    """A prompt whose generation another process began."""

    prompt: StoredPrompt
    steps: list[Step]
    """What it has brought so far, or all of it."""


@dataclass(slots=True)
class StoredFile:
    """What a journal file holds."""

    path: Path
    identity: dict[str, str]
    """Of the model and program that wrote it."""
    streams: list[StoredStream]
    """Those that are still kept, in the order in which they began."""
    damage: Damage


_OPENED: Final = msgspec.msgpack.Decoder(Opened)
_PROMPT: Final = msgspec.msgpack.Decoder(StoredPrompt)
_STEPS: Final = msgspec.msgpack.Decoder(list[Step])
_IDENTITY: Final = msgspec.msgpack.Decoder(dict[str, str])
_TIME: Final = msgspec.msgpack.Decoder(float)


def params_digest(params: SamplingParams) -> bytes:
    """Equal for parameters that give the same tokens."""
    return hashlib.blake2b(msgspec.msgpack.encode(params), digest_size=16).digest()


def read_file(path: Path, key: bytes | None, tell_damage: bool = True) -> StoredFile:
    """Read a journal file as far as it can be trusted.

    Args:
        path: Of the file.
        key: To decrypt it with.
        tell_damage: Log what cannot be read. A file that is being written may end anywhere.

    Raises:
        StartupError: it cannot be read, is of another format, or is encrypted with another key.
    """
    remedy = "or remove the file: its requests are lost then"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StartupError(f"the journal {path} cannot be read: {error.strerror}") from None
    if not data:
        return StoredFile(path, {}, [], Damage())
    try:
        header = Header.decode(data)
    except BadHeader as error:
        raise StartupError(
            f"the journal {path} cannot be used: {error}. Start the version that wrote it, {remedy}"
        ) from None
    if header.encrypted and key is None:
        raise StartupError(f"the journal {path} is encrypted: give --journal-key-file, {remedy}")
    cipher = file_cipher(key, header) if header.encrypted and key is not None else None
    damage = Damage()
    records = list(scan(data, header, damage, cipher))
    if damage.undecrypted and not records:
        raise StartupError(
            f"the journal {path} was encrypted with another key: give it with --journal-key-file, "
            + remedy
        )
    if damage.num_bytes and tell_damage:
        logger.warning(
            "%d bytes of the journal %s are damaged; what they said is computed again where it "
            "follows from the rest, and lost otherwise",
            damage.num_bytes,
            path,
        )
    identity, streams = assemble(records)
    return StoredFile(path, identity, streams, damage)


def assemble(records: Iterable[Record]) -> tuple[dict[str, str], list[StoredStream]]:
    """Identity and streams from the records that could be read. A stream counts up to the first of
    its records that is missing: later ones are tokens after a gap."""
    identity: dict[str, str] = {}
    streams: dict[int, StoredStream] = {}
    for record in records:
        if record.kind is Kind.IDENTITY:
            identity = _IDENTITY.decode(record.payload)
        elif record.kind is Kind.OPEN:
            opened = _OPENED.decode(record.payload)
            prompts = {opened.prompt.index: opened.prompt}
            streams[record.stream] = StoredStream(opened.stream_id, opened.opening, prompts)
        elif record.kind is Kind.FORGET:
            streams.pop(record.stream, None)
        elif (stream := streams.get(record.stream)) and record.place == stream.num_records:
            stream.num_records += 1
            _add(stream, record)
    return identity, list(streams.values())


def _add(stream: StoredStream, record: Record) -> None:
    match record.kind:
        case Kind.PROMPT:
            prompt = _PROMPT.decode(record.payload)
            stream.prompts[prompt.index] = prompt
        case Kind.STEP:
            stream.steps += _STEPS.decode(record.payload)
        case Kind.END:
            stream.ended_at = _TIME.decode(record.payload)
        case Kind.RELEASE:
            stream.is_released = True
