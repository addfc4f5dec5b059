"""A conversation in a chat template, and without one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from peer import cli
from peer.checkpoint.export import export_model
from peer.data.pretrained_tokenizer import HubTokenizer
from peer.data.tokenizer import ByteTokenizer, as_transformers
from peer.errors import UserError
from peer.genesis import build_initial_model
from peer.use.chat import Chat, converse
from peer.use.generate import Sampling, generate
from peer.use.trained import Trained, open_trained
from tests.use.test_trained import manifest_of

USER, ANSWER, END = "<|user|>", "<|answer|>", "<|end|>"
TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'system' and turn.content == 'no' %}{{ raise_exception('none') }}"
    "{% endif %}{{ '<|' + turn.role.replace('assistant', 'answer') + '|>' + turn.content }}"
    "{{ ('<|end|>' if turn.role == 'assistant' else '') }}{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)
LIKELIEST = Sampling(temperature=0.0, max_new_tokens=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export of random weights whose tokenizer has a chat template."""
    bytes_alone = tmp_path / "bytes"
    model = build_initial_model(manifest_of(), ByteTokenizer())
    ByteTokenizer().save(bytes_alone)
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(bytes_alone)
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, ANSWER, END]})
    tokenizer.chat_template, tokenizer.split_special_tokens = TEMPLATE, False

    class Saves:
        def save(self, path: Path) -> None:
            tokenizer.save_pretrained(path)

    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return export_model(model, Saves(), tmp_path / "model")


def said_after(trained: Trained, ids: list[int], new: int, ends: set[int]) -> str:
    """The plain loop."""
    said: list[int] = []
    while len(said) < new:
        with torch.no_grad():
            logits = trained.model(input_ids=torch.tensor([[*ids, *said]])).logits[0, -1]
        if (best := int(logits[: trained.tokenizer.vocab_size].argmax())) in ends:
            break
        said.append(best)
    return str(AutoTokenizer.from_pretrained(trained.model.name_or_path).decode(said, skip_special_tokens=True))


def test_each_answer_follows_the_template_of_the_whole_conversation(folder: Path) -> None:
    trained, theirs = open_trained(folder), AutoTokenizer.from_pretrained(folder)
    chat, turns = Chat(trained, LIKELIEST, "x"), [{"role": "system", "content": "x"}]
    for text in ("a", "b", "c"):  # the third does not fit into the window of 24 tokens: the first is forgotten
        turns.append({"role": "user", "content": text})
        asked = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        if len(asked) > 24 - 8:
            del turns[1:3]
            asked = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        answer = chat.answer(text)
        assert answer == said_after(trained, asked, 8, {1, theirs.convert_tokens_to_ids(END)})
        turns.append({"role": "assistant", "content": answer})
    assert turns[1]["content"] != "a"


def test_an_answer_ends_where_the_template_ends_a_turn(folder: Path) -> None:
    trained = open_trained(folder)
    whole = Chat(trained, LIKELIEST).answer("a")
    theirs = AutoTokenizer.from_pretrained(folder)
    first, end = int(theirs.encode(whole)[0]), theirs.convert_tokens_to_ids(END)
    weights = trained.model.get_input_embeddings().weight.data  # tied: the model says the one where it said the other
    weights[[first, end]] = weights[[end, first]]
    assert Chat(trained, LIKELIEST).answer("a") == ""
    assert Chat(trained, LIKELIEST)._ends == {end}


def test_text_without_a_template_is_continued(tmp_path: Path) -> None:
    model = build_initial_model(manifest_of(), ByteTokenizer())
    exported = open_trained(export_model(model, ByteTokenizer(), tmp_path / "model"))
    assert not Chat(exported, LIKELIEST).without_template  # of bytes, as in training
    plain = HubTokenizer(as_transformers(ByteTokenizer()), "plain")  # whose files name no template
    trained = replace(exported, tokenizer=plain)
    chat = Chat(trained, LIKELIEST)
    assert chat.without_template
    first = chat.answer("ab")
    assert first == generate(trained, "ab", LIKELIEST)
    assert chat.answer("c") == generate(trained, f"ab{first}\nc", LIKELIEST)


def test_a_conversation_reads_as_in_training_and_holds_no_control_token_that_was_typed(capsys) -> None:
    trained = Trained(model=build_initial_model(manifest_of(), ByteTokenizer()).eval(), tokenizer=ByteTokenizer())
    chat = Chat(trained, LIKELIEST)
    chat._turns.append({"role": "user", "content": "ab"})
    training = ByteTokenizer().encoder()
    text, ((begin, _),) = training.chat.spans([*chat._turns, {"role": "assistant", "content": "c"}])
    assert chat._prompt().tolist() == training.encode_rendered(text[:begin])[0].tolist()
    with pytest.raises(UserError, match="the text spells '</s>', a control token"):
        chat.answer("a</s>b")
    converse(chat, iter(["</s>"]), asks=True)
    assert "control token" in capsys.readouterr().out
    assert len(chat._turns) == 1


def test_an_interrupted_answer_is_remembered_and_the_chat_goes_on(folder: Path, capsys) -> None:
    chat = Chat(open_trained(folder), LIKELIEST)

    def lines() -> Iterator[str]:
        yield "a"
        raise KeyboardInterrupt

    def typed() -> Iterator[str]:
        yield from ("a", " ", "b")

    asked: list[str] = []

    class Interrupted(Chat):
        def answer(self, text: str, say=print) -> str:
            asked.append(text)

            def stop(piece: str) -> None:
                say(piece)
                raise KeyboardInterrupt

            return super().answer(text, stop if text == "a" else say)

    chat = Interrupted(open_trained(folder), LIKELIEST)
    converse(chat, typed(), asks=True)
    said = capsys.readouterr().out
    assert asked == ["a", "b"]
    assert "(Ctrl-D ends the chat)" in said
    cut = chat._turns[1]["content"]
    assert cut
    assert said.startswith(cut)
    with pytest.raises(KeyboardInterrupt):  # from a pipe it ends the command
        converse(chat, lines(), asks=False)


def test_a_pipe_is_answered_line_by_line_and_a_refusal_has_a_remedy(folder: Path, capsys, monkeypatch) -> None:
    chat = Chat(open_trained(folder), LIKELIEST)
    expected = "".join(f"{chat.answer(text)}\n" for text in ("a", "b"))
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    command = ["chat", str(folder), "--temperature", "0", "--max-new-tokens", "8", "--device", "cpu"]
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert caught.value.code == 0
    assert capsys.readouterr().out == expected
    with pytest.raises(UserError, match="the conversation is refused by the chat template: none"):
        Chat(open_trained(folder), LIKELIEST, "no")
