"""What may be in no reply: words of exceptions, paths, addresses in memory, names of modules."""

from __future__ import annotations

import re
from typing import Final

from quire.errors import QuireError

MARK: Final = "hush-hush"
"""In every exception that a test raises on purpose."""
MODULES: Final = (
    "quire", "msgspec", "starlette", "uvicorn", "asyncio", "llguidance", "torch", "tokenizers",
    "jinja2", "numpy", "httptools",
)  # fmt: skip
PATTERNS: Final = (
    re.compile(MARK),
    re.compile(r"Traceback|(?i:stack trace)"),
    re.compile(r"\b0x[0-9a-fA-F]{6,}"),
    re.compile(r"<[\w.]+ object|<(?:function|class|coroutine|bound method) "),
    re.compile(r"(?<![\w.:])/(?:bin|dev|etc|home|lib|mnt|opt|proc|root|run|srv|tmp|usr|var|work)/"),
    re.compile(r"\b\w+\.(?:py|so|cpp)\b"),
    re.compile(rf"\b(?:{'|'.join(MODULES)})\.[a-z_]\w*"),
    re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt|Warning)\b"),
)
"""The last one finds names of exceptions; those that are a `type` of error objects are left out."""


def _types(kind: type[QuireError]) -> set[str]:
    return {kind.type}.union(*(_types(below) for below in kind.__subclasses__()))


def leaks(text: str) -> list[str]:
    """What is in a reply and should not be."""
    told = _types(QuireError)
    found = [match[0] for pattern in PATTERNS for match in pattern.finditer(text)]
    return [word for word in found if word not in told]
