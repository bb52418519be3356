"""The tokenizer of a model folder: text to ids and back, on top of the `tokenizers` library.

Loads `tokenizer.json` and `tokenizer_config.json`. The library is imported only then, and templates
are compiled only when used. Knows nothing of requests or of the width of a model's logits: an id
without an entry (padding of the vocabulary) gives the empty text.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from quire.errors import InvalidRequest, ModelLoadError
from quire.tokenizer.byte_spelling import ByteSpelling, byte_spelling
from quire.tokenizer.chat_template import ChatTemplate, read_chat_template
from quire.tokenizer.pairs import EncodedPair, encode_alone, encode_pair, encode_within
from quire.tokenizer.sources import (
    TOKENIZER_FILE,
    TokenizerSource,
    find_tokenizer,
    read_config,
    token_text,
)
from quire.tokenizer.usual_names import UsualNames
from quire.tokenizer.wordpiece import VOCABULARY, read_wordpiece

if TYPE_CHECKING:
    import tokenizers

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_LIBRARY_ID = 2**32 - 1


class Tokenizer(UsualNames):
    """Text to token ids and back. Immutable after loading; safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any] | None = None,
        templates: dict[str, str] | None = None,
    ) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._named = _named_tokens(config or {})
        self._mark_special()
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._spelling = _spelling_of(backend)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.chat_template = ChatTemplate(templates, self._named) if templates else None
        """The model's chat template, if it has one."""

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder.

        `chat_template` is the option of that name: a file or a template that replaces the model's
        own.

        Raises:
            ModelLoadError: a file is missing or cannot be read; the message names it.
        """
        wordpiece = folder / VOCABULARY
        if wordpiece.is_file() and not (folder / TOKENIZER_FILE).is_file():
            config = read_config(folder)
            backend = read_wordpiece(folder, config)
        else:
            source = find_tokenizer(folder)
            backend, config = _read_backend(source), source.config
        if chat_template is None:
            base = folder if folder.is_dir() else folder.parent
            return cls(backend, config, _read_templates(base, config))
        return cls(backend, config, {"default": read_chat_template(chat_template)})

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return str(self._backend.to_str())

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def largest_base_id(self) -> int:
        """Largest id of the vocabulary without added tokens; -1 if it is empty."""
        vocab = self._backend.get_vocab(with_added_tokens=False).values()
        return max((i for i in vocab if i not in self._added_ids), default=-1)

    @functools.cached_property
    def longest_token(self) -> int:
        """Upper bound on the number of characters in one token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token named by the configuration."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token named by the configuration."""
        return self._id_of("eos_token")

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._special_ids

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The same ids by the text of their tokens."""
        added = self._backend.get_added_tokens_decoder()
        return {added[i].content: i for i in sorted(self._special_ids)}

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of all added tokens, special or not."""
        return self._added_ids

    @property
    def leading_spaces(self) -> int:
        """Number of spaces removed from the start of a whole decoded text."""
        return self._spelling.leading_spaces if self._spelling else 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, on request with the special tokens that the tokenizer puts around
        it.

        Raises:
            InvalidRequest: the text has lone surrogates, which UTF-8 cannot represent.
        """
        with _checked(text):
            ids: list[int] = encode_alone(self._backend, text, add_special_tokens).ids
        return ids

    def encode_within(
        self, text: str, max_tokens: int, side: str = "right", add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text, truncated at `side` to `max_tokens`, special tokens included.

        Raises:
            InvalidRequest: the text holds lone surrogates.
        """
        with _checked(text):
            return encode_within(self._backend, text, max_tokens, side, add_special_tokens)

    def encode_pair(
        self,
        first: str,
        second: str,
        max_tokens: int | None = None,
        max_first: int | None = None,
        max_second: int | None = None,
    ) -> EncodedPair:
        """Two texts as one prompt for a cross-encoder; limits as in `pairs.encode_pair`.

        Raises:
            InvalidRequest: a text holds lone surrogates.
        """
        with _checked(first, second):
            return encode_pair(self._backend, first, second, max_tokens, max_first, max_second)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        kept = [i for i in ids if not (skip_special_tokens and i in self._special_ids)]
        if self._spelling is None:
            return self._decode_with_library(kept)
        text = b"".join(map(self._spell, kept)).decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self._spelling.leading_spaces) :]

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of one token; `None` if tokens are not byte strings."""
        return None if self._spelling is None else self._spell(token_id)

    def token_text(self, token_id: int) -> str | None:
        """The bytes of one token as text; `None` if they are not whole characters, or tokens are
        not byte strings."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = _whole(self.token_bytes(token_id))
            return text

    def id_to_text(self, token_id: int) -> str:
        """The text of one token, as shown beside a log-probability; special tokens have text, too.

        A token that is only part of a character shows as U+FFFD; `token_bytes` gives its bytes. Any
        id is allowed; one that the tokenizer does not know gives the empty text.
        """
        if self._spelling is None:
            return self._decode_with_library([token_id])
        return self._spell(token_id).decode("utf-8", "replace")

    @overload
    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: Literal[True], **kwargs: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        *,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """Render a conversation with the model's chat template, or with the one given; `tokenize`
        gives its token ids.

        Further keywords reach the template as variables; check keywords that come from a client
        with `check_template_kwargs` first.

        Raises:
            InvalidRequest: there is no template, or it cannot render these messages.
        """
        template = self.chat_template
        if template is None:
            if chat_template is None:
                raise InvalidRequest(
                    "this model has no chat template: start with --chat-template, or send a "
                    "plain prompt instead of messages.",
                    param="messages",
                )
            template = ChatTemplate({}, self._named)
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            variables=kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _id_of(self, name: str) -> int | None:
        token = self._named.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _mark_special(self) -> None:
        """Mark the tokens that the configuration names as special, even if tokenizer.json does
        not."""
        added = self._backend.get_added_tokens_decoder().values()
        marked = {token.content for token in added if token.special}
        for token in dict.fromkeys(self._named.values()):
            if token not in marked and self._backend.token_to_id(token) is not None:
                self._backend.add_special_tokens([token])

    def _spell(self, token_id: int) -> bytes:
        spelled = self._bytes.get(token_id)
        if spelled is None:
            assert self._spelling is not None
            entry = self._entry(token_id)
            if entry is None:
                return b""
            spelled = self._bytes[token_id] = self._spelling.spell(entry)
        return spelled

    def _entry(self, token_id: int) -> str | None:
        if not 0 <= token_id <= _MAX_LIBRARY_ID:
            return None
        entry: str | None = self._backend.id_to_token(token_id)
        return entry

    def _decode_with_library(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if 0 <= i <= _MAX_LIBRARY_ID]
        text: str = self._backend.decode(known, skip_special_tokens=False)
        return text


