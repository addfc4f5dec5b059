"""`atoll tokenizer train`: a folder that a manifest can name, the same for the same text."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from peer.cli import main
from peer.data.tokenizer import load_tokenizer
from peer.protocol.manifest import ALONE, TokenizerSpec

MANIFEST = "name: mine\nmodel: {architecture: llama}\n"
WORDS = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(MANIFEST)
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} {WORDS}" * 50)
    return tmp_path


def atoll(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exited:
        main(["tokenizer", "train", *map(str, arguments)])
    return int(exited.value.code)


def test_a_trained_tokenizer_is_one_that_a_manifest_can_name(here, capsys):
    for output in ("one", "two"):
        assert atoll("run.yaml", "--vocab-size", 300, "--output", output, "--train-files", "text") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "tokenizer  300 ids, from 0.0 MB in 2 documents" in said.out  # the third one validates
    assert "manifest   tokenizer: {kind: folder, name: two}" in said.out
    files = [sorted((path.name, path.read_bytes()) for path in (here / name).iterdir()) for name in ("one", "two")]
    assert files[0] == files[1]
    spec = TokenizerSpec.model_validate({"kind": "folder", "name": "one"}, context=ALONE)
    tokenizer = load_tokenizer(spec)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (300, 1)
    ids = tokenizer.encode(WORDS)
    assert tokenizer.decode(ids) == WORDS
    assert len(WORDS) / ids.size > 1.5


def test_less_text_than_the_ids_need_gives_fewer_and_says_so(here, capsys):
    assert atoll("run.yaml", "--vocab-size", 4096, "--output", "out", "--train-files", "text") == 0
    err = capsys.readouterr().err
    assert "of 4096 ids" in err
    vocab = json.loads((here / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert f"the text gives only {len(vocab)} of 4096" in err


def test_a_word_without_end_does_not_take_hours(here):
    (here / "text" / "b.txt").write_text("".join(random.Random(1).choices("abcdefgh", k=1_000_000)))
    assert atoll("run.yaml", "--vocab-size", 600, "--output", "out", "--train-files", "text") == 0


ENDLESS = """
import os, random, re, signal, threading
from peer.data import train_bpe
from peer.system.exit_signals import exiting_on_signals

def texts():
    yield "".join(random.Random(1).choices("abcdefgh", k=10_000_000))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

train_bpe._LONG = re.compile("(?!)")
with exiting_on_signals(130):
    train_bpe.train_bpe(texts(), 100_000)
"""


def test_a_signal_ends_it_while_rust_is_at_work():
    assert subprocess.run([sys.executable, "-c", ENDLESS], timeout=60).returncode == 130


@pytest.mark.usefixtures("here")
def test_no_more_text_is_read_than_wanted(capsys):
    assert atoll("run.yaml", "--vocab-size", 260, "--output", "out", "--train-files", "text", "--megabytes", 0.001) == 0
    assert "in 1 documents" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "says"), [
    (("run.yaml", "--vocab-size", 258, "--output", "out"), "--vocab-size 258: must be between 259 (the bytes, and 3"),
    (("run.yaml", "--vocab-size", 2**22 + 1, "--output", "out"), "--vocab-size 4194305: must be between 259"),
    (("run.yaml", "--vocab-size", 300, "--output", "text"), "--output text exists already"),
    (("run.yaml", "--vocab-size", 300, "--output", "run.yaml"), "--output run.yaml exists already"),
    (("run.yaml", "--vocab-size", 300, "--output", "/proc/out"), "--output /proc/out cannot be written"),
    (("none.yaml", "--vocab-size", 300, "--output", "out"), "manifest none.yaml cannot be read"),
    (("run.yaml", "--vocab-size", 300, "--output", "out", "--train-files", "none"), "train_files 'none' matches no"),
    (("run.yaml", "--vocab-size", 300, "--output", "out", "--megabytes", 0), "--megabytes 0: must be above 0"),
])  # fmt: skip
def test_what_a_person_can_mend_is_said(here, arguments, says, capsys):
    more = () if "--train-files" in arguments else ("--train-files", "text")
    assert atoll(*arguments, *more) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert "Traceback" not in said.err
    assert not (here / "out").exists()
