"""One HTTP request and its reply, directly on ASGI: reads the body within limits, replies, streams.

Knows no route and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from quire.bounds import read_field
from quire.config import ServerConfig
from quire.engine.frontend.stream import Pipe
from quire.errors import InvalidRequest, PayloadTooLarge, QuireError, TooManyRequests
from quire.logger import get_logger
from quire.serving import errors
from quire.serving.auth import NOBODY, Tenant
from quire.serving.body_scan import SMALL, BodyScan, pieces
from quire.serving.checks import renamed
from quire.serving.deadline import Deadline
from quire.serving.decode import Unsupported, decode, show, without_mark
from quire.serving.dialect import OPENAI
from quire.serving.durable import Durable, Recovered, StoredRequest, told_headers
from quire.serving.errors import (
    IdempotencyKeyReused,
    OtherRequest,
    RequestTimeout,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from quire.serving.keep_alive import kept_alive
from quire.serving.kept_streams import KeptReply, Opening, Reader
from quire.serving.key_accounts import Place, outcome_of, outcome_of_error
from quire.serving.large_json import ONE_GO, sendable
from quire.serving.load_report import TOLD
from quire.serving.server_state import ServedModel, ServerState
from quire.serving.stream_headers import Wishes, read_wishes
from quire.serving.stream_skip import Skip
from quire.serving.unread_fields import UnreadFields, begin

logger = get_logger(__name__)

Scope = MutableMapping[str, Any]
T = TypeVar("T", bound=msgspec.Struct)
NO_DESCRIPTORS: Final = "quire.no_descriptors"
"""Key in the scope of a request that came when the process could open hardly any more files."""
PIPE: Final = "quire.pipe"
"""Key of the `ReplyPipe` in the scope of a request that came over a socket."""
KEY: Final = "quire.exchange"
"""Key of the exchange in the ASGI scope."""
JSON: Final = b"application/json"
BODY_SECONDS: Final = 60.0
"""Seconds that a whole body may take to arrive."""
DISCARD_TIMES: Final = 8
"""Of a body that is too long, at most this many times the limit is read and discarded."""
DISCARD_SECONDS: Final = 5.0
LONGEST_DEADLINE: Final = 86_400_000
"""Milliseconds: a day."""
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")
_INTEGER: Final = re.compile(rb"[+-]?[0-9]{1,20}")
_REPLAYED: Final = (b"idempotent-replayed", b"true")
"""Stripe's header: the reply was made for an earlier request."""
_CLOSE: Final = (b"connection", b"close")
_UNBUFFERED: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Asks proxies to pass on a stream without buffering."""


class ReplyPipe(Pipe, Protocol):
    """The connection of a request."""

    def write_chunk(self, data: bytes) -> bool:
        """Write one chunk of a body that is sent in chunks, or nothing if it is empty; false, and
        nothing is written, if the client reads slowly or has gone."""
        ...


class Exchange:
    """A request being answered."""

    def __init__(self, scope: Scope, receive: Any, send: Any, state: ServerState) -> None:
        self.scope = scope
        self.state = state
        self.caller = NOBODY
        """Who sent it; the gate finds out."""
        self.dialect = OPENAI
        """The route's, or that of the route above an unknown path."""
        self.request_id = uuid.uuid4().hex
        self.deadline: Deadline | None = None
        """When the caller wants the reply to be complete."""
        self.unread = UnreadFields(state.unknown_fields)
        """Fields of the request that have no effect."""
        self.status: int | None = None
        """Status of the reply once it has started."""
        self.finished = False
        self.bytes_in = self.bytes_out = 0
        """Bytes of bodies, read and sent."""
        self.created = int(time.time())
        """When the request came, in seconds since 1970. Replies tell it."""
        self.kept: KeptReply | None = None
        """The reply, if it is written for later readers too. Set once it is being made."""
        self.before_end: Callable[[], None] | None = None
        """Called once, before the last bytes leave: whoever reads the reply finds it counted."""
        self.tell_load: Callable[[], bytes | None] | None = None
        """Makes the header with the engine's load, if the client asked for it."""
        self.durable: Durable | None = None
        """The same reply in the journal on disk."""
        self._place: Place | None = None
        self._failed: tuple[str, str | None] | None = None
        # what became of the request, if an error ended it, and which limit it met
        self._task: asyncio.Task[None] | None = None
        # makes the reply, without need of this connection
        self._recovered: Recovered | None = None
        self._opening: Opening | None = None
        self._body = b""
        self._peeked: bytes | None = None
        self._accepted = False
        self._more_body = True
        self._receive = receive
        self._send = send
        self.pipe: ReplyPipe | None = None
        """Where chunks of the stream can be written without detours, once it has started."""
        self._whole = asyncio.Lock()
        # held while a frame is written in parts

    @property
    def config(self) -> ServerConfig:
        """The server's."""
        return self.state.config

    def recover(self, recovered: Recovered) -> None:
        """The request is one that another process accepted."""
        self._recovered = recovered
        self.caller = self.state.keys.owner(recovered.request.owner)
        self.request_id, self.created = recovered.request.request_id, recovered.request.created

    def header(self, name: bytes) -> bytes | None:
        """First value of a request header; `name` in lower case."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def trace_headers(self) -> dict[str, str] | None:
        """The caller's trace context, if it sent one."""
        found = {
            name.decode(): value.decode("latin-1")
            for name in (b"traceparent", b"tracestate")
            if (value := self.header(name)) is not None
        }
        return found or None

    def client(self, user: str | None) -> Tenant:
        """The client that a request counts for: the key if there are several, otherwise the
        request's `user`. Call it after `admit`."""
        entry = None if self._place is None else self._place.entry
        return Tenant(self.caller.name or user or "", self.caller.space, entry)

    def adopt_request_id(self) -> None:
        """Take the caller's `X-Request-Id`, if there is one.

        Raises:
            InvalidRequest: it is too long or not made of visible ASCII.
        """
        given = self.header(b"x-request-id")
        if given is None:
            return
        if not _REQUEST_ID.fullmatch(given):
            raise InvalidRequest(
                "X-Request-Id must be 1 to 128 visible ASCII characters without spaces, got "
                f"{len(given)} bytes.",
                param="X-Request-Id",
            )
        self.request_id = given.decode("ascii")

    def adopt_deadline(self) -> None:
        """Take the caller's `X-Request-Deadline-Ms`, if there is one; it counts from now.

        Raises:
            InvalidRequest: it is not a whole number of milliseconds up to a day.
        """
        given = self.header(b"x-request-deadline-ms")
        if given is None:
            return
        if not (given.isdigit() and len(given) < 20 and 0 < int(given) <= LONGEST_DEADLINE):
            raise InvalidRequest(
                f"X-Request-Deadline-Ms must be an integer from 1 to {LONGEST_DEADLINE}, got "
                f"{show(given.decode('latin-1'))}.",
                param="X-Request-Deadline-Ms",
            )
        self.deadline = Deadline(int(given))

    def priority(self, given: int | None, policy: str) -> int:
        """The request's priority: that of `X-Vllm-Priority`, or else the one given in its body.
        One that the scheduling policy does not read is told in the reply, and once in the log.

        Raises:
            InvalidRequest: it is out of range, or the header is not an integer.
        """
        header = self.header(b"x-vllm-priority")
        if header is not None and not _INTEGER.fullmatch(header):
            raise InvalidRequest(
                f"X-Vllm-Priority must be an integer, got {show(header.decode('latin-1'))}.",
                param="X-Vllm-Priority",
            )
        with renamed("priority", "priority" if header is None else "X-Vllm-Priority"):
            found: int = read_field("priority", (given or 0) if header is None else int(header))
        if found and policy != "priority":
            logger.warning_once(
                "a request has a priority, which the scheduling policy %s does not read (start "
                "with --scheduling-policy priority); replies to others tell it in a header",
                policy,
            )
            self.unread.note("priority")
        return found

    def _check_rank(self) -> None:
        """Refuse to be asked for another engine than the one there is.

        Raises:
            InvalidRequest: `X-data-parallel-rank` is not 0.
        """
        given = self.header(b"x-data-parallel-rank")
        if given is not None and given.strip() != b"0":
            raise InvalidRequest(
                "X-data-parallel-rank must be 0, because a server has one engine, got "
                f"{show(given.decode('latin-1'))}.",
                param="X-data-parallel-rank",
            )

    async def body(self) -> bytes:
        """The request's body, which must be declared as JSON.

        Raises:
            UnsupportedMediaType: it is not.
            UnsupportedEncoding: it is compressed.
            PayloadTooLarge: it is longer than the server reads; noticed while it arrives.
            InvalidRequest: it holds more than the server decodes; noticed while it arrives.
            RequestTimeout: it takes more than a minute to arrive.
            ClientDisconnect: the client has disconnected.
        """
        if self._peeked is not None:
            body, self._peeked = self._peeked, None
            return body
        given = (self.header(b"content-type") or b"").decode("latin-1")
        if given.partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaType(given)
        coding = (self.header(b"content-encoding") or b"").decode("latin-1")
        if coding.strip().lower() not in ("", "identity"):
            raise UnsupportedEncoding(coding)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read()
        except (PayloadTooLarge, InvalidRequest):
            await self._discard()
            raise
        except TimeoutError:
            raise RequestTimeout(
                f"The body must arrive within {BODY_SECONDS:.0f} seconds."
            ) from None
        return without_mark(body)

    async def peek(self) -> bytes:
        """The request's body, which the handler that reads it next gets again.

        Raises:
            ServiceUnavailable: no model takes requests.
            RequestError: as `body` raises it.
        """
        if self._recovered is None:
            self.state.check_open()
        self._peeked = await self.body()
        return self._peeked

    async def record(self, kind: type[T], unsupported: Mapping[str, Unsupported]) -> T:
        """The request's body as a typed record.

        A server that accepts no requests at all says so before it reads the body.

        Raises:
            ServiceUnavailable: no model takes requests.
            InvalidRequest: the body is not such a record, or a header is bad.
            RequestError: as `body` raises it, or the client goes on with a reply that there is not.
            Answered: the request was sent before, and has the reply it had then.
        """
        begin(self.unread)
        if self._recovered is not None:
            return decode(kind, await self._recovered_body(self._recovered.request), unsupported)
        self.state.check_open()
        self.adopt_deadline()
        self._check_rank()
        wishes = read_wishes(self.scope["headers"], self.state.config.resumable_streams)
        body = await self.body()
        self._accept()
        if wishes is not None:
            self._body = body
            await self._resume(wishes, body)
        if len(body) <= SMALL:
            return decode(kind, body, unsupported)
        return await asyncio.to_thread(decode, kind, body, unsupported)

    def admit(self, model: str | None) -> ServedModel:
        """The model that a request is for, if it can take one more. Texts are rendered and
        tokenised after this: under overload, refusals must not cost what answers cost.

        Raises:
            ServiceUnavailable, NotFound: as `ServerState.model_for` raises them.
            TooManyRequests: its queue is full, or the caller's key has used what it may.
        """
        served = self.state.model_for(model)
        account = self.state.accounts.find(self.caller.key)
        if self._recovered is None:  # that one was admitted when it came
            try:
                if account is not None:
                    account.check()
                served.engine.check_room(None if account is None else account.meter)
            except TooManyRequests as error:
                if account is not None:
                    account.refuse(error)
                raise
        if account is not None and self._place is None:
            self._place = account.enter()
        return served

    def settle(self) -> None:
        """The reply is complete but for its last bytes, or will not be: its key has room for
        another. Whoever has read the whole reply finds that so."""
        if self._place is not None:
            status = self.status if self.finished else None
            if self._task is not None:  # without an error it is complete, whoever reads it
                status = 200 if self.kept is None else self.kept.status
            self._place.release(*(self._failed or (outcome_of(status), None)))

    def goes_on_in(self, task: asyncio.Task[None]) -> None:
        """The reply is made by a task that does not end with this connection."""
        self._task = task
        task.add_done_callback(lambda _: self.settle())

    def failed(self, error: BaseException) -> None:
        """Note what ends the reply; the first error counts. What goes wrong with a connection is
        nothing to a reply that goes on without it."""
        if self._failed is None and self._task in (None, asyncio.current_task()):
            begun = (self.status if self.kept is None else self.kept.status) is not None
            # not the error itself, which knows the frames that know this
            self._failed = outcome_of_error(error, begun), getattr(error, "limit", None)

    async def _recovered_body(self, stored: StoredRequest) -> bytes:
        body = await self.body()
        self._accept()
        self._opening = Opening(stored.owner, stored.digest, stored.key, stored.asked, self.dialect)
        return body

    async def _resume(self, wishes: Wishes, body: bytes) -> None:
        """Give the reply that the request had when it was sent before, or note that this one is to
        be kept."""
        owner = self.caller.owner
        digest = hashlib.sha256(self.scope["path"].encode() + b"\0" + body).digest()
        if wishes.last_event_id is not None:
            stream_id = wishes.last_event_id.partition(":")[0]
            await self.state.kept.look_for(stream_id)
            kept = self.state.kept.find(stream_id, owner)
            if kept.opening.digest != digest:
                raise OtherRequest
            await self.follow(kept, "last_event_id", wishes.last_event_id)
            raise Answered
        self._opening = Opening(owner, digest, wishes.key, wishes.asked, self.dialect)
        await self._join()

    async def _join(self) -> None:
        """Give the reply that this `Idempotency-Key` has, if there is one."""
        opening = self._opening
        assert opening is not None
        if opening.key is None:
            return
        await self.state.kept.look_for()
        if not (kept := self.state.kept.by_key(opening.owner, opening.key)):
            return
        if kept.opening.digest != opening.digest:
            raise IdempotencyKeyReused
        await self.follow(kept, "idempotency_key")
        raise Answered

    def _accept(self) -> None:
        """From here on a drain waits for the reply."""
        if not self._accepted:
            self._accepted = True
            self.state.answering += 1

    def leave(self) -> None:
        """The reply has ended, or will not come."""
        if self._task is None:
            self.settle()
        if self._accepted:
            self._accepted = False
            self.state.answering -= 1

    async def _read(self) -> bytes:
        limit = self.state.config.max_body_bytes
        declared = self.header(b"content-length") or b"0"
        if declared.isdigit() and int(declared[:20]) > limit:
            raise PayloadTooLarge(f"The body may have at most {limit} bytes, got {int(declared)}.")
        chunks: list[bytes] = []
        size, more, scan = 0, True, None
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            more = self._more_body = message.get("more_body", False)
            size += len(chunk)
            self.bytes_in = size
            if size > limit:
                raise PayloadTooLarge(f"The body may have at most {limit} bytes, got more.")
            chunks.append(chunk)
            if size > SMALL:
                arrived = chunk if scan is not None else b"".join(chunks)
                scan = scan or BodyScan()
                for piece in pieces(arrived):
                    scan.feed(piece)
                    await asyncio.sleep(0)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _discard(self) -> None:
        """Read the rest of a body that is too long, within limits. A client that is still sending
        when the connection closes would see a broken connection instead of the reply."""
        if not self.bytes_in and b"100-continue" in (self.header(b"expect") or b"").lower():
            return  # it waits for leave to send
        left = DISCARD_TIMES * self.state.config.max_body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while self._more_body and left > 0:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    self._more_body = message.get("more_body", False)
                    left -= len(message.get("body", b""))

    async def reply(
        self,
        body: bytes | Sequence[bytes] = b"",
        status: int = 200,
        content_type: bytes = JSON,
        headers: errors.Headers | None = None,
    ) -> None:
        """Send a whole reply, of which a large one comes in pieces."""
        pieces = [body] if isinstance(body, bytes) else body
        size = sum(map(len, pieces))
        head = [(b"content-length", str(size).encode()), *(headers or ())]
        head += self.unread.headers
        if size:
            head.append((b"content-type", content_type))
        if self.kept is not None:
            self.kept.start(status, head)
            self.settle()
            for piece in sendable(pieces):
                self.kept.write(piece)
                await asyncio.sleep(0)
            return self.kept.end(b"", failed=status >= 400)
        await self._start(status, head)
        await self._send_in_parts(pieces, more=False)

    async def fail(self, error: QuireError) -> None:
        """Reply with an error, in the dialect's format."""
        body, self.kept = self.dialect.error(error, self.request_id), None
        await self.reply(body, error.status, headers=errors.headers(error))

    async def start_stream(self) -> None:
        """Start a stream, of the content type that the dialect has."""
        head = [(b"content-type", self.dialect.stream_type), *_UNBUFFERED, *self.unread.headers]
        if self.kept is not None:
            return self.kept.start(200, head)
        await self._start(200, head)
        if self.scope["method"] != "HEAD":
            self.pipe = self.scope.get(PIPE)

    def write_now(self, frames: bytes) -> bool:
        """Send finished frames of the stream, if that can be done without waiting. With no bytes,
        tell whether it can."""
        if self.pipe is None or not self.pipe.write_chunk(frames):
            return False
        self.bytes_out += len(frames)
        return True

    async def write(self, frames: bytes) -> None:
        """Send finished frames of the stream; waits while the client reads slowly."""
        if len(frames) > ONE_GO:
            async with self._whole:
                return await self._send_in_parts([frames], more=True)
        await self._send_body(frames, more=True)

    async def write_between(self, frames: bytes) -> None:
        """The same for what others may write at any time: it does not get into a frame."""
        async with self._whole:
            await self._send_body(frames, more=True)

    async def end_stream(self, frames: bytes = b"") -> None:
        """Send the last frames."""
        self.finished = True
        await self._send_body(frames, more=False)

    async def _send_in_parts(self, pieces: Sequence[bytes], more: bool) -> None:
        """Send much so that others have their turn in between."""
        parts = sendable(pieces)
        part = next(parts, b"")
        for following in parts:
            await self._send_body(part, more=True)
            await asyncio.sleep(0)
            part = following
        self.finished = not more
        await self._send_body(part, more)

    async def _send_body(self, data: bytes, more: bool) -> None:
        if self.scope["method"] != "HEAD":  # whose body stays here
            self.bytes_out += len(data)
        if not more and self._task is None:
            self.settle()
        if not more and self.before_end is not None:
            tell, self.before_end = self.before_end, None
            tell()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _start(self, status: int, headers: errors.Headers) -> None:
        self.status = status
        if self.state.config.enable_request_id_headers:
            told = self.request_id.encode()
            headers += [(name, told) for name in self.dialect.id_headers]
        if self.tell_load is not None and (load := self.tell_load()) is not None:
            headers.append((TOLD, load))
        if (self.state.draining or self.state.handed_over) and _CLOSE not in headers:
            headers.append(_CLOSE)  # the next request is for the process that comes after this one
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which replies, and cancel it as soon as the client disconnects; a reply that
        is kept goes on without it. Call it after `body()`."""
        if self._opening is None:
            return await self.unless_disconnected(work)
        if self._recovered is not None:
            return await self._render_again(self._recovered, self._opening, work)
        try:
            await self._join()  # another request with the same key may have come first
            self.kept = self.state.kept.open(self._opening)
        except BaseException:
            work.close()
            raise
        if self.kept is None:
            return await self.unless_disconnected(work)
        self._make_durable(self.kept, self._opening)
        self.kept.answer(self._made(work))
        assert self.kept.task is not None
        self.goes_on_in(self.kept.task)
        await self.follow(self.kept)

    async def _made(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BaseException as error:
            self.failed(error)
            raise

    def _make_durable(self, kept: KeptReply, opening: Opening) -> None:
        """Have the journal on disk hold the reply, if there is one."""
        if (journal := self.state.journal) is None:
            return
        request = StoredRequest(
            self.scope["path"],
            told_headers(self.scope["headers"]),
            self._body,
            opening.owner,
            opening.digest,
            opening.key,
            opening.asked,
            self.request_id,
            self.created,
        )
        self.durable = Durable(journal, kept.id, msgspec.msgpack.encode(request))

    async def _render_again(
        self, recovered: Recovered, opening: Opening, work: Coroutine[Any, Any, None]
    ) -> None:
        """Write a reply that another process kept, for whoever comes for it."""
        stream, journal = recovered.stream, self.state.journal
        assert journal is not None, "what is recovered comes from the journal"
        self.kept = self.state.kept.restore(stream.stream_id, opening)
        if recovered.refusal is not None:
            work.close()
            self.kept.fail(recovered.refusal)
            return
        self.durable = Durable(journal, stream.stream_id, stream.opening, stream)
        self.kept.answer(self._made(work))
        recovered.begun.set()
        assert self.kept.task is not None
        self.goes_on_in(self.kept.task)
        await asyncio.wait((self.kept.task,))

    async def follow(self, kept: KeptReply, by: str | None = None, after: str = "") -> None:
        """Send a kept reply as far as the client stays.

        Args:
            kept: The reply.
            by: How the client named it, if it has been there before; for the metrics.
            after: Id of the last event that the client has, if it has some.

        Raises:
            NotFound: what comes after this event is not kept.
            QuireError: the reply could not begin.
        """
        skip = Skip(after) if after and kept.is_restored and not kept.has(after) else None
        reader = kept.read(kept.after(after) if after and skip is None else 0)
        if by is not None:
            self.state.http.count_resume(by)
        try:
            await self.unless_disconnected(self._copy(reader, by is not None, skip))
        finally:
            kept.leave(reader)

    async def _copy(self, reader: Reader, again: bool, skip: Skip | None) -> None:
        await reader.begun()
        kept = reader.kept
        assert kept.status is not None
        head = [*kept.headers, (b"x-stream-id", kept.id.encode())]
        await self._start(kept.status, [*head, _REPLAYED] if again else head)
        with kept_alive(self, kept.content_type):
            more = True
            while more:
                data, more = await self._next(reader, skip)
                if len(data) > ONE_GO:
                    async with self._whole:
                        await self._send_in_parts([data], more)
                else:
                    self.finished = not more
                    await self._send_body(data, more)

    async def _next(self, reader: Reader, skip: Skip | None) -> tuple[bytes, bool]:
        """The next bytes of a kept reply, and whether more will follow."""
        try:
            data, more = await reader.take()
            return data if skip is None else skip.feed(data, not more), more
        except QuireError as error:
            if not reader.kept.content_type.startswith(b"text/event-stream"):
                raise  # its length is told already, or nobody knows how it tells errors
            dialect = reader.kept.opening.dialect
            return dialect.stream_error(error, self.request_id) + dialect.stream_end, False

    async def unless_disconnected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which replies, and cancel it as soon as the client disconnects. Call it after
        `body()`."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            # A complete reply also counts as a disconnect: then let `work` clean up in peace.
            if task.done() or self.finished:
                await task
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
            # An exception knows this frame, and the task knows the exception: without this, each
            # refusal would be a circle of a hundred objects for the garbage collector.
            del task, gone, work

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Answered(Exception):
    """The client has got its reply, and nothing is left to do for the handler."""


class ClientDisconnect(Exception):
    """The client has disconnected, so there is nobody to reply to."""
