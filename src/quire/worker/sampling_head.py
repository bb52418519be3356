"""What a model that generates text does with hidden states: logits, new tokens, log-probabilities.

A request samples at the end of its known tokens and, with drafts, at each of these; a sample that
equals a draft confirms it. Knows no model family and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from quire.core.batch import BatchResult, TokenLogprobs
from quire.errors import GrammarFailed
from quire.logger import get_logger
from quire.models.base import CausalLM
from quire.sampling import RequestSampling, Sampler, SamplerOutput, SamplingMetadata
from quire.sampling.metadata import ASKED_AFTER
from quire.sampling.processors import forced_end
from quire.structured.state import GrammarState, begin_masks, make_masks
from quire.worker.device import Device
from quire.worker.input_batch import InputBatch, StepInputs
from quire.worker.prompt_scores import PromptScorer
from quire.worker.step_runner import Outcome
from quire.worker.tensors import to_tensor_on

logger = get_logger(__name__)


class SamplingHead:
    """Samples new tokens; a `StepHead`.

    Args:
        model: Computes logits.
        input_batch: The requests' state.
        device: Where the model is.
    """

    def __init__(self, model: CausalLM, input_batch: InputBatch, device: Device) -> None:
        self._model = model
        self._input_batch = input_batch
        self._tensor = to_tensor_on(device)
        # Where the forward pass itself is on the cores, another thread only delays it.
        self._makes_ahead = device.name != "cpu"
        self._sampler = Sampler(model.ops)
        self._asks_after = self._sampler.picks_at_once(device.name)
        self._scorer = PromptScorer(model, input_batch, device)

    def wants_every_token(self) -> bool:
        """True while the log-probabilities of a prompt are computed."""
        return bool(self._input_batch.prompt_logprobs or self._input_batch.scored)

    def read_every_token(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> Tensor:
        """Score prompts; returns the states to sample from."""
        self._scorer.score(inputs, hidden, outcome)
        last = inputs.wanted if inputs.sampled is None else inputs.wanted[inputs.sampled]
        return hidden[self._tensor(last)]

    def finish(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> None:
        """Compute logits and new tokens, only for requests whose known tokens end in this step.

        `hidden` has the tokens that are sampled after, `[S, H]`.
        """
        owners = [i for i, count in enumerate(inputs.samples) for _ in range(count)]
        if not owners:
            return
        ahead: list[int] = []  # drafts before each sample; empty: nobody has any
        if max(inputs.samples) > 1:
            ahead = [k for count in inputs.samples for k in range(count)]
        rows = [inputs.rows[owner] for owner in owners]
        requests = [self._input_batch.sampling_of(row) for row in rows]
        if any(request.active for request in requests):
            logits = self._model.compute_logits(hidden, keep="logits")
            result = self._sample(requests, rows, ahead, logits)
        else:
            result = self._sampler.take(self._model.compute_likeliest(hidden))
        places: Sequence[int] = range(len(owners))
        if ahead:
            places = self._confirmed(owners, ahead, rows, result)
        _note([inputs.req_ids[owner] for owner in owners], places, result, outcome)

    def sample(
        self, req_ids: Sequence[str], rows: Sequence[int], logits: Tensor, outcome: Outcome
    ) -> None:
        """The same for requests of which each computes its last token, whose logits are there:
        `[requests, vocab]`, overwritten."""
        requests = [self._input_batch.sampling_of(row) for row in rows]
        result = self._sample(requests, rows, [], logits)
        _note(req_ids, range(len(rows)), result, outcome)

    def _sample(
        self,
        requests: Sequence[RequestSampling],
        rows: Sequence[int],
        ahead: Sequence[int],
        logits: Tensor,
    ) -> SamplerOutput:
        outputs = self._input_batch.outputs(rows, ahead)
        if not ahead and self._input_batch.grammar_states:
            make_masks(
                [
                    (request.mask, output)
                    for request, output in zip(requests, outputs, strict=True)
                    if isinstance(request.mask, GrammarState)
                    and request.mask.is_large
                    and not (self._asks_after and ASKED_AFTER in request.active)
                ]
            )
        metadata = SamplingMetadata.build(requests, outputs, num_drafts=ahead)
        return self._sampler(logits, metadata)

    def commit(self, outcome: Outcome, result: BatchResult) -> None:
        """Make the sampled tokens known ones, and return prompt log-probabilities once they are
        complete."""
        pending = self._input_batch.prompt_logprobs
        for req_id, entries in outcome.prompt_entries.items():
            if req_id not in outcome.failed:
                pending[req_id].extend(entries)
        scored = self._input_batch.scored
        for req_id, (first, rows) in outcome.scored.items():
            if req_id not in outcome.failed:
                scored[req_id].logprobs[first : first + len(rows)] = rows
        for req_id, token_ids in outcome.sampled.items():
            self._input_batch.append_tokens(req_id, token_ids)
        if self._input_batch.budgeted:
            self._end_thinking(outcome, result)
        if self._input_batch.grammar_states:
            self._jump_forward(outcome, result)
        done = [i for i in outcome.sampled if i in pending] if pending else []
        result.logprobs = outcome.logprobs
        result.prompt_logprobs = {i: pending.pop(i) for i in done}
        done = [i for i in outcome.sampled if i in scored] if scored else []
        result.scored = {i: scored.pop(i).result() for i in done}

    def _end_thinking(self, outcome: Outcome, result: BatchResult) -> None:
        """Append the tokens that end the reasoning of those who have just spent their budget; the
        same in all else as `_jump_forward`, which goes on after them."""
        known = self._input_batch
        for req_id in known.budgeted & outcome.sampled.keys() - outcome.logprobs.keys():
            request, count = known.sampling_of(known.row_of[req_id]), 0
            while known.room_of(req_id) > 0:
                token = forced_end(request, known.output_of(req_id))
                if token is None:
                    break
                known.append_tokens(req_id, [token])
                outcome.sampled[req_id].append(token)
                count += 1
            if count:
                _note_forced(result, req_id, count)

    def _jump_forward(self, outcome: Outcome, result: BatchResult) -> None:
        """Append the tokens that grammars force after those just sampled: the next step computes
        them together, and none needs logits of its own.

        A request that wants log-probabilities gets its forced tokens one by one, with those that
        the model gives them. So does one with logits processors, which may not want a token.
        """
        known = self._input_batch
        states, logprobs = known.grammar_states, outcome.logprobs
        req_ids = [i for i in outcome.sampled if i in states and i not in logprobs]
        rows = [known.row_of[i] for i in req_ids]
        for req_id, output in zip(req_ids, known.outputs(rows), strict=True):
            if known.sampling_of(known.row_of[req_id]).processors is not None:
                continue
            with suppress(GrammarFailed):  # the next mask says so
                if not states[req_id].forces_after(output):
                    continue
                forced = states[req_id].forced(output, known.room_of(req_id))
                if forced:
                    known.append_tokens(req_id, forced)
                    outcome.sampled[req_id] += forced
                    _note_forced(result, req_id, len(forced))
        if self._makes_ahead:
            begin_masks([states[i] for i in req_ids])

    def _confirmed(
        self,
        owners: Sequence[int],
        num_drafts: Sequence[int],
        rows: Sequence[int],
        result: SamplerOutput,
    ) -> list[int]:
        """Positions of the sampled tokens that are kept: a request's first, and each one before
        which all drafts equal what was sampled. So the output is the same as without drafts.

        If sampling failed at a position, the request ends only if it is the first position.
        Otherwise the tokens before it are output now, and the next step meets the failure again, as
        it would without drafts.
        """
        drafts = self._input_batch.drafts_after(rows, num_drafts)
        places: list[int] = []
        ended = -1
        for place, (owner, count) in enumerate(zip(owners, num_drafts, strict=True)):
            if owner == ended or (count and place in result.failed):
                ended = owner
                continue
            places.append(place)
            if place in result.failed or result.token_ids[place] != drafts[place]:
                ended = owner
        return places


def _note(
    req_ids: Sequence[str], places: Sequence[int], result: SamplerOutput, outcome: Outcome
) -> None:
    """Add what was sampled at some places, each its request's, to the outcome."""
    for place in places:
        req_id = req_ids[place]
        if place in result.failed:
            logger.error("request %s failed: %s", req_id, result.failed[place])
            outcome.failed[req_id] = result.failed[place]
            continue
        if req_id in outcome.failed:
            continue
        outcome.sampled.setdefault(req_id, []).append(result.token_ids[place])
        entry = result.logprobs[place]
        if entry is not None:
            outcome.logprobs.setdefault(req_id, []).append(TokenLogprobs(*entry))


def _note_forced(result: BatchResult, req_id: str, count: int) -> None:
    result.num_forced[req_id] = result.num_forced.get(req_id, 0) + count
