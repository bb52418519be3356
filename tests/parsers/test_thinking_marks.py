"""The marks around reasoning: the table by parsers' names agrees with the parsers."""

from __future__ import annotations

from quire.serving.parsing import REASONING_PARSERS
from quire.thinking import ThinkingMarks
from quire.tokenizer.thinking import MARKS, REASONING_MARKS, SENTENCES, marks_of


def test_the_table_has_what_the_parsers_have() -> None:
    for name in {name for name, _ in REASONING_MARKS}:
        kind = REASONING_PARSERS.get(name)
        if kind.thoughts is None:
            assert name not in MARKS
        else:
            always = getattr(kind, "always", False)
            assert MARKS[name] == ThinkingMarks(*kind.thoughts, always)


def test_templates_tell_them() -> None:
    assert marks_of(["{{ messages }}"]) is None
    assert marks_of(["<think>\n{{ content }}</think>"]) == MARKS["qwen3"]
    assert marks_of(["{% if x %}</think>{% endif %}"]) == MARKS["deepseek_r1"]
    assert marks_of(["Write 'Here is my thought process:' first"]) == SENTENCES
    assert marks_of(["<|start_of_role|>a<think></think><response>"]) == MARKS["granite"]
    assert marks_of(["a", "[THINK]"]) == MARKS["mistral"]


def test_whether_a_prompt_ends_within_reasoning() -> None:
    plain, always = MARKS["qwen3"], MARKS["deepseek_r1"]
    for text, is_open in (("a<think>\n", True), ("<think>a", False), ("<think></think>\n", False)):
        assert plain.is_open_after(text) == is_open
    assert always.is_open_after("a") and not always.is_open_after("</think>\n\n")
