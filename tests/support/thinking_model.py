"""The embedded model as one that reasons: its two tokens around calls become `<think>` and
`</think>`, and its template opens the reasoning if `enable_thinking` is true.

And what tests of such a model do with it: the same requests in all kinds of company, steps counted,
a core that is killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from live_server import title_of
from quire import LLM, SamplingParams
from quire.assets import __file__ as assets
from routes_server import RoutesServer

TURNS = [{"role": "user", "content": "Tell me a story about a fox."}]
ASK = {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": True}, "seed": 3}

OPEN, CLOSE = 3, 4
"""The tokens of the marks."""
_TURN = "{{- '<|im_start|>assistant\\n' -}}"
_THINKING = (
    "{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}"
)


def make_thinking_model(folder: Path) -> Path:
    """Write it into a folder, which must not exist."""
    shutil.copytree(Path(assets).parent / "quire-demo", folder)
    (folder / "SHA256SUMS").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        text = path.read_text("utf-8")
        assert "<tool_call>" in text
        text = text.replace("<tool_call>", "<think>").replace("</tool_call>", "</think>")
        if name == "tokenizer_config.json":
            turn = _TURN.replace("\\", "\\\\")
            assert turn in text
            text = text.replace(turn, turn + _THINKING.replace("\\", "\\\\"))
        path.write_text(text, "utf-8")
    return folder


def opened(llm: LLM) -> list[int]:
    """A prompt that ends within the reasoning."""
    text = llm.get_tokenizer().apply_chat_template(
        TURNS, add_generation_prompt=True, enable_thinking=True
    )
    return text if isinstance(text, list) else llm.get_tokenizer().encode(text)


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [[(c.token_ids, c.finish_reason) for c in o.outputs] for o in outputs]


def same_in_all_company(
    model: str, llm: LLM, params: list[SamplingParams], num_blocks: int, max_model_len: int
) -> list[Any]:
    """Requests get the same tokens alone, in a crowd, in chunks, with KV that is swapped or
    recomputed; returns those."""
    ids = opened(llm)
    prompts = [[*range(300, 300 + 11 * (i % 5)), *ids] for i in range(len(params))]
    alone = [tokens_of(llm, [p], [one])[0] for p, one in zip(prompts, params, strict=True)]
    assert tokens_of(llm, prompts, params) == alone
    small = {"num_gpu_blocks_override": num_blocks}
    for options in (
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        small | {"preemption_mode": "recompute"},
        small | {"swap_space": 0.02, "preemption_mode": "swap"},
    ):
        with LLM(model, max_model_len=max_model_len, block_size=16, **options) as other:
            assert tokens_of(other, prompts, params) == alone, options
    return alone


def count_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the steps of an engine from now on; the function gives those since its last call."""
    executor, steps = llm.llm_engine.core.executor, 0
    submit = executor.submit

    def counted(batch: Any) -> Any:
        nonlocal steps
        steps += 1
        return submit(batch)

    def since() -> int:
        nonlocal steps
        found, steps = steps, 0
        return found

    monkeypatch.setattr(executor, "submit", counted)
    return since


def core() -> psutil.Process:
    """Of the only engine with a process of its own."""
    return next(c for c in psutil.Process().children() if "quire::EngineCore" in title_of(c))


def killed_twice(
    server: RoutesServer, ids: list[int], params: SamplingParams, after: tuple[int, int]
) -> list[int]:
    """The tokens of a request during which kill -9 ends the core, after so many tokens each."""

    async def run() -> list[int]:
        killed, got = 0, []
        async for output in server.engine.generate(
            {"prompt_token_ids": ids}, params, f"killed-{os.getpid()}"
        ):
            got = output.outputs[0].token_ids
            if killed < 2 and len(got) > after[killed]:
                core().send_signal(signal.SIGKILL)
                killed += 1
        assert killed == 2
        return list(got)

    return server.run(run())
