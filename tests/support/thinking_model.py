"""The embedded model as one that reasons: its two tokens around calls become `<think>` and
`</think>`, and its template opens the reasoning if `enable_thinking` is true."""

from __future__ import annotations

import shutil
from pathlib import Path

from quire.assets import __file__ as assets

OPEN, CLOSE = 3, 4
"""The tokens of the marks."""
_TURN = "{{- '<|im_start|>assistant\\n' -}}"
_THINKING = (
    "{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}"
)


def make_thinking_model(folder: Path) -> Path:
    """Write it into a folder, which must not exist."""
    shutil.copytree(Path(assets).parent / "quire-demo", folder)
    (folder / "SHA256SUMS").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        text = path.read_text("utf-8")
        assert "<tool_call>" in text
        text = text.replace("<tool_call>", "<think>").replace("</tool_call>", "</think>")
        if name == "tokenizer_config.json":
            turn = _TURN.replace("\\", "\\\\")
            assert turn in text
            text = text.replace(turn, turn + _THINKING.replace("\\", "\\\\"))
        path.write_text(text, "utf-8")
    return folder
