"""The demo corpus keeps its held-out items out, and its chat form is the shipped template.

Needs neither torch nor a trained model; the template tests need jinja2 and the tokenizer
tests the `tokenizers` library and the shipped folder.
"""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import demo_chat  # noqa: E402
import demo_corpus  # noqa: E402
import demo_facts  # noqa: E402

TOKENIZER = ROOT / "src" / "quire" / "assets" / "quire-demo" / "tokenizer.json"
EQUATION = re.compile(r"(?<![\d.])(\d{1,2}) ?(\+|-|plus|minus) ?(\d{1,2})(?!\d)")


def text_of(doc: demo_corpus.Doc) -> str:
    return "".join(text for text, _ in doc)


def training_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    docs = islice(demo_corpus.documents(rng, long_words=300, long_share=0.05), count)
    return [text_of(doc) for doc in docs]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return training_texts(5, 6000)


def test_no_held_out_sum_in_training(texts: list[str]) -> None:
    # Code lines to be copied hold lone sums of a word and a number only, so every match of
    # two small numbers is arithmetic.
    seen = 0
    for text in texts:
        for a, sign, b in EQUATION.findall(text):
            sign = {"plus": "+", "minus": "-"}.get(sign, sign)
            seen += 1
            assert not demo_corpus.held_out_pair(int(a), sign, int(b)), text
    assert seen > 5000


def test_no_held_out_copy_in_training() -> None:
    rng = random.Random(6)
    for _ in range(3000):
        assert not demo_corpus.held_out("copy", demo_corpus.copy_turns(rng)[1]["content"])
        edited = demo_corpus.edit_turns(rng)[0]["content"].split(" in this text: ", 1)[1]
        assert not demo_corpus.held_out("copy", edited)
        copied = text_of(demo_corpus.copy_completion(rng)).split("\nCopy: ")[-1]
        assert not demo_corpus.held_out("copy", copied.removesuffix(demo_chat.END))


def test_evaluation_copies_are_held_out(texts: list[str]) -> None:
    items = demo_corpus.eval_copies(random.Random(7), 40, lambda text: text.count(" ") + 1, 30)
    for item in items:
        assert demo_corpus.held_out("copy", item["expect"])
        assert not any(item["expect"] in text for text in texts)


def test_no_held_out_tool_question_in_training(texts: list[str]) -> None:
    asked = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n<tool_c")
    questions = [question for text in texts for question in asked.findall(text)]
    assert len(questions) > 400
    assert not [q for q in questions if demo_corpus.held_out("tool", q)]
    items = demo_corpus.eval_tools(random.Random(8), 50)
    assert all(demo_corpus.held_out("tool", i["messages"][-1]["content"]) for i in items)


def test_no_held_out_capital_question_in_training() -> None:
    rng = random.Random(9)
    asked = {demo_corpus.capital_turns(rng)[0]["content"] for _ in range(20000)}
    held = {
        question.format(country)
        for country in demo_facts.CAPITALS
        for question in demo_corpus.CAPITAL_QUESTIONS
        if demo_corpus.held_out("capital", f"{country}/{question}")
    }
    assert len(held) > 150
    assert not asked & held


def test_held_out_share_is_about_a_tenth() -> None:
    numbers = range(10, 100)
    for sign in "+-":
        share = len(demo_corpus.held_out_pairs(sign)) / len(numbers) ** 2
        assert 0.08 < share < 0.12


def test_pairs_are_held_out_in_both_orders() -> None:
    for a, sign, b in demo_corpus.held_out_pairs("+"):
        assert demo_corpus.held_out_pair(b, sign, a)


def test_every_sum_in_training_is_right(texts: list[str]) -> None:
    stated = re.compile(r"(?<!\d)(\d{1,2}) ([+-]) (\d{1,2}) = (-?\d+)(?!\d)")
    for text in texts:
        if "role" in text or "Tools:" in text:
            continue  # a tool's made-up result is not arithmetic
        for a, sign, b, value in stated.findall(text):
            assert demo_corpus.result(int(a), sign, int(b)) == int(value), text


def test_same_seed_same_corpus() -> None:
    assert training_texts(3, 200) == training_texts(3, 200)
    assert training_texts(3, 200) != training_texts(4, 200)


