"""A talker that runs its own engine, for `quire chat` without `--url`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Coroutine, Generator
from typing import Any, Final, TypeVar

from quire.cli.talkers import Turn
from quire.config import EngineConfig, ServerConfig
from quire.errors import StepFailed
from quire.serving.parsing import ChoiceParser
from quire.serving.turns import ModelTurn, Text

T = TypeVar("T")

_STOP_SECONDS: Final = 3.0
"""Seconds that the rest of an interrupted start has to end."""


class EngineTalker:
    """An engine on an event loop in a thread.

    So the engine keeps working (heartbeats, noticing a dead core) while the main thread waits for
    the user.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises StartupError if the engine cannot start."""
        quiet = dataclasses.replace(config.observability, disable_log_stats=True)
        self._config = dataclasses.replace(config, observability=quiet)
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._engine = self._run(self._start())
        except BaseException:
            self._stop_loop()
            raise
        self.model: str = self._engine.config.model.names[0]
        self.place = f"on {self._engine.info['place']}"

    def reply(
        self, messages: list[dict[str, Any]], options: dict[str, Any], turn: Turn
    ) -> Generator[str]:
        """See `Talker`."""
        request_id = f"chat-{next(self._ids)}"
        stream, parser = self._run(self._submit(messages, dict(options), request_id))
        said = ModelTurn(0)
        finished = False
        try:
            while not finished:
                output = self._run(anext(stream))
                if output.error:
                    raise StepFailed(output.error)
                piece = output.outputs[0]
                finished = output.finished
                text = piece.text
                if parser is not None:
                    batch = parser.feed(text) + (parser.finish() if finished else [])
                    text = ModelTurn(0).add(e for e in batch if isinstance(e, Text)).text
                    said.add(batch)
                turn.add(text, len(piece.token_ids))
                yield text
            turn.calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        finally:
            self._run(stream.aclose())

    def close(self) -> None:
        """Stop the engine and the loop."""
        try:
            self._run(self._engine.shutdown())
        finally:
            self._stop_loop()

    async def _start(self) -> Any:
        from quire.engine.async_llm import AsyncLLM

        engine = await AsyncLLM.start(self._config)
        try:
            await engine.wait_ready()
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def _submit(
        self, messages: list[dict[str, Any]], options: dict[str, Any], request_id: str
    ) -> tuple[Any, ChoiceParser | None]:
        from quire.params import RequestOutputKind
        from quire.serving.conversation import read_tools
        from quire.serving.model_parsers import choose_parsers

        tools = options.pop("tools", None)
        kind = RequestOutputKind.DELTA
        chosen = self._engine.default_params.replace(
            **{"max_tokens": None, **options}, output_kind=kind
        )
        tokenizer = self._engine.tokenizer
        use, template = read_tools(tools), tokenizer.chat_template
        sources = list(template.templates.values()) if template else []
        parsers = choose_parsers(ServerConfig(), sources)
        parsers.check_tools(use)
        prompt = tokenizer.apply_chat_template(messages, tools=use.for_template())
        parsing, chosen = parsers.parsing(prompt, use, chosen, tokenizer)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        stream = await self._engine.submit({"prompt_token_ids": ids}, chosen, request_id)
        return stream, parsing.begin(0, request_id)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop; Ctrl-C here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        with contextlib.suppress(TimeoutError):  # what was cancelled may have a core to end
            self._run(_others_end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        with contextlib.suppress(RuntimeError):
            self._loop.close()


async def _others_end() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, left = await asyncio.wait(others, timeout=_STOP_SECONDS)
        for task in left:  # a core that ends slowly ends with this process
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_STOP_SECONDS)
