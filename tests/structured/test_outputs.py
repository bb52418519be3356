"""Outputs of the embedded model: valid, the same under any load, in few steps."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import InvalidRequest
from quire.structured import state
from quire.structured.state import AHEAD_ROWS, GrammarState, begin_masks
from quire.worker import sampling_head
from quire.worker.sampling_head import SamplingHead
from schemas import Schema, schema

PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 15},
        "occupation": {"enum": ["photographer", "astronomer", "librarian"]},
        "favourite_numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 2,
            "maxItems": 4,
        },
    },
    "required": ["name", "occupation", "favourite_numbers"],
    "additionalProperties": False,
}
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "begin": '<tool_call>{"name": "',
                "content": {"type": "regex", "pattern": "[a-z]{3,8}"},
                "end": '"}</tool_call>',
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
FORMS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"regex": r"(fox|owl)-\d{4}( and [a-z]{2,9}){2,6}"},
    {"choice": ["an extraordinary day", "an extravagant evening", "no"]},
    {"grammar": 'root ::= "(" root ")" | item\nitem ::= [a-f]{3,9} " "'},
    {"json": PERSON, "disable_any_whitespace": True},
    {"structural_tag": CALL},
    {"json_object": True},
]
STORY = "Once upon a time there was a small fox who lived at the edge of the forest. "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as engine:
        yield engine


def run(engine: LLM, wishes: list[dict[str, Any]], prompt: str = STORY) -> list[RequestOutput]:
    prompts = [prompt + f"{i}:" for i in range(len(wishes))]
    params = [SamplingParams(**wish) for wish in wishes]
    return engine.generate(prompts, params, use_tqdm=False)


def steps(engine: LLM) -> int:
    return engine.llm_engine.core.scheduler.step


def test_masks_made_during_the_forward_pass_change_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices that leave the processor's cores free."""
    wishes = [
        {"structured_outputs": FORMS[i % len(FORMS)], "temperature": 1.0, "seed": i,
         "max_tokens": 40, "logprobs": 1 if i % 5 == 4 else None}
        for i in range(24)
    ]  # fmt: skip
    at_once = [o.outputs[0].token_ids for o in run(llm, wishes)]
    begun: list[int] = []
    made = SamplingHead.__init__

    def make(head: SamplingHead, *args: Any) -> None:
        made(head, *args)
        head._makes_ahead = True

    def begin(states: list[GrammarState]) -> None:
        begin_masks(states)
        begun.append(len(states))

    monkeypatch.setattr(SamplingHead, "__init__", make)
    monkeypatch.setattr(sampling_head, "begin_masks", begin)
    with LLM() as other:
        assert [o.outputs[0].token_ids for o in run(other, wishes)] == at_once
    assert max(begun) > AHEAD_ROWS


def test_every_finished_output_is_valid(llm: LLM) -> None:
    schemas = [schema(random.Random(i)) for i in range(500)]
    for one in schemas:
        jsonschema.Draft202012Validator.check_schema(one)
    outputs = run(
        llm,
        [
            {"temperature": 1, "seed": i, "max_tokens": 600, "structured_outputs": {"json": one}}
            for i, one in enumerate(schemas)
        ],
        "JSON ",
    )
    finished = 0
    for one, output in zip(schemas, outputs, strict=True):
        assert output.error is None, (one, output.error)
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            finished += 1
            value = json.loads(completion.text)
            jsonschema.validate(value, one, cls=jsonschema.Draft202012Validator)
    assert finished > 450


def wishes() -> list[dict[str, Any]]:
    """Every form with every kind of sampling that is likely to disturb it."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "logprobs": 2},
        {"temperature": 1, "n": 3},
        {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 1, "logit_bias": {300: 3.0, 11: -100}, "min_tokens": 7},
        {"temperature": 1, "bad_words": ["and", "{"], "ignore_eos": True},
        {"temperature": 1, "stop": ["er", "9"]},
    ]
    return [
        {"seed": i, "max_tokens": 20 + 17 * (i % 5), **kind, "structured_outputs": form}
        for i, (form, kind) in enumerate((form, kind) for form in FORMS for kind in kinds)
    ]


def facts(output: RequestOutput) -> Any:
    return output.error, [
        (
            c.text,
            tuple(c.token_ids),
            c.finish_reason,
            c.stop_reason,
            None if c.logprobs is None else [list(p.items()) for p in c.logprobs],
        )
        for c in output.outputs
    ]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Any]:
    params = [SamplingParams(**wish) for wish in wishes()]
    return [
        facts(llm.generate(STORY + f"{i}:", one, use_tqdm=False)[0]) for i, one in enumerate(params)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 24, "max_model_len": 256},
        {"num_gpu_blocks_override": 24, "max_model_len": 256, "swap_space": 0.1,
         "preemption_mode": "swap"},
    ],
    ids=["crowd", "chunked", "preempted", "swapped"],
)  # fmt: skip
def test_together_as_alone(alone: list[Any], options: dict[str, Any]) -> None:
    with LLM(disable_log_stats=False, **options) as engine:
        together = [facts(output) for output in run(engine, wishes())]
        engine.llm_engine.core.scheduler.check_integrity()
        values = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
    for wish, got, expected in zip(wishes(), together, alone, strict=True):
        assert got == expected, f"{wish} differs under {options}"
    if "num_gpu_blocks_override" in options:
        assert values["vllm:num_preemptions"] > 0, "the pool was meant to be too small"


def test_masks_asked_after_the_pick_change_nothing(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a large vocabulary."""
    asked = 0
    permits = GrammarState.permits

    def counted(one: GrammarState, *args: Any) -> bool:
        nonlocal asked
        asked += 1
        return permits(one, *args)

    monkeypatch.setattr(state, "PARALLEL_WORDS", 1)
    monkeypatch.setattr(GrammarState, "permits", counted)
    with LLM() as engine:
        together = [facts(output) for output in run(engine, wishes())]
    for wish, got, expected in zip(wishes(), together, alone, strict=True):
        assert got == expected, wish
    assert asked > 100


