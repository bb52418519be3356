"""The grammars of an engine core: compiled once each, off the path of the steps.

One thread compiles. Meanwhile the steps go on, because llguidance lets go of the interpreter lock.
What was compiled is kept, so that a request that returns after a preemption, and the next one with
the same schema, find it. If it is kept no longer, the step waits for this one grammar, and for none
of those that are in the line. Knows no scheduler: who asks may come again until the grammar is
there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from quire.errors import GrammarFailed, InvalidRequest
from quire.logger import get_logger
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.structured.compiler import Vocabulary
    from quire.structured.state import GrammarState

logger = get_logger(__name__)

KEPT: Final = 512
"""Compiled grammars that are kept, or twice as many as requests run, if that is more; and most
characters of theirs are below. Those that are still to be compiled do not count."""
KEPT_CHARS: Final = 16 * 2**20


class GrammarStore:
    """Compiles grammars and hands out their states.

    Args:
        tokenizer: Gives the text of `tokenizer.json`; called when the first grammar comes, on the
            thread that compiles.
        vocab_size: Width of the logits.
        max_num_seqs: Requests that run at once: at least twice as many grammars are kept.
    """

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, max_num_seqs: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._kept = max(KEPT, 2 * max_num_seqs)
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        # of the vocabulary
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        # the second one, True, is for what a step waits for
        self._done = threading.Event()
        self._chars = 0
        self._grammars: OrderedDict[str, Future[Any]] = OrderedDict()
        # by text, the least recently asked for first

    def begin(self, params: SamplingParams) -> bool:
        """Begin to compile the grammar of a request, unless that was done; gives whether it is."""
        return self._find(params).done()

    def wait(self, seconds: float) -> None:
        """Wait until one more grammar is compiled, or for so long."""
        if self._done.wait(seconds):
            self._done.clear()

    def state(self, params: SamplingParams) -> GrammarState | None:
        """A request at the beginning of its grammar; None if it has none. Waits if it has to.

        Raises:
            GrammarFailed: the grammar could not be compiled.
        """
        if params.grammar is None:
            return None
        from quire.structured.state import GrammarState

        compiled = self._find(params, at_once=True)
        # Asked for, not raised: whatever is raised here interrupts the waiting, and no grammar.
        error = compiled.exception()
        if isinstance(error, InvalidRequest):
            raise GrammarFailed(error.message)
        if error is not None:  # a panic of the library is no Exception
            logger.error("a grammar could not be compiled", exc_info=error)
            self._drop(params.grammar.text)  # the next request with it may find more memory
            what = f"compiling it failed ({type(error).__name__}); see the server's log"
            raise GrammarFailed(f"structured_outputs: {what}")
        start = compiled.result()
        assert self._vocabulary is not None, "the grammar was compiled with it"
        return GrammarState(start, self._vocabulary, _may_force(params))

    def close(self) -> None:
        """End the threads, once they have compiled what they are at."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _find(self, params: SamplingParams, at_once: bool = False) -> Future[Any]:
        assert params.grammar is not None, "it was asked before"
        text = params.grammar.text
        found = self._grammars.get(text)
        if found is None or (at_once and not found.done()):
            self._chars += len(text) * (found is None)
            found = self._grammars[text] = self._thread(at_once).submit(self._compile, params)
            found.add_done_callback(lambda _: self._done.set())
            self._grammars.move_to_end(text)
            self._forget()
        else:
            self._grammars.move_to_end(text)
        return found

    def _thread(self, at_once: bool) -> ThreadPoolExecutor:
        if at_once not in self._threads:
            self._threads[at_once] = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        return self._threads[at_once]

    def _forget(self) -> None:
        """Let go of the grammars that nobody has asked for longest, but of none that is still to be
        compiled: whoever comes again for it would have to begin anew, and so never have it."""
        while len(self._grammars) > self._kept or (
            self._chars > KEPT_CHARS and len(self._grammars) > 1
        ):
            text, oldest = next(iter(self._grammars.items()))
            if not oldest.done():
                return
            self._drop(text)

    def _drop(self, text: str) -> None:
        if self._grammars.pop(text, None) is not None:
            self._chars -= len(text)

    def _compile(self, params: SamplingParams) -> Any:
        from quire.structured.compiler import Vocabulary

        assert params.grammar is not None
        with self._making:
            if self._vocabulary is None:
                ends = params.eos_token_ids
                self._vocabulary = Vocabulary(self._tokenizer(), self._vocab_size, ends)
        return self._vocabulary.compile(params.grammar)


def _may_force(params: SamplingParams) -> bool:
    """Whether forced text may come in the tokenizer's own tokens: not where some are banned, so
    that other spellings of the text remain."""
    return not (params.allowed_token_ids or params.bad_words_token_ids)
