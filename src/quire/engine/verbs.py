"""Control verbs: what may be asked of a running engine, each defined once.

A verb is a function. Its first parameter is the engine core, the others are the verb's arguments;
their annotations are checked before it runs. `EngineCore.call` runs it between two steps, and takes
back what it changed if it fails. A row of `VERBS` gives it its name; a row of `serving/app.py` may
offer it over HTTP.

Some verbs have a part at the front end as well, which knows what the core does not: the ids that
callers use, the tokenizer, the journal. `prepare` runs there before the call and `settle` after it.

Arguments and results are what messages can carry (numbers, text, lists, objects), in every kind of
engine: what works inline also works through a process. Knows no sockets, no HTTP and no tensors.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from quire.bounds import TYPE_WORDS, read_field, show
from quire.core.admission import LIVE_LIMITS, check_changes
from quire.core.request import Request
from quire.errors import EngineError, InvalidRequest, NotFound
from quire.params import SamplingParams
from quire.registry import Registry
from quire.spelling import did_you_mean

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.core.kv.manager import KVCacheManager
    from quire.core.scheduler import Scheduler

Args = dict[str, Any]
_EXPECTED: Final = re.compile(r"Expected `([^`]+)`")


class Asked(Protocol):
    """The part of an executor that verbs use."""

    def check_processors(self, params: SamplingParams) -> None:
        """Ask the logits processors whether they take a request."""
        ...

    def start_profile(self) -> None:
        """Begin a recording."""
        ...

    def stop_profile(self) -> None:
        """End it and write it."""
        ...


class Core(Protocol):
    """What a verb may reach of the engine core."""

    @property
    def scheduler(self) -> Scheduler:
        """Queues, limits, requests."""
        ...

    @property
    def kv(self) -> KVCacheManager:
        """The KV blocks and who holds them."""
        ...

    @property
    def executor(self) -> Asked:
        """What runs the model."""
        ...


class Front(Protocol):
    """What a verb may reach of the front end."""

    @property
    def config(self) -> EngineConfig:
        """The configuration that holds now."""
        ...

    def check_prefix(self, ids: list[int], cache_salt: str | None) -> None:
        """Check a prompt's tokens and salt as a request's are checked.

        Raises:
            InvalidRequest: they are not of this model.
        """
        ...

    def internal_ids(self, request_id: str) -> list[str]:
        """The unfinished completions of a request, by the id that its caller knows."""
        ...

    def adopt_limits(self, limits: Mapping[str, Any], priorities: Mapping[str, int]) -> None:
        """Keep a copy of what the core now holds.

        Args:
            limits: All of `LIVE_LIMITS`.
            priorities: What was changed, by internal id.
        """
        ...


@dataclass(frozen=True, slots=True)
class Verb:
    """A control verb."""

    run: Callable[..., Any]
    """In the core: `run(core, **args)`."""
    prepare: Callable[[Any, Args], Args] | None = None
    """At the front end, before: `prepare(front, args)` gives the arguments to send."""
    settle: Callable[[Any, Args, Any], None] | None = None
    """At the front end, after: `settle(front, sent_args, result)`."""

    @property
    def arguments(self) -> type[msgspec.Struct]:
        """A record with one field for each argument, for request bodies."""
        return _arguments(self.run)

    def ask(self, front: Front, args: Mapping[str, Any]) -> Args:
        """The arguments to send to the core, checked as far as the front end can.

        Raises:
            InvalidRequest: they do not fit the verb, or no message can carry them.
        """
        _check_names(self.run, args)
        bound = self.bind(self.prepare(front, dict(args)) if self.prepare else args)
        for name, value in bound.items():
            _check_sendable(name, value)
        return bound

    def bind(self, args: Mapping[str, Any]) -> Args:
        """The arguments, each of its type.

        Raises:
            InvalidRequest: they do not fit the verb.
        """
        _check_names(self.run, args)
        hints = _hints(self.run)
        return {name: _convert(name, value, hints.get(name, Any)) for name, value in args.items()}

    def tell(self, front: Front, sent: Args, result: Any) -> Any:
        """Let the front end know of the result; returns it."""
        if self.settle is not None:
            self.settle(front, sent, result)
        return result

    def __call__(self, core: Core, args: Mapping[str, Any]) -> Any:
        """Run it in the core.

        Returns:
            The result as a message would carry it: a tuple becomes a list, a record an object.

        Raises:
            InvalidRequest: the arguments do not fit.
            EngineError: no message can carry the result.
        """
        result = self.run(core, **self.bind(args))
        try:
            return msgspec.msgpack.decode(msgspec.msgpack.encode(result))
        except (TypeError, OverflowError, RecursionError, ValueError) as error:
            raise EngineError(f"the result of verb {self.run.__name__!r}: {error}") from None


def find_verb(name: str) -> Verb:
    """The verb of that name.

    Raises:
        InvalidRequest: there is none, and all names are told; or a plugin's cannot be used.
    """
    row = VERBS.get(name)
    if isinstance(row, Verb):
        return row
    if not inspect.isfunction(row):
        raise InvalidRequest(f"verb {name!r} is not a function, but {show(row)}")
    return Verb(row)


# ---- arguments -----------------------------------------------------------------------------------


@functools.cache
def _parameters(run: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The arguments of a verb: all parameters after the core."""
    return tuple(inspect.signature(run).parameters.values())[1:]


