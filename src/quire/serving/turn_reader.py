"""From the engine's outputs to turn events: the one place where the two meet.

Runs once per token of every stream: a token of plain text costs one event and two lists. Knows no
wire format.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from quire.params import SamplingParams
from quire.serving.parsing import ChoiceParser, Parsing
from quire.serving.submission import request_failed
from quire.serving.turns import Batch, Begin, Finish, PromptInfo, Text, Tokens, Usage


class TurnReader:
    """Reads the outputs of all prompts of one request.

    Args:
        params: What the model was asked for.
        tokens: Whether the reply shows sampled tokens or their log-probabilities.
        prompt_only: Only the prompt was wanted: the one token that must be computed is dropped.
        parsing: How the text is parsed, one way for all prompts or one for each; `None`: it is the
            answer as it is.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        tokens: bool = False,
        prompt_only: bool = False,
        parsing: Parsing | Sequence[Parsing] | None = None,
    ) -> None:
        self.usage = Usage()
        """Grows as outputs are read."""
        self.times: RequestMetrics | None = None
        """Of the latest prompt that has ended."""
        self.n = params.n
        """Choices of each prompt."""
        self.scored = params.prompt_logprobs is not None
        """Whether outputs must go through `release` before they are read."""
        self._tokens = tokens
        self._prompt_only = prompt_only
        self._parsing = parsing
        self._prompts: dict[int, PromptInfo] = {}
        self._parsers: dict[int, ChoiceParser | None] = {}
        """Of the choices that have begun."""
        self._held: dict[int, list[RequestOutput]] = {}
        self._scores: dict[int, Sequence[PositionLogprobs | None]] = {}

    def release(self, prompt_index: int, output: RequestOutput) -> list[RequestOutput]:
        """Outputs that may be read now, each with its prompt's log-probabilities, if these were
        asked for.

        They come once, with whichever completion is first; a reply needs them at the beginning of
        every choice. So what comes before them waits.
        """
        if not self.scored or output.error is not None:
            return [output]
        waiting = self._held.setdefault(prompt_index, [])
        waiting.append(output)
        if output.prompt_logprobs is not None:
            self._scores[prompt_index] = output.prompt_logprobs
        elif prompt_index not in self._scores and not output.finished:
            return []
        self._held[prompt_index] = []
        for released in waiting:
            released.prompt_logprobs = self._scores.get(prompt_index)
        return waiting

    def is_text(self, choice: int) -> bool:
        """Whether text of this choice is a `Text` event and nothing else, and so needs no `read`.
        Its tokens are to be counted in `usage`."""
        begun: object = self._parsers.get(choice, self)
        return begun is None and not self._tokens and not self._prompt_only

    def read(self, prompt_index: int, output: RequestOutput) -> list[Batch]:
        """The events of an output, a batch for each choice that has some.

        Raises:
            StepFailed: the engine failed on the request; what it said about it is in the log.
        """
        if output.error is not None:
            raise request_failed(output)
        if output.finished:
            self.times = output.metrics
        batches = []
        for completion in output.outputs:
            choice = prompt_index * self.n + completion.index
            batch: Batch = []
            if choice not in self._parsers:
                batch.append(self._begin(choice, prompt_index, output))
            parser = self._parsers[choice]
            if self._prompt_only:
                _drop_tokens(completion)
            self.usage.completion_tokens += len(completion.token_ids)
            if self._tokens and completion.token_ids:
                batch.append(Tokens(choice, completion.token_ids, completion.logprobs))
            if parser is not None:
                parser.count(completion.token_ids)
                batch += parser.feed(completion.text)
            elif completion.text:
                batch.append(Text(choice, completion.text))
            if completion.finish_reason is not None:
                self._finish(choice, output, completion, batch)
            if batch:
                batches.append(batch)
        return batches

    def _begin(self, choice: int, prompt_index: int, output: RequestOutput) -> Begin:
        prompt = self._prompts.get(prompt_index)
        if prompt is None:
            prompt = self._prompts[prompt_index] = PromptInfo(
                prompt_index,
                output.prompt_token_ids,
                output.num_cached_tokens,
                output.prompt_logprobs,
                output.scored,
            )
            self.usage.prompt_tokens += len(prompt.token_ids)
            self.usage.cached_tokens += prompt.num_cached_tokens
        own = self._parsing
        if isinstance(own, Sequence):
            own = own[prompt_index]
        self._parsers[choice] = None if own is None else own.begin(choice, output.request_id)
        return Begin(choice, prompt)

    def _finish(
        self, choice: int, output: RequestOutput, completion: CompletionOutput, batch: Batch
    ) -> None:
        assert completion.finish_reason is not None
        if completion.finish_reason == "error":
            raise request_failed(output)
        parser, num_calls = self._parsers[choice], 0
        if parser is not None:
            batch += parser.finish()
            num_calls = parser.num_calls
            self.usage.reasoning_tokens += parser.num_reasoning_tokens
        batch.append(Finish(choice, completion.finish_reason, completion.stop_reason, num_calls))


def _drop_tokens(completion: CompletionOutput) -> None:
    completion.text, completion.token_ids, completion.stop_reason = "", [], None
    completion.logprobs = None if completion.logprobs is None else []
    if completion.finish_reason is not None:
        completion.finish_reason = "length"