def test_what_is_alone_is_right(alone: list[Any]) -> None:
    for wish, (error, choices) in zip(wishes(), alone, strict=True):
        form = wish["structured_outputs"]
        if error is not None:
            assert "bad_words" in wish and "no token can be sampled" in error
            continue
        for text, _, reason, stop_reason, _ in choices:
            if reason != "stop" or stop_reason is not None:
                continue
            if "json" in form:
                jsonschema.validate(json.loads(text), form["json"])
            elif "regex" in form:
                assert re.fullmatch(form["regex"], text)
            elif "choice" in form:
                assert text in form["choice"]
            elif "grammar" in form:
                assert re.fullmatch(r"\(*[a-f]{3,9} \)*", text)
                assert text.count("(") == text.count(")")


def test_forced_tokens_cost_no_step(llm: LLM) -> None:
    text = "one two three four five six seven eight nine ten eleven twelve"
    wish = {"temperature": 1, "seed": 1, "max_tokens": 300}
    for form in ({"regex": f"(a|b) {text} (a|b) {text}"}, {"choice": [text]}):
        run(llm, [{**wish, "max_tokens": 1, "structured_outputs": form}])
        before = steps(llm)  # where the grammar is compiled: steps go on meanwhile
        [jumped] = run(llm, [{**wish, "structured_outputs": form}])
        taken = steps(llm) - before
        [slow] = run(llm, [{**wish, "structured_outputs": form, "logprobs": 0}])
        count = len(jumped.outputs[0].token_ids)
        assert jumped.outputs[0].text.endswith(text) and count > 10
        assert taken <= 6 < count
        assert steps(llm) - before - taken >= count
        assert slow.outputs[0].token_ids == jumped.outputs[0].token_ids
        assert slow.outputs[0].logprobs is not None
        assert len(slow.outputs[0].logprobs) == count


def test_forced_tokens_end_where_they_must(llm: LLM) -> None:
    text = "one two three four five six seven eight nine ten eleven twelve"
    wish = {"temperature": 1, "seed": 1, "structured_outputs": {"choice": [text]}}
    cut, stopped, banned = run(
        llm,
        [
            {**wish, "max_tokens": 7},
            {**wish, "max_tokens": 99, "stop": ["four five"]},
            {**wish, "max_tokens": 99, "bad_words": [" five"]},
        ],
    )
    assert len(cut.outputs[0].token_ids) == 7 and cut.outputs[0].finish_reason == "length"
    assert stopped.outputs[0].text == "one two three "
    assert stopped.outputs[0].stop_reason == "four five"
    assert banned.outputs[0].text == text
    assert banned.outputs[0].token_ids != stopped.outputs[0].token_ids


def test_an_empty_mask_is_an_error_of_its_own(llm: LLM) -> None:
    good, bad = run(
        llm,
        [
            {"max_tokens": 9, "structured_outputs": {"choice": ["yes"]}},
            {"max_tokens": 9, "structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [0]},
        ],
    )
    assert good.outputs[0].text == "yes"
    assert bad.error is not None and "no token can be sampled" in bad.error


def test_whitespace_has_an_end(llm: LLM) -> None:
    """A model that prefers newlines to everything still gets done."""
    tokenizer = llm.get_tokenizer()
    newlines = {tokenizer.encode(text)[-1]: 100.0 for text in ("\n", "\n\n", " ", "\t")}
    wish = {"temperature": 1, "seed": 3, "max_tokens": 400, "logit_bias": newlines}
    [output] = run(llm, [{**wish, "structured_outputs": {"json": PERSON}}])
    assert output.outputs[0].finish_reason == "stop"
    outside = re.sub(r'"[^"]*"', '""', output.outputs[0].text)
    assert max(map(len, re.findall(r"[ \n\r\t]+", outside))) == 8
    [tight] = run(
        llm, [{**wish, "structured_outputs": {"json": PERSON, "whitespace_pattern": " ?"}}]
    )
    outside = re.sub(r'"[^"]*"', "", tight.outputs[0].text)
    assert not re.search(r"[\n\r\t]|  ", outside)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": {"not": {}}}, "# has the keyword 'not'"),
        ({"json": {"properties": {"a": {"uniqueItems": True}}}}, "#/properties/a has the keyword"),
        ({"json": {"$ref": "http://localhost/x"}}, "only references within"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"json": {}, "whitespace_pattern": "x*"}, "at position 0"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": 'start: "a" b'}, 'unknown name: "b"'),
        ({"grammar": 'root ::= "a" b'}, "line 1, column 14: the rule b is not defined"),
        ({"grammar": 'start: %json {"not": {}}'}, "'not'"),
        ({"grammar": '%llguidance {"lenient": true}\nstart: "a"'}, "line 1, column 1"),
        ({"structural_tag": {"format": {"type": "qwen_xml"}}}, "format: type must be one of"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(llm: LLM, form: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        run(llm, [{"structured_outputs": form}])
    assert said in found.value.message, found.value.message
    assert (found.value.param or "").startswith("structured_outputs")
