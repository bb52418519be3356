"""Bodies that mean harm, or are broken: whole ones, single values, and good bodies gone wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any


class Raw(str):
    """JSON text that `json.dumps` would not write."""


USER = {"role": "user", "content": "hi"}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2, "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {}}}]},
    "/v1/chat/completions/batch": {"messages": [[USER], [USER, USER]], "max_tokens": 2},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1},
    "/v1/responses": {"input": [USER], "max_output_tokens": 2, "tools": [
        {"type": "function", "name": "f", "parameters": {}}], "text": {"format": {"type": "text"}}},
    "/v1/responses/input_tokens": {"input": "hi", "instructions": "be kind"},
    "/v1/messages": {"model": "quire-demo", "messages": [USER], "max_tokens": 2, "system": "x",
                     "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    "/v1/messages/count_tokens": {"model": "quire-demo", "messages": [USER]},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/invocations": {"messages": [USER], "max_tokens": 2},
    "/tokenize": {"prompt": "hi", "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
    "/explain_prefix": {"prompt": [5, 6], "cache_salt": "x"},
    "/limits": {"max_num_seqs": 8, "priorities": {"x": 1}},
    "/v1/embeddings": {"input": ["a"], "dimensions": 4},
    "/pooling": {"input": "a", "task": "embed"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": ["b"]},
    "/rerank": {"query": "a", "documents": ["b", {"text": "c"}]},
}  # fmt: skip
"""A body for each route that takes one; the fields below are mixed in."""
FIELDS = (
    "n", "stop", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed",
    "logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "min_tokens", "echo",
    "prompt_logprobs", "logprobs", "top_logprobs", "truncate_prompt_tokens", "priority",
    "cache_salt", "request_id", "user", "metadata", "response_format", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "model", "tool_choice", "documents", "best_of",
    "chat_template_kwargs", "continue_final_message", "add_special_tokens", "return_token_ids",
    "max_tokens", "max_completion_tokens", "truncation_side", "encoding_format", "top_n", "items",
    "use_beam_search", "length_penalty",
)  # fmt: skip

NESTED = "[" * 3000 + "]" * 3000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**63), 2**64, 10**40, -(10**400), 0.5, 1e-46, 1e300, -0.0, "", "x", "\0", "\u202e\ufeff",
    "a" * 5000, "\U0001f98a" * 50, [], {}, [None], [[]], [""], ["x"] * 70, [1, "x"], [1] * 3000,
    [-1], [2**32], [2**63], [10**40], {"": None}, {"1": 0.5}, {"-1": 1}, {"1" * 30: 1},
    {"type": "json_object"}, {"include_usage": True}, {"role": "user"}, [USER] * 40,
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-1e-999"), Raw("1" * 4400),
    Raw(r'"\ud800"'), Raw(r'"\udc00\ud800"'), Raw(r'"\u0000"'), Raw('"\x01"'), Raw("01"),
    Raw("+1"), Raw(".5"), Raw("0x10"), Raw("'x'"), Raw("undefined"), Raw("[1,]"), Raw("{,}"),
    Raw(NESTED), Raw('{"a":' * 500 + "1" + "}" * 500), Raw('{"a":1,"a":2}'),
)  # fmt: skip
"""In the place of a value."""


def dump(value: Any) -> bytes:
    """JSON with raw pieces in it."""
    pieces: list[str] = []

    def default(found: Any) -> Any:
        if isinstance(found, Raw):
            pieces.append(str(found))
            return f"@raw{len(pieces) - 1}@"
        if isinstance(found, dict):
            return {key: default(inner) for key, inner in found.items()}
        return [default(inner) for inner in found] if isinstance(found, list) else found

    text = json.dumps(default(value), ensure_ascii=False)
    for number, piece in enumerate(pieces):
        text = text.replace(f'"@raw{number}@"', piece)
    return text.encode("utf-8", "surrogatepass")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all values inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in inner:
        found.append((*path, key))
        if isinstance(child, (dict, list)):
            found += places(child, (*path, key))
    return found


PLAIN: tuple[Any, ...] = tuple(value for value in VALUES if not isinstance(value, Raw))
"""Those of `VALUES` that any writer of JSON may write."""


def damage(rng: random.Random, inside: Any, values: Sequence[Any] = PLAIN) -> str:
    """Replace or drop a value somewhere inside; says which."""
    *way, last = rng.choice(places(inside))
    parent = inside
    for step in way:
        parent = parent[step]
    if rng.random() < 0.25:
        del parent[last]
        return f"{[*way, last]} dropped"
    parent[last] = deepcopy(rng.choice(values))
    return f"{[*way, last]} = {parent[last]!r:.40}"


def spoil(rng: random.Random, good: dict[str, Any]) -> bytes:
    """A good body with up to three values replaced, added, dropped or repeated; now and then the
    bytes are cut or changed as well."""
    body = json.loads(json.dumps(good))
    # Of each value a copy: the next change may go into it.
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            body[rng.choice(FIELDS)] = deepcopy(rng.choice(VALUES))
            continue
        paths = places(body)
        if paths:
            *way, last = rng.choice(paths)
            parent = body
            for step in way:
                parent = parent[step]
            if rng.random() < 0.8:
                parent[last] = deepcopy(rng.choice(VALUES))
            else:
                del parent[last]
    data = dump(body)
    if rng.random() < 0.1:
        twice = json.dumps(rng.choice(FIELDS)).encode()
        data = b"{" + twice + b":1," + twice + b":" + dump(rng.choice(VALUES)) + b"," + data[1:]
    if rng.random() < 0.15:
        data = data[: rng.randrange(len(data) + 1)]
    if rng.random() < 0.15 and data:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.randint(1, 3)) + data[at + 1 :]
    return data


MANY = 100_000
WHOLE: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\t",
    "null": b"null",
    "a number": b"1e999",
    "a string": b'"prompt"',
    "a list": b"[]",
    "two byte order marks": b"\xef\xbb\xbf\xef\xbb\xbf{}",
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "Latin-1": b'{"prompt": "\xe9"}',
    "NUL bytes": b"\0" * 100,
    "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xabV*(\xca\xcf-(\x01",
    "truncated": b'{"prompt": "a", "max_tokens": ',
    "truncated in a character": b'{"prompt": "\xf0\x9f',
    "two values": b'{"prompt": "a"} {"prompt": "b"}',
    "deep in a free field": b'{"messages":[],"metadata":{"a":' + NESTED.encode() + b"}}",
    "an unknown field": b'{"xyzzy": 1}',
    "a field of a class": b'{"__class__": {"__init__": 1}}',
}
"""No route takes one of these."""
LARGE: dict[str, bytes] = {
    "deep lists": b"[" * MANY + b"]" * MANY,
    "deep lists, open": b"[" * MANY,
    "deep objects": b'{"messages":' * MANY + b"1" + b"}" * MANY,
    "many fields": b"{" + b",".join(b'"%d":1' % i for i in range(MANY)) + b"}",
    "a long key": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "many ids of no token": dump({name: [10**6] * MANY for name in ("prompt", "tokens", "input")}),
    "many strings": dump({name: ["x"] * MANY for name in ("prompt", "input", "documents")}),
    "many empty lists": dump({name: [[]] * MANY for name in ("prompt", "input", "messages")}),
    "many stops": dump({"prompt": "a", "input": "a", "stop": ["x"] * MANY}),
    "many biases": dump({"prompt": "a", "logit_bias": {str(i): 1 for i in range(MANY)}}),
    "a huge integer": b'{"prompt": [' + b"9" * MANY + b"]}",
    "a huge fraction": b'{"temperature": 0.' + b"9" * MANY + b', "prompt": ""}',
}
"""Nor these; one route of each kind is enough for them."""
LARGE_FOR = ("/v1/chat/completions", "/v1/completions", "/detokenize", "/explain_prefix", "/score")
