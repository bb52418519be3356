"""Scripts ask a tokenizer what `transformers` would answer."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from quire.errors import NotAvailable
from quire.tokenizer import Tokenizer

TEXTS = ["Hello there", "the cat"]


@pytest.fixture
def both(folder):
    ours = Tokenizer.from_folder(folder)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=ours.bos_token,
        eos_token=ours.eos_token,
    )
    return ours, theirs


def test_the_same_answers(both):
    ours, theirs = both
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert ours(TEXTS[0]).input_ids == theirs(TEXTS[0]).input_ids
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    assert ours(TEXTS).attention_mask == theirs(TEXTS).attention_mask
    plain = ours(TEXTS[0], add_special_tokens=False, padding=False, return_tensors=None)
    assert plain.input_ids == theirs(TEXTS[0], add_special_tokens=False).input_ids
    ids = theirs(TEXTS).input_ids
    assert ours.batch_decode(ids) == theirs.batch_decode(ids, skip_special_tokens=True)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert ours.convert_tokens_to_ids(ours.eos_token) == theirs.eos_token_id
    tokens = theirs.convert_ids_to_tokens(ids[0])
    assert ours.convert_ids_to_tokens(ids[0]) == tokens
    assert ours.convert_ids_to_tokens(ids[0][-1]) == tokens[-1]
    assert ours.convert_tokens_to_ids(tokens) == ids[0]
    assert ours.convert_tokens_to_ids("no such token") is None


def test_what_is_not_done_is_refused(both):
    for option in ({"return_tensors": "pt"}, {"padding": True}, {"truncation": True}):
        with pytest.raises(NotAvailable, match=f"{next(iter(option))}=.* is not available"):
            both[0](TEXTS, **option)
    assert both[0] and both[0].pad_token is None and both[0].pad_token_id is None
