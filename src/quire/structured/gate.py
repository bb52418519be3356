"""Settles the grammars of requests at the input gate, and remembers the verdicts.

In a process of its caller (`LLM`) grammars are compiled right here: who calls it writes the
grammars, llguidance's limits hold, and a helper process would take longer to start than most
scripts have to wait. A server has clients that it cannot trust; there `helper.HelperGate` takes
this one's place.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import structs

from quire.errors import InvalidRequest
from quire.structured.params import Grammar, StructuredOutputsParams
from quire.structured.schema import PARAM as JSON
from quire.structured.tags import schemas_of
from quire.utils.helpers.words import HelperLimits

if TYPE_CHECKING:
    from quire.structured.compiler import Vocabulary

KEPT: Final = 1024
"""Verdicts that are remembered, and at most so many characters of theirs."""
KEPT_CHARS: Final = 16 * 2**20


class GrammarGate(Protocol):
    """What the input gate needs."""

    def settle(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar that a request asks for, which can be compiled.

        Raises:
            InvalidRequest: it cannot.
        """
        ...


MakeGate = Callable[[Callable[[], str], int, Sequence[int]], GrammarGate]
"""What a gate is made of: see `LocalGate`."""


class LocalGate:
    """Compiles in this process.

    Args:
        tokenizer: Gives the text of `tokenizer.json`; called when the first grammar comes.
        vocab_size: Width of the logits.
        eos_token_ids: What may end an output.
    """

    def __init__(
        self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._verdicts = Verdicts()

    def settle(self, params: StructuredOutputsParams) -> Grammar:
        """See `GrammarGate`."""
        from quire.structured.compiler import Vocabulary

        key = verdict_key(params)
        found = self._verdicts.find(key)
        if found is None:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(
                    self._tokenizer(), self._vocab_size, self._eos_token_ids
                )
            found = judge(self._vocabulary, params)
            self._verdicts.keep(key, found)
        return verdict(found)


def judge(vocabulary: Vocabulary, params: StructuredOutputsParams) -> Grammar | Refusal:
    """Compile what a request asks for, and say what came of it."""
    try:
        grammar = vocabulary.settle(params)
        vocabulary.check(grammar)
    except InvalidRequest as error:
        return _schema_at_fault(vocabulary, params) or Refusal(error.message, error.param)
    return grammar


def _schema_at_fault(vocabulary: Vocabulary, params: StructuredOutputsParams) -> Refusal | None:
    """Which of the schemas in a structural tag cannot be compiled by itself, if one is."""
    if params.structural_tag is None:
        return None
    for where, schema in schemas_of(params.structural_tag):
        alone = structs.replace(params, structural_tag=None, json=schema, reasoning=None)
        try:
            vocabulary.check(vocabulary.settle(alone))
        except InvalidRequest as error:
            return Refusal(error.message.replace(JSON, where, 1), where)
    return None


def verdict(found: Grammar | Refusal) -> Grammar:
    """The grammar, or the refusal raised.

    Raises:
        InvalidRequest: it was refused.
    """
    if isinstance(found, Refusal):
        raise InvalidRequest(found.message, param=found.param)
    return found


class Refusal(msgspec.Struct, frozen=True):
    """What was said of a grammar that is refused."""

    message: str
    param: str | None = None
    passes: bool = False
    """Whether it says more of the machine at that time than of the grammar."""


class Answer(msgspec.Struct):
    """A verdict on its way between processes: one of the two."""

    grammar: Grammar | None = None
    refusal: Refusal | None = None

    @classmethod
    def of(cls, found: Grammar | Refusal) -> Answer:
        """A verdict, packed."""
        return cls(refusal=found) if isinstance(found, Refusal) else cls(grammar=found)

    @property
    def found(self) -> Grammar | Refusal:
        """The verdict."""
        found = self.grammar or self.refusal
        assert found is not None, "an answer has one of the two"
        return found


class HelperSetup(msgspec.Struct):
    """The first word to a helper: what grammars are compiled for, and under which limits."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: list[int]
    limits: HelperLimits


class Verdicts:
    """The latest verdicts, by what was asked."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, Grammar | Refusal] = OrderedDict()
        self._chars = 0

    def find(self, key: bytes) -> Grammar | Refusal | None:
        """The verdict on what was asked, if it is remembered."""
        if key in self._found:
            self._found.move_to_end(key)
        return self._found.get(key)

    def keep(self, key: bytes, found: Grammar | Refusal) -> None:
        """Remember a verdict, and forget the oldest if need be."""
        self._chars += _length(found) - _length(self._found.get(key))
        self._found[key] = found
        self._found.move_to_end(key)
        while len(self._found) > KEPT or self._chars > KEPT_CHARS:
            _, old = self._found.popitem(last=False)
            self._chars -= _length(old)


def verdict_key(params: StructuredOutputsParams) -> bytes:
    """Equal for requests that ask for the same, and short."""
    return hashlib.sha256(msgspec.json.encode(params)).digest()


def _length(found: Grammar | Refusal | None) -> int:
    if found is None:
        return 0
    return len(found.text) if isinstance(found, Grammar) else len(found.message)
