"""`LLM.beam_search`: searches in step with each other, so that they share batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.bounds import show
from quire.engine.foreign import check_request_options
from quire.engine.frontend.beam_params import BeamSearchParams
from quire.engine.frontend.beams import CANDIDATES, BeamSearch, check_width, step_params
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.input_gate import text_gate
from quire.engine.frontend.prompts import PromptType, ReadPrompt, TokensPrompt
from quire.engine.llm_part import LLMPart, as_prompts
from quire.engine.progress import GenerateProgress
from quire.errors import InvalidRequest, StepFailed
from quire.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from quire.params import SamplingParams


class BeamVerb(LLMPart):
    """What `LLM` does by beam search."""

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: object = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of prompts.

        Args:
            prompts: As for `generate`.
            params: Width, length and how sequences are ranked.
            lora_request: Only `None`, for scripts that pass it.
            use_tqdm: Show progress: a switch, or what makes a bar, like `tqdm`.
            concurrency_limit: Prompts that are searched at the same time; all unless given.

        Returns:
            One output per prompt, in the order given.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing is computed for any.
            StepFailed: the engine failed on a prompt.
        """
        check_request_options(lora_request=lora_request)
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(
                f"params must be BeamSearchParams, got {show(params)}.", param="params"
            )
        items = as_prompts(prompts)
        limit = _concurrency(concurrency_limit, len(items))
        gate = text_gate(self.llm_engine.frontend.input)
        config = self.llm_engine.frontend.config.model
        width = check_width(params.beam_width, config.max_logprobs, "beam_width")
        whole = _whole(params)
        checked = gate.check(step_params(whole, width))
        assert config.max_model_len is not None, "resolve() settles it"
        jobs = []
        for item in items:
            read = gate.read_prompt(item)
            search = BeamSearch(
                read.ids, whole, width, params.length_penalty, config.max_model_len,
                self.llm_engine.tokenizer,
            )  # fmt: skip
            search.set_ends(checked.params.eos_token_ids)
            jobs.append((read, search))
        with GenerateProgress(len(jobs), use_tqdm) as progress:
            for start in range(0, len(jobs), limit):
                self._search(jobs[start : start + limit], checked, progress)
        skip = params.skip_special_tokens
        return [
            BeamSearchOutput([self._sequence(item, one, made, skip) for made in one.outputs()])
            for item, (_, one) in zip(items, jobs, strict=True)
        ]

    def _search(
        self,
        jobs: Sequence[tuple[ReadPrompt, BeamSearch]],
        params: CheckedParams,
        progress: GenerateProgress,
    ) -> None:
        """Step searches to their end, all of them by one token at a time."""
        while running := [
            (read, search, search.prompts) for read, search in jobs if search.prompts
        ]:
            prompts = [_prompt(ids, read.salt) for read, _, found in running for ids in found]
            outputs = iter(self._submit_all(prompts, [params] * len(prompts), False))
            for _, search, found in running:
                search.advance([_candidates(next(outputs)) for _ in found])
                if not search.prompts:
                    ids = search.prompt_token_ids
                    progress.finish(RequestOutput("", None, ids, search.outputs(), True))

    def _sequence(
        self, prompt: PromptType, search: BeamSearch, made: CompletionOutput, skip: bool
    ) -> BeamSearchSequence:
        tokens = search.prompt_token_ids + made.token_ids
        assert made.logprobs is not None and made.cumulative_logprob is not None
        return BeamSearchSequence(
            tokens,
            made.logprobs,
            cum_logprob=made.cumulative_logprob,
            text=self.llm_engine.tokenizer.decode(tokens, skip_special_tokens=skip),
            finish_reason=made.finish_reason,
            stop_reason=made.stop_reason,
            orig_prompt=prompt,
        )


def _whole(params: BeamSearchParams) -> SamplingParams:
    """What each output is to be like. vLLM tells all candidates of each position."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=CANDIDATES * params.beam_width,
        detokenize=False,
    )


def _concurrency(given: int | None, count: int) -> int:
    if given is None:
        return max(1, count)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InvalidRequest(
            f"concurrency_limit must be an integer of at least 1, got {show(given)}.",
            param="concurrency_limit",
        )
    return given


def _prompt(ids: list[int], salt: str | None) -> TokensPrompt:
    prompt: TokensPrompt = {"prompt_token_ids": ids}
    if salt is not None:
        prompt["cache_salt"] = salt
    return prompt


def _candidates(output: RequestOutput) -> Any:
    (made,) = output.outputs
    if output.error is not None or not made.logprobs:
        raise StepFailed(output.error or "the engine ended a request of this search")
    return made.logprobs[0]
