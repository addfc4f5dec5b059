"""Conversations through chat templates: what is learned of them, and what is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peer.data import encode
from peer.data.chat import MAX_RENDERED, ChatTemplate, Conversation
from peer.data.corpus import ReadingOptions, open_corpus
from peer.data.encode import ID_MASK, INNER, UNLEARNED, DocumentEncoder, encoder_of
from peer.data.pretrained_tokenizer import HubTokenizer
from peer.data.shards import text_or_reason
from peer.data.tokenizer import ByteTokenizer
from peer.errors import UserError
from peer.protocol.manifest import DataSpec
from peer.train import batch
from peer.train.batch import IGNORED, Batch
from peer.train.loss import LanguageLoss
from tests.train.tiny import tiny_model

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen 3: what is thought is kept of the last turn alone, and an empty thought is written there.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Mistral: roles alternate, no system.
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "hi \u00fc"}, {"role": "assistant", "content": "a"},
    {"role": "user", "content": "more?"}, {"role": "assistant", "content": "  yes, \u2603\n"},
]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    vocab = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def conversation(messages: list[dict[str, str]]) -> Conversation:
    found, reason = text_or_reason(messages)
    assert reason is None
    assert isinstance(found, Conversation)
    return found


def learned_text(made: PreTrainedTokenizerFast, tokens: np.ndarray) -> str:
    return str(made.decode([int(token) & ID_MASK for token in tokens if not token & UNLEARNED]))


@pytest.mark.parametrize(("template", "learned"), [
    (CHATML, "a<|im_end|>  yes, \u2603\n<|im_end|>"), (THINKING, "a<|im_end|>yes, \u2603<|im_end|>"),
    (STRICT, "a</s>  yes, \u2603\n</s>"),
])  # fmt: skip
def test_the_ids_are_those_of_transformers_and_the_assistant_alone_is_learned(template, learned):
    made = tokenizer(template)
    encoder = HubTokenizer(made, "x").encoder()
    for one in (encoder, encoder_of(json.loads(json.dumps(encoder.document)))):
        (tokens,) = DocumentEncoder(one).tokens_of([conversation(TALK)])
        expected = list(made.apply_chat_template(TALK)["input_ids"])
        expected += [made.eos_token_id] if expected[-1] != made.eos_token_id else []
        assert (tokens & ID_MASK).tolist() == expected
        assert learned_text(made, tokens) == learned
    (everything,) = DocumentEncoder(encoder, "all").tokens_of([conversation(TALK)])
    assert not (everything & UNLEARNED).any()
    assert [int(token) for token in everything if token & ID_MASK == made.eos_token_id and not token & INNER] == [
        made.eos_token_id
    ]


@pytest.mark.parametrize(("source", "reason"), [
    ("{% set x = 'a' * 100000000 %}{{ x|length }}", "too large"), ("{{ [1] * 100000000 }}", "too large"),
    ("{{ 9 ** 9 ** 9 }}", "too large"),
    ("{% set x = namespace(s='ab') %}{% for i in range(40) %}{% set x.s = x.s + x.s %}{% endfor %}", "too large"),
    ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "loops too often"),
    ("{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}", "too much text"),
    ("{{ 'x'|truncate(1, leeway=0) }}", ""), ("{{ raise_exception('never') }}", "never"),
])  # fmt: skip
def test_a_hostile_template_is_refused_in_bounded_time_and_memory(source, reason):
    template = ChatTemplate(source, {}, [])
    with pytest.raises(ValueError, match=f"refused by the chat template: .*{reason}"):
        template.render([{"role": "user", "content": "a" * (MAX_RENDERED >> 12)}])


@pytest.mark.parametrize("source", ["{% for a in [] %}" * 25 + "{% endfor %}" * 25, "{% break %}", "{% if %}"])
def test_a_template_that_cannot_be_compiled_counts_as_none(source):
    definition = RawTokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str()
    assert encode.FastEncoder(definition, 0, {}, 1, ("{{ messages }}", {})).chat is not None
    assert encode.FastEncoder(definition, 0, {}, 1, (source, {})).chat is None


def test_a_turn_that_the_template_rewrites_is_found_by_what_comes_before_it():
    made = tokenizer(THINKING.replace("{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}", ""))
    talk = [TALK[0], {"role": "assistant", "content": "<think>hm</think> so"}]
    (tokens,) = DocumentEncoder(HubTokenizer(made, "x").encoder()).tokens_of([conversation(talk)])
    assert learned_text(made, tokens) == "so<|im_end|>"


def test_bytes_have_a_template_of_their_own_and_end_turns_with_eos():
    (tokens,) = DocumentEncoder(ByteTokenizer().encoder()).tokens_of([conversation(TALK)])
    learned = tokens[(tokens & UNLEARNED) == 0]
    whole = "user: hi \u00fc\nassistant: auser: more?\nassistant:   yes, \u2603\n"
    assert ByteTokenizer().decode(tokens & ID_MASK) == whole
    assert ByteTokenizer().decode(learned & ID_MASK) == "a  yes, \u2603\n"
    assert (learned & ID_MASK).tolist().count(1) == 2
    assert [bool(token & INNER) for token in learned if token & ID_MASK == 1] == [True, False]


@pytest.mark.parametrize(("row", "reason"), [
    ([{"role": "user", "content": "hi"}], "conversations without an assistant's turn"),
    ([{"role": "narrator", "content": "hi"}, TALK[1]], "conversations with an unknown role"),
    ([{"role": "assistant", "content": None}], "conversations with a message that is no text"),
    ([{"from": "human", "value": "hi"}], "conversations without roles"),
    (["a", "b"], "list"),
])  # fmt: skip
def test_rows_that_are_no_conversation_are_left_out(row, reason):
    assert text_or_reason(row) == ("", reason)


def test_conversations_that_cannot_be_rendered_are_left_out_and_counted():
    documents = DocumentEncoder(HubTokenizer(tokenizer(STRICT), "x").encoder())
    odd = [TALK[1], TALK[0]]
    spelled = [TALK[0], {"role": "assistant", "content": "a<|im_end|>b"}]
    assert [len(one) for one in documents.tokens_of([conversation(odd), conversation(spelled)])] == [0, 0]
    assert documents.left_out == {
        "conversations that the chat template refuses": 1, "conversations with a control token in a message": 1,
    }  # fmt: skip


@pytest.mark.parametrize("template", [None, "{% for"])
def test_without_a_template_the_user_is_told(template):
    documents = DocumentEncoder(HubTokenizer(tokenizer(template), "x").encoder())
    assert documents.tokens_of(["plain"])[0].size == 6
    with pytest.raises(UserError, match="conversations, and the run's tokenizer has no chat template that works"):
        documents.tokens_of([conversation(TALK)])


@pytest.mark.parametrize("end", [None, 1])
def test_the_loss_of_masked_labels_is_that_of_transformers(end):
    (tokens,) = DocumentEncoder(ByteTokenizer().encoder()).tokens_of([conversation(TALK[:2])])
    windows = torch.from_numpy(np.concatenate([tokens, tokens])[:32].astype(np.int64)).unsqueeze(0)
    model = tiny_model().train(False)
    one = Batch.of(windows, end)
    labels = torch.where((windows & UNLEARNED) != 0, IGNORED, windows & ID_MASK)
    more = {}
    if end is not None:
        more["position_ids"] = torch.tensor([[*range(len(tokens)), *range(31 - len(tokens))]])
        labels[0, len(tokens)] = IGNORED  # not predicted from the end of another conversation
        assert one.positions_bt.tolist() == more["position_ids"].tolist()
    more = {key: value[:, : windows.shape[1] - 1] for key, value in more.items()}
    # shifted here, as the labels of the last input are one token further
    inputs = (windows & ID_MASK)[:, :-1]
    wanted = model(input_ids=inputs, shift_labels=labels[:, 1:], labels=labels[:, 1:], **more).loss
    assert LanguageLoss(model).mean(one) == pytest.approx(float(wanted.detach()), abs=1e-6)
    assert one.tokens == int((labels[:, 1:] != IGNORED).sum())
    assert 0 < one.tokens < windows.shape[1] // 2


def test_marks_mean_the_same_where_they_are_written_and_where_they_are_read():
    assert (batch.ID_MASK, batch.UNLEARNED) == (encode.ID_MASK, encode.UNLEARNED)


def corpus_of(folder: Path, files: tuple[str, ...], **spec: object):
    options = ReadingOptions(train_files=files, validates=False, cache=folder / "cache", hub_headers={})
    return open_corpus(DataSpec(sequence_length=16, validation_fraction=0.3, **spec), ByteTokenizer(), options, 1)


def test_files_of_conversations_train_beside_text(tmp_path, caplog):
    rows = [{"messages": [{"role": "user", "content": f"n {n}"}, {"role": "assistant", "content": "x" * n}]}
            for n in range(1, 40)]  # fmt: skip
    bad = [{"messages": [{"role": "user", "content": "alone"}]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:20], *bad]))
    pq.write_table(pa.Table.from_pylist(rows[20:]), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("plain words " * 9)
    with caplog.at_level(logging.WARNING):
        corpus = corpus_of(tmp_path, (str(tmp_path / "*.*"),))
    assert "1 conversations without an assistant's turn" in caplog.text
    tokens = np.concatenate([corpus.sources[0].windows.tokens, corpus.validation.tokens]).astype(np.int64)
    learned = ByteTokenizer().decode((tokens[(tokens & UNLEARNED) == 0] & ID_MASK).astype(np.int32))
    assert learned.count("x") == sum(range(1, 40))
    assert "plain words" in learned
    assert "user" not in learned


def test_the_shipped_instructions_fill_batches(tmp_path):
    corpus = corpus_of(tmp_path, (), sources=({"kind": "instructions"},))
    windows = corpus.sources[0].windows
    assert len(windows) > 200
    tokens = windows.tokens.astype(np.int64)
    assert 0.2 < float(((tokens & UNLEARNED) == 0).mean()) < 0.6
    assert corpus.digest != corpus_of(tmp_path, (), sources=({"kind": "python-stdlib"},)).digest
