"""`LLM`: an exception in a step that belongs to one request ends that request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fake_executor import FakeExecutor
from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.llm_engine import LLMEngine
from quire.params import RequestOutputKind, SamplingParams

PARAMS = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
NAMES = ("a", "b", "c", "d", "e")
BLOCK = 16


class Computes(FakeExecutor):
    """It has nothing to forget."""

    def reset(self) -> None:
        pass


def engine() -> LLMEngine:
    config = EngineConfig.from_options(disable_log_stats=True)
    made = LLMEngine(config, executor=Computes(lambda prompt, n: 400 + n))
    for k, name in enumerate(NAMES):
        made.add_request(name, {"prompt_token_ids": [300 + k, 301, 302]}, PARAMS)
    return made


def run(made: LLMEngine) -> tuple[dict[str, list[int]], dict[str, str]]:
    tokens: dict[str, list[int]] = {name: [] for name in NAMES}
    errors: dict[str, str] = {}
    while made.has_unfinished_requests:
        for output in made.step():
            tokens[output.request_id] += output.outputs[0].token_ids
            if output.error:
                errors[output.request_id] = output.error
        made.frontend.output.check_integrity()
        made.core.scheduler.check_integrity()
    return tokens, errors


def breaks(made: LLMEngine, patched: pytest.MonkeyPatch, when: Callable[[Request], bool]) -> None:
    """Have the allocation of blocks raise for some requests."""
    allocate = made.core.kv.allocate_slots

    def checked(request: Request, *about: Any, **how: Any) -> Any:
        if when(request):
            raise RuntimeError("a bug")
        return allocate(request, *about, **how)

    patched.setattr(made.core.kv, "allocate_slots", checked)


@pytest.mark.parametrize("culprit", [0, 2, 4])
@pytest.mark.parametrize("at", [1, BLOCK])
def test_the_culprit_ends_with_its_own_error(
    culprit: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is admitted, and when it needs its second block."""
    expected, _ = run(engine())
    made = engine()
    breaks(
        made, monkeypatch, lambda r: r.prompt_token_ids[0] == 300 + culprit and r.num_tokens > at
    )
    tokens, errors = run(made)
    name = NAMES[culprit]
    assert list(errors) == [name] and "internal error" in errors[name]
    assert "a bug" not in errors[name]
    assert tokens == expected | {name: expected[name][: len(tokens[name])]}
    assert bool(tokens[name]) == (at > 1)


def test_what_is_nobodys_fault_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    with monkeypatch.context() as patched:
        breaks(made, patched, lambda r: True)
        with pytest.raises(RuntimeError, match="a bug"):
            run(made)
    assert run(made)[0] == run(engine())[0], "nothing is lost by it"


def test_what_passes_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [RuntimeError("once"), RuntimeError("later once")]
    made = engine()
    update = made.core.scheduler.update

    def sometimes(*about: Any) -> Any:
        outputs = update(*about)
        if left and made.core.scheduler.books.step in (2, 6):
            raise left.pop()
        return outputs

    monkeypatch.setattr(made.core.scheduler, "update", sometimes)
    tokens, errors = run(made)
    assert not errors and not left
    assert tokens == run(engine())[0]
