"""`LLM.beam_search` on the model that ships: against the model's plain forward, and as vLLM's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paged_run import load, serve
from quire import LLM, BeamSearchParams, SamplingParams
from quire.compat.modules import MODULES
from quire.config import EngineConfig
from quire.config.locate import located
from quire.engine.frontend.input_gate import text_gate
from quire.errors import ContextLengthExceeded, InvalidRequest

PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3,"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as engine:
        yield engine


class Plain:
    """Beam search as a textbook has it, over the logits of whole sequences."""

    def __init__(self, llm: LLM) -> None:
        self.model = load(located(EngineConfig.from_options()).model.folder)
        gate = text_gate(llm.llm_engine.frontend.input)
        self.eos = gate.check(SamplingParams()).params.eos_token_ids

    def scores(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        rows = serve(self.model, sequences, random.Random(0))
        return [row[-1].float().log_softmax(-1) for row in rows]

    def search(
        self, prompt: list[int], width: int, length: int, penalty: float
    ) -> list[tuple[list[int], float]]:
        live: list[tuple[list[int], float]] = [([], 0.0)]
        done: list[tuple[float, list[int], float]] = []
        for _ in range(length):
            pool = []
            rows = self.scores([prompt + tokens for tokens, _ in live])
            for (tokens, total), row in zip(live, rows, strict=True):
                values, ids = row.topk(2 * width)
                for value, token in zip(values.tolist(), ids.tolist(), strict=True):
                    one = ([*tokens, token], total + value)
                    if token in self.eos:
                        done.append((self.score(prompt, tokens, one[1], penalty), *one))
                    else:
                        pool.append(one)
            live = sorted(pool, key=lambda one: -one[1])[:width]
        done += [(self.score(prompt, *one, penalty), *one) for one in live]
        return [one[1:] for one in sorted(done, key=lambda one: -one[0])[:width]]

    @staticmethod
    def score(prompt: list[int], tokens: list[int], total: float, penalty: float) -> float:
        return total / float((len(prompt) + len(tokens)) ** penalty)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Plain:
    return Plain(llm)


@pytest.mark.parametrize(
    ("width", "length", "penalty"),
    [(1, 6, 1.0), (2, 8, 1.0), (4, 6, 0.0), (3, 9, 4.0), (5, 5, -3.0)],
)
def test_it_is_a_plain_search(
    llm: LLM, plain: Plain, width: int, length: int, penalty: float
) -> None:
    params = BeamSearchParams(width, length, length_penalty=penalty)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        want = plain.search(ids, width, length, penalty)
        assert [one.tokens for one in output.sequences] == [ids + tokens for tokens, _ in want]
        for one, (_, total) in zip(output.sequences, want, strict=True):
            assert one.cum_logprob == pytest.approx(total, abs=1e-3)


def test_a_sequence_is_as_vllm_has_it(llm: LLM, plain: Plain) -> None:
    (output,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=6))
    tokenizer = llm.get_tokenizer()
    assert len(output.sequences) == 3
    for one in output.sequences:
        ids = one.tokens[len(tokenizer.encode(PROMPTS[0])) :]
        assert one.text == tokenizer.decode(one.tokens)
        assert one.text is not None and one.text.startswith(PROMPTS[0])
        ended = ids[-1] in plain.eos
        assert one.finish_reason == ("stop" if ended else "length") and one.stop_reason is None
        assert [next(iter(position)) for position in one.logprobs] == ids
        total = sum(position[i].logprob for i, position in zip(ids, one.logprobs, strict=True))
        assert one.cum_logprob == pytest.approx(total)
        assert all(len(position) == 6 for position in one.logprobs)
        assert one.orig_prompt == PROMPTS[0]
    assert "Paris" in (output.sequences[0].text or "")
    assert output.sequences[0].finish_reason == "stop"


def test_one_beam_is_greedy(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    greedy = llm.generate(PROMPTS, params, use_tqdm=False)
    found = llm.beam_search(PROMPTS, BeamSearchParams(1, 12, ignore_eos=True))
    for one, two in zip(greedy, found, strict=True):
        assert two.sequences[0].tokens == one.prompt_token_ids + one.outputs[0].token_ids


def test_the_company_changes_nothing(llm: LLM) -> None:
    params = BeamSearchParams(4, 10)
    alone = [llm.beam_search([prompt], params)[0] for prompt in PROMPTS]
    assert llm.beam_search(PROMPTS, params) == alone
    assert llm.beam_search(PROMPTS, params, concurrency_limit=3) == alone
    with LLM(enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=3) as small:
        assert small.beam_search(PROMPTS, params) == alone


def test_prompts_may_be_tokens(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    params = BeamSearchParams(2, 3)
    given: list[Any] = [PROMPTS[0], {"prompt_token_ids": ids, "cache_salt": "a"}, ids]
    found = [[one.tokens for one in out.sequences] for out in llm.beam_search(given, params)]
    assert found[0] == found[1] == found[2]


def test_progress_counts_prompts(llm: LLM) -> None:
    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total, self.count = total, 0
            bars.append(self)

        def update(self, by: int) -> None:
            self.count += by

        def close(self) -> None:
            pass

    bars: list[Bar] = []
    llm.beam_search(PROMPTS, BeamSearchParams(2, 2), use_tqdm=Bar)
    (bar,) = bars
    assert bar.total == bar.count == len(PROMPTS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1 to 128, got 0"),
        ({"beam_width": 11}, r"beam_width must be at most 10 .*--max-logprobs 20\), got 11"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"length_penalty": 11.0}, r"length_penalty must be a number in \[-10, 10\], got 11"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number"),
        ({"temperature": 3}, r"temperature must be a number in \[0, 2\], got 3"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false, got 'yes'"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs is not supported with beam"),
        ({"watermarking": {}}, None),
        ({"watermarking": {"key": 1}}, "watermarking is not supported yet"),
    ],
)
def test_bad_parameters_are_refused_by_name(
    llm: LLM, given: dict[str, Any], said: str | None
) -> None:
    def search() -> Any:
        return llm.beam_search(
            ["x"], BeamSearchParams(**{"beam_width": 2, "max_tokens": 1} | given)
        )

    if said is None:
        assert search()
        return
    with pytest.raises(InvalidRequest, match=said) as caught:
        search()
    assert caught.value.param == next(iter(given))


def test_bad_calls_are_refused(llm: LLM) -> None:
    params = BeamSearchParams(2, 2)
    with pytest.raises(InvalidRequest, match="params must be BeamSearchParams, got SamplingParams"):
        llm.beam_search(["x"], SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="concurrency_limit must be .* at least 1, got 0"):
        llm.beam_search(["x"], params, concurrency_limit=0)
    with pytest.raises(InvalidRequest, match="lora_request"):
        llm.beam_search(["x"], params, lora_request=object())
    with pytest.raises(ContextLengthExceeded):
        llm.beam_search(["x", [5] * 4000], params)
    assert not llm.llm_engine.has_unfinished_requests


def test_vllms_names() -> None:
    names = MODULES["vllm.entrypoints.generate.beam_search.utils"]
    assert names == MODULES["vllm.beam_search"]
    assert names["BeamSearchOutput"] == "quire.outputs:BeamSearchOutput"
    where = MODULES["vllm.sampling_params"]["BeamSearchParams"]
    assert where == f"{BeamSearchParams.__module__}:BeamSearchParams"
    assert BeamSearchParams(4, 16) == BeamSearchParams(beam_width=4, max_tokens=16)