@functools.cache
def _hints(run: Callable[..., Any]) -> dict[str, Any]:
    """The type of each argument that has one. The core's own annotation is left alone: its module
    may import that type for type checkers only."""
    written = {
        p.name: p.annotation
        for p in _parameters(run)
        if p.annotation is not p.empty and p.kind is not p.VAR_KEYWORD
    }
    holder = types.SimpleNamespace(__annotations__=written)
    try:
        return typing.get_type_hints(holder, getattr(run, "__globals__", {}))
    except Exception as error:
        # They are expressions in the code of others.
        raise InvalidRequest(f"the annotations of verb {run.__name__!r}: {error}") from None


@functools.cache
def _arguments(run: Callable[..., Any]) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for p in _parameters(run):
        if p.kind is not p.VAR_KEYWORD:
            kind = _hints(run).get(p.name, Any)
            fields.append((p.name, kind) if p.default is p.empty else (p.name, kind, p.default))
    return msgspec.defstruct(run.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def _check_names(run: Callable[..., Any], args: Mapping[str, Any]) -> None:
    parameters = _parameters(run)
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes_more = len(names) < len(parameters)
    for name in args:
        if name not in names and not takes_more:
            hint = did_you_mean(str(name), names) or "."
            known = ", ".join(names) or "none"
            raise InvalidRequest(
                f"verb {run.__name__!r} has no argument {show(name)}{hint} Known: {known}"
            )
    for p in parameters:
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in args:
            raise InvalidRequest(f"{p.name} is required.", param=p.name)


def _convert(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _EXPECTED.match(str(error))
        words = found.group(1).split(" | ") if found else []
        rule = " or ".join(TYPE_WORDS.get(w, w) for w in words if w != "null") or "of its type"
        inner = "made of values that are " if "$[" in str(error) else ""
        raise InvalidRequest(
            f"{name} must be {inner}{rule}, got {show(value)}", param=name
        ) from None


def _check_sendable(name: str, value: Any) -> None:
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(
            f"{name} cannot be sent: {error}, got {show(value)}", param=name
        ) from None


# ---- the verbs -----------------------------------------------------------------------------------


def ping(core: Core) -> int:
    """Number of the last step; an answer proves that the core takes messages."""
    return core.scheduler.step


def reset_prefix_cache(core: Core) -> bool:
    """Forget cached prefixes. False, and nothing happened, while requests run."""
    return core.scheduler.reset_prefix_cache()


def start_profile(core: Core) -> None:
    """Begin a profiler recording.

    Raises:
        ConfigError: no profiler is configured.
        Conflict: it runs already.
    """
    core.executor.start_profile()


def stop_profile(core: Core) -> None:
    """End the recording and write its trace.

    Raises:
        Conflict: none runs.
    """
    core.executor.stop_profile()


def check_integrity(core: Core) -> dict[str, int]:
    """Run the books' own check and say what is held: `running` and `waiting` requests,
    `free_blocks` of `total_blocks`."""
    core.scheduler.check_integrity()
    pool = core.kv.block_pool
    return {
        "running": len(core.scheduler.running),
        "waiting": len(core.scheduler.waiting),
        "free_blocks": pool.get_num_free_blocks(),
        "total_blocks": pool.num_blocks - 1,
    }


def explain_prefix(
    core: Core, prompt_token_ids: list[int], cache_salt: str | None = None
) -> dict[str, Any]:
    """Why a prompt would, or would not, find its prefix in the cache; the result is a
    `quire.core.kv.answer.PrefixAnswer`.

    Raises:
        InvalidRequest: the prompt is empty, not of this model or too long, or the salt is bad.
    """
    if not prompt_token_ids:
        raise InvalidRequest("prompt_token_ids must hold at least one token, got none")
    request = Request("", prompt_token_ids, SamplingParams(), cache_salt=cache_salt)
    return asdict(core.kv.explain_prefix(request))


def _check_prompt(front: Front, args: Args) -> Args:
    # Only the front end knows the vocabulary and the context.
    front.check_prefix(args["prompt_token_ids"], args.get("cache_salt"))
    return args


def set_limits(
    core: Core, priorities: dict[str, Any] | None = None, **limits: Any
) -> dict[str, Any]:
    """Change limits of the scheduler, by the names of `LIVE_LIMITS`, and priorities of unfinished
    requests, by id. Returns all limits, as they hold now.

    Raises:
        InvalidRequest: a name or a value is bad; nothing has changed.
        NotFound: no unfinished request has such an id; nothing has changed.
    """
    given = {i: read_field("priority", p) for i, p in (priorities or {}).items()}
    core.scheduler.set_limits(**limits)
    for request_id, priority in given.items():
        core.scheduler.set_priority(request_id, priority)
    return {name: getattr(core.scheduler.config, name) for name in LIVE_LIMITS}


def _check_limits(front: Front, args: Args) -> Args:
    """Refuse what the core would refuse (a message cannot carry numbers of any size), and turn the
    callers' request ids into those of the core."""
    limits = dict(args)
    priorities = _convert("priorities", limits.pop("priorities", None) or {}, dict[str, Any])
    model = front.config.model
    assert model.max_model_len is not None, "resolve() settles it"
    check_changes(front.config.scheduler, limits, priorities, model.max_model_len)
    completions = {name: front.internal_ids(name) for name in priorities}
    if unknown := [name for name, found in completions.items() if not found]:
        raise NotFound(f"no unfinished request has the id {unknown[0]!r}")
    told = {i: priorities[name] for name, found in completions.items() for i in found}
    return {**limits, "priorities": told}


def _adopt_limits(front: Front, sent: Args, now: dict[str, Any]) -> None:
    front.adopt_limits(now, sent["priorities"])


def check_processors(core: Core, sampling_params: dict[str, Any]) -> None:
    """Ask the logits processors whether they take a request.

    Raises:
        ProcessorRefused: one does not.
        ProcessorFailed: one fails on it.
    """
    core.executor.check_processors(msgspec.convert(sampling_params, SamplingParams))


VERBS: Final[Registry[Verb | Callable[..., Any]]] = Registry(
    "verb",
    {
        "check_integrity": check_integrity,
        "check_processors": check_processors,
        "explain_prefix": Verb(explain_prefix, prepare=_check_prompt),
        "ping": ping,
        "reset_prefix_cache": reset_prefix_cache,
        "set_limits": Verb(set_limits, prepare=_check_limits, settle=_adopt_limits),
        "start_profile": start_profile,
        "stop_profile": stop_profile,
    },
    error=InvalidRequest,
    plugins="verb",
)
"""Name to verb; a plain function is a verb without a part at the front end."""
