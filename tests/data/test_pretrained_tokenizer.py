"""Tokenizers made of files: any text comes back, none becomes a control token, bad files are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from peer.data import tokenizer as loading
from peer.data.pretrained_tokenizer import FolderTokenizer, HubTokenizer
from peer.data.tokenizer import load_tokenizer, published_spec
from peer.data.train_bpe import train_bpe
from peer.errors import UserError
from peer.protocol.manifest import ALONE, TokenizerSpec
from peer.protocol.tokenizer_spec import MAX_TOKENIZER_BYTES
from peer.tokenizer_files import TokenizerFiles, list_files, read_folder

TEXT = "def train(self, text):\n    return self.words[text]  # the text of the run, and the words of it\n"
SPELLINGS = ("</s>", "<pad>", "<unk>", "</", "s>", "<", ">", "s", "a", " ", "\n", "\u00e9", "\u4f60")
BYTES = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
END = {"eos_token": "</s>"}
TRAINED = train_bpe([TEXT] * 3, 300)


def spec_of(folder: Path, **more: Any) -> TokenizerSpec:
    return TokenizerSpec.model_validate({"kind": "folder", "name": str(folder), **more}, context=ALONE)


def byte_level(**parts: Any) -> RawTokenizer:
    """A tokenizer of the 256 bytes and an end token, with some parts of its own."""
    raw = RawTokenizer(models.BPE(vocab={**BYTES, "</s>": 256}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, part in parts.items():
        setattr(raw, name, part)
    return raw


def folder_of(folder: Path, raw: RawTokenizer | str, config: Any = END) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(raw if isinstance(raw, str) else raw.to_str())
    (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def unigram() -> RawTokenizer:
    """Its end token is a piece like others, and the best one of that spelling."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -2.0) for letter in "ab</s>")]
    return RawTokenizer(models.Unigram(pieces, unk_id=0))


def in_memory(raw: RawTokenizer, config: Any = END) -> FolderTokenizer:
    files = {"tokenizer.json": raw.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return FolderTokenizer(files, "x")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(SPELLINGS)).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_and_none_of_it_is_a_control_token(text):
    ids = TRAINED.encode(text)
    assert ids.dtype == np.int32
    assert TRAINED.decode(ids) == text
    assert not np.isin(ids, [0, 1, 2]).any()


@pytest.mark.parametrize("tokenizer", [
    in_memory(unigram(), {**END, "unk_token": "<unk>"}),
    HubTokenizer(PreTrainedTokenizerFast(tokenizer_object=unigram(), eos_token="</s>", unk_token="<unk>"), "x"),
], ids=["folder", "hub"])  # fmt: skip
def test_a_piece_that_spells_the_end_token_does_not_end_a_text(tokenizer):
    assert tokenizer.eos_id == 1
    for text in ("</s>", "ab</s>ab", "</s></s>", "</</s>s>"):
        ids = tokenizer.encode(text)
        assert 1 not in ids
        assert "".join(tokenizer.decode(ids).split()) == text
        (same,) = tokenizer.encoder().encode_all([text])  # in a process that reads the data
        assert same.tolist() == ids.tolist()
    assert tokenizer.encode("az").tolist()[-1] == 0  # what it does not know is still unknown


def test_ids_that_the_tokenizer_fails_of_give_no_text():
    bomb = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("(a+)+$"), "")])
    tokenizer = in_memory(byte_level(decoder=bomb))
    assert tokenizer.decode(tokenizer.encode("a" * 200 + "!")) == ""
    assert tokenizer.decode(tokenizer.encode("b")) == "b"


