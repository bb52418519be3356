"""Questions to the records, for `LLM` and the server alike.

Joins the ring of records with what the frontend knows of unfinished requests. What answers is
imported when somebody asks: no server waits for it at its start.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quire.bounds import read_field, show
from quire.config import EngineConfig
from quire.engine.frontend.listeners import AcceptedRequest, Listener
from quire.engine.frontend.output_processor import ActiveCompletion, OutputProcessor
from quire.engine.messages import EngineCoreRequest
from quire.errors import InvalidRequest, NotFound, QuireError
from quire.observability.recorder.lives import Lives, wait_name
from quire.observability.recorder.ring import StepRecords

if TYPE_CHECKING:
    from quire.observability.explain.explanation import Explanation
    from quire.observability.explain.record_signals import Signals

NAMED_IDS = 10
"""Ids that a refusal names."""
PREFIX_SECONDS = 2.0
"""How long an explanation waits for a core in the middle of a long step."""
PREFIXES = ("chatcmpl-", "cmpl-")
"""What the server puts before the id that a caller chose."""


class RequestState(msgspec.Struct):
    """One unfinished completion, for listings."""

    id: str
    index: int
    state: str
    """`accepted` (the core has not spoken of it yet), `waiting`, `running`, `preempted` or
    `swapped`."""
    wait_reason: str | None
    """Why the head of the queue waits, for waiting ones."""
    queue_head: bool
    """It is the head of the queue."""
    age: float
    """Seconds since arrival."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int


class RecordListener(Listener):
    """Tells the ring of records which requests came in, so that it knows their callers' names."""

    def __init__(self, records: StepRecords) -> None:
        self._records = records

    def accepted(self, accepted: AcceptedRequest) -> None:
        """Before the core has it, so that no record is of an unknown request."""
        for one in accepted.requests:
            self._records.accept(one.external_id, one.index, one.request_id, one.arrival_time)


def _waiting_request(
    told: Sequence[Explanation], output: OutputProcessor
) -> EngineCoreRequest | None:
    """The request of an explanation that has no prefix yet, because it waits; all its completions
    have the same prompt."""
    for explanation in told:
        if explanation.prefix is None and explanation.finish_reason is None:
            return output.request_of(explanation.internal_id)
    return None


def _tell_prefix(
    told: Sequence[Explanation],
    request: EngineCoreRequest,
    answer: Mapping[str, Any] | None,
    config: EngineConfig,
) -> None:
    """Add to explanations without a prefix what the request would find if it came in now.

    Args:
        told: Explanations of its completions.
        request: Asked for.
        answer: Of the verb `explain_prefix`; `None` if the request does not read the cache.
        config: What holds.
    """
    from quire.observability.explain.assemble import expected_prefix, unread_prefix

    for explanation in told:
        if explanation.prefix is None and explanation.finish_reason is None:
            explanation.prefix = (
                unread_prefix(len(request.prompt_token_ids))
                if answer is None
                else expected_prefix(answer, config.cache.block_size)
            )


class Answering(Protocol):
    """A front end, as far as explanations go."""

    output: OutputProcessor

    @property
    def config(self) -> EngineConfig:
        """What holds."""
        ...

    def question(self) -> Question:
        """A copy of the records."""
        ...


def explain_inline(
    front: Answering, explain_prefix: Callable[[EngineCoreRequest], Mapping[str, Any]], name: str
) -> list[Explanation]:
    """Explain a request, asking the core in this process what its prefix cache has for it.

    Args:
        front: Knows the records.
        explain_prefix: Asks the core.
        name: The request's id.

    Raises:
        NotFound: the id is in no record; some that are get named.
        InvalidRequest: no records are kept.
    """
    told = front.question().explain(name)
    request = _waiting_request(told, front.output)
    if request is not None:
        reads = request.sampling_params.reads_prefix_cache
        _tell_prefix(told, request, explain_prefix(request) if reads else None, front.config)
    return told


async def explain_live(
    front: Answering,
    explain_prefix: Callable[[EngineCoreRequest], Coroutine[Any, Any, Mapping[str, Any]]],
    name: str,
) -> list[Explanation]:
    """Explain a request, asking the core elsewhere what its prefix cache has for it.

    Args:
        front: Knows the records.
        explain_prefix: Asks the core.
        name: The request's id.

    Raises:
        NotFound: the id is in no record; some that are get named.
        InvalidRequest: no records are kept.
    """
    told = await asyncio.to_thread(front.question().explain, name)
    request, answer = _waiting_request(told, front.output), None
    if request is None:
        return told
    if request.sampling_params.reads_prefix_cache:
        try:
            answer = await asyncio.wait_for(explain_prefix(request), PREFIX_SECONDS)
        except (TimeoutError, QuireError):
            return told  # the core is busy or gone: the rest is true without it
        # It may have come in meanwhile; then its own blocks were found.
        told = await asyncio.to_thread(front.question().explain, name)
    _tell_prefix(told, request, answer, front.config)
    return told


