"""Who may call which route: roles of routes, and keys, which are compared in constant time.

Knows nothing of routes; decides from the headers of the ASGI scope alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from quire.config import ServerConfig
from quire.config.key_file import FileState, KeyLine, digest_of, read_keys, shown_time, state_of
from quire.engine.frontend.meter import Entry
from quire.engine.frontend.prompts import MAX_CACHE_SALT_LENGTH
from quire.errors import ConfigError, NotFound, RequestError, Unauthorized
from quire.logger import get_logger

logger = get_logger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often the key file is looked at."""


class Role(Enum):
    """The role that a route requires of its caller."""

    OPEN = "open"
    """Anyone; only for health probes and the version."""
    USER = "user"
    ADMIN = "admin"
    METRICS = "metrics"


_ROLES: Final = {
    "user": frozenset((Role.OPEN, Role.USER)),
    "metrics": frozenset((Role.OPEN, Role.METRICS)),
    "admin": frozenset(Role),
}
"""What a key of a role may call."""


class RoleMissing(RequestError):
    """The key is right, but not for this route."""

    status = 403
    type = "Forbidden"
    code = "role_missing"

    def __init__(self, needed: Role) -> None:
        if needed is Role.METRICS:
            remedy = "a key of the role metrics or admin in --api-key-file, or --admin-api-key"
        else:
            remedy = f"--admin-api-key, or a key of the role {needed.value} in --api-key-file"
        super().__init__(
            f"This route needs the role {needed.value}, which this key does not have. The server's "
            f"operator can give one: {remedy}."
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    roles: frozenset[Role] = frozenset()
    """What it may call; nothing, unless somebody decides otherwise."""
    name: str = ""
    """Which of several keys it has, for fair scheduling. Empty if there is at most one key."""
    owner: bytes = b""
    """Digest of its key, which stays the same when keys are added. Empty without keys."""
    space: str = ""
    """Its part of the prefix cache; empty: the one that all share."""
    key: str = ""
    """Name of its key in the key file, under which its use is counted. Empty for other keys."""

    def require(self, role: Role) -> None:
        """Refuse the caller what it may not call.

        Raises:
            RoleMissing: it has not the role.
        """
        if role not in self.roles:
            raise RoleMissing(role)


@dataclass(frozen=True, slots=True)
class Tenant:
    """For whom the engine works."""

    name: str = ""
    """Whose turn a request takes under the `fair` policy."""
    space: str = ""
    """Whose part of the prefix cache it uses; empty: the one that all share."""
    entry: Entry | None = field(default=None, compare=False)
    """Of whose key the use is counted, if it is."""

    def salt(self, given: str | None) -> str | None:
        """The cache salt of a request that gave this one, or none. Within a space of its own a
        client's salts separate its own callers, and no salt leads into another's space. A salt that
        the engine refuses is left as it is, so that the error shows what was given."""
        if not self.space or given is None:
            return given if given is not None else self.space or None
        try:
            raw = given.encode()
        except UnicodeEncodeError:
            return given
        if not 1 <= len(given) <= MAX_CACHE_SALT_LENGTH:
            return given
        return hashlib.sha256(self.space.encode() + b":" + raw).hexdigest()


NOBODY: Final = Caller()
"""A caller nobody has decided on yet: it may call nothing."""
_EVERYBODY: Final = Caller(frozenset(Role))
_STRANGER: Final = Caller(frozenset((Role.OPEN,)))
_SCRAPER: Final = Caller(frozenset((Role.OPEN, Role.METRICS)))


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    caller: Caller
    expires: float | None = None


Headers = Iterable[tuple[bytes, bytes]]


class KeyRing:
    """The accepted keys, of which only hashes are kept. Without any key, every caller is
    accepted.

    Keys of `--api-key` have the role user. As long as there is no key file, they may also read
    metrics, and `/metrics` is open, as scrapers of vLLM's servers expect.

    Args:
        config: With the keys, and the path of the key file.
        now: Seconds since 1970.

    Raises:
        ConfigError: the key file cannot be used.
    """

    def __init__(self, config: ServerConfig, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._path = config.api_key_file
        plain = _ROLES["user"] | (set() if self._path else {Role.METRICS})
        self._given = (
            *_keys(config.admin_api_key, _ROLES["admin"], "admin key"),
            *_keys(config.api_key, plain, "key"),
        )
        self._keys: tuple[_Key, ...] = ()
        self._shared_cache = config.shared_prefix_cache
        self._senders: set[bytes] = set()
        # every key with which prompts could ever be sent: what a key that is gone has left in the
        # cache is not for the next one
        self._state: FileState | None = None
        self._complaint: str | None = None
        self._lines: Sequence[KeyLine] = ()
        self._hear: Callable[[Sequence[KeyLine]], None] | None = None
        if self._path is None:
            self._use(())
        else:
            self._state = state_of_or_none(self._path)
            self._use(read_keys(self._path))

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def metrics_are_open(self) -> bool:
        """Whether `/metrics` needs no key."""
        return self._path is None

    @property
    def stranger(self) -> Caller:
        """A caller of an open path, whose key is not looked at."""
        return _SCRAPER if self.metrics_are_open else _STRANGER

    def caller(self, headers: Headers) -> Caller:
        """Who a request is from.

        Raises:
            Unauthorized: keys are configured, and the caller sent none of them, or one that has
                expired.
        """
        if not self._keys:
            return _EVERYBODY
        presented = _presented(headers)
        # No early exit: the time taken must not tell which key, or how much of it, was right.
        found: _Key | None = None
        for token in presented:
            digest = digest_of(token)
            for known in self._keys:
                fits = hmac.compare_digest(digest, known.digest)
                found = known if fits and found is None else found
        if found is None:
            given = "is wrong" if presented else "is missing"
            raise Unauthorized(
                f"The API key {given}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        if found.expires is not None and self._now() >= found.expires:
            raise Unauthorized(f"The API key expired at {shown_time(found.expires)}.")
        return found.caller

    def client_of(self, name: str) -> Tenant:
        """The client with the key of this name.

        Raises:
            NotFound: there is none.
        """
        for key in self._keys:
            if key.caller.name == name:
                return Tenant(name, key.caller.space)
        raise NotFound(f"There is no key named {name[:100]!r}.", param="key")

    def owner(self, digest: bytes) -> Caller:
        """Who a request was from that another process accepted; the key may be gone since."""
        known = (key.caller for key in self._keys if hmac.compare_digest(key.digest, digest))
        gone = Caller(_ROLES["user"], owner=digest)
        return next(known, gone if self._shared_cache or not digest else _apart(gone))

    # ------------------------------------------------------------------------------- the key file

    async def watch(self) -> None:
        """Use the key file anew whenever it changes. Runs until it is cancelled."""
        while self._path is not None:
            await asyncio.sleep(LOOK_SECONDS)
            keys = await asyncio.to_thread(self._read_changed)
            if keys is not None:
                self._use(keys)

    def reload(self) -> None:
        """Use the key file anew if it has changed."""
        if (keys := self._read_changed()) is not None:
            self._use(keys)

    def _read_changed(self) -> list[KeyLine] | None:
        """The keys of the file, if it has changed since. One that cannot be used changes nothing,
        and the log says why, once: a typing error must not lock everybody out."""
        assert self._path is not None
        state = state_of_or_none(self._path)
        if state is not None and state == self._state:
            return None
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            if error.message != self._complaint:
                logger.error("the keys stay as they were: %s", error.message)
            # Read again next time: whoever wrote it may not be done.
            self._state, self._complaint = None, error.message
            return None
        # Of the state before it was read: a change meanwhile is seen next time.
        self._state, self._complaint = state, None
        return keys

    def listen(self, hear: Callable[[Sequence[KeyLine]], None]) -> None:
        """Have somebody hear of the lines of the key file: now, and whenever they change. Without a
        key file he hears nothing."""
        if self._path is not None:
            self._hear = hear
            hear(self._lines)

    def _use(self, lines: Sequence[KeyLine]) -> None:
        """Have these keys of the file, besides those of the command line."""
        self._lines = lines
        of_file = (
            _Key(
                line.digest,
                Caller(_ROLES[line.role], line.name, line.digest, key=line.name),
                line.expires,
            )
            for line in lines
        )
        before, keys = self._keys, (*self._given, *of_file)
        self._senders |= {key.digest for key in keys if Role.USER in key.caller.roles}
        if len(self._senders) > 1 and not self._shared_cache:
            keys = tuple(replace(key, caller=_apart(key.caller)) for key in keys)
        if len(keys) == 1:
            keys = (replace(keys[0], caller=replace(keys[0].caller, name="")),)
        self._keys = keys
        if self._hear is not None:
            self._hear(lines)
        if before:
            logger.info("the key file has changed: %d key(s) are accepted now", len(keys))


def _apart(caller: Caller) -> Caller:
    """The caller with a part of the prefix cache for itself. The journal and the core see its
    name, so it is not the digest of the key."""
    return replace(caller, space=hashlib.sha256(b"prefix cache of " + caller.owner).hexdigest())


def state_of_or_none(path: str) -> FileState | None:
    """The state of a file; `None` if there is none."""
    try:
        return state_of(path)
    except OSError:
        return None


def _keys(keys: Iterable[str], roles: frozenset[Role], name: str) -> Iterable[_Key]:
    for number, key in enumerate(keys):
        digest = digest_of(key.encode("utf-8", "surrogateescape"))
        yield _Key(digest, Caller(roles, f"{name} {number}", digest))


def _presented(headers: Headers) -> list[bytes]:
    """The first key of each way of sending one."""
    bearer: bytes | None = None
    plain: bytes | None = None
    for name, value in headers:
        if name == b"authorization" and bearer is None:
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                bearer = token.strip()
        elif name == b"x-api-key" and plain is None and value:
            plain = value
    return [token for token in (bearer, plain) if token is not None]
