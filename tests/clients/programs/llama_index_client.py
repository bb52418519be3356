"""llama-index's OpenAILike: complete, chat, stream."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = sys.argv[1], sys.argv[2]
llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    max_retries=0,
)
question = [ChatMessage(role="user", content="What is the capital of France?")]
assert "Paris" in llm.chat(question).message.content
assert "Paris" in "".join(part.delta or "" for part in llm.stream_chat(question))
assert "Paris" in llm.complete("What is the capital of France?").text
print("ok chat", flush=True)
