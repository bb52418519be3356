"""Seeds: drawn ones fit a double, and no two prompts or choices of a call share one."""

from __future__ import annotations

from quire.engine.frontend.seeds import MAX_DRAWN, choice_seed, draw_seed, prompt_seed
from quire.params import MAX_SEED


def test_drawn_seeds_survive_a_double() -> None:
    drawn = [draw_seed(0, number, b"x") for number in range(2000)]
    assert len(set(drawn)) == 2000
    assert all(0 <= seed <= MAX_DRAWN and int(float(seed)) == seed for seed in drawn)
    assert max(drawn) > MAX_DRAWN // 2, "all bits are used"


def test_the_first_prompt_has_the_base_and_no_two_prompts_the_same() -> None:
    bases = [0, 7, 8, MAX_DRAWN, MAX_SEED]
    assert [prompt_seed(base, 0) for base in bases] == bases
    made = {prompt_seed(base, index) for base in bases for index in range(1024)}
    assert len(made) == 5 * 1024
    assert all(0 <= seed <= MAX_SEED for seed in made)


def test_choices_count_up_and_go_round() -> None:
    assert [choice_seed(7, i) for i in range(3)] == [7, 8, 9]
    assert choice_seed(MAX_SEED, 1) == 0
    assert [choice_seed(-2, i) for i in range(3)] == [MAX_SEED - 1, MAX_SEED, 0]
