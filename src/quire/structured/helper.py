"""The input gate's grammars in a server: compiled first in processes that may be killed.

A schema, a regex or a grammar of a client can take any time and memory to compile. So a
`HelperGate` asks a helper process first (`helper_process`), and only what passed there goes on to
the engine core. Verdicts are remembered, unless the machine was at fault. Few grammars are compiled
at once, and one that has waited too long for its turn is refused, so that a flood of them ends in
bounded time.

Knows no HTTP and no event loop but that of the caller who waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import msgspec

from quire.structured.gate import Answer, HelperSetup, Refusal, Verdicts, verdict, verdict_key
from quire.structured.params import Grammar, StructuredOutputsParams
from quire.utils.helpers.pool import MAX_WAIT, HelperPool
from quire.utils.helpers.words import HelperLimits

_FAILED: Final = Refusal("structured_outputs: it could not be compiled.", passes=True)


@dataclass(slots=True)
class _Asked:
    answer: Future[bytes | None]
    waiting: int = 0
    """How many wait for the answer."""


class HelperGate:
    """Settles grammars with the help of processes; a `GrammarGate`.

    Processes and threads start with the first grammar.

    Args:
        tokenizer: Gives the text of `tokenizer.json`.
        vocab_size: Width of the logits.
        eos_token_ids: What may end an output.
        limits: For one grammar.
        max_wait: Seconds for which a grammar may wait for its turn.
    """

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: HelperLimits | None = None,
        max_wait: float = MAX_WAIT,
    ) -> None:
        ends = list(eos_token_ids)
        self._pool = HelperPool(
            "quire.structured.helper_process",
            lambda: HelperSetup(tokenizer(), vocab_size, ends, limits or HelperLimits()),
            "grammar-helper",
            "Other grammars are being compiled",
            max_wait,
        )
        self._verdicts = Verdicts()
        self._jobs: dict[bytes, _Asked] = {}

    async def prepare(self, params: StructuredOutputsParams) -> None:
        """Have a grammar looked at, so that `settle` knows the verdict. Whoever waits may be
        cancelled; a grammar for which nobody waits any more is not begun.

        Raises:
            TooManyRequests: others are being compiled, and its turn did not come in time; or the
                machine was too busy or short of memory for it.
        """
        key = verdict_key(params)
        if self._verdicts.find(key) is not None:
            return
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Asked(self._pool.ask(lambda: params))
        job.waiting += 1
        try:
            found = await asyncio.shield(asyncio.wrap_future(job.answer))
        finally:
            job.waiting -= 1
            if not job.waiting:
                self._jobs.pop(key, None)
                job.answer.cancel()
        self._read(key, found)

    def settle(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar that a request asks for, which can be compiled. Waits for the verdict, unless
        `prepare` came before.

        Raises:
            InvalidRequest: it cannot.
            TooManyRequests: see `prepare`.
        """
        key = verdict_key(params)
        found = self._verdicts.find(key)
        if found is None:
            found = self._read(key, self._pool.ask(lambda: params).result())
        return verdict(found)

    def close(self) -> None:
        """End the helpers."""
        self._pool.close()

    def _read(self, key: bytes, answer: bytes | None) -> Grammar | Refusal:
        """What a helper said (None: it could not answer), remembered.

        Raises:
            TooManyRequests: it may say something else at another time.
        """
        found = _FAILED if answer is None else msgspec.msgpack.decode(answer, type=Answer).found
        if isinstance(found, Refusal) and found.passes:
            raise self._pool.passing(found.message)
        self._verdicts.keep(key, found)
        return found
