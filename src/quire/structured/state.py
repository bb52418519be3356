"""Where one request stands in its grammar: which tokens may come next, and which must.

A pure function of the grammar and the output so far. The matcher is only a cache of that: it moves
back and forth with the outputs that it is asked about, or begins anew.

Where the grammar leaves only one text, the tokens of that text are forced: those that the tokenizer
makes of it, so that the model gets its usual spelling. They are settled together, at the first
position at which they are forced. Within such a run nothing else is allowed, whether the tokens are
appended at once (`forced`) or sampled one by one, so that both give the same output. Knows no
tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quire.errors import GrammarFailed

if TYPE_CHECKING:
    from concurrent.futures import Future

    from quire.structured.compiler import Vocabulary

_TOKEN: Final = struct.Struct("=i")
MAX_FORCED: Final = 256
"""Tokens that are appended at once: some grammars force text without end."""
PARALLEL_WORDS: Final = 1024
"""Masks of so many words, 32,768 tokens, are worth several threads: smaller ones take less time
than it takes to wake these."""


AHEAD_ROWS: Final = 8
"""So many small masks are worth another thread."""


class GrammarState:
    """One request in its grammar; a `TokenMask`.

    Args:
        start: A matcher at the beginning of the grammar. It is copied.
        vocabulary: Of the model.
        forces: Whether forced text has forced tokens. Without, its bytes may come in any tokens, as
            a request needs that bans some.
    """

    def __init__(self, start: Any, vocabulary: Vocabulary, forces: bool = True) -> None:
        self.asked_first = vocabulary.num_words >= PARALLEL_WORDS
        self._start = start
        self._vocabulary = vocabulary
        self._forces = forces
        self._matcher = start.deep_copy()
        self._seen, self._count = bytearray(), 0
        # output tokens the matcher has consumed, each an int32, and their number
        self._run: list[int] = []
        self._until = 0
        # the last run of forced tokens, and the number of output tokens at its end
        self._ready: tuple[int, np.ndarray] | None = None
        # a mask made ahead, and the count that it is for
        self._coming: tuple[Future[np.ndarray], int] | None = None
        # such a mask while another thread makes it, which has the matcher until then
        self._mask, self._address = _with_address(vocabulary.num_words)
        # what `allowed` returns: a new array for each mask, and its address, would take longer than
        # most masks
        self._arrive()

    def allowed(self, output: np.ndarray) -> np.ndarray:
        """The mask at the end of an output, int32 `[ceil(vocab / 32)]`; see `TokenMask`. It holds
        until the next call.

        Raises:
            GrammarFailed: the output is none of this grammar, or a limit was exceeded.
        """
        self.follow(output)
        if self._count < self._until:
            return self._only(self.pending()[0])
        if self._ready is not None and self._ready[0] == self._count:
            self._check()
            return self._ready[1]
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        self._check()
        return self._mask

    def permits(self, output: np.ndarray, tokens: Iterable[int]) -> bool:
        """Whether the mask at the end of an output allows all of some tokens.

        Raises:
            GrammarFailed: see `allowed`.
        """
        self.follow(output)
        if self._count < self._until:
            return all(token == self.pending()[0] for token in tokens)
        found = all(self._matcher.validate_tokens([token]) for token in tokens)
        self._check()
        return found

    @staticmethod
    def make_together(asked: Sequence[tuple[GrammarState, np.ndarray]]) -> None:
        """See `make_masks`."""
        make_masks(asked)

    def forced(self, output: Sequence[int] | np.ndarray, room: int) -> list[int]:
        """The tokens that must follow an output, at most `room`; they end with an end-of-sequence
        token where nothing else may follow.

        Raises:
            GrammarFailed: see `allowed`.
        """
        self.follow(output)
        found: list[int] = []
        most = min(room, MAX_FORCED)
        while len(found) < most and (pending := self.pending()):
            found += pending
            for token in pending:
                self._consume(token)
            self._arrive()
        return found[:most]

    def forces_after(self, output: np.ndarray) -> bool:
        """Whether some token must follow an output.

        Raises:
            GrammarFailed: see `allowed`.
        """
        self.follow(output)
        return self._count < self._until

    def follow(self, output: Sequence[int] | np.ndarray) -> None:
        """Move to the end of an output.

        Raises:
            GrammarFailed: it is none of this grammar.
        """
        if self._coming is not None:
            self._await_mask()
        # Comparing bytes takes a quarter of the time of comparing arrays this short.
        given = np.asarray(output, dtype=np.int32).tobytes()
        if given == self._seen:
            return
        if not given.startswith(self._seen):
            # llguidance can roll back, but its masks are then not always those of a new matcher.
            self._restart()
        for (token,) in _TOKEN.iter_unpack(given[len(self._seen) :]):
            self._consume(token)
            self._arrive()

    def pending(self) -> list[int]:
        """Forced tokens that follow the current position."""
        return self._run[self._count - self._until :] if self._count < self._until else []

    def wants_mask(self) -> bool:
        """Whether the next mask is yet to be computed."""
        if self._coming is not None or self._count < self._until:
            return False
        return self._ready is None or self._ready[0] != self._count

    def expect_mask(self, masks: Future[np.ndarray], row: int) -> None:
        """Another thread makes the mask of the current position. Whatever is asked of this state
        next waits for it."""
        self._coming = (masks, row)

    def _await_mask(self) -> None:
        assert self._coming is not None, "another thread was asked"
        (masks, row), self._coming = self._coming, None
        # Where every core is busy the other thread may not have begun: then it is quicker here.
        if not masks.cancel():
            self._ready = (self._count, masks.result()[row])

    def take_mask(self, mask: np.ndarray) -> None:
        """Keep a mask that was computed for the current position."""
        self._ready = (self._count, mask)

    @property
    def is_large(self) -> bool:
        """Whether it takes so long to make a mask that several are best made by `make_masks`."""
        return self._vocabulary.num_words >= PARALLEL_WORDS

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's."""
        return self._vocabulary

    @property
    def matcher(self) -> Any:
        """llguidance's matcher, at the current position."""
        return self._matcher

    def _arrive(self) -> None:
        """Settle which tokens are forced here, unless a run of forced tokens goes on."""
        if not self._forces or self._count < self._until:
            return
        matcher = self._matcher
        forced = matcher.compute_ff_tokens()
        self._check()
        if not forced and matcher.is_stopped() and matcher.is_accepting():
            ends = self._vocabulary.eos_token_ids
            ended = self._seen and _TOKEN.unpack_from(self._seen, len(self._seen) - 4)[0] in ends
            forced = [] if ended else ends[:1]
        if forced:
            self._run, self._until = forced, self._count + len(forced)

    def _consume(self, token: int) -> None:
        if self._count < self._until and self._run[self._count - self._until] != token:
            # Only an output of another hand goes on otherwise; what is said of it stays true.
            self._until = self._count
        if not self._matcher.consume_token(token):
            self._restart()
            raise GrammarFailed("structured_outputs: the output so far does not follow its grammar")
        self._seen += _TOKEN.pack(token)
        self._count += 1

    def _restart(self) -> None:
        self._begin_anew()
        self._arrive()

    def _begin_anew(self) -> None:
        self._matcher = self._start.deep_copy()
        self._count, self._until, self._ready = 0, 0, None
        self._seen.clear()

    def _only(self, token: int) -> np.ndarray:
        self._mask.fill(0)
        self._mask.view(np.uint32)[token // 32] = 1 << (token % 32)
        return self._mask

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        # Whoever asks again for an earlier position gets a matcher without the error.
        self._begin_anew()
        raise GrammarFailed(
            "structured_outputs: the grammar needs more work for one token than is allowed"
        )


def _with_address(num_words: int) -> tuple[np.ndarray, int]:
    words = np.zeros(num_words, dtype=np.int32)
    return words, words.ctypes.data


def make_masks(asked: Sequence[tuple[GrammarState, np.ndarray]]) -> None:
    """Make the next masks of several requests at once, on several cores; each is kept in its state.

    What fails is left to `GrammarState.allowed`.

    Args:
        asked: States with the outputs after which the masks are for.
    """
    lacking: list[GrammarState] = []
    for state, output in asked:
        try:
            state.follow(output)
        except GrammarFailed:
            continue
        if state.wants_mask():
            lacking.append(state)
    if len(lacking) < 2:
        return
    masks = lacking[0].vocabulary.make_masks([state.matcher for state in lacking])
    for state, mask in zip(lacking, masks, strict=True):
        state.take_mask(mask)


def begin_masks(states: Sequence[GrammarState]) -> None:
    """Begin to make the masks of some requests' current positions, while the caller goes on: the
    next step asks for them only after its forward pass. For devices that leave the cores free.

    What fails is left to `GrammarState.allowed`.
    """
    lacking = [state for state in states if state.wants_mask()]
    if len(lacking) < AHEAD_ROWS and not (lacking and lacking[0].is_large):
        return
    masks = lacking[0].vocabulary.begin_masks([state.matcher for state in lacking])
    for row, state in enumerate(lacking):
        state.expect_mask(masks, row)
