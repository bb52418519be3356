"""`AsyncLLM` over a core that says what a test has written for it, in pieces of any size.

Gate, output processor (stop strings, characters in parts, log-probabilities) and streams are the
real ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import plain_text
from quire.config import EngineConfig
from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores.handle import OnExit, OnMessage
from quire.engine.messages import AbortRequests, EngineCoreRequest, Outputs
from quire.outputs import FinishReason
from silent_core import SilentCore


class ScriptedCore(SilentCore):
    """Completions say the texts in their order, the first ones again after the last. The very first
    does not end before `first_may_end` is set."""

    def __init__(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> None:
        super().__init__(epoch, on_message, on_exit)
        self.texts: list[list[int]] = []
        self.rng = random.Random(0)
        self.first_may_end = asyncio.Event()
        self.first_may_end.set()
        self.aborted: list[str] = []
        self.speaking: set[asyncio.Task[None]] = set()

    def send(self, message: Any) -> None:
        super().send(message)
        if isinstance(message, AbortRequests):
            self.aborted += message.request_ids

    def _end(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            tokens = self.texts[self.sent.index(request) % len(self.texts)]
            task = asyncio.ensure_future(self._speak(request, tokens))
            self.speaking.add(task)
            task.add_done_callback(self.speaking.discard)

    async def _speak(self, request: EngineCoreRequest, tokens: list[int]) -> None:
        params = request.sampling_params
        tokens = [*tokens, min(plain_text.eos_ids())][: params.max_tokens]
        reason = FinishReason.LENGTH if len(tokens) == params.max_tokens else FinishReason.STOP
        start = 0
        while start < len(tokens) and request.request_id not in self.aborted:
            await asyncio.sleep(0)
            end = min(len(tokens), start + self.rng.choice([1, 1, 1, 2, 5]))
            piece, last = tokens[start:end], end == len(tokens)
            if last and request is self.sent[0]:
                await self.first_may_end.wait()
            scores = None
            if params.logprobs is not None:
                scores = [_scores(token, params.logprobs) for token in piece]
            prompt = None
            if params.prompt_logprobs is not None and start == 0:
                ids = request.prompt_token_ids
                prompt = [None, *(_scores(token, params.prompt_logprobs) for token in ids[1:])]
            output = EngineCoreOutput(
                request.request_id, piece, scores, prompt, reason if last else None
            )
            self._number += 1
            self._on_message(Outputs(self.epoch, self._number, [output]))
            start = end


def _scores(token: int, more: int) -> TokenLogprobs:
    others = [(token + 1 + i) % 2000 for i in range(more)]
    return TokenLogprobs([token, *others], [-0.5 - i for i in range(more + 1)], 1)


def scripted_engine(texts: Sequence[str], seed: int = 0) -> tuple[AsyncLLM, ScriptedCore]:
    """An engine that is ready, and its core."""
    made: list[ScriptedCore] = []

    def make(epoch: int, on_message: OnMessage, on_exit: OnExit) -> ScriptedCore:
        made.append(ScriptedCore(epoch, on_message, on_exit))
        return made[-1]

    engine = AsyncLLM(EngineConfig.from_options(), entropy=b"fixed", make_core=make)
    engine.supervisor.start()
    engine.supervisor.state = "ready"
    core = made[-1]
    core.rng = random.Random(seed)
    core.texts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return engine, core
