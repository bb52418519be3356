"""Text of the embedded model's tokens from its files alone: bytes joined, stop strings found.

The tokenizer is byte-level BPE, so a token is a run of bytes, and a stop string stands in the text
exactly where its bytes stand in the bytes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from quire.config.model import EMBEDDED_FOLDER

FOLDER = Path(EMBEDDED_FOLDER) / "quire-demo"


class End(NamedTuple):
    """How a completion must end."""

    num_tokens: int
    text: str
    finish_reason: str
    stop_reason: int | str | None


@cache
def library() -> tokenizers.Tokenizer:
    """The tokenizer, by the library that defines its format."""
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@cache
def eos_ids() -> frozenset[int]:
    """Ids that end a sequence: of the model's files."""
    ids = set()
    for name in ("config.json", "generation_config.json"):
        value = json.loads((FOLDER / name).read_text("utf-8"))["eos_token_id"]
        ids |= set(value if isinstance(value, list) else [value])
    return frozenset(ids)


@cache
def _tables() -> tuple[list[bytes], list[bool]]:
    """Bytes of each token, and whether it is special."""
    file = json.loads((FOLDER / "tokenizer.json").read_text("utf-8"))
    # GPT-2's spelling of bytes: printable ones are themselves, the others follow from U+0100.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    spelled |= {chr(256 + place): byte for place, byte in enumerate(others)}
    table = [b""] * len(file["model"]["vocab"])
    for token, i in file["model"]["vocab"].items():
        table[i] = b"" if any(c not in spelled for c in token) else bytes(spelled[c] for c in token)
    special = [False] * len(table)
    for added in file["added_tokens"]:
        table[added["id"]] = added["content"].encode()
        special[added["id"]] = added["special"]
    return table, special


def pieces(token_ids: list[int], skip_special: bool = True) -> list[bytes]:
    """Bytes that each token adds."""
    table, special = _tables()
    return [b"" if skip_special and special[i] else table[i] for i in token_ids]


def banned_sequences(words: list[str]) -> list[list[int]]:
    """Token sequences of `bad_words`, by vLLM's rule: as a text begins with the word, and after a
    space if that is as long and begins differently."""
    banned = []
    for word in words:
        plain, spaced = (
            library().encode(prefix + word.lstrip(" "), add_special_tokens=False).ids
            for prefix in ("", " ")
        )
        banned.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            banned.append(spaced)
    return banned


def expected_end(params: dict[str, Any], tokens: list[int], room: int) -> End | None:
    """How a completion must end whose tokens begin like this; `None`: it goes on.

    Args:
        params: As the caller gave them.
        tokens: As many as were sampled, those after the end included.
        room: Tokens that the context leaves for the output.
    """
    by_token = token_end(params, tokens, room)
    known = tokens[: by_token[0]] if by_token else tokens
    stop = _stop_string(params, known, silent_last=bool(by_token) and by_token[1] == "stop")
    if stop is not None:
        return stop
    if by_token is None:
        return None
    count, reason, stop_reason = by_token
    include = params.get("include_stop_str_in_output", False)
    shown = known[:-1] if reason == "stop" and not include else known
    return End(count, _text(params, shown), reason, stop_reason)


def token_end(
    params: dict[str, Any], tokens: list[int], room: int
) -> tuple[int, str, int | str | None] | None:
    """What the core ends it by: number of tokens, finish reason, stop reason."""
    most = min(params.get("max_tokens") or room, room)
    for count, token in enumerate(tokens, 1):
        if token in eos_ids() and not params.get("ignore_eos"):
            return count, "stop", None
        if token in (params.get("stop_token_ids") or ()):
            return count, "stop", token
        if count == most:
            return count, "length", None
        if count >= params.get("min_tokens", 0) and _repeats(params, tokens[:count]):
            return count, "repetition", "repetition_detected"
    return None


def _repeats(params: dict[str, Any], tokens: list[int]) -> bool:
    """Whether they end with a pattern that is there often enough."""
    asked = params.get("repetition_detection")
    if asked is None:
        return False
    times = asked["min_count"]
    return any(
        tokens[-size * times :] == tokens[-size:] * times
        for size in range(max(1, asked["min_pattern_size"]), asked["max_pattern_size"] + 1)
        if size * times <= len(tokens)
    )


def _text(params: dict[str, Any], tokens: list[int]) -> str:
    if not params.get("detokenize", True):
        return ""
    skip = params.get("skip_special_tokens", True)
    return b"".join(pieces(tokens, skip)).decode("utf-8", "replace")


def _stop_string(params: dict[str, Any], tokens: list[int], silent_last: bool) -> End | None:
    """Of the stop strings the one complete first, of those the one that began first."""
    stops = params.get("stop") or []
    parts = pieces(tokens, params.get("skip_special_tokens", True))
    if silent_last and not params.get("include_stop_str_in_output"):
        parts[-1] = b""
    least = params.get("min_tokens") or 0
    before, whole = len(b"".join(parts[:least])), b"".join(parts)
    found = []
    for stop in [stops] if isinstance(stops, str) else stops:
        sought = stop.encode()
        start = whole.find(sought, max(0, before - len(sought) + 1))
        if start >= 0:
            found.append((start + len(sought), start, stop))
    if not found:
        return None
    end, start, stop = min(found)
    count, size = 0, 0
    while size < end:
        size += len(parts[count])
        count += 1
    kept = whole[: end if params.get("include_stop_str_in_output") else start]
    return End(count, kept.decode("utf-8", "replace"), "stop", stop)
