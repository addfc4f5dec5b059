from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from peer.data.tokenizer import ByteTokenizer, HubTokenizer, load_tokenizer
from peer.errors import UserError
from peer.protocol.manifest import ALONE, TokenizerSpec

REFERENCE = ByT5Tokenizer(extra_ids=0)


def words_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    raw = RawTokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", **special)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_bytes_equal_byt5(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == REFERENCE.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ByteTokenizer().decode(ids) == text


@given(st.lists(st.integers(0, 258)))
@settings(max_examples=100, deadline=None)
def test_any_ids_decode_as_byt5_does(ids):
    assert ByteTokenizer().decode(np.array(ids, np.int32)) == REFERENCE.decode(ids, skip_special_tokens=True)


def test_special_tokens_in_a_document_stay_text():
    assert ByteTokenizer().encode("</s>").tolist() == [byte + 3 for byte in b"</s>"]


def test_ids_of_a_padded_embedding_and_broken_text_never_raise():
    assert ByteTokenizer().decode(np.array([100, 263, 2, 101], np.int32)) == "ab"
    assert ByteTokenizer().encode("a\udcffb").tolist() == [100, 66, 101]


def test_sizes_match_the_reference():
    assert ByteTokenizer().vocab_size == len(REFERENCE) == 259
    assert ByteTokenizer().eos_id == REFERENCE.eos_token_id == 1


TEXT = "def train():\n  h\u00e9llo \u5c9b </s> <pad> it's 12.5  \t\r\n\x00 ."


def test_saved_bytes_load_with_transformers(tmp_path):
    load_tokenizer(TokenizerSpec()).save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id) == (259, 1, 0)
    ids = ByteTokenizer().encode(TEXT).tolist()
    assert loaded(TEXT)["input_ids"] == ids  # nothing behind it: a prompt is to be continued
    assert loaded.decode(ids) == TEXT
    assert loaded.decode([*ids, 1, 0], skip_special_tokens=True) == TEXT
    assert loaded("cafe\u0301")["input_ids"] == ByteTokenizer().encode("cafe\u0301").tolist()


def test_saved_bytes_give_the_same_ids_beside_every_architecture(tmp_path):
    """AutoTokenizer chooses a class by the model's kind. gemma4_assistant is refused: its defaults make no config."""
    ByteTokenizer().save(tmp_path)
    ids, wrong = ByteTokenizer().encode(TEXT).tolist(), {}
    for architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {"gemma4_assistant"}:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        got = (loaded(TEXT)["input_ids"], loaded.decode(ids), loaded.eos_token_id, loaded.pad_token_id)
        if got != (ids, TEXT, 1, 0):
            wrong[architecture] = got
    assert wrong == {}


def test_a_hub_tokenizer_behaves_as_its_original(tmp_path):
    tokenizer = HubTokenizer(words_tokenizer(eos_token="<eos>"), "words")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 0)
    assert tokenizer.encode("two one three").tolist() == [3, 2, 1]
    assert tokenizer.encode("two").dtype == np.int32
    assert tokenizer.decode(np.array([3, 0, 2, 77], np.int32)) == "two one"
    tokenizer.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("one two", add_special_tokens=False) == [2, 3]


def _folder(name: object) -> TokenizerSpec:
    return TokenizerSpec.model_validate({"kind": "folder", "name": str(name)}, context=ALONE)


def test_loading_and_its_errors(tmp_path, monkeypatch):
    words_tokenizer(eos_token="<eos>").save_pretrained(tmp_path / "words")
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer(_folder("./words")).encode("one").tolist() == [2]
    with pytest.raises(UserError, match="cannot load the tokenizer no-owner/none at revision 'main'"):
        load_tokenizer(TokenizerSpec(kind="hub", name="no-owner/none"))
    with pytest.raises(UserError, match="words has no eos token"):
        HubTokenizer(words_tokenizer(), "words")
