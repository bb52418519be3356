"""Beam search over an engine: rounds of one-token requests, and their outputs as turns.

All prompts of a request are searched in step. The first round is subject to the limits of the
queue like any request; what was accepted then is not refused later. Rounds take their turn under
the scheduling policy, with the request's priority, client and salt. Nothing is drawn and ties are
broken by rule, so a reply is the same whatever else runs, and when a core is replaced in between.
Knows no wire format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.frontend.beams import BeamSearch, step_params
from quire.errors import StepFailed
from quire.outputs import PositionLogprobs, RequestOutput
from quire.params import SamplingParams
from quire.serving.engine_protocol import EngineClient, OutputStream
from quire.serving.errors import DeadlineExceeded
from quire.serving.server_state import ServerState
from quire.serving.submission import Submission, request_failed, submitted
from quire.serving.turn_reader import TurnReader
from quire.serving.turns import ModelTurn, Usage


@dataclass(frozen=True, slots=True)
class Beams:
    """What is asked of a search."""

    width: int
    length_penalty: float


class BeamGeneration:
    """The outputs of a search for each prompt of one HTTP request. Whoever is cancelled while he
    waits for them ends it.

    Args:
        state: Of the server.
        engine: Computes the rounds.
        submission: The prompts, and what their outputs are to be like.
        reader: Of the outputs.
        beams: Of each prompt.
    """

    def __init__(
        self,
        state: ServerState,
        engine: EngineClient,
        submission: Submission,
        reader: TurnReader,
        beams: Beams,
    ) -> None:
        self._state = state
        self._engine = engine
        self._submission = submission
        self._reader = reader
        params = submission.params
        assert isinstance(params, SamplingParams), "only text is searched for"
        self._step_params = step_params(params, beams.width)
        self._params = params
        self._searches = [
            BeamSearch(
                ids, params, beams.width, beams.length_penalty, engine.max_model_len,
                engine.tokenizer,
            )
            for ids in submission.prompts
        ]  # fmt: skip
        self._num_rounds = 0
        self._num_cached = [0] * len(self._searches)

    @property
    def metrics(self) -> dict[str, Any]:
        """None: a search is many requests."""
        return {}

    @property
    def seed(self) -> int:
        """The request's own; nothing is drawn with it."""
        return self._params.seed or 0

    @property
    def usage(self) -> Usage:
        """Tokens of the prompts, and of the outputs that are returned."""
        return self._reader.usage

    async def turns(self) -> list[ModelTurn]:
        """All choices in order, complete; of each prompt the best first.

        Raises:
            RequestError: the engine refuses a prompt.
            EngineError: the engine failed; what it said about it is in the log.
        """
        while any(search.num_open for search in self._searches):
            await self._round()
        turns = []
        for index, search in enumerate(self._searches):
            output = RequestOutput(
                self._submission.request_ids[index],
                None,
                search.prompt_token_ids,
                search.outputs(),
                finished=True,
                num_cached_tokens=self._num_cached[index],
            )
            for batch in self._reader.read(index, output):
                turns.append(ModelTurn(batch[0].choice).add(batch))
        return turns

    async def _round(self) -> None:
        """One more token for every open sequence."""
        names, prompts = [], []
        for name, search in zip(self._submission.request_ids, self._searches, strict=True):
            for place, ids in enumerate(search.prompts):
                names.append(f"{name}-{self._num_rounds}-{place}")
                prompts.append(ids)
        submission = replace(
            self._submission,
            request_ids=names,
            prompts=prompts,
            params=self._step_params,
            continues=self._num_rounds > 0,
        )
        try:
            async with submitted(self._state, self._engine, submission) as streams:
                if not self._num_rounds:
                    for search in self._searches:
                        search.set_ends(streams[0].checked.params.eos_token_ids)
                outputs = [await _output(stream) for stream in streams]
        except DeadlineExceeded:
            if not self._num_rounds:
                raise
            return self._abort()
        if not self._num_rounds:
            self._num_cached = [output.num_cached_tokens for output in outputs]
        self._num_rounds += 1
        if any(output.outputs[0].finish_reason == "abort" for output in outputs):
            return self._abort()
        self._advance(outputs)

    def _advance(self, outputs: Sequence[RequestOutput]) -> None:
        answers = iter(outputs)
        for search in self._searches:
            if count := search.num_open:
                search.advance([_candidates(next(answers)) for _ in range(count)])

    def _abort(self) -> None:
        """The time is up, or the server ends: what there is counts."""
        for search in self._searches:
            if search.num_open:
                search.abort()


async def _output(stream: OutputStream) -> RequestOutput:
    async for output in stream:
        if output.error is not None or output.outputs[0].finish_reason == "error":
            raise request_failed(output)
        if output.finished:
            return output
    raise StepFailed("The engine ended a stream without saying why.")


def _candidates(output: RequestOutput) -> PositionLogprobs:
    positions = output.outputs[0].logprobs
    assert positions, "log-probabilities were asked for"
    return positions[0]
