"""Checks whether a tokenizer and a model belong together, as far as sizes tell."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.logger import get_logger
from quire.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)


def check_fit(tokenizer: Tokenizer, shape: ModelShape) -> None:
    """Refuse a tokenizer whose vocabulary is larger than the model's; warn of doubtful ones.

    A model may have more rows than the tokenizer has tokens (padding). Added tokens may have ids
    beyond the model's; requests that use them are refused individually.

    Raises:
        ModelLoadError: ordinary text would result in ids that the model does not have.
    """
    if tokenizer.vocab_size > shape.vocab_size:
        largest = tokenizer.largest_base_id()
        if largest >= shape.vocab_size:
            raise ModelLoadError(
                f"this is not the model's tokenizer: it has token ids up to {largest}, the model's "
                f"vocabulary only up to {shape.vocab_size - 1}; point --tokenizer at the right one"
            )
        logger.warning(
            "%d added tokens of the tokenizer lie beyond the model's vocabulary of %d; requests "
            "that use them are refused",
            tokenizer.vocab_size - shape.vocab_size,
            shape.vocab_size,
        )
    elif 2 * tokenizer.vocab_size < shape.vocab_size:
        logger.warning(
            "the tokenizer has %d tokens, the model's vocabulary %d. Is this the right tokenizer "
            "for the model?",
            tokenizer.vocab_size,
            shape.vocab_size,
        )