def _whole(spelled: bytes | None) -> str | None:
    try:
        return None if spelled is None else spelled.decode()
    except UnicodeDecodeError:
        return None


@contextlib.contextmanager
def _checked(*texts: str) -> Iterator[None]:
    """Refuse lone surrogates, which the library cannot take, with our own error."""
    try:
        yield
    except (TypeError, UnicodeEncodeError):
        if not all(isinstance(text, str) for text in texts):
            raise
        raise InvalidRequest(
            "the text must be valid Unicode, but it holds lone surrogates (half characters)."
        ) from None


def _spelling_of(backend: tokenizers.Tokenizer) -> ByteSpelling | None:
    decoder = backend.decoder
    # the library hands out a decoder's JSON under the name that copying uses
    return None if decoder is None else byte_spelling(json.loads(decoder.__getstate__()))


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The text of each token to which the configuration gives a role; entries are strings or
    objects."""
    found: dict[str, str] = {}
    for name in NAMED_TOKENS:
        text = token_text(config.get(name))
        if text is not None:
            found[name] = text
    return found


def _read_backend(source: TokenizerSource) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(source.json)
    except (KeyboardInterrupt, SystemExit):
        raise
    # For bad files the library raises plain Exception, or panics, which is no Exception.
    except BaseException as error:
        raise ModelLoadError(
            f"cannot read {str(source.path)!r}: {error}; fetch the file again or save it with a "
            "current version of the tokenizers library"
        ) from None


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: those in the configuration, replaced by those in files."""
    entry = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        templates = {e["name"]: e["template"] for e in entry if _is_named_template(e)}
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        try:
            templates[name] = path.read_text("utf-8")
        except (ValueError, OSError) as error:
            raise ModelLoadError(f"cannot read {str(path)!r}: {error}; fetch it again") from None
    return templates


def _is_named_template(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    )
