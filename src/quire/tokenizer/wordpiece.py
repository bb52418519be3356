"""A WordPiece tokenizer from `vocab.txt`, for BERT folders without `tokenizer.json`.

The file has one token per line; the line number is the id (Devlin et al. 2018). The options
`do_lower_case`, `strip_accents` and `tokenize_chinese_chars` come from `tokenizer_config.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

VOCABULARY = "vocab.txt"
SPECIAL = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def read_wordpiece(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a folder with `vocab.txt`.

    Raises:
        ModelLoadError: the file cannot be read, or lacks a token that BERT needs.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = _read(folder / VOCABULARY)
    names = {role: _name(config, role, default) for role, default in SPECIAL.items()}
    for role in ("unk_token", "sep_token", "cls_token"):
        if names[role] not in vocabulary:
            raise ModelLoadError(
                f"{str(folder / VOCABULARY)!r} has no token {names[role]!r} ({role})"
            )
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=names["unk_token"]))
    backend.add_special_tokens([name for name in names.values() if name in vocabulary])
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    sep, cls = ((names[role], vocabulary[names[role]]) for role in ("sep_token", "cls_token"))
    backend.post_processor = processors.BertProcessing(sep, cls)
    backend.decoder = decoders.WordPiece()
    return backend


def _read(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}; fetch it again") from None
    if lines and not lines[-1]:
        lines.pop()
    return {line.rstrip("\r"): i for i, line in enumerate(lines)}


def _name(config: dict[str, Any], role: str, default: str) -> str:
    value = config.get(role)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else default
