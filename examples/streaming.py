"""Stream two requests at once from one engine. Run: python examples/streaming.py"""

import asyncio

from quire import AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams


async def follow(engine: AsyncLLM, name: str, prompt: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(prompt, params, request_id=name):
        print(f"[{name}] {output.outputs[0].text!r}")


async def main() -> None:
    async with await AsyncLLM.start(EngineConfig()) as engine:
        await engine.wait_ready()
        await asyncio.gather(
            follow(engine, "story", "Once upon a time"),
            follow(engine, "fact", "The capital of Italy is"),
        )


if __name__ == "__main__":
    asyncio.run(main())
