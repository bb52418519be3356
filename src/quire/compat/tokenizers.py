"""`vllm.tokenizers`: a tokenizer by the name of its model."""

from __future__ import annotations

from typing import Any

from quire.config import EngineConfig
from quire.config.locate import located
from quire.tokenizer.tokenizer import Tokenizer


def get_tokenizer(tokenizer_name: str, *_: Any, **options: Any) -> Tokenizer:
    """The tokenizer of a folder or of a model on the hub.

    Raises:
        StartupError: an option has an unsupported value, or there is no tokenizer.
    """
    config = located(EngineConfig.from_options(model=str(tokenizer_name), **options))
    return Tokenizer.from_folder(config.model.tokenizer_folder, config.model.chat_template)