class Question:
    """A copy of everything that an answer needs. Make it on the engine's own thread or event loop;
    it may then be asked on any thread.

    Raises:
        InvalidRequest: no records are kept.
    """

    def __init__(
        self,
        records: StepRecords,
        active: Iterable[ActiveCompletion],
        now: float,
        config: EngineConfig,
    ) -> None:
        if not records.num_steps:
            raise InvalidRequest("no records are kept: --record-steps is 0")
        self._recording = records.snapshot()
        self._active = {completion.internal_id: completion for completion in active}
        self._known = records.external_ids()
        self._now = now
        self._config = config

    def explain(self, request_id: str) -> list[Explanation]:
        """Each completion of a request, in order.

        Raises:
            NotFound: the id is in no record; some that are get named.
            InvalidRequest: it is the beginning of several ids; they get named.
        """
        from quire.observability.explain.assemble import explain

        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id must be text, got {show(request_id)}")
        internal_ids = self._find(request_id)
        if not internal_ids:
            raise NotFound(self._unknown(request_id))
        found = []
        for internal in internal_ids:
            active = self._active.get(internal)
            made = explain(
                self._recording,
                internal,
                now=self._now if active else None,
                num_output_tokens=active.num_output_tokens if active else None,
            )
            if made is not None:
                found.append(made)
        return found

    def _find(self, request_id: str) -> list[str]:
        """Internal ids. A repeated id means the latest request; the server's prefix may be left
        out, and so may the number of the prompt, or the end of the id.

        Raises:
            InvalidRequest: several requests begin so.
        """
        accepted = self._recording.accepted
        for wanted, index in _readings(request_id):
            names = self._external_ids(wanted)
            if not names:
                continue
            chosen = [i for i, known in accepted.items() if known.external_id in names]
            # The last one, and its sisters: internal ids of one request differ in front.
            groups = {i: (accepted[i].external_id, accepted[i].arrival) for i in chosen}
            latest = dict(groups.values())
            found = [i for i, (name, arrival) in groups.items() if latest[name] == arrival]
            return [i for i in found if index is None or accepted[i].index == index]
        return []

    def _external_ids(self, wanted: str) -> set[str]:
        """The ids that are meant: this one; those of all its prompts; the only one that begins so.

        Raises:
            InvalidRequest: several requests begin so.
        """
        spelled = (wanted, *(prefix + wanted for prefix in PREFIXES))
        known = [accepted.external_id for accepted in self._recording.accepted.values()]
        for match in (_same, _same_prompt):
            if found := {name for name in known if match(name, spelled)}:
                return found
        begun = {name: None for name in known if name.startswith(spelled)}
        if len({_without_prompt(name) for name in begun}) > 1:
            raise InvalidRequest(
                f"{len(begun)} requests begin with {wanted[:200]!r}: {_listed(list(begun)[::-1])}; "
                "give more of the id",
                param="id",
            )
        return set(begun)

    def _unknown(self, request_id: str) -> str:
        text = f"no request {request_id[:200]!r} is in the records"
        if not self._known:
            return f"{text}: they are empty"
        return f"{text}; there are: {_listed(self._known)} (the last {len(self._recording)} steps)"

    def timeline(self, steps: int) -> dict[str, Any]:
        """The last steps as a Chrome trace.

        Raises:
            InvalidRequest: `steps` is no positive number.
        """
        from quire.observability.recorder.chrome_trace import timeline

        self._recording.keep_last(read_field("steps", steps))
        return timeline(self._recording)

    def requests(self) -> list[RequestState]:
        """The unfinished completions, oldest first."""
        lives = self._lives()
        numbers = {name: key for key, name in self._recording.names.items()}
        return [self._state(c, lives, numbers) for c in self._active.values()]

    def _lives(self) -> Lives:
        recording = self._recording
        recording.skip(len(recording))
        return recording.before

    def _state(
        self, active: ActiveCompletion, lives: Lives, numbers: dict[str, tuple[int, int]]
    ) -> RequestState:
        epoch, number = numbers.get(active.internal_id, (0, 0))
        life = lives.lives.get(number) if epoch == self._recording.epoch else None
        state = life.state if life else "accepted"
        head = lives.head if state in ("waiting", "preempted", "swapped") else None
        return RequestState(
            active.external_id,
            active.index,
            state,
            wait_name(head.reason) if head else None,
            head is not None and head.number == number,
            max(0.0, self._now - active.arrival_time),
            active.num_prompt_tokens,
            life.num_cached_tokens if life else 0,
            active.num_output_tokens,
            life.num_preemptions if life else 0,
        )

    def signals(self, window: float) -> Signals:
        """Figures of the last `window` seconds, for the doctor."""
        from quire.observability.explain.record_signals import read_signals

        blocks = self._config.cache.num_gpu_blocks_override
        return read_signals(self._recording, self._config.scheduler, window, self._now, blocks)


def _readings(request_id: str) -> Iterator[tuple[str, int | None]]:
    """What a given id may mean: itself; as `quire top` shows it, with the number of a completion in
    brackets, or cut off with an ellipsis."""
    yield request_id, None
    shown = _SHOWN.fullmatch(request_id)
    if shown is not None and (shown["index"] or shown["cut"]):
        yield shown["id"], int(shown["index"]) if shown["index"] else None


_SHOWN = re.compile(
    r"(?P<id>.+?)(?:\[(?P<index>\d{1,9})\])?(?P<cut>\N{HORIZONTAL ELLIPSIS}|\.\.\.)?"
)


def _same(external: str, spelled: Collection[str]) -> bool:
    return external in spelled


def _same_prompt(external: str, spelled: Collection[str]) -> bool:
    return _without_prompt(external) in spelled


def _without_prompt(external: str) -> str:
    """An id without the number of the prompt, which ids of text completions end with."""
    head, _, index = external.rpartition("-")
    return head if head.startswith("cmpl-") and index.isdecimal() else external


def _listed(ids: Sequence[str]) -> str:
    more = len(ids) - NAMED_IDS
    return ", ".join(ids[:NAMED_IDS]) + (f" and {more} more" if more > 0 else "")
