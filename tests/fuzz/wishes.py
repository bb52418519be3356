"""Random prompts and parameters for the embedded model: every field, in any combination."""

from __future__ import annotations

import random
from typing import Any

from plain_text import library

VOCAB = 2048
STORY = "Once upon a time there was a small fox who lived at the edge of the forest. "
OPENINGS = (
    "The capital of France is",
    STORY,
    STORY * 4 + "The end? No:",
    "23 + 45 =",
    "Repeat this text: the quick brown fox jumps over the lazy dog",
    "Größe, naïve café — 東京 🦊 ",
)
WORDS = ("the", "Paris", "fox", " a", "and the", "é", "e", "🦊", "upon a time")
STOPS = ("e", ".", "the", " fox", "once upon", "é", "zzz", "\n", "00", "ther", "and", "🦊")


def prompt(rng: random.Random, most: int = 300) -> list[int]:
    """Token ids: of a text, of noise, or of one after the other."""
    ids: list[int] = []
    if rng.random() < 0.8:
        ids += library().encode(rng.choice(OPENINGS), add_special_tokens=False).ids
    if rng.random() < 0.4:
        ids += [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 40, 200]))]
    return ids[:most] or [rng.randrange(VOCAB)]


def params(rng: random.Random, most: int, least: int = 1) -> dict[str, Any]:
    """Fields of SamplingParams, for outputs of `least` to `most` tokens if nothing ends them."""
    chance = rng.choice([0.15, 0.35, 0.6])
    wish: dict[str, Any] = {"max_tokens": rng.randint(least, most), "seed": rng.getrandbits(53)}
    for name, make in MAKERS.items():
        if rng.random() < chance:
            wish[name] = make(rng, wish["max_tokens"])
    if least > 16 and rng.random() < 0.8:
        wish["ignore_eos"] = True
    # Seldom, because it ends outputs early; with dice of its own, so that no other case changes.
    other = random.Random(wish["seed"])
    if other.random() < 0.1:
        wish["repetition_detection"] = _repetition(other)
    return tidied(wish)


def tidied(wish: dict[str, Any]) -> dict[str, Any]:
    """Without what the engine refuses together."""
    if wish.get("temperature", 1.0) < 1e-5:
        wish.pop("n", None)
    if not wish.get("detokenize", True):
        wish.pop("stop", None)
    return wish


def _repetition(rng: random.Random) -> dict[str, int]:
    return {
        "max_pattern_size": rng.choice([1, 4, 2048]),
        "min_count": rng.choice([2, 2, 3, 9]),
        "min_pattern_size": rng.choice([0, 1]),
    }


def _tokens(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(1, most))]


MAKERS = {
    "temperature": lambda rng, _: rng.choice([0.0, 0.0, 1e-6, 0.005, 0.3, 0.8, 1.0, 1.4, 2.0]),
    "top_k": lambda rng, _: rng.choice([-1, 0, 1, 2, 7, 40, 500, VOCAB - 1, VOCAB, 10**6]),
    "top_p": lambda rng, _: rng.choice([1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, rng.random() or 1]),
    "min_p": lambda rng, _: rng.choice([0.0, 1e-4, 0.02, 0.3, 1.0]),
    "repetition_penalty": lambda rng, _: rng.choice([1.0, 0.8, 1.05, 1.1, 1.3, 2.0]),
    "frequency_penalty": lambda rng, _: rng.choice([-0.5, 0.1, 0.5, 1.0, 2.0]),
    "presence_penalty": lambda rng, _: rng.choice([-2.0, 0.2, 0.7, 1.5, 2.0]),
    "logit_bias": lambda rng, _: {
        i: rng.choice([-100.0, -3.3, 0.1, 2.5, 7.0]) for i in _tokens(rng, 20)
    },
    "allowed_token_ids": lambda rng, _: (
        _tokens(rng, rng.choice([3, 900])) + [rng.choice([0, 2, 300])]
    ),
    "bad_words": lambda rng, _: rng.sample(WORDS, rng.randint(1, 4)),
    "min_tokens": lambda rng, most: rng.randint(0, most),
    "stop_token_ids": lambda rng, _: _tokens(rng, 3),
    "stop": lambda rng, _: (
        rng.choice(STOPS) if rng.random() < 0.3 else rng.sample(STOPS, rng.randint(1, 3))
    ),
    "include_stop_str_in_output": lambda rng, _: True,
    "ignore_eos": lambda rng, _: True,
    "logprobs": lambda rng, _: rng.choice([0, 0, 1, 3, 20]),
    "prompt_logprobs": lambda rng, _: rng.choice([0, 2, 20]),
    "skip_special_tokens": lambda rng, _: rng.random() < 0.5,
    "detokenize": lambda rng, _: rng.random() < 0.5,
    "n": lambda rng, _: rng.choice([1, 2, 3]),
}
"""By field: how to choose a value; given the most tokens of the output."""