@pytest.mark.parametrize("raw", [byte_level(), unigram()], ids=["bytes", "unigram"])
def test_a_tokenizer_of_the_hub_has_a_digest_too(raw, tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(folder)
    monkeypatch.setattr(loading, "fetch", lambda *_: str(folder))
    spec = TokenizerSpec(kind="hub", name="o/n", revision="a" * 40)
    tokenizer = load_tokenizer(spec)
    published = published_spec(spec, tokenizer)
    assert (published.name, published.files, published.digest) == ("o/n", (), tokenizer.digest)
    assert load_tokenizer(published).encode("ab</s>").tolist() == tokenizer.encode("ab</s>").tolist()
    with pytest.raises(UserError, match=r"its digest is .*, the manifest's tokenizer\.digest 00000000"):
        load_tokenizer(published.model_copy(update={"digest": "0" * 64}))


def test_an_end_token_of_one_character_leaves_nothing_behind():
    raw = RawTokenizer(models.Unigram([("<unk>", 0.0), ("\n", 0.0), ("a", -1.0)], unk_id=0))
    tokenizer = in_memory(raw, {"eos_token": "\n", "unk_token": "<unk>"})
    assert tokenizer.encode("a\na").tolist() == [2, 2]


def test_what_a_file_sets_for_prompts_does_not_change_texts():
    raw = byte_level()
    raw.enable_truncation(2)
    raw.enable_padding(length=64)
    assert in_memory(raw).encode("four").size == 4
    merging = RawTokenizer(models.BPE(vocab={**BYTES, "ab": 256, "</s>": 257}, merges=[("a", "b")], dropout=0.9))
    merging.pre_tokenizer = byte_level().pre_tokenizer
    assert {tuple(in_memory(merging).encode("ab" * 20).tolist()) for _ in range(5)} == {(256,) * 20}


def test_ids_with_holes_count_up_to_the_largest():
    assert in_memory(RawTokenizer(models.BPE(vocab={"a": 0, "</s>": 999}, merges=[]))).vocab_size == 1000


def test_a_trained_tokenizer_gives_the_same_ids_beside_every_architecture(tmp_path):
    """transformers puts a class of its own beside some. gemma4_assistant is refused: its defaults make no config."""
    TRAINED.save(tmp_path)
    text, wrong = TEXT + "</s>\u00e9 it's 12.5\n\n x  y\r\n", {}
    expected = (ids := TRAINED.encode(text).tolist(), text, 1, 0)
    for architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {"gemma4_assistant"}:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        encoded = loaded(text, split_special_tokens=True)["input_ids"]
        got = (encoded, loaded.decode(ids), loaded.eos_token_id, loaded.pad_token_id)
        if got != expected:
            wrong[architecture] = got
    assert wrong == {}
    assert load_tokenizer(spec_of(tmp_path)).digest == TRAINED.digest


def test_nothing_but_tokens_and_the_template_of_a_config_counts(tmp_path):
    config = {
        "eos_token": {"content": "</s>", "lstrip": True}, "bos_token": "<absent>", "auto_map": {"x": "evil.py"},
        "vocab_file": "/etc/passwd", "tokenizer_class": "BertTokenizer", "chat_template": "{{ messages }}",
    }  # fmt: skip
    folder = folder_of(tmp_path / "in", byte_level(), config)
    (folder / "evil.py").write_text("raise SystemExit")
    tokenizer = load_tokenizer(spec_of(folder))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    tokenizer.save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["eos_token"] == "</s>"
    assert not {"auto_map", "vocab_file", "bos_token"} & {key for key, value in saved.items() if value is not None}
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"


BOMB = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), byte_level().pre_tokenizer])
BAD: dict[str, tuple[RawTokenizer | str, Any, str]] = {
    "torn": (byte_level().to_str()[:200], END, r"tokenizer\.json of .* cannot be read: EOF while parsing"),
    "deep": ('{"model":' * 100_000, END, "cannot be read: recursion limit exceeded"),
    "a list": ("[]", END, "cannot be read: invalid type: sequence"),
    "without a model": ("{}", END, "cannot be read: Model missing"),
    "a torn config": (byte_level(), '{"eos', r"tokenizer_config\.json of .* cannot be read"),
    "a deep config": (byte_level(), '{"a":' * 100_000, r"tokenizer_config\.json of .* cannot be read"),
    "a config that is a list": (byte_level(), [], r"tokenizer_config\.json of .* is no mapping"),
    "without an end token": (byte_level(), {}, "has no eos token"),
    "an end token that has no id": (byte_level(), {"eos_token": "<end>"}, "has no eos token"),
    "an end token that is a number": (byte_level(), {"eos_token": 1}, "has no eos token"),
    "ids without end": (
        byte_level().to_str().replace('"</s>":256', '"</s>":4294967294'), END,
        "has ids up to 4294967294; the limit is 4194303"),
    "a pattern that needs a lifetime": (byte_level(pre_tokenizer=BOMB), END, "fails of a text of 2049 characters"),
    "a text that grows": (
        byte_level(normalizer=normalizers.Replace("a", "a" * 100)), END, "makes 204800 ids of 2048 bytes"),
    "a text that fills the memory": (
        byte_level(normalizer=normalizers.Replace("a", "a" * 10_000_000)), END, "had 60 s of CPU and 2 GiB of memory"),
    "ids that grow": (
        byte_level(decoder=decoders.Replace("a", "a" * 100_000)), END, r"makes 1002\d\d characters of its 257 ids"),
    "a text that goes": (byte_level(normalizer=normalizers.Replace(Regex(r"[\s\S]"), "")), END, "makes no ids of text"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_a_reason_and_this_process_goes_on(name, tmp_path, capfd):
    raw, config, message = BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(spec_of(folder_of(tmp_path / "words", raw, config)))
    assert caught.value.hint
    assert capfd.readouterr() == ("", "")  # not a word of Rust


@pytest.mark.parametrize(("files", "message"), [
    (None, "no such folder"), ({}, "holds no tokenizer.json"), ({"tokenizer.model": b"x"}, "holds no tokenizer.json"),
    ({"tokenizer.json": b""}, "holds no tokenizer.json"),
    ({"tokenizer.json": b"x" * (MAX_TOKENIZER_BYTES - 1), "tokenizer_config.json": b"xx"}, "are larger than 33554432"),
])  # fmt: skip
def test_a_folder_that_holds_no_tokenizer_is_refused(files, message, tmp_path):
    folder = tmp_path / "words"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(spec_of(folder))


def test_a_peer_whose_tokenizer_does_something_else_does_not_train(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "words", byte_level())
    spec = published_spec(spec_of(folder), load_tokenizer(spec_of(folder)))
    assert (spec.name, [file.name for file in spec.files]) == (None, ["tokenizer.json", "tokenizer_config.json"])
    assert spec == TokenizerSpec.model_validate(spec.model_dump())  # as it comes from the network
    contents, kept = read_folder(folder), TokenizerFiles(tmp_path, spec.files)
    with pytest.raises(UserError, match=r"tokenizer\.json in .* is missing or damaged"):
        load_tokenizer(spec, tmp_path)
    for file in spec.files:
        kept.put(file, contents[file.name])
    assert load_tokenizer(spec, tmp_path).digest == spec.digest
    # as if another version of a library lay here
    monkeypatch.setattr(loading, "examine", lambda *_: "0" * 64)
    with pytest.raises(UserError, match=r"its digest is 0000000000000000, the manifest's tokenizer\.digest") as caught:
        load_tokenizer(spec, tmp_path)
    assert "the versions of tokenizers and transformers that the organiser has" in caught.value.hint


def test_a_digest_is_that_of_what_a_tokenizer_does():
    same = in_memory(byte_level(), {**END, "chat_template": "x"})
    assert same.digest == in_memory(byte_level()).digest
    others = [
        in_memory(byte_level(normalizer=normalizers.Lowercase())), in_memory(byte_level(), {"eos_token": "a"}),
        in_memory(RawTokenizer(models.BPE(vocab={**BYTES, "</s>": 257}, merges=[]))), TRAINED,
    ]  # fmt: skip
    assert len({same.digest, *(other.digest for other in others)}) == 5


def test_special_tokens_that_are_no_special_ones_in_the_file_are_so_here():
    raw = byte_level()
    raw.add_tokens([AddedToken("<end>", special=False)])
    tokenizer = in_memory(raw, {"eos_token": "<end>"})
    assert tokenizer.encode("a<end>").size == 6
    assert tokenizer.decode(np.array([BYTES["a"], tokenizer.eos_id], np.int32)) == "a"


def test_files_are_listed_with_size_and_digest():
    (file,) = list_files({"tokenizer.json": b"abc"})
    assert (file.name, file.size) == ("tokenizer.json", 3)
    assert file.digest == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"  # BLAKE3's test vector
