"""The members that scripts use of a tokenizer of `transformers`, on top of quire's few
operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import NotAvailable

if TYPE_CHECKING:
    import tokenizers


class Encoding(dict[str, Any]):
    """Token ids and their mask, by key or as attributes."""

    @property
    def input_ids(self) -> Any:
        """The ids of one text, or a list of ids for each of several."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """A 1 for each id, because nothing is padded."""
        return self["attention_mask"]


class UsualNames:
    """Members of `Tokenizer` under the names of `transformers`."""

    _backend: tokenizers.Tokenizer
    _named: dict[str, str]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, **options: Any
    ) -> Encoding:
        """Token ids of one text or of several.

        Raises:
            NotAvailable: tensors, padding or truncation are asked for.
        """
        if asked := [name for name, value in options.items() if value]:
            raise NotAvailable(
                f"{asked[0]}={options[asked[0]]!r} is not available: the tokenizer gives lists of "
                "ids, neither padded nor cut."
            )
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """The text of each sequence of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added ones included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each of several. A token that does not exist has the id of the
        unknown token, or `None`."""
        if isinstance(tokens, str):
            found = self._backend.token_to_id(tokens)
            unknown = self._named.get("unk_token")
            return self._backend.token_to_id(unknown) if found is None and unknown else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or of each of several, as spelled in the vocabulary."""
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        return [self._backend.id_to_token(i) for i in ids]

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-sequence token, if the configuration names one."""
        return self._named.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token, if the configuration names one."""
        return self._named.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The padding token, if the configuration names one. quire pads nothing."""
        return self._named.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token."""
        return None if self.pad_token is None else self._backend.token_to_id(self.pad_token)
