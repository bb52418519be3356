"""What each parser finds in texts as models write them, whole and at every cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parser_kit import TOOLS, TRANSCRIPTS, Case, all_cases, check_form, cut, read, told
from quire.serving.parsing import PARSERS, REASONING_PARSERS, ParserSetup

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_whole_text(case: Case) -> None:
    events = read([case.text], case.kinds, ParserSetup(case.prompt, TOOLS))
    assert told(events) == case.told
    check_form(events)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_cut_gives_the_same(case: Case) -> None:
    setup = ParserSetup(case.prompt, TOOLS)
    events = read(list(case.text), case.kinds, setup)
    check_form(events)
    assert told(events) == case.told
    for place in range(len(case.text)):
        assert told(read(cut(case.text, [place]), case.kinds, setup)) == case.told, place


@given(st.sampled_from(CASES), st.lists(st.integers(0, 10**6), max_size=12))
@settings(max_examples=300)
def test_random_cuts_give_the_same(case: Case, places: list[int]) -> None:
    events = read(cut(case.text, places), case.kinds, ParserSetup(case.prompt, TOOLS))
    assert told(events) == case.told


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_text_that_ends_anywhere(case: Case) -> None:
    """Everything before the cut was said alike: what is told only grows."""
    setup = ParserSetup(case.prompt, TOOLS)
    for place in range(len(case.text)):
        events = read([case.text[:place]], case.kinds, setup)
        check_form(events)
        assert told(events) == told(read(list(case.text[:place]), case.kinds, setup)), place


def test_complete_calls_have_json_objects() -> None:
    calls = [part for case in CASES for part in case.told if part[0] == "call"]
    assert len(calls) > 5
    for case in CASES:
        for part in case.told[:-1]:  # the last one may be cut off
            if part[0] == "call":
                assert isinstance(json.loads(part[2]), dict), case.name


def test_every_parser_has_a_transcript() -> None:
    tested = {kind for case in CASES for kind in case.kinds}
    for table in (PARSERS, REASONING_PARSERS):
        for name in table:
            assert table.get(name) in tested, f"{name} has no case in {TRANSCRIPTS}"