def test_capitals_list() -> None:
    assert len(demo_facts.CAPITALS) >= 190
    assert demo_facts.CAPITALS["France"] == "Paris"
    assert all(
        name == name.strip() and name for pair in demo_facts.CAPITALS.items() for name in pair
    )


def test_edit_replaces_whole_words() -> None:
    assert demo_corpus.edit("cat location cat", "cat", "dog") == "dog location dog"


def test_pirate_speaks_as_one() -> None:
    said = demo_corpus.pirate("The capital of France is Paris.")
    assert said == "Arr, matey! The capital o' France be Paris. Yo ho ho!"


# --- the chat template -------------------------------------------------------------------------


def template():
    jinja2 = pytest.importorskip("jinja2")
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    assert jinja2
    return environment.from_string(demo_chat.CHAT_TEMPLATE)


def conversations() -> list[tuple[list[dict], list[dict] | None]]:
    rng = random.Random(10)
    made: list[tuple[list[dict], list[dict] | None]] = []
    for _ in range(60):
        case = demo_corpus.tool_case(rng)
        turns = [
            demo_corpus.user(case.question),
            demo_corpus.call(case.name, case.arguments),
            {"role": "tool", "content": json.dumps(case.outcome)},
            demo_corpus.assistant(case.answer),
        ]
        made.append((demo_corpus.with_system(rng, turns, 0.5), demo_corpus.toolbox(rng, case)))
        made.append((demo_corpus.with_system(rng, demo_corpus.talk_turns(rng), 0.5), None))
    return made


def test_template_equals_training_form() -> None:
    shipped = template()
    for messages, tools in conversations():
        rendered = shipped.render(messages=messages, tools=tools)
        assert rendered == "".join(text for text, _ in demo_chat.render(messages, tools))
        asked = shipped.render(messages=messages[:-1], tools=tools, add_generation_prompt=True)
        assert asked == demo_chat.prompt_text(messages[:-1], tools)


def test_template_takes_parts_and_bare_tools() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there!"}]
    assert template().render(messages=[{"role": "user", "content": parts}]) == (
        "<|im_start|>user\nHello there!<|im_end|>\n"
    )
    bare = [{"name": "now", "description": "The time."}]
    assert template().render(messages=[], tools=bare) == (
        "<|im_start|>system\nTools:\nnow() The time.<|im_end|>\n"
    )


def test_template_takes_string_arguments_and_missing_content() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    assert template().render(messages=[message]) == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
        "</tool_call><|im_end|>\n"
    )


def test_shipped_template_is_this_one() -> None:
    config = json.loads((TOKENIZER.parent / "tokenizer_config.json").read_text())
    assert config["chat_template"] == demo_chat.CHAT_TEMPLATE


# --- the tokenizer -----------------------------------------------------------------------------


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(TOKENIZER))


def test_tokenizer_round_trips_any_text() -> None:
    loaded = tokenizer()
    rng = random.Random(11)
    for _ in range(300):
        points = [
            rng.choice((rng.randrange(1, 0xD800), rng.randrange(0xE000, 0x110000)))
            for _ in "x" * 20
        ]
        text = "".join(map(chr, points))
        assert loaded.decode(loaded.encode(text).ids, skip_special_tokens=False) == text
    assert loaded.get_vocab_size() == 2048


def test_digits_stand_alone() -> None:
    assert tokenizer().encode("x 4821 = 17").tokens == [*"xĠ4821", "Ġ=", *"Ġ17"]


def test_only_turn_marks_are_special() -> None:
    added = json.loads(TOKENIZER.read_text())["added_tokens"]
    assert {t["content"] for t in added if t["special"]} == set(demo_chat.SPECIAL_TOKENS)
    assert {t["content"] for t in added if not t["special"]} == set(demo_chat.MARKER_TOKENS)


def test_pieces_tokenize_like_the_whole(texts: list[str]) -> None:
    loaded = tokenizer()
    for doc in islice(demo_corpus.documents(random.Random(12)), 1500):
        parts = [token for text, _ in doc for token in loaded.encode(text).ids]
        assert parts == loaded.encode(text_of(doc)).ids
