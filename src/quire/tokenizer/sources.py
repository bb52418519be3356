"""Finds the tokenizer of a model, in whatever format, and gives it as `tokenizer.json` with its
configuration.

`tokenizer.json` is used if there is one. Otherwise a sentencepiece or tiktoken file, `vocab.json`
with `merges.txt`, or the metadata of a GGUF file is converted. Knows file names and formats, but
does not tokenise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.checkpoint.gguf_header import read_header
from quire.checkpoint.gguf_model import gguf_file
from quire.errors import ModelLoadError
from quire.tokenizer import byte_bpe, sentencepiece
from quire.tokenizer.protobuf import NotAMessage
from quire.tokenizer.sentencepiece import Piece, PieceModel, added_token

CONFIG_FILE: Final = "tokenizer_config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
PIECE_FILES: Final = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "ice_text.model",
)  # fmt: skip
MAX_FILE: Final = 2**28
"""Largest vocabulary file that is read, in bytes."""

GGUF_PATTERNS: Final = {
    "default": "gpt2", "gpt-2": "gpt2", "llama-bpe": "cl100k", "llama3": "cl100k",
    "llama-v3": "cl100k", "qwen2": "qwen", "smollm": "gpt2", "chatglm-bpe": "cl100k",
}  # fmt: skip
"""By `tokenizer.ggml.pre`, the pattern that splits words."""
WHOLE_WORDS: Final = ("llama-bpe", "llama3", "llama-v3", "chatglm-bpe")
BEGINNERS: Final = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
"""Classes that put the beginning-of-sequence token first unless told otherwise."""
ENDERS: Final = ("T5Tokenizer",)
"""Classes that put the end-of-sequence token last unless told otherwise."""


@dataclass(frozen=True, slots=True)
class GLM:
    """What the code of a ChatGLM tokenizer adds to the vocabulary in its file."""

    special: tuple[str, ...]
    prefix: tuple[str, ...]


_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_TOKENIZERS: Final = {
    "ChatGLMTokenizer": GLM(
        ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *_ROLES), ("[gMASK]", "sop")
    ),
    "ChatGLM4Tokenizer": GLM((), ("[gMASK]", "<sop>")),
}
"""By `tokenizer_class`."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What a tokenizer is built from."""

    json: str
    """`tokenizer.json`."""
    config: dict[str, Any]
    """`tokenizer_config.json`."""
    path: Path
    """The file it comes from, for errors."""


