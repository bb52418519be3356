"""Stand-ins for well-known datasets, made offline: synthetic, of random tokens.

What is kept of each set is the shape: how long prompts and outputs are, and what requests share.
Lengths are log-normal with medians near those that are published for such traffic;
docs/benchmarks.md prints what comes out. Requests of one conversation or agent are in order, but an
open-loop load does not wait for the answer before the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from quire.workload.lengths import LogNormalLength
from quire.workload.options import DatasetOptions
from quire.workload.prompts import PromptMaker
from quire.workload.request import WorkloadRequest

SHORTEST: Final = 1
_Drawn = tuple[list[int], int, int]
"""Token ids, output length, tokens at the beginning that others have too."""


def sharegpt(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """First turns of strangers' conversations: short and long, nothing shared."""
    inputs = _lengths(options, rng, LogNormalLength(90, 1.2, 4, 1024), options.input_len)
    outputs = _lengths(options, rng, LogNormalLength(130, 1.0, 4, 1024), options.output_len)
    drawn = [(maker.ids(n), m, 0) for n, m in zip(inputs, outputs, strict=True)]
    return _requests(maker, drawn)


def chat(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Conversations of about three turns behind one system prompt: each request repeats all that
    was said before."""
    num, system = options.num_prompts, maker.ids(_scaled(options, 60))
    said = _lengths(options, rng, LogNormalLength(45, 1.0, 2, 800), options.input_len)
    replies = _lengths(options, rng, LogNormalLength(170, 0.9, 4, 1000), options.output_len)
    drawn: list[_Drawn] = []
    histories: list[list[int]] = []
    for n, m in zip(said, replies, strict=True):
        going_on = bool(histories) and rng.random() < 2 / 3
        which = int(rng.integers(len(histories))) if going_on else len(histories)
        before = histories[which] if going_on else system
        ids = [*before, *maker.ids(n)]
        drawn.append((ids, m, len(before)))
        after = [*ids, *maker.ids(m)]  # the answer is not known: words stand for it
        histories[which : which + 1] = [after]
        if len(histories) > max(4, num // 8):
            histories.pop(0)
    return _requests(maker, drawn)


def code(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Completions in an editor: much context of a few files, some of which are open most of the
    time, a new line or two, and a very short output."""
    num_files = max(2, options.num_prompts // 20)
    sizes = LogNormalLength(1400, 0.7, 60, 7000).sample(num_files, rng)
    files = [maker.ids(_scaled(options, int(size))) for size in sizes]
    suffixes = _lengths(options, rng, LogNormalLength(60, 0.8, 4, 500), options.input_len)
    outputs = _lengths(options, rng, LogNormalLength(13, 1.0, 1, 300), options.output_len)
    drawn: list[_Drawn] = []
    for n, m in zip(suffixes, outputs, strict=True):
        file = files[_popular(num_files, rng)]
        kept = file[: max(1, int(len(file) * rng.uniform(0.5, 1.0)))]
        drawn.append(([*kept, *maker.ids(n)], m, len(kept)))
    return _requests(maker, drawn)


def rag(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Questions about four passages that a search has found, popular ones first, behind the same
    instructions."""
    rules = maker.ids(_scaled(options, 120))
    num_passages = max(8, options.num_prompts // 4)
    sizes = LogNormalLength(450, 0.4, 50, 1500).sample(num_passages, rng)
    passages = [maker.ids(_scaled(options, int(size))) for size in sizes]
    questions = _lengths(options, rng, LogNormalLength(25, 0.6, 4, 200), options.input_len)
    outputs = _lengths(options, rng, LogNormalLength(120, 0.7, 4, 600), options.output_len)
    drawn: list[_Drawn] = []
    for n, m in zip(questions, outputs, strict=True):
        found = sorted({_popular(num_passages, rng) for _ in range(4)})
        context = [token for which in found for token in passages[which]]
        drawn.append(([*rules, *context, *maker.ids(n)], m, len(rules)))
    return _requests(maker, drawn)


def agents(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Agents with many tools: a long common beginning, then calls and their results, step by step,
    so that nearly all of each prompt was there in the step before."""
    tools = maker.ids(_scaled(options, 2500))
    results = _lengths(options, rng, LogNormalLength(350, 1.0, 20, 4000), options.input_len)
    calls = _lengths(options, rng, LogNormalLength(110, 0.8, 8, 1000), options.output_len)
    num_agents = max(1, options.num_prompts // 12)
    histories = [tools] * num_agents
    drawn: list[_Drawn] = []
    for i, (n, m) in enumerate(zip(results, calls, strict=True)):
        which = i % num_agents
        ids = [*histories[which], *maker.ids(n)]
        drawn.append((ids, m, len(histories[which])))
        is_done = rng.random() < 1 / 12
        histories[which] = tools if is_done else [*ids, *maker.ids(m)]
    return _requests(maker, drawn)


def _lengths(
    options: DatasetOptions, rng: np.random.Generator, lengths: LogNormalLength, fixed: int | None
) -> list[int]:
    """One per request: as drawn and scaled, or the one that was asked for."""
    drawn = lengths.sample(options.num_prompts, rng)
    if fixed is not None:
        return [fixed] * options.num_prompts
    return [_scaled(options, int(length)) for length in drawn]


def _scaled(options: DatasetOptions, length: int) -> int:
    return max(SHORTEST, round(length * options.synthetic_scale))


def _popular(num: int, rng: np.random.Generator) -> int:
    """One of `num` things: the k-th most popular is k times rarer than the first (Zipf)."""
    return min(num - 1, int(num ** rng.random()) - 1)


def _requests(maker: PromptMaker, drawn: Sequence[_Drawn]) -> list[WorkloadRequest]:
    requests = []
    for ids, output, shared in drawn:
        text, tokens = maker.text(ids)
        requests.append(WorkloadRequest(text, tokens, output, shared_prefix=shared))
    return requests
