"""What scripts for vLLM pass and call: nothing asked for is taken, the rest refused by name."""

from __future__ import annotations

import copy

import msgspec
import pytest

import drop_in
from quire import LLM, PoolingParams, RequestOutputKind, SamplingParams
from quire.engine.foreign import (
    ABSENT_OF_LLM,
    ABSENT_OF_LLM_ENGINE,
    REQUEST_OPTIONS,
    check_request_options,
)
from quire.errors import InvalidRequest, NotAvailable
from quire.params import _NOT_DONE_POOLING, NOT_DONE, SamplingType

GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def llm():
    with LLM() as engine:
        yield engine


# ------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("kind", "name", "neutral"),
    [
        (kind, name, value)
        for kind, table in ((SamplingParams, NOT_DONE), (PoolingParams, _NOT_DONE_POOLING))
        for name, (values, _) in table.items()
        for value in values
    ],
)
def test_a_parameter_that_asks_for_nothing_is_as_if_not_given(kind, name, neutral):
    given = kind(**{name: neutral})
    assert given == kind()
    assert msgspec.msgpack.encode(given) == msgspec.msgpack.encode(kind())


@pytest.mark.parametrize("name", NOT_DONE)
def test_a_parameter_that_asks_for_something_is_refused(name):
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet: .*; got 77") as caught:
        SamplingParams(**{name: 77})
    assert caught.value.param == name


def test_all_parameters_of_vllm_are_known_at_their_defaults():
    defaults = {**drop_in.SURFACE["sampling_params"]}
    defaults["output_kind"] = RequestOutputKind.CUMULATIVE
    assert SamplingParams(**defaults).replace(stop_token_ids=[]) == SamplingParams()
    assert len(defaults) == 39


def test_clone_shares_nothing():
    params = SamplingParams(stop=["a"], stop_token_ids=[3], logit_bias={1: 2.0}, seed=5)
    twin = params.clone()
    assert twin == params == copy.deepcopy(params)
    twin.stop.append("b")
    twin.logit_bias[7] = 1.0
    assert params.stop == ["a"] and params.logit_bias == {1: 2.0}


def test_a_field_may_be_replaced_and_is_checked():
    params = SamplingParams()
    params.max_tokens = 5
    params.top_k = -1
    assert (params.max_tokens, params.top_k) == (5, 0)
    params.top_k = 4
    params.temperature = 0.0
    assert params == SamplingParams(max_tokens=5, temperature=0.0), "greedy has one spelling"
    with pytest.raises(InvalidRequest, match="max_tokens must be"):
        params.max_tokens = 0
    with pytest.raises(AttributeError, match="has no 'max_token'"):
        params.max_token = 5
    assert params.max_tokens == 5


def test_other_members_of_parameters():
    assert SamplingParams.from_optional(top_p=None, top_k=3, max_tokens=None) == SamplingParams(
        top_k=3, max_tokens=None
    )
    assert GREEDY.sampling_type is SamplingType.GREEDY
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=1).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(logprobs=2).num_logprobs == 2 and GREEDY.eos_token_id is None


def test_all_options_of_vllm_at_their_defaults_together(caplog, monkeypatch):
    monkeypatch.setattr("quire.engine.llm.logger.propagate", True)
    rows = {name: row for name, row in drop_in.SURFACE["engine_args"].items() if "default" in row}
    options = {name: row["default"] for name, row in rows.items() if name != "model"}
    with LLM(**options) as engine:
        assert engine.llm_engine.config.scheduler.max_num_seqs == 256, "the default of LLM"
        assert engine.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert "without effect" not in caplog.text, "nothing was asked for"


# -------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("name", REQUEST_OPTIONS)
def test_request_options(name):
    for nothing in (None, {}, [], [None, None]):
        check_request_options(**{name: nothing})
    for something in ({"x": 1}, [None, object()], object()):
        with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet: ") as caught:
            check_request_options(**{name: something})
        assert caught.value.param == name


def test_keywords_of_the_verbs(llm):
    nothing = {"lora_request": None, "tokenization_kwargs": None, "mm_processor_kwargs": None}
    plain = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    same = llm.generate(["Hello"] * 2, GREEDY, use_tqdm=False, priority=0, **nothing)
    assert [output.outputs[0].token_ids for output in same] == [plain] * 2
    talk = [{"role": "user", "content": "Hello"}]
    answer = llm.chat(talk, GREEDY, False, None, chat_template_content_format="auto", **{
        name: value for name, value in nothing.items() if name != "lora_request"
    })  # fmt: skip
    assert answer[0].outputs[0].token_ids
    for verb in (llm.generate, llm.chat):
        with pytest.raises(InvalidRequest, match="lora_request is not supported yet: give a model"):
            verb(talk if verb == llm.chat else "Hello", GREEDY, lora_request=object())
    with pytest.raises(InvalidRequest, match="chat_template_content_format is not supported yet"):
        llm.chat(talk, GREEDY, chat_template_content_format="openai")
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_a_request_keeps_the_parameters_it_came_with(llm):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop_token_ids=[5])
    llm.llm_engine.add_request("mine", "Hello", params)
    params.max_tokens = 1
    params.ignore_eos = False
    ended = []
    while not ended:
        ended = [output for output in llm.llm_engine.step() if output.finished]
    assert len(ended[0].outputs[0].token_ids) == 9


def test_a_bar_of_the_callers(llm):
    told = []

    class Bar:
        def __init__(self, **how):
            told.append(how["total"])

        def update(self, count):
            told.append(count)

        def close(self):
            told.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert told == [2, 1, 1, "closed"]


# --------------------------------------------------------------------------------------- members


@pytest.mark.parametrize("name", ABSENT_OF_LLM)
def test_members_of_llm_that_are_not_there_say_so(llm, name):
    with pytest.raises(NotAvailable, match=f"^LLM.{name} is not available: .*[.]$"):
        getattr(llm, name)("x", level=1)
    assert ABSENT_OF_LLM[name] in getattr(LLM, name).__doc__


@pytest.mark.parametrize("name", ABSENT_OF_LLM_ENGINE)
def test_members_of_the_engine_that_are_not_there_say_so(llm, name):
    with pytest.raises(NotImplementedError, match=f"^LLMEngine.{name} is not available: "):
        getattr(llm.llm_engine, name)()


def test_members_that_are_there(llm):
    engine = llm.llm_engine
    assert llm.get_world_size() == 1 and llm.reset_mm_cache() is None
    assert engine.get_tokenizer() is llm.get_tokenizer() is engine.tokenizer
    assert engine.model_config.max_model_len > 1
    assert engine.get_supported_tasks() == ("generate",) and engine.list_loras() == set()
    assert engine.add_request("7", "Hello", SamplingParams(n=2, max_tokens=2)) == "7"
    assert engine.get_num_unfinished_requests() == 1
    engine.step()
    assert not engine.reset_prefix_cache() and not engine.is_sleeping()
    with pytest.raises(NotAvailable, match="reset_running_requests"):
        engine.reset_prefix_cache(reset_running_requests=True)
    while engine.has_unfinished_requests:
        engine.step()
    engine.do_log_stats()
    assert engine.get_num_unfinished_requests() == 0 and engine.reset_prefix_cache()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(InvalidRequest, match="profile_prefix"):
        llm.start_profile("mine")
    with pytest.raises(InvalidRequest, match="arrival_time"):
        engine.add_request("8", "Hello", GREEDY, 1.0)


def test_token_ids_of_a_conversation(llm):
    tokenizer = llm.get_tokenizer()
    talk = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    ids = tokenizer.apply_chat_template(talk, tokenize=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
