"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import msgspec

from quire.errors import InvalidRequest
from quire.serving.conversation import read_tools, render_chat
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.openai.schema import (
    TOKENIZE_UNSUPPORTED,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.serving.prompts import check_ids, encode, off_loop

_CHAT_ONLY = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(exchange: Exchange) -> None:
    """Token ids of a text or of a rendered conversation."""
    request = await exchange.record(TokenizeRequest, TOKENIZE_UNSUPPORTED)
    engine = exchange.state.engine_for(request.model)
    ids = await _ids(engine, request)
    wanted, tokenizer, room = request.return_token_strs, engine.tokenizer, engine.max_model_len

    def work() -> bytes:
        strings = [tokenizer.id_to_text(i) for i in ids] if wanted else None
        reply = {"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": strings}
        return msgspec.json.encode(reply)

    await exchange.reply(await off_loop(len(ids), work))


async def _ids(engine: EngineClient, request: TokenizeRequest) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    special = request.add_special_tokens
    if request.messages is None:
        for name in _CHAT_ONLY:
            if getattr(request, name) is not None:
                raise InvalidRequest(f"{name} needs messages, not prompt.", param=name)
        return await encode(engine, request.prompt or "", special is not False, cut=True)
    text = await render_chat(
        engine,
        request.messages,
        read_tools(request.tools).for_template(),
        request.add_generation_prompt,
        request.continue_final_message,
        request.chat_template_kwargs,
    )
    return await encode(engine, text, bool(special), cut=True)


async def detokenize(exchange: Exchange) -> None:
    """Text of token ids, special tokens included.

    Raises:
        InvalidRequest: an id is outside the vocabulary.
    """
    request = await exchange.record(DetokenizeRequest, {})
    engine = exchange.state.engine_for(request.model)
    check_ids(request.tokens, engine.vocab_size, "tokens")
    tokenizer, tokens = engine.tokenizer, request.tokens
    text = await off_loop(len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False))
    await exchange.reply(msgspec.json.encode({"prompt": text}))
