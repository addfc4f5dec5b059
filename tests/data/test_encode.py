from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peer.data.encode import ByteEncoder, encoder_of
from peer.data.tokenizer import ByteTokenizer


def definition(*before: pre_tokenizers.PreTokenizer) -> str:
    vocab = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    raw = Tokenizer(models.BPE(vocab={**vocab, "</s>": 256}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return raw.to_str()


def document(text: str) -> dict[str, object]:
    return {"kind": "fast", "definition": text, "eos_id": 256, "control": {"</s>": 256}, "vocab_size": 257}


def test_bytes_are_those_of_the_tokenizer():
    texts = ["one", "ü☃\ud800", ""]
    found = ByteEncoder().encode_all(texts)
    assert all(np.array_equal(ids, ByteTokenizer().encode(text)) for ids, text in zip(found, texts, strict=True))
    assert encoder_of(ByteEncoder().document).encode_all(["a"])[0].tolist() == [100]


@pytest.mark.parametrize("text", ["</s>", "a </s> b", "<</s>/s>"])
def test_text_that_spells_a_control_token_stays_text(text):
    encoder = encoder_of(document(definition()))
    (ids,) = encoder.encode_all([text])
    assert 256 not in ids
    assert len(ids) == len(text)
    assert encoder_of(encoder.document).encode_all([text])[0].tolist() == ids.tolist()


def test_a_text_that_the_tokenizer_fails_of_costs_no_other_one():
    bomb = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    first, failed, last = encoder_of(document(definition(bomb))).encode_all(["one", "a" * 5000 + "\x01", "two"])
    assert (len(first), len(failed), len(last)) == (3, 0, 3)