def find_tokenizer(model: Path) -> TokenizerSource:
    """The tokenizer of a model folder or GGUF file.

    Raises:
        ModelLoadError: there is no tokenizer, or its file cannot be read; the message names the
            file.
    """
    folder = model if model.is_dir() else model.parent
    path = folder / TOKENIZER_FILE
    if path.is_file():
        return TokenizerSource(_text(path), read_config(folder), path)
    for name in (*PIECE_FILES, "tiktoken.model"):
        if (folder / name).is_file():
            return _from_file(folder / name, read_config(folder))
    for path in sorted(folder.glob("*.tiktoken")):
        return _from_file(path, read_config(folder))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_vocab_and_merges(folder, read_config(folder))
    gguf = gguf_file(model)
    if gguf is not None:
        return _from_gguf(gguf)
    raise ModelLoadError(
        f"there is no {str(path)!r}, nor another tokenizer file ({', '.join(PIECE_FILES)}, "
        "*.tiktoken, vocab.json with merges.txt): give a model folder in Hugging Face format, or "
        "point --tokenizer at a folder that has one"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`.

    Raises:
        ModelLoadError: it is missing, or not a JSON object.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelLoadError(
            f"there is no {str(path)!r}: copy the file from the model's repository; an empty "
            "object {} is enough for a tokenizer without special tokens and chat template"
        )
    return _json_object(path)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}; fetch the file again") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{str(path)!r} must hold a JSON object, got {type(value).__name__}")
    return value


def _text(path: Path) -> str:
    try:
        return _data(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}; fetch the file again") from None


def _data(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE:
            raise ModelLoadError(f"{str(path)!r} has more than {MAX_FILE} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error.strerror}") from None


# --------------------------------------------------------------------------------------- formats


def _from_file(path: Path, config: dict[str, Any]) -> TokenizerSource:
    """Read a sentencepiece or a tiktoken file; both can be called `tokenizer.model`."""
    data = _data(path)
    try:
        if byte_bpe.is_tiktoken(data) or path.suffix == ".tiktoken":
            ranks = byte_bpe.read_tiktoken(data)
            added = _added_tokens(path.parent, config, 1 + max(ranks.values()))
            result = byte_bpe.tiktoken_json(ranks, config, added)
        else:
            model = sentencepiece.read_model(data)
            added = _added_tokens(path.parent, config, len(model.pieces))
            result = sentencepiece.to_json(model, config, added)
    except (NotAMessage, ValueError) as error:
        raise ModelLoadError(
            f"cannot read {str(path)!r} as a sentencepiece or tiktoken vocabulary: {error}; fetch "
            "the file again"
        ) from None
    return _finished(result, config, path)


def _from_vocab_and_merges(folder: Path, config: dict[str, Any]) -> TokenizerSource:
    path = folder / "vocab.json"
    vocab = _json_object(path)
    if not all(isinstance(number, int) for number in vocab.values()):
        raise ModelLoadError(f"{str(path)!r} must map tokens to ids")
    lines = _text(folder / "merges.txt").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    added = _added_tokens(folder, config, 1 + max(vocab.values(), default=-1))
    pattern = "qwen" if str(config.get("tokenizer_class")).startswith("Qwen2") else "gpt2"
    return _finished(byte_bpe.byte_level_json(vocab, merges, pattern, added), config, path)


def _added_tokens(folder: Path, config: dict[str, Any], first: int) -> list[dict[str, Any]]:
    """Tokens that other files, or the code of the tokenizer's class, add to the vocabulary."""
    found: dict[int, dict[str, Any]] = {}
    entries = config.get("added_tokens_decoder")
    for number, entry in (entries if isinstance(entries, dict) else {}).items():
        if str(number).isdecimal() and isinstance(entry, dict) and entry.get("content"):
            token = added_token(int(number), str(entry["content"]), special=True)
            flags = {k: bool(entry[k]) for k in token if isinstance(entry.get(k), bool)}
            found[int(number)] = token | flags
    path = folder / "added_tokens.json"
    for text, number in (_json_object(path) if path.is_file() else {}).items():
        if isinstance(number, int) and number not in found:
            found[number] = added_token(number, text, special=False)
    if not found:
        kind = str(config.get("tokenizer_class"))
        glm, family = GLM_TOKENIZERS.get(kind), byte_bpe.FAMILIES.get(kind)
        special = glm.special if glm else family.special if family else ()
        found = {first + i: added_token(first + i, t, special=True) for i, t in enumerate(special)}
    return list(found.values())


def _finished(result: dict[str, Any], config: dict[str, Any], path: Path) -> TokenizerSource:
    result["post_processor"] = _post_processor(result, config)
    return TokenizerSource(json.dumps(result), config, path)


def _post_processor(result: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """The post-processor that puts special tokens around every text."""
    ids = {token["content"]: token["id"] for token in result["added_tokens"]}
    vocab = result["model"]["vocab"]
    if isinstance(vocab, dict):
        ids = {**vocab, **ids}
    before, after = _around(config)
    before, after = [t for t in before if t in ids], [t for t in after if t in ids]
    if not before and not after:
        return None
    return {
        "type": "TemplateProcessing",
        "single": [*_specials(before), {"Sequence": {"id": "A", "type_id": 0}}, *_specials(after)],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in (*before, *after)
        },
    }


def _specials(texts: list[str]) -> Iterator[dict[str, Any]]:
    for text in texts:
        yield {"SpecialToken": {"id": text, "type_id": 0}}


def _around(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if kind in GLM_TOKENIZERS:
        return list(GLM_TOKENIZERS[kind].prefix), []
    begins = config.get("add_bos_token", kind in BEGINNERS)
    ends = config.get("add_eos_token", kind in ENDERS)
    bos, eos = token_text(config.get("bos_token")), token_text(config.get("eos_token"))
    return [bos] if begins and bos else [], [eos] if ends and eos else []


def token_text(value: object) -> str | None:
    """The text of a named token, which configurations give as a string or an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


# ------------------------------------------------------------------------------------------ GGUF


def _from_gguf(path: Path) -> TokenizerSource:
    meta = read_header(path).metadata
    kind = meta.get("tokenizer.ggml.model")
    makers: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {
        "llama": _gguf_pieces,
        "gpt2": _gguf_bytes,
    }
    maker = makers.get(str(kind))
    tokens = meta.get("tokenizer.ggml.tokens")
    if maker is None or not isinstance(tokens, list) or not _are(tokens, str):
        raise ModelLoadError(_no_tokenizer(path, f"has no tokenizer that quire reads ({kind!r})"))
    config: dict[str, Any] = {"chat_template": meta.get("tokenizer.chat_template")}
    for name in ("bos", "eos", "unknown", "padding"):
        number = meta.get(f"tokenizer.ggml.{name}_token_id")
        role = {"unknown": "unk", "padding": "pad"}.get(name, name)
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{role}_token"] = tokens[number]
    for name in ("add_bos_token", "add_eos_token"):
        config[name] = meta.get(f"tokenizer.ggml.{name}", kind == "llama" and "bos" in name)
    return _finished(maker(meta, path), config, path)


def _gguf_pieces(meta: dict[str, Any], path: Path) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    scores, types = meta.get("tokenizer.ggml.scores"), _types(meta, path)
    if not isinstance(scores, list) or len(scores) != len(tokens) or not _are(scores, float):
        raise ModelLoadError(_no_tokenizer(path, "has tokens without scores"))
    pieces = [Piece(*entry) for entry in zip(tokens, scores, types, strict=True)]
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    bytes_too = sentencepiece.BYTE in types
    model = PieceModel(pieces, sentencepiece.BPE, bytes_too, b"", prefix, trims_spaces=False)
    return sentencepiece.to_json(model, {})


def _gguf_bytes(meta: dict[str, Any], path: Path) -> dict[str, Any]:
    pre = str(meta.get("tokenizer.ggml.pre", "default"))
    if pre not in GGUF_PATTERNS:
        raise ModelLoadError(
            _no_tokenizer(path, f"cuts words by the rule {pre!r}, which quire does not know")
        )
    merges = meta.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not _are(merges, str):
        raise ModelLoadError(_no_tokenizer(path, "has a vocabulary without merges"))
    tokens, types = meta["tokenizer.ggml.tokens"], _types(meta, path)
    special = {sentencepiece.CONTROL: True, sentencepiece.UNKNOWN: True,
               sentencepiece.USER_DEFINED: False}  # fmt: skip
    added = [
        added_token(i, text, special=special[kind])
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in special
    ]
    return byte_bpe.byte_level_json(
        {text: i for i, text in enumerate(tokens)},
        [merge.split(" ", 1) for merge in merges],
        GGUF_PATTERNS[pre],
        added,
        whole_words_first=pre in WHOLE_WORDS,
    )


def _types(meta: dict[str, Any], path: Path) -> list[int]:
    types = meta.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(meta["tokenizer.ggml.tokens"]):
        raise ModelLoadError(_no_tokenizer(path, "has tokens without types"))
    return types


def _are(values: list[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _no_tokenizer(path: Path, why: str) -> str:
    return (
        f"{str(path)!r} {why}: put tokenizer.json and tokenizer_config.json of the original model "
        "beside it, or point --tokenizer at a folder that has them"
    )
