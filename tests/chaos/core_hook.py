"""Faults inside the engine core: a scheduling policy that patches the worker of its process.

A completions request whose prompt is token ids beginning with `MARK` and an entry of `KINDS` asks
for that fault, once it has `AFTER` output tokens. Every other request is served as always, in order
of arrival. Only drills name this policy (`--scheduler-cls core_hook:HookedPolicy`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from quire.core.policies import FCFS

MARK = [301, 302, 303, 301]
KINDS = {"die": 310, "raise": 311, "memory": 312, "nan": 313, "inf": 314, "loop": 315, "hang": 316}
AFTER = 2
ONCE = "QUIRE_CHAOS_ONCE"
"""Variable with a folder: `loop` and `hang` strike once for each of them, noted there."""
SLOWLY = "QUIRE_CHAOS_SLOWLY"
"""Variable with a file: while it is there, every step takes `PAUSE` more seconds."""
PAUSE = 0.05


class HookedPolicy(FCFS):
    """First come, first served; its making installs the faults."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        install()


def prompt(kind: str) -> list[int]:
    """The prompt of a request that asks for a fault."""
    return [*MARK, KINDS[kind], 305, 306]


def kind_of(tokens: list[int]) -> str | None:
    """The fault that a prompt asks for."""
    if list(tokens[: len(MARK)]) != MARK:
        return None
    return next((k for k, token in KINDS.items() if token == tokens[len(MARK)]), None)


def strikes(kind: str) -> bool:
    """Whether it has not struck before."""
    try:
        (Path(os.environ[ONCE]) / kind).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def install() -> None:
    """Patch the worker, once in a process."""
    from quire.worker.forward_pass import PagedForward
    from quire.worker.step_runner import StepRunner

    if hasattr(StepRunner, "chaos"):
        return
    StepRunner.chaos = True  # type: ignore[attr-defined]
    marked: dict[str, tuple[str, int]] = {}
    slowly = Path(os.environ[SLOWLY]) if SLOWLY in os.environ else None
    update, run, forward = StepRunner._update_states, StepRunner._run, PagedForward.__call__

    def hooked_update(self: Any, batch: Any) -> Any:
        for new in batch.scheduled_new_reqs:
            if kind := kind_of(new.prompt_token_ids):
                marked[new.req_id] = kind, len(new.prompt_token_ids) + AFTER
        for name in batch.finished_req_ids:
            marked.pop(name, None)
        return update(self, batch)

    def hooked_run(self: Any, req_ids: Any, counts: Any) -> Any:
        if slowly is not None and slowly.exists():
            time.sleep(PAUSE)
        for kind in due(self._input_batch.select(req_ids, counts)).values() if marked else ():
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise RuntimeError("a drill: the forward pass fails")
            if kind == "memory":
                raise MemoryError("a drill: no memory")
            if kind in ("loop", "hang") and strikes(kind):
                while kind == "loop":
                    pass
                threading.Event().wait()
        return run(self, req_ids, counts)

    def due(inputs: Any) -> dict[int, str]:
        ends = zip(inputs.req_ids, inputs.seq_lens, strict=True)
        return {
            row: marked[name][0]
            for row, (name, length) in enumerate(ends)
            if name in marked and length >= marked[name][1]
        }

    def hooked_forward(self: Any, inputs: Any, every_token: bool) -> Any:
        hidden = forward(self, inputs, every_token)
        starts = inputs.query_start_loc if every_token else inputs.wanted_start_loc
        for row, kind in due(inputs).items() if marked else ():
            if kind in ("nan", "inf"):
                hidden[starts[row] : starts[row + 1]] = float(kind)
        return hidden

    StepRunner._update_states = hooked_update  # type: ignore[method-assign]
    StepRunner._run = hooked_run  # type: ignore[method-assign]
    PagedForward.__call__ = hooked_forward  # type: ignore[method-assign]
