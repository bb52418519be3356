"""Text to tokens and back: the tokenizer façade, chat templates, incremental detokenisation."""

from quire.tokenizer.chat_template import ChatTemplate
from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer"]
