"""`AsyncLLM` with streams, as in the async_llm_streaming example."""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils import random_uuid
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    sampling_params = SamplingParams(
        max_tokens=12,
        temperature=0.8,
        top_p=0.95,
        seed=42,
        output_kind=RequestOutputKind.DELTA,
    )
    text = ""
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            print(f"[{request_id}]", text)
    return text


async def main():
    engine_args = AsyncEngineArgs(model="meta-llama/Llama-3.2-1B-Instruct", enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        prompts = ["The capital of France is", "Once upon a time"]
        first = await stream_response(engine, prompts[0], "alone")
        texts = await asyncio.gather(
            *(stream_response(engine, prompt, random_uuid()) for prompt in prompts)
        )
        assert texts[0] == first and engine.is_running and not engine.errored
        tokenizer = await engine.get_tokenizer()
        assert tokenizer.encode(first)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
